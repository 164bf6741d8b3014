"""Ids that were prepared before this process led, and whose commits it may not know.

A process knows these ids only from its disk, and a disk can be rolled back to a copy. The bucket's
claims show that only if one of them was made after the copy. A commit of the last seconds leaves no
other trace than its object. Bytes that end like an object prove which offsets they contain. Other
bytes prove nothing, so they stay for a while, in which an operator can notice the rollback.
"""

from __future__ import annotations

from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import INT64_MAX

KEPT_MS = 24 * 3600 * 1000
"""Time for which bytes under such ids stay, by this process's timer, in milliseconds."""

IDS_MAX = 100_000
"""Maximum number of remembered ids. The ids that expire last are omitted."""


class InheritedIds:
    """Ids that were prepared but not committed when this process first led."""

    def __init__(self) -> None:
        self._ids: frozenset[int] = frozenset()
        self._until_ms: int | None = None

    def note_takeover(self, cluster_metadata: ClusterMetadata, now_ms: int) -> None:
        """Remember the prepared ids, only on the first election of this process.

        This process has seen all later prepares itself, and they can't be rolled back without it.
        """
        # Later elections learn nothing new: this process itself applied all entries since the
        # first.
        if self._until_ms is None:
            self._ids = frozenset(cluster_metadata.list_expired(INT64_MAX, IDS_MAX))
            self._until_ms = now_ms + KEPT_MS

    def is_over(self, now_ms: int) -> bool:
        """Whether bytes under inherited ids no longer have to stay."""
        return self._until_ms is None or now_ms >= self._until_ms

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._ids
