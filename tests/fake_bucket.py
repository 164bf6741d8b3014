"""Markers of clusters that are faked in tests, as if they lay in every store used there."""

from typing import Any

import pytest

from streammeta.client.controllers import bucket_check
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, read_marker
from streammeta.storage.object_store.protocol.base import ObjectStore

FAKE_UUID = "00000000-0000-4000-8000-00000000fake"


def as_fake_markers(*clusters: tuple[str, str]) -> Any:
    """Return a `read_marker` that finds those of (cluster id, namespace) wherever it looks."""
    by_namespace = {
        namespace: BucketMarker(
            cluster_id=cluster_id, cluster_uuid=FAKE_UUID, namespace=namespace, created_ms=0
        )
        for cluster_id, namespace in clusters
    }

    def read(store: ObjectStore, namespace: str) -> BucketMarker | None:
        return by_namespace.get(namespace) or read_marker(store, namespace)

    return read


def fake_markers_of_process(*clusters: tuple[str, str]) -> None:
    """Have the clusters' markers be in every store for the rest of this process, a test's child."""
    module: Any = bucket_check
    module.read_marker = as_fake_markers(*clusters)


def put_fake_markers(monkeypatch: pytest.MonkeyPatch, *clusters: tuple[str, str]) -> None:
    """Have the clusters' markers be in every store while a test runs."""
    monkeypatch.setattr(bucket_check, "read_marker", as_fake_markers(*clusters))
