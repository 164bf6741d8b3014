"""One segment of a flat file: appends wait in buffers until a commit uploads them together.

Knows no backend but by `SegmentStorage`. A commit that failed is settled by the backend's size
before anything else is written, so no byte is written twice and none is left out.
"""

from __future__ import annotations

import asyncio
import io
import logging
from dataclasses import dataclass, field
from enum import StrEnum

from streammeta.brokers.rocketmq.formats.message import with_physical_offset
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.storage import (
    OtherWriterError,
    SegmentStorage,
    SegmentWriteError,
)

_log = logging.getLogger(__name__)

UNKNOWN_TIME = 2**63 - 1
"""Bounds of the times of a segment that holds nothing."""


class AppendResult(StrEnum):
    """Outcomes of an append; the names are those of the source."""

    SUCCESS = "SUCCESS"
    """The bytes wait for a commit."""
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    """The last segment is full and can't be committed now; append again later."""
    OFFSET_INCORRECT = "OFFSET_INCORRECT"
    """The source's: an append that does not continue the queue. Dispatch here never makes one."""
    BUFFER_FULL = "BUFFER_FULL"
    """Too many appends wait; commit, then append again."""
    FILE_FULL = "FILE_FULL"
    """The segment, or the largest one of a file, has no room for so many bytes."""
    FILE_CLOSED = "FILE_CLOSED"
    """The segment is sealed or deleted; its file appends to the next one."""


class SegmentReadError(ValueError):
    """A read names bytes that are not committed."""

    code = "ILLEGAL_PARAM"

    def __init__(self, position: int, length: int, end: int) -> None:
        super().__init__(
            f"read is of {length} bytes at {position}, wanted at least one byte and a position in"
            f" 0..{end - 1}"
        )


class UploadBody:
    """Bytes of one commit, which can be read again from a mark on."""

    def __init__(self, position: int, data: bytes) -> None:
        self.position = position
        self.data = data
        self._stream = io.BytesIO(data)
        self._mark: int | None = None

    @property
    def end(self) -> int:
        """Position behind the last byte."""
        return self.position + len(self.data)

    def read(self, size: int = -1) -> bytes:
        """Read on, to the end with a negative size."""
        return self._stream.read(size)

    def mark(self) -> None:
        """Remember the place that `reset` goes back to."""
        self._mark = self._stream.tell()

    def reset(self) -> None:
        """Go back to the mark; raise `OSError` if there is none."""
        if self._mark is None:
            raise OSError("there is no mark to go back to; call mark first")
        self._stream.seek(self._mark)

    def rest_from(self, position: int) -> bytes:
        """Return what of the body lies at or behind a position of the segment."""
        return self.data[position - self.position :]


def commit_log_body(
    start_offset: int, messages: list[bytes], position: int = 0, coda: bytes = b""
) -> UploadBody:
    """Return messages with the physical offsets they have from `start_offset` on, then a coda."""
    parts, offset = [], start_offset
    for message in messages:
        parts.append(with_physical_offset(message, offset))
        offset += len(message)
    return UploadBody(position, b"".join((*parts, coda)))


