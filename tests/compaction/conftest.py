"""Fixtures of compaction tests: cluster markers in every bucket, stores that take small parts."""

from collections.abc import Iterator

import pytest

from tests.compaction.compaction_lives import small_parts
from tests.compaction.compaction_world import CLUSTER_ID, NAMESPACE
from tests.fake_bucket import put_fake_markers
from tests.kit.fake_cluster import NAMESPACE as FAKE_NAMESPACE


@pytest.fixture(autouse=True)
def _fake_markers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:  # its own: tests undo theirs
        small_parts(monkeypatch)
        put_fake_markers(monkeypatch, ("fake", FAKE_NAMESPACE), (CLUSTER_ID, NAMESPACE))
        yield
