"""Model of adoptions: records in the bucket, streams of the restored metadata, and reasons.

The survey, which reads the bucket, and the planner, which decides, share it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Offsets `[start, end)` of a stream in an object. Equal digests mean equal bytes."""

    start: int
    end: int
    epoch: int
    digest: bytes


Entry: TypeAlias = tuple[StoredRecord, ...]
"""Records of an index entry, at least one. They are adopted together."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Contiguous entries of a stream in an object."""

    object_id: int
    stream_id: int
    entries: tuple[Entry, ...]

    @property
    def records(self) -> Iterator[StoredRecord]:
        """The records of all entries."""
        return (record for entry in self.entries for record in entry)

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.entries[-1][-1].end


@dataclass(frozen=True, slots=True)
class Candidate:
    """An undecided object that the metadata does not know."""

    object_id: int
    size: int
    runs: tuple[StoredRun, ...]


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Visible offsets `[start, end)` of a stream that the metadata assigns to an object.

    `is_readable` is False if the bucket no longer has the object.
    """

    start: int
    end: int
    object_id: int
    is_readable: bool


@dataclass(frozen=True, slots=True)
class StreamHead:
    """A stream of the metadata: its end and epoch, its contents, and pending uploads below its end.

    `owed` has start, end and record epoch of each pending upload. `held` are the ranges of objects,
    by offset. `owners` has start, end and epoch of each writer's range in the metadata, by offset.
    """

    end_offset: int
    epoch: int
    owed: tuple[tuple[int, int, int], ...] = ()
    start_offset: int = 0
    held: tuple[HeldRange, ...] = ()
    owners: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AdoptedRange:
    """Offsets of a stream to adopt. `epoch` is the largest of their records.

    With `after_gap`, the offsets before them are in no object and lost.
    """

    stream_id: int
    start: int
    end: int
    epoch: int
    after_gap: bool = False


@dataclass(frozen=True, slots=True)
class Adopted:
    """An object to adopt with some of its ranges, by stream id."""

    object_id: int
    size: int
    ranges: tuple[AdoptedRange, ...]


class Why(StrEnum):
    """Reason why offsets of an object are not adopted."""

    KNOWN = "known"
    """The metadata has these offsets from other objects."""
    DUPLICATE = "duplicate"
    """Another object with the same records is adopted."""
    FENCED = "fenced"
    """A fenced writer left them, and other records have a larger epoch."""
    DELETED_STREAM = "deleted-stream"
    """The stream was deleted before the restored point."""
    COMPOSITE = "composite"
    """The object has no records. It links other objects, which are checked separately."""
    CONFLICT = "conflict"
    """Other records of the same epoch have the same offset. A person has to decide."""
    GAP = "gap"
    """The offsets before them are in no object."""
    NEW_STREAM = "new-stream"
    """The stream was created after the restored point."""
    RELATIVE = "relative"
    """The object is of shared streams. Only its commit, which was lost, knew their offsets."""
    UNREADABLE = "unreadable"
    """The object is damaged."""


HARMLESS = frozenset(
    {Why.KNOWN, Why.DUPLICATE, Why.FENCED, Why.DELETED_STREAM, Why.COMPOSITE},
)
"""Reasons without a loss."""


@dataclass(frozen=True, slots=True, order=True)
class LeftBehind:
    """Offsets of an object that are not adopted. Stream and offsets are -1 for the whole object."""

    object_id: int
    stream_id: int
    start: int
    end: int
    why: Why
