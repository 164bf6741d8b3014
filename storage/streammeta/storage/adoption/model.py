"""Model of adoptions: records in the bucket, streams of the restored map, and reasons.

Shared by the survey, which reads the bucket, and the planner, which decides. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Offsets `[start, end)` of a stream as an object has them; equal digests are equal bytes."""

    start: int
    end: int
    epoch: int
    digest: bytes


Entry: TypeAlias = tuple[StoredRecord, ...]
"""Records of one entry of an object's index, which are taken together; at least one."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Entries of one stream in an object, each beginning where the one before ends."""

    object_id: int
    stream_id: int
    entries: tuple[Entry, ...]

    @property
    def records(self) -> Iterator[StoredRecord]:
        """The records of all entries."""
        return (record for entry in self.entries for record in entry)

    @property
    def end(self) -> int:
        """The offset behind the last one."""
        return self.entries[-1][-1].end


@dataclass(frozen=True, slots=True)
class Candidate:
    """An undecided object that the map does not know."""

    object_id: int
    size: int
    runs: tuple[StoredRun, ...]


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Visible offsets `[start, end)` of a stream that the map reads from one object.

    `is_readable` is False if the bucket no longer has the object.
    """

    start: int
    end: int
    object_id: int
    is_readable: bool


@dataclass(frozen=True, slots=True)
class StreamHead:
    """A stream of the map: its end and epoch, its contents, and pending uploads below its end.

    `owed` has start, end and epoch of each pending upload, the epoch being that of its records.
    `held` are the ranges of objects, by offset; `owners` start, end and epoch of each writer's
    range that the map remembers, by offset.
    """

    end_offset: int
    epoch: int
    owed: tuple[tuple[int, int, int], ...] = ()
    start_offset: int = 0
    held: tuple[HeldRange, ...] = ()
    owners: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AdoptedRange:
    """Offsets of a stream to adopt; `epoch` is the largest among their records.

    `after_gap`: offsets before them are in no object, and are lost.
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
    """Reasons to leave offsets of an object behind."""

    KNOWN = "known"
    """The map has these offsets from other objects."""
    DUPLICATE = "duplicate"
    """Another object with the same records is adopted."""
    FENCED = "fenced"
    """A writer that was fenced left them: other records have a larger epoch."""
    DELETED_STREAM = "deleted-stream"
    """The stream was deleted before the restored point."""
    COMPOSITE = "composite"
    """The object has no records of its own: it names others, which are judged themselves."""
    CONFLICT = "conflict"
    """Other records of the same epoch are at the same offset; a person has to decide."""
    GAP = "gap"
    """Offsets before them are in no object."""
    NEW_STREAM = "new-stream"
    """The stream was created after the restored point."""
    UNREADABLE = "unreadable"
    """The object is damaged."""


HARMLESS = frozenset(
    {Why.KNOWN, Why.DUPLICATE, Why.FENCED, Why.DELETED_STREAM, Why.COMPOSITE},
)
"""Reasons by which nothing is lost."""


@dataclass(frozen=True, slots=True, order=True)
class LeftBehind:
    """Offsets of an object that are not adopted; stream and offsets are -1 if all of it is."""

    object_id: int
    stream_id: int
    start: int
    end: int
    why: Why
