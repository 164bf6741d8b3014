"""Tests of the client: the markers of the clusters that are faked here are in every bucket."""

from collections.abc import Iterator

import pytest

from tests.compaction.compaction_world import CLUSTER_ID, NAMESPACE
from tests.fake_bucket import put_fake_markers
from tests.kit.fake_cluster import NAMESPACE as FAKE_NAMESPACE


@pytest.fixture(autouse=True)
def _fake_markers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:  # its own: tests undo theirs
        put_fake_markers(monkeypatch, ("fake", FAKE_NAMESPACE), (CLUSTER_ID, NAMESPACE))
        yield
