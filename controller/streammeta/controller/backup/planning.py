"""Next step of a leader's continuous backup. Pure: decides on offsets only.

Segments continue the backup and contain committed entries only. If the log no longer reaches back
to the backup's end, because the bucket was unavailable for long, a checkpoint begins a new chain.
Each new checkpoint of the controller is uploaded after the segments before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from streammeta.controller.backup.segments import Position
from streammeta.controller.ids import SnapshotId
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH

ORIGIN = Position(0, EMPTY_LOG_HASH)
"""Beginning of a log that was never trimmed."""


@dataclass(frozen=True, slots=True)
class PutSegment:
    """Upload the entries from a position on, at most up to `end_offset`."""

    start: Position
    end_offset: int


@dataclass(frozen=True, slots=True)
class PutCheckpoint:
    """Upload a checkpoint from the controller's disk."""

    snapshot_id: SnapshotId


Step: TypeAlias = PutSegment | PutCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of the backup and of the controller.

    `position` is the end of the backed up log, None if a chain must begin. `checkpoint_end` is the
    end of the newest checkpoint in the backup, 0 without one. `newest` is the controller's newest
    one.
    """

    position: Position | None
    checkpoint_end: int
    newest: SnapshotId | None
    committed_end: int


def next_step(progress: Progress) -> Step | None:
    """Return the next upload, None if everything committed is in the backup."""
    newest, position = progress.newest, progress.position
    if position is None:
        # The log before a checkpoint may be trimmed, so a chain can only begin there.
        if newest is not None:
            return PutCheckpoint(newest)
        position = ORIGIN
    elif newest is not None and progress.checkpoint_end < newest.end_offset <= position.end_offset:
        return PutCheckpoint(newest)
    if progress.committed_end > position.end_offset:
        return PutSegment(position, progress.committed_end)
    return None
