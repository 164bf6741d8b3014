"""Interface of segment storage, and a backend in memory.

A backend stores the bytes of segments and does not interpret them. Writes continue at the stored
end. After a failed write the backend's size says which bytes were stored.
"""

from __future__ import annotations

from typing import Protocol

from streammeta.brokers.rocketmq.formats.names import SegmentType


class SegmentWriteError(Exception):
    """A write failed. `position` is the end of the segment if the backend knows it."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        self.position = position
        super().__init__(f"segment write failed: {reason}. Commit again")


class OtherWriterError(SegmentWriteError):
    """Another process wrote other bytes at the end of the segment. Reload it."""


TimeBounds = tuple[int, int]
"""Earliest and latest time of messages, in ms since 1970."""


class SegmentStorage(Protocol):
    """The bytes of one segment. Positions are bytes from its begin."""

    async def size(self) -> int | None:
        """Return the number of stored bytes, None if it is unknown now.

        Raises `OtherWriterError` if another process wrote them.
        """
        ...

    async def reload(self) -> int | None:
        """Return the number of stored bytes, whoever wrote them, and forget earlier writes."""
        ...

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Store bytes after the stored ones. `position` is the segment's size.

        `times` are the bounds for all bytes appended to the segment. Raises `SegmentWriteError`,
        after which the stored size is unknown.
        """
        ...

    async def read(self, position: int, length: int) -> bytes:
        """Return stored bytes, fewer at the end of the segment."""
        ...

    async def seal(self) -> None:
        """Prepare for the end of writes, once the metadata says that the segment is sealed.

        May be repeated. A backend may do its work later, also after a restart.
        """
        ...

    async def destroy(self) -> None:
        """Delete the segment. A missing one counts as deleted."""
        ...


class SegmentStore(Protocol):
    """Storage of the segments of all flat files."""

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> SegmentStorage:
        """Return the storage of a segment, whether it exists or not."""
        ...
