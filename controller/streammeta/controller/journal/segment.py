"""One file of the log: a header that names the log, then batches end to end.

A segment appears under its name only once its header is durable, so a bad header is always damage.
The header also has the epoch of the batch before the segment, for when the log begins there.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.batch_codec import (
    HEADER_SIZE,
    MAGIC,
    BadBatchError,
    BatchHeader,
    decode_body,
    decode_header,
    encode_batch,
)
from streammeta.controller.journal.errors import RESTART_REPAIRS, JournalDamagedError
from streammeta.controller.quorum.messages import Batch
from streammeta.storage.durable_files import DiskFullError, File, FileSystem, replace_file

_NAME = re.compile(r"^(\d{20})\.log$")
_TEMPORARY_NAME = re.compile(r"^\d{20}\.log\.(damaged\.)?tmp$")
_FIELDS = struct.Struct(">4s16sQQ")
_CHECKSUM = struct.Struct(">I")
SEGMENT_HEADER_SIZE = _FIELDS.size + _CHECKSUM.size
_HEADER_MAGIC = b"SMS2"
_INDEX_INTERVAL = 16 << 10
_WINDOW_BYTES = 1 << 20


class BadSegmentError(Exception):
    """A segment's header is not that of this log at this offset; the message says why."""


def segment_base(name: str) -> EndOffset | None:
    """Return the base offset in a segment's file name, None for other files."""
    match = _NAME.match(name)
    return EndOffset(int(match[1])) if match else None


def is_temporary_segment(name: str) -> bool:
    """Whether a crash while a segment was created or copied left this file."""
    return _TEMPORARY_NAME.match(name) is not None


class Segment:
    """An open segment and a sparse index of where its batches are."""

    def __init__(
        self,
        path: Path,
        file: File,
        log_id: bytes,
        base_offset: EndOffset,
        previous_epoch: Epoch,
    ) -> None:
        self.path = path
        self.base_offset = base_offset
        self.previous_epoch = previous_epoch
        self.size = SEGMENT_HEADER_SIZE
        self._file = file
        self._log_id = log_id
        self._offsets = array("Q")
        self._positions = array("Q")

    @classmethod
    def create(
        cls,
        files: FileSystem,
        directory: Path,
        log_id: bytes,
        base_offset: EndOffset,
        previous_epoch: Epoch,
    ) -> Segment:
        """Create an empty segment, durably; raises DiskFullError with nothing left behind."""
        path = directory / f"{base_offset:020d}.log"
        fields = _FIELDS.pack(_HEADER_MAGIC, log_id, base_offset, previous_epoch)
        replace_file(files, path, fields + _CHECKSUM.pack(google_crc32c.value(fields)))
        files.sync_directory(directory)
        return cls(path, files.open(path), log_id, base_offset, previous_epoch)

    @classmethod
    def open(cls, files: FileSystem, path: Path, log_id: bytes) -> Segment:
        """Open a segment; raises BadSegmentError unless its header fits name and log."""
        file = files.open(path)
        try:
            base_offset, previous_epoch = _read_header(file, path.name, log_id)
        except BadSegmentError:
            file.close()
            raise
        return cls(path, file, log_id, base_offset, previous_epoch)

    @property
    def file_size(self) -> int:
        """Bytes of the file, with whatever follows the last batch read."""
        return self._file.size()

    def scan(self, position: int = SEGMENT_HEADER_SIZE) -> Iterator[tuple[Batch, BatchHeader]]:
        """Yield the batches from a position on, and take them into the index.

        Raises:
            BadBatchError: what follows the last yielded batch, at `size`, is not one.
        """
        self.rewind(position)
        window = _Window(self._file, position)
        while data := window.take(HEADER_SIZE):
            header = decode_header(data, self._log_id)
            batch = decode_body(header, window.take(header.body_length))
            self._note(batch.base_offset, HEADER_SIZE + header.body_length)
            yield batch, header

    def rewind(self, size: int) -> None:
        """Take what lies at or beyond `size` for not read yet."""
        keep = bisect_right(self._positions, size - 1)
        del self._offsets[keep:], self._positions[keep:]
        self.size = size

    def later_flushed_end(self) -> EndOffset:
        """Return the highest flushed end that any header beyond `size` vouches for, or 0."""
        ends = (header.flushed_end for _, header in self.later_headers())
        return max(ends, default=EndOffset(0))

    def later_headers(self) -> Iterator[tuple[int, BatchHeader]]:
        """Yield every whole header at or beyond `size`, wherever it begins, with its position."""
        position = self.size
        window = _Window(self._file, position)
        data = window.take(_WINDOW_BYTES)
        while len(data) >= HEADER_SIZE:
            for found, header in _headers_in(data, self._log_id):
                yield position + found, header
            # A header may lie across two pieces.
            following = window.take(_WINDOW_BYTES)
            if not following:
                return
            kept = HEADER_SIZE - 1
            position += len(data) - kept
            data = data[-kept:] + following

    def append(self, batch: Batch, flushed_end: EndOffset) -> None:
        """Write a batch at the end; durable after `sync`.

        Raises DiskFullError with the half-written batch taken back.
        """
        data = encode_batch(batch, self._log_id, flushed_end)
        try:
            self._file.write(self.size, data)
        except DiskFullError:
            if self._file.size() > self.size:
                self._file.truncate(self.size)
            raise
        self._note(batch.base_offset, len(data))

    def sync(self) -> None:
        """Make everything appended durable."""
        self._file.sync()

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def cut(self, size: int) -> None:
        """Cut the file after `size` bytes, durably."""
        self._file.truncate(size)
        self._file.sync()
        self.rewind(size)

    def position_of(self, offset: EndOffset) -> int | None:
        """Return where the batch that begins at `offset` begins, None if none does."""
        for position, header in self._headers(offset):
            if header.base_offset >= offset:
                return position if header.base_offset == offset else None
        return None

    def epoch_ending_at(self, end_offset: EndOffset) -> Epoch | None:
        """Return the epoch of the batch that ends at `end_offset`, None if none does."""
        for _, header in self._headers(EndOffset(end_offset - 1)):
            if header.end_offset >= end_offset:
                return header.epoch if header.end_offset == end_offset else None
        return None

    def read(self, offset: EndOffset, max_bytes: int) -> list[Batch]:
        """Return whole batches from `offset`, at least one if there is any."""
        batches: list[Batch] = []
        budget = max_bytes
        for position, header in self._headers(offset):
            if header.base_offset < offset:
                continue
            if batches and header.body_length > budget:
                break
            body = self._file.read(position + HEADER_SIZE, header.body_length)
            try:
                batches.append(decode_body(header, body))
            except BadBatchError as error:
                raise self._damaged(position, header.base_offset, error) from None
            budget -= header.body_length
        return batches

    def _note(self, base_offset: EndOffset, length: int) -> None:
        if not self._positions or self.size - self._positions[-1] >= _INDEX_INTERVAL:
            self._offsets.append(base_offset)
            self._positions.append(self.size)
        self.size += length

    def _headers(self, offset: EndOffset) -> Iterator[tuple[int, BatchHeader]]:
        index = bisect_right(self._offsets, offset) - 1
        position = self._positions[index] if index >= 0 else SEGMENT_HEADER_SIZE
        following = self._offsets[index] if index >= 0 else self.base_offset
        while position < self.size:
            data = self._file.read(position, HEADER_SIZE)
            try:
                header = decode_header(data, self._log_id)
            except BadBatchError as error:
                raise self._damaged(position, following, error) from None
            yield position, header
            position += HEADER_SIZE + header.body_length
            following = header.end_offset

    def _damaged(self, position: int, offset: int, error: BadBatchError) -> JournalDamagedError:
        what = f"the batch at offset {offset}: {error}"
        return JournalDamagedError(self.path, position, what, RESTART_REPAIRS)


