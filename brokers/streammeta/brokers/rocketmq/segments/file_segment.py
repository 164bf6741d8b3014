"""Segment of a flat file: appends wait in buffers until one commit uploads them together.

Uses a backend only through `SegmentStorage`. After a failed commit the backend's size is read
before the next write, so that no byte is written twice or left out.
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
"""Bounds of the times of an empty segment."""


class AppendResult(StrEnum):
    """Outcomes of an append. The names are the source's."""

    SUCCESS = "SUCCESS"
    """The bytes wait for a commit."""
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    """The last segment is full and can't be committed now. Append again later."""
    OFFSET_INCORRECT = "OFFSET_INCORRECT"
    """An append of the source that does not continue the queue. Dispatch never causes one."""
    BUFFER_FULL = "BUFFER_FULL"
    """Too many appends wait. Commit, then append again."""
    FILE_FULL = "FILE_FULL"
    """The segment, or the largest one of a file, has no room for so many bytes."""
    FILE_CLOSED = "FILE_CLOSED"
    """The segment is sealed or deleted. Its file appends to the next one."""


class SegmentReadError(ValueError):
    """A read names uncommitted bytes."""

    code = "ILLEGAL_PARAM"

    def __init__(self, position: int, length: int, end: int) -> None:
        super().__init__(
            f"read is of {length} bytes at {position}, expected at least one byte and a"
            f" position in 0..{end - 1}"
        )


class UploadBody:
    """Bytes of one commit, which can be read again from a mark."""

    def __init__(self, position: int, data: bytes) -> None:
        self.position = position
        self.data = data
        self._stream = io.BytesIO(data)
        self._mark: int | None = None

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self.position + len(self.data)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, all remaining ones for a negative size."""
        return self._stream.read(size)

    def mark(self) -> None:
        """Mark the position for `reset`."""
        self._mark = self._stream.tell()

    def reset(self) -> None:
        """Return to the mark. Raise `OSError` without one."""
        if self._mark is None:
            raise OSError("the body has no mark. Call mark first")
        self._stream.seek(self._mark)

    def rest_from(self, position: int) -> bytes:
        """Return the bytes of the body from a position of the segment on."""
        return self.data[position - self.position :]


def commit_log_body(
    start_offset: int, messages: list[bytes], position: int = 0, coda: bytes = b""
) -> UploadBody:
    """Return messages with their physical offsets from `start_offset` on, then a coda."""
    parts, offset = [], start_offset
    for message in messages:
        parts.append(with_physical_offset(message, offset))
        offset += len(message)
    return UploadBody(position, b"".join((*parts, coda)))


@dataclass(slots=True, eq=False)
class FileSegment:
    """One segment. An offset of the flat file is `base_offset` plus a position.

    `max_size` None means no limit. `start_size` bytes are already stored in the backend.
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
        """End of the committed bytes."""
        return self.base_offset + self.commit_position

    @property
    def append_offset(self) -> int:
        """End of the appended bytes."""
        return self.base_offset + self.append_position

    @property
    def needs_commit(self) -> bool:
        """Whether appended bytes wait for a commit."""
        return self.append_position > self.commit_position

    def check_append(self, size: int) -> AppendResult:
        """Return the result of an append of so many bytes now."""
        if self.closed:
            return AppendResult.FILE_CLOSED
        if self.max_size is not None and self.append_position + size > self.max_size:
            return AppendResult.FILE_FULL
        if len(self._buffers) >= self.max_buffers:
            return AppendResult.BUFFER_FULL
        return AppendResult.SUCCESS

    def append(self, data: bytes, timestamp_ms: int) -> AppendResult:
        """Add bytes to the buffer. They are readable after their commit."""
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
        """Upload appended bytes. Return False on a failure, or if another commit is under way."""
        if self.closed:
            return False
        if not self.needs_commit:
            return True
        # One commit at a time: a second one would upload the same buffers.
        if not self.hold():
            return False

        try:
            # A failed upload is settled first, so that no byte is written twice.
            return await self._settle() and await self._upload()
        except OtherWriterError as error:
            # The queue reloads the segment before its next commit.
            self.has_other_writer = True
            _log.warning(
                "commit to the segment at %d failed, the next commit repairs it: %s",
                self.base_offset,
                error,
            )
            return False
        finally:
            self.release()

    def hold(self) -> bool:
        """Acquire the permit to commit. Return False if it is in use."""
        if self._committing:
            return False
        self._committing = True
        return True

    def release(self) -> None:
        """Release the permit to commit."""
        self._committing = False

    async def _settle(self) -> bool:
        """Find out how much a failed upload stored. Return False if the backend does not say."""
        body = self._unsettled
        if body is None:
            return True
        size = await self.storage.size()
        # A size outside of the body comes from a stale answer or another writer.
        if size is None or not body.position <= size <= body.end:
            return False
        # A partly stored body continues at the stored size.
        self.commit_position = size
        if size == body.end:
            self._unsettled = None
        return True

    async def _upload(self) -> bool:
        """Send the rest of an unsettled body, or else all appended bytes."""
        if self._unsettled is None:
            # New appends go to fresh buffers, so a retry sends exactly the same bytes.
            self._unsettled = self._take_buffers()
        body = self._unsettled
        try:
            # The backend may already have stored all bytes of an unanswered write.
            data = body.rest_from(self.commit_position)
            if data:
                times = (self.min_timestamp_ms, self.max_timestamp_ms)
                await self.storage.write(self.commit_position, data, times)
        except OtherWriterError:
            raise
        except SegmentWriteError as error:
            # The backend has all bytes if its end is the body's end: only the answer was lost.
            if error.position != body.end:
                _log.warning(
                    "commit to the segment at %d failed, the next commit repeats it: %s",
                    self.base_offset,
                    error,
                )
                return False

        self.commit_position = body.end
        self._unsettled = None
        return True

    def _take_buffers(self) -> UploadBody:
        buffers, self._buffers = self._buffers, []
        # Messages contain their physical offset, which is known only at the commit.
        if self.kind is SegmentType.COMMIT_LOG:
            return commit_log_body(self.commit_offset, buffers, self.commit_position)
        return UploadBody(self.commit_position, b"".join(buffers))

    async def read(self, position: int, length: int) -> bytes:
        """Return committed bytes, at most up to the last committed one.

        Raises:
            SegmentReadError: the position is not committed, no byte is requested, the segment is
                deleted, or the backend has lost committed bytes.
        """
        # A deleted segment rejects new reads, while reads under way may finish.
        end = 0 if self.is_deleted else self.commit_position
        if position < 0 or position >= end or length <= 0:
            raise SegmentReadError(position, length, end)
        length = min(length, end - position)
        # `delete` waits until no reader is left.
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
        """Delete the bytes once the reads under way have ended. May be repeated."""
        self.closed = self.is_deleted = True

        while self._readers:
            self._unread.clear()
            await self._unread.wait()
        await self.storage.destroy()

    def close(self) -> None:
        """Reject appends and commits from now on. Committed bytes stay readable."""
        self.closed = True
