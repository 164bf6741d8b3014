"""Bytes of one frame: what is written, and kept or lost, as a whole.

Big-endian. Header: magic `SMWF` · header CRC-32C u32 · body CRC-32C u32 · body length u32 · first
sequence u64 · flushed end u64 · node epoch u64 · kind u8 · count u32, then the body. The header's
checksum is over the log id and the fields after it. Sequences number the records of a log from 0 in
the order of their appends; `flushed end` is the sequence up to which the log was known to be on the
disk when the frame was written. Bodies: kind 1 is `count` encoded records of the object format, end
to end; kind 2 is empty and stands for `count` records that were lost; kind 3, with a count of 0, is
a text in UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c

from streammeta.storage.durable_files import File
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.record import RecordBatch, decode_record

MAGIC = b"SMWF"
_PREFIX = struct.Struct(">4sI")
_FIELDS = struct.Struct(">IIQQQBI")
FRAME_HEADER_SIZE = _PREFIX.size + _FIELDS.size
WINDOW_BYTES = 1 << 20


class FrameKind(IntEnum):
    """What the body of a frame is."""

    RECORDS = 1
    LOST = 2
    TEXT = 3


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What precedes the body."""

    body_checksum: int
    body_length: int
    first_sequence: int
    flushed_end: int
    node_epoch: int
    kind: int
    count: int

    @property
    def end_sequence(self) -> int:
        """The sequence behind the last record."""
        return self.first_sequence + self.count

    @property
    def size(self) -> int:
        """Bytes of the whole frame."""
        return FRAME_HEADER_SIZE + self.body_length


class BadFrameError(Exception):
    """These bytes are not a whole frame of this log; the message says why."""


@dataclass(frozen=True, slots=True)
class FrameOrigin:
    """What the frames that one process writes to one log have in common."""

    log_id: bytes
    node_epoch: int

    def encode(
        self, kind: FrameKind, body: bytes, first_sequence: int, count: int, flushed_end: int
    ) -> bytes:
        """Return the bytes of one frame."""
        fields = _FIELDS.pack(
            google_crc32c.value(body),
            len(body),
            first_sequence,
            flushed_end,
            self.node_epoch,
            kind,
            count,
        )
        checksum = google_crc32c.value(self.log_id + fields)
        return b"".join((_PREFIX.pack(MAGIC, checksum), fields, body))


def decode_frame_header(data: bytes, log_id: bytes) -> FrameHeader:
    """Check and split a header; raises `BadFrameError`."""
    if len(data) < FRAME_HEADER_SIZE:
        raise BadFrameError(f"{len(data)} bytes left, a frame header has {FRAME_HEADER_SIZE}")
    magic, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise BadFrameError(f"a frame starts with {bytes(magic)!r}, wanted {MAGIC!r}")
    fields = data[_PREFIX.size : FRAME_HEADER_SIZE]
    if checksum != google_crc32c.value(log_id + fields):
        raise BadFrameError("the checksum of a frame's header does not match")
    return FrameHeader(*_FIELDS.unpack(fields))


def check_body(header: FrameHeader, body: bytes) -> None:
    """Raise `BadFrameError` unless `body` is what the header's checksum was made of."""
    if len(body) < header.body_length:
        raise BadFrameError(f"{len(body)} bytes of a frame's body, wanted {header.body_length}")
    if google_crc32c.value(body) != header.body_checksum:
        raise BadFrameError("the checksum of a frame's body does not match")


def records_in(header: FrameHeader, body: bytes, source: str) -> Iterator[RecordBatch]:
    """Yield the records of a checked frame; raises `BadFrameError` if they are not `count`."""
    if header.kind in (FrameKind.LOST, FrameKind.TEXT):
        return
    if header.kind != FrameKind.RECORDS:
        raise BadFrameError(f"a frame is of kind {header.kind}, this release knows 1 to 3")
    view = memoryview(body)
    position = 0
    for _ in range(header.count):
        try:
            record = decode_record(view, position, source=source)
        except CorruptObjectError as error:
            raise BadFrameError(f"a record in a frame is malformed: {error.problem}") from error
        position += record.encoded_size
        yield record
    if position != len(body):
        raise BadFrameError(f"{len(body) - position} bytes behind the last record of a frame")


class FrameReader:
    """Reads frames end to end from a file, through a window of a bounded size."""

    def __init__(self, file: File, log_id: bytes, position: int) -> None:
        self._file = file
        self._log_id = log_id
        self._window = b""
        self._window_start = position
        self.position = position
        """The byte where the next frame begins."""

    def next(self) -> tuple[FrameHeader, bytes] | None:
        """Return the next frame, None at the end of the file; raises `BadFrameError`."""
        head = self._peek(FRAME_HEADER_SIZE)
        if not head:
            return None
        header = decode_frame_header(head, self._log_id)
        body = self._peek(header.size)[FRAME_HEADER_SIZE:]
        check_body(header, body)
        self.position += header.size
        return header, body

    def _peek(self, size: int) -> bytes:
        """Return up to `size` bytes at the position."""
        start = self.position - self._window_start
        if start + size > len(self._window):
            self._window = self._file.read(self.position, max(size, WINDOW_BYTES))
            self._window_start = self.position
            start = 0
        return self._window[start : start + size]


def frame_headers_from(
    file: File, log_id: bytes, position: int
) -> Iterator[tuple[int, FrameHeader]]:
    """Yield every intact frame header at or behind `position`, with the byte it begins at."""
    kept = FRAME_HEADER_SIZE - 1
    data = file.read(position, WINDOW_BYTES)
    while len(data) >= FRAME_HEADER_SIZE:
        found = data.find(MAGIC)
        while 0 <= found <= len(data) - FRAME_HEADER_SIZE:
            try:
                header = decode_frame_header(data[found : found + FRAME_HEADER_SIZE], log_id)
            except BadFrameError:
                pass
            else:
                yield position + found, header
            found = data.find(MAGIC, found + 1)
        position += len(data) - kept
        data = data[-kept:] + file.read(position + kept, WINDOW_BYTES)
        if len(data) == kept:
            return