class _Window:
    """Reads a file once from front to end, a piece at a time."""

    def __init__(self, file: File, position: int) -> None:
        self._file = file
        self._position = position
        self._buffer = b""
        self._taken = 0

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end of the file."""
        if len(self._buffer) - self._taken < size:
            rest = self._buffer[self._taken :]
            wanted = max(size - len(rest), _WINDOW_BYTES)
            more = self._file.read(self._position, wanted)
            self._position += len(more)
            self._buffer, self._taken = rest + more, 0
        data = self._buffer[self._taken : self._taken + size]
        self._taken += len(data)
        return data


def _read_header(file: File, name: str, log_id: bytes) -> tuple[EndOffset, Epoch]:
    data = file.read(0, SEGMENT_HEADER_SIZE)
    if len(data) < SEGMENT_HEADER_SIZE:
        raise BadSegmentError(f"{len(data)} bytes, a header has {SEGMENT_HEADER_SIZE}")
    magic, found_log, base_offset, previous_epoch = _FIELDS.unpack(data[: _FIELDS.size])
    if _CHECKSUM.unpack(data[_FIELDS.size :]) != (google_crc32c.value(data[: _FIELDS.size]),):
        raise BadSegmentError("its header's checksum does not match")
    if magic != _HEADER_MAGIC or found_log != log_id:
        raise BadSegmentError("its header is that of another log")
    if base_offset != segment_base(name):
        raise BadSegmentError(f"its header says it begins at offset {base_offset}")
    return EndOffset(base_offset), Epoch(previous_epoch)


def _headers_in(data: bytes, log_id: bytes) -> Iterator[tuple[int, BatchHeader]]:
    position = data.find(MAGIC)
    while position >= 0:
        try:
            header = decode_header(data[position : position + HEADER_SIZE], log_id)
        except BadBatchError:
            pass
        else:
            yield position, header
        position = data.find(MAGIC, position + 1)
