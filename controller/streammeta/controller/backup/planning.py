"""Next step of a leader's continuous backup. Pure: decides on offsets, touches nothing.

Segments continue what is in the backup; they hold committed entries alone. Where the log no longer
reaches back to it, because the bucket was away for long, a checkpoint begins a new chain. Each new
checkpoint of the controller follows once the segments before it are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from streammeta.controller.backup.segments import Position
from streammeta.controller.ids import SnapshotId
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH

ORIGIN = Position(0, EMPTY_LOG_HASH)
"""The beginning of a log that was never trimmed."""


@dataclass(frozen=True, slots=True)
class PutSegment:
    """Put the entries from a position on, at most up to `end_offset`."""

    start: Position
    end_offset: int


@dataclass(frozen=True, slots=True)
class PutCheckpoint:
    """Put a checkpoint that the controller has on its disk."""

    snapshot_id: SnapshotId


Step: TypeAlias = PutSegment | PutCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Contents of the backup beside those of the controller.

    `position` is the end of the backed up log, None if a chain must begin; `checkpoint_end` the end
    of the newest checkpoint in the backup, 0 without one. `newest` is the controller's newest one.
    """

    position: Position | None
    checkpoint_end: int
    newest: SnapshotId | None
    committed_end: int


def next_step(progress: Progress) -> Step | None:
    """Return what is to be put next, None if everything committed is there."""
    newest, position = progress.newest, progress.position
    if position is None:
        if newest is not None:
            return PutCheckpoint(newest)
        position = ORIGIN
    elif newest is not None and progress.checkpoint_end < newest.end_offset <= position.end_offset:
        return PutCheckpoint(newest)
    if progress.committed_end > position.end_offset:
        return PutSegment(position, progress.committed_end)
    return None
