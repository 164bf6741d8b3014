"""A directory as a bucket for reconciliation tests, and keys of its clusters."""

from __future__ import annotations

import os
from pathlib import Path

from streammeta.storage.object_format.object_key import cluster_namespace, key_for
from streammeta.storage.object_store.address import open_object_store

OWN = cluster_namespace("c1")
OTHER = cluster_namespace("c2")
LONG_AGO_S = 1_700_000_000


def is_marker(key: str) -> bool:
    """Whether it is the marker of any cluster."""
    return key.endswith("/cluster.json")


class LocalBucket:
    """A folder as a bucket; what is put is old unless told otherwise."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.uri = root.as_uri()
        self.store = open_object_store(self.uri)

    def put(self, key: str, size: int = 10, *, young: bool = False) -> str:
        """Store `size` bytes; gives the key."""
        self.store.put(key, b"x" * size)
        if not young:
            os.utime(self.root / "objects" / key, (LONG_AGO_S, LONG_AGO_S))
        return key

    def keys(self) -> set[str]:
        """All keys but the markers'."""
        return {key for info in self.store.list_objects() if not is_marker(key := info.key)}


def own(object_id: int) -> str:
    """The key of an object of this cluster."""
    return key_for(object_id, OWN)
