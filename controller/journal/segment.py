"""One file of the log: a header that names the log, then batches end to end.

A segment appears under its name only once its header is durable, so a bad header is always damage.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from controller.ids import EndOffset
from controller.journal.batch_codec import (
    HEADER_SIZE,
    MAGIC,
    BadBatchError,
    BatchHeader,
    decode_body,
    decode_header,
    encode_batch,
)
from controller.journal.errors import JournalDamagedError
from controller.journal.files import File, FileSystem
from controller.quorum.messages import Batch

_NAME = re.compile(r"^(\d{20})\.log$")
_TEMPORARY_NAME = re.compile(r"^\d{20}\.log\.tmp$")
_HEADER = struct.Struct(">4s16sQI")
_HEADER_MAGIC = b"SMS1"
_INDEX_INTERVAL = 16 << 10


def segment_base(name: str) -> EndOffset | None:
    """Return the base offset in a segment's file name, None for other files."""
    match = _NAME.match(name)
    return EndOffset(int(match[1])) if match else None


def is_temporary_segment(name: str) -> bool:
    """Whether a crash while a segment was created left this file."""
    return _TEMPORARY_NAME.match(name) is not None


class Segment:
    """An open segment and a sparse index of where its batches are."""

    def __init__(self, path: Path, file: File, log_id: bytes, base_offset: EndOffset) -> None:
        self.path = path
        self.base_offset = base_offset
        self.size = _HEADER.size
        self._file = file
        self._log_id = log_id
        self._offsets = array("Q")
        self._positions = array("Q")

    @classmethod
    def create(
        cls, files: FileSystem, directory: Path, log_id: bytes, base_offset: EndOffset
    ) -> Segment:
        """Create an empty segment, durably."""
        path = directory / f"{base_offset:020d}.log"
        temporary = path.with_name(path.name + ".tmp")
        file = files.open(temporary, create=True)
        fields = _HEADER.pack(_HEADER_MAGIC, log_id, base_offset, 0)[:-4]
        file.truncate(0)
        file.write(0, fields + struct.pack(">I", google_crc32c.value(fields)))
        file.sync()
        files.rename(temporary, path)
        files.sync_directory(directory)
        return cls(path, file, log_id, base_offset)

    @classmethod
    def open(cls, files: FileSystem, path: Path, log_id: bytes) -> Segment:
        """Open a segment; raises JournalDamagedError unless its header fits name and log."""
        file = files.open(path)
        data = file.read(0, _HEADER.size)
        base_offset = segment_base(path.name)
        expected = _HEADER.pack(_HEADER_MAGIC, log_id, base_offset, 0)[:-4]
        if data != expected + struct.pack(">I", google_crc32c.value(expected)):
            file.close()
            raise JournalDamagedError(path, 0, "its header is not that of this log at this offset")
        assert base_offset is not None
        return cls(path, file, log_id, base_offset)

    def scan(self) -> Iterator[tuple[Batch, BatchHeader]]:
        """Yield the batches from the start, and take them into the index.

        Raises:
            BadBatchError: what follows the last yielded batch, at `size`, is not one.
        """
        data = self._file.read(0, self._file.size())
        while self.size < len(data):
            header = decode_header(data[self.size : self.size + HEADER_SIZE], self._log_id)
            body_start = self.size + HEADER_SIZE
            batch = decode_body(header, data[body_start : body_start + header.body_length])
            self._note(batch.base_offset, HEADER_SIZE + header.body_length)
            yield batch, header

    def later_flushed_end(self) -> EndOffset:
        """Return the highest flushed end that any header beyond `size` vouches for, or 0."""
        data = self._file.read(self.size, max(0, self._file.size() - self.size))
        highest = EndOffset(0)
        position = data.find(MAGIC, 1)
        while position >= 0:
            try:
                header = decode_header(data[position : position + HEADER_SIZE], self._log_id)
            except BadBatchError:
                pass
            else:
                highest = max(highest, header.flushed_end)
            position = data.find(MAGIC, position + 1)
        return highest

    def append(self, batch: Batch, flushed_end: EndOffset) -> None:
        """Write a batch at the end; durable after `sync`."""
        data = encode_batch(batch, self._log_id, flushed_end)
        self._file.write(self.size, data)
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
        self.size = size
        keep = bisect_right(self._positions, size - 1) if size > _HEADER.size else 0
        del self._offsets[keep:], self._positions[keep:]

    def position_of(self, offset: EndOffset) -> int | None:
        """Return where the batch that begins at `offset` begins, None if none does."""
        for position, header in self._headers(offset):
            if header.base_offset >= offset:
                return position if header.base_offset == offset else None
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
                raise JournalDamagedError(self.path, position, str(error)) from None
            budget -= header.body_length
        return batches

    def _note(self, base_offset: EndOffset, length: int) -> None:
        if not self._positions or self.size - self._positions[-1] >= _INDEX_INTERVAL:
            self._offsets.append(base_offset)
            self._positions.append(self.size)
        self.size += length

    def _headers(self, offset: EndOffset) -> Iterator[tuple[int, BatchHeader]]:
        index = bisect_right(self._offsets, offset) - 1
        position = self._positions[index] if index >= 0 else _HEADER.size
        while position < self.size:
            data = self._file.read(position, HEADER_SIZE)
            try:
                header = decode_header(data, self._log_id)
            except BadBatchError as error:
                raise JournalDamagedError(self.path, position, str(error)) from None
            yield position, header
            position += HEADER_SIZE + header.body_length