@dataclass(slots=True, eq=False)
class FileSegment:
    """A segment; offsets of the flat file are `base_offset` and a position.

    `max_size` None: no limit. `start_size` bytes are in the backend already.
    """

    kind: SegmentType
    base_offset: int
    storage: SegmentStorage
    max_size: int | None = None
    max_buffers: int = 10_000
    start_size: int = 0
    min_timestamp_ms: int = UNKNOWN_TIME
    max_timestamp_ms: int = UNKNOWN_TIME
    closed: bool = False
    is_deleted: bool = False
    has_other_writer: bool = field(init=False, default=False)
    commit_position: int = field(init=False)
    append_position: int = field(init=False)
    _buffers: list[bytes] = field(init=False, default_factory=list)
    _unsettled: UploadBody | None = field(init=False, default=None)
    _committing: bool = field(init=False, default=False)
    _readers: int = field(init=False, default=0)
    _unread: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.commit_position = self.append_position = self.start_size

    @property
    def commit_offset(self) -> int:
        """End of what is committed."""
        return self.base_offset + self.commit_position

    @property
    def append_offset(self) -> int:
        """End of what was appended."""
        return self.base_offset + self.append_position

    @property
    def needs_commit(self) -> bool:
        """Whether appended bytes wait for a commit."""
        return self.append_position > self.commit_position

    def check_append(self, size: int) -> AppendResult:
        """Return the result that an append of so many bytes would have now."""
        if self.closed:
            return AppendResult.FILE_CLOSED
        if self.max_size is not None and self.append_position + size > self.max_size:
            return AppendResult.FILE_FULL
        if len(self._buffers) >= self.max_buffers:
            return AppendResult.BUFFER_FULL
        return AppendResult.SUCCESS

    def append(self, data: bytes, timestamp_ms: int) -> AppendResult:
        """Take bytes into the buffer; they are readable once they are committed."""
        result = self.check_append(len(data))
        if result is not AppendResult.SUCCESS:
            return result
        if self.min_timestamp_ms == UNKNOWN_TIME:
            self.min_timestamp_ms = self.max_timestamp_ms = timestamp_ms
        self.max_timestamp_ms = max(self.max_timestamp_ms, timestamp_ms)
        self._buffers.append(data)
        self.append_position += len(data)
        return AppendResult.SUCCESS

    async def commit(self) -> bool:
        """Upload what waits; False: another commit is under way, or this one failed."""
        if self.closed:
            return False
        if not self.needs_commit:
            return True
        if not self.hold():
            return False
        try:
            return await self._settle() and await self._upload()
        except OtherWriterError as error:
            self.has_other_writer = True
            _log.warning("commit to the segment at %d failed: %s", self.base_offset, error)
            return False
        finally:
            self.release()

    def hold(self) -> bool:
        """Take the permit to commit; False if it is taken."""
        if self._committing:
            return False
        self._committing = True
        return True

    def release(self) -> None:
        """Give the permit to commit back."""
        self._committing = False

    async def _settle(self) -> bool:
        """Find out what a failed upload left; False if the backend does not say."""
        body = self._unsettled
        if body is None:
            return True
        size = await self.storage.size()
        if size is None or not body.position <= size <= body.end:
            return False
        self.commit_position = size
        if size == body.end:
            self._unsettled = None
        return True

    async def _upload(self) -> bool:
        """Send the rest of an unsettled body, or else all that waits."""
        if self._unsettled is None:
            self._unsettled = self._take_buffers()
        body = self._unsettled
        try:
            data = body.rest_from(self.commit_position)
            if data:
                times = (self.min_timestamp_ms, self.max_timestamp_ms)
                await self.storage.write(self.commit_position, data, times)
        except OtherWriterError:
            raise
        except SegmentWriteError as error:
            if error.position != body.end:
                _log.warning("commit to the segment at %d failed: %s", self.base_offset, error)
                return False
        self.commit_position = body.end
        self._unsettled = None
        return True

    def _take_buffers(self) -> UploadBody:
        buffers, self._buffers = self._buffers, []
        if self.kind is SegmentType.COMMIT_LOG:
            return commit_log_body(self.commit_offset, buffers, self.commit_position)
        return UploadBody(self.commit_position, b"".join(buffers))

    async def read(self, position: int, length: int) -> bytes:
        """Return committed bytes, cut at the last committed one.

        Raises:
            SegmentReadError: the position is not committed, no byte is asked for, the segment is
                deleted, or the backend has lost committed bytes.
        """
        end = 0 if self.is_deleted else self.commit_position
        if position < 0 or position >= end or length <= 0:
            raise SegmentReadError(position, length, end)
        length = min(length, end - position)
        self._readers += 1
        try:
            data = await self.storage.read(position, length)
        finally:
            self._readers -= 1
            if not self._readers:
                self._unread.set()
        if len(data) != length:
            raise SegmentReadError(position, length, position + len(data))
        return data

    async def delete(self) -> None:
        """Delete the bytes once the reads under way have ended; may be repeated."""
        self.closed = self.is_deleted = True
        while self._readers:
            self._unread.clear()
            await self._unread.wait()
        await self.storage.destroy()

    def close(self) -> None:
        """Refuse appends and commits from now on; what is committed stays readable."""
        self.closed = True
