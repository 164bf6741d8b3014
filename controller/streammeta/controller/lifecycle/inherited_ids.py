"""Ids that were prepared before this process led, and whose commits it may not know.

A process knows these ids from its disk alone, and a disk can be rolled back to a copy. The bucket's
claims show that only if one of them was made after the copy; a commit of the last seconds leaves no
other trace than its object. Bytes that end like an object prove how far they go. Others prove
nothing, so they stay for a while, in which an operator can notice the rollback.
"""

from __future__ import annotations

from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import INT64_MAX

KEPT_MS = 24 * 3600 * 1000
"""Time that bytes under such ids stay, by the timer of this process, in milliseconds."""

IDS_MAX = 100_000
"""Maximum ids remembered; beyond it those that expire last are not."""


class InheritedIds:
    """The ids that were prepared, and not committed, when this process first led."""

    def __init__(self) -> None:
        self._ids: frozenset[int] = frozenset()
        self._until_ms: int | None = None

    def note_takeover(self, cluster_metadata: ClusterMetadata, now_ms: int) -> None:
        """Remember the prepared ids of the map, on the first takeover of this process alone.

        What is prepared afterwards this process has seen itself, and nobody can take it back.
        """
        if self._until_ms is None:
            self._ids = frozenset(cluster_metadata.list_expired(INT64_MAX, IDS_MAX))
            self._until_ms = now_ms + KEPT_MS

    def is_over(self, now_ms: int) -> bool:
        """Whether bytes under inherited ids need no longer stay."""
        return self._until_ms is None or now_ms >= self._until_ms

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._ids
