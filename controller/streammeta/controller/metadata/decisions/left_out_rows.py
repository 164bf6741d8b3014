"""Rows that commits left out under ACCEPT_VALID, so that a repeat gets the first answer.

A verdict belongs to one row of one commit, so the key contains the commit's digest: the same object
may be left out of several commits and be committed by another one later. Below the feature level
that records the digest it is `NO_DIGEST`, and a newer verdict on the same object and stream
replaces the older one.

Replay adds entries and evicts them in order of arrival, so every replica forgets the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from streammeta.controller.metadata.api.request_identity import NO_DIGEST, REJECTED_ROWS_MAX
from streammeta.controller.metadata.tables.shared_views import Window, WindowView
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import Int64Column
from streammeta.controller.records.record import CommitRowsRejected


class RowKey(NamedTuple):
    """A row of a commit."""

    content_digest: int
    object_id: int
    stream_id: int


class LeftOutRows:
    """A bounded window of verdicts, by row."""

    def __init__(self) -> None:
        self._errors: Window[RowKey, int] = Window(REJECTED_ROWS_MAX)

    def verdicts(self, digest: int, object_id: Int64Column, stream_id: Int64Column) -> Int64Column:
        """Return the `ErrorCode` number of each row of a commit, 0 if not remembered."""
        if not len(self._errors):
            return np.zeros(len(object_id), dtype=np.int64)
        rows = zip(object_id.tolist(), stream_id.tolist(), strict=True)
        return np.array([self._error(digest, *row) for row in rows], dtype=np.int64)

    def _error(self, digest: int, object_id: int, stream_id: int) -> int:
        known = self._errors.get(RowKey(digest, object_id, stream_id))
        # The verdict may be older than the feature level that stores digests.
        if known is None:
            known = self._errors.get(RowKey(NO_DIGEST, object_id, stream_id))
        return known or 0

    def view(self) -> WindowView[RowKey, int]:
        """Return an immutable view of the remembered verdicts, oldest first."""
        return self._errors.view()

    def load(self, entries: Iterable[tuple[RowKey, int]]) -> None:
        """Add entries, which are newer than those loaded before."""
        self._errors.load(entries)

    def replay(self, record: CommitRowsRejected, undo: Undo) -> None:
        """Replay `CommitRowsRejected`."""
        for object_id, stream_id, error in zip(
            record.object_id.tolist(), record.stream_id.tolist(), record.error.tolist(), strict=True
        ):
            self._errors.put(RowKey(record.content_digest, object_id, stream_id), error, undo)
