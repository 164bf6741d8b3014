"""Segmented, checksummed logs: frames, segment files, and the two-slot file beside them.

The controller's journal and a broker's write-ahead log are such logs. A segment is a file header
and frames end to end; it is named after the offset of its first record and replaced only as a
whole, so only the last one can have a torn tail. Offsets number the records of a log from 0.

A frame, big-endian: magic of 4 bytes · header CRC-32C u32 · body CRC-32C u32 · body length u32 ·
base offset u64 · epoch and flushed end, u64 each, in the order of the log's codec · kind u8 ·
record count u32 · body. The header's checksum begins with the log id, so a frame of another log, or
at another offset, never passes. `flushed end` is how far the log was known to be flushed when the
frame was written: frames vouch for those before them.

Knows neither the contents of file headers and bodies nor the reaction to damage: both logs have
their own rules for that.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from streammeta.storage.durable_files import DiskFullError, File

WINDOW_BYTES = 1 << 20
"""Bytes read at once by a scan."""

_PREFIX = struct.Struct(">4sI")
_FIELDS = struct.Struct(">IIQQQBI")
FRAME_HEADER_SIZE = _PREFIX.size + _FIELDS.size

_SEGMENT_NAME = re.compile(r"([0-9]{20})\.([a-z]+)")


class BadFrameError(Exception):
    """These bytes are not a whole frame of this log; the message says why."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The fields before a frame's body."""

    body_checksum: int
    body_length: int
    base_offset: int
    epoch: int
    flushed_end: int
    kind: int
    count: int

    @property
    def end_offset(self) -> int:
        """The offset after the last record."""
        return self.base_offset + self.count

    @property
    def size(self) -> int:
        """Bytes of the whole frame."""
        return FRAME_HEADER_SIZE + self.body_length

    def check_body(self, body: bytes) -> None:
        """Raise BadFrameError unless this is the frame's body."""
        if len(body) < self.body_length:
            raise BadFrameError(f"{len(body)} bytes of body, its header says {self.body_length}")
        if google_crc32c.value(body) != self.body_checksum:
            raise BadFrameError("its body's checksum does not match")


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """The frames of one log: their magic, its id, and which of two header fields comes first."""

    magic: bytes
    log_id: bytes
    has_epoch_first: bool

    def encode(
        self, body: bytes, *, base_offset: int, epoch: int, flushed_end: int, kind: int, count: int
    ) -> bytes:
        """Return the bytes of a frame."""
        first, second = (epoch, flushed_end) if self.has_epoch_first else (flushed_end, epoch)
        fields = _FIELDS.pack(
            google_crc32c.value(body), len(body), base_offset, first, second, kind, count
        )
        checksum = google_crc32c.value(self.log_id + fields)
        return b"".join((_PREFIX.pack(self.magic, checksum), fields, body))

    def decode_header(self, data: bytes) -> FrameHeader:
        """Check and split a header; raises BadFrameError."""
        if len(data) < FRAME_HEADER_SIZE:
            raise BadFrameError(f"{len(data)} bytes left, a header has {FRAME_HEADER_SIZE}")
        magic, checksum = _PREFIX.unpack_from(data)
        if magic != self.magic:
            raise BadFrameError(f"starts with {magic!r}, wanted {self.magic!r}")
        fields = data[_PREFIX.size : FRAME_HEADER_SIZE]
        if checksum != google_crc32c.value(self.log_id + fields):
            raise BadFrameError("its header's checksum does not match")
        body_checksum, length, base, first, second, kind, count = _FIELDS.unpack(fields)
        epoch, flushed = (first, second) if self.has_epoch_first else (second, first)
        return FrameHeader(body_checksum, length, base, epoch, flushed, kind, count)

    def frames(self, file: File, position: int) -> FrameReader:
        """Return a reader of the frames of `file` from a byte on."""
        return FrameReader(self, file, position)

    def headers_from(self, file: File, position: int) -> Iterator[tuple[int, FrameHeader]]:
        """Yield every intact header at or behind a byte, wherever it begins, with its position."""
        kept = FRAME_HEADER_SIZE - 1  # a header may lie across two pieces
        data = file.read(position, WINDOW_BYTES)
        while len(data) >= FRAME_HEADER_SIZE:
            found = data.find(self.magic)
            while 0 <= found <= len(data) - FRAME_HEADER_SIZE:
                try:
                    header = self.decode_header(data[found : found + FRAME_HEADER_SIZE])
                except BadFrameError:
                    pass
                else:
                    yield position + found, header
                found = data.find(self.magic, found + 1)
            position += len(data) - kept
            data = data[-kept:] + file.read(position + kept, WINDOW_BYTES)


class FrameReader:
    """Reads frames end to end from a file, through a window of a bounded size."""

    def __init__(self, codec: FrameCodec, file: File, position: int) -> None:
        self._codec = codec
        self._file = file
        self._window = b""
        self._window_start = position
        self.position = position
        """The byte where the next frame begins."""

    def next(self) -> tuple[FrameHeader, bytes] | None:
        """Return the next frame, None at the end of the file; raises BadFrameError."""
        data = self._read(self.position, FRAME_HEADER_SIZE)
        if not data:
            return None
        header = self._codec.decode_header(data)
        body = self._read(self.position + FRAME_HEADER_SIZE, header.body_length)
        header.check_body(body)
        self.position += header.size
        return header, body

    def _read(self, position: int, size: int) -> bytes:
        start = position - self._window_start
        if start + size > len(self._window):
            self._window = self._file.read(position, max(size, WINDOW_BYTES))
            self._window_start, start = position, 0
        return self._window[start : start + size]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no frame, and the next intact header behind them, if there is one."""

    problem: str
    next_header: FrameHeader | None


def segment_path(directory: Path, base_offset: int, suffix: str) -> Path:
    """Return where the segment that begins at `base_offset` is."""
    return directory / f"{base_offset:020d}{suffix}"


def segment_base(name: str, suffix: str) -> int | None:
    """Return the base offset in a segment's file name, None for other files."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match and name.endswith(suffix) else None


class Segment:
    """An open segment; frames are appended at byte `size`, whatever follows there."""

    def __init__(
        self, path: Path, file: File, codec: FrameCodec, base_offset: int, header_size: int
    ) -> None:
        self.path = path
        self.file = file
        self.codec = codec
        self.base_offset = base_offset
        self.header_size = header_size
        self.size = header_size

    def append(self, frame: bytes, room: int = 0) -> None:
        """Write a frame at the end, and `room` bytes of zero behind it; durable after `sync`.

        Raises DiskFullError with the half-written frame taken back.
        """
        try:
            self.file.write(self.size, frame + bytes(room) if room else frame)
        except DiskFullError:
            self.cut_tail()
            raise
        self.size += len(frame)

    def cut_tail(self) -> None:
        """Cut off the bytes beyond `size`; durable after `sync`."""
        if self.file.size() > self.size:
            self.file.truncate(self.size)

    def vouches_beyond(self, end_offset: int) -> bool:
        """Whether a frame beyond `size` says that the log was flushed beyond `end_offset`."""
        later = self.codec.headers_from(self.file, self.size)
        return any(header.flushed_end > end_offset for _, header in later)

    def frames_past_damage(
        self, position: int
    ) -> Iterator[tuple[int, tuple[FrameHeader, bytes] | Damage]]:
        """Yield every good frame from a byte on, and each damage between, with its position."""
        while True:
            frames = self.codec.frames(self.file, position)
            try:
                while frame := frames.next():
                    yield position, frame
                    position = frames.position
                return
            except BadFrameError as error:
                problem = str(error)
            later = next(self.codec.headers_from(self.file, position + 1), None)
            yield position, Damage(problem, later[1] if later else None)
            if later is None:
                return
            position, _ = later

    def sync(self) -> None:
        """Make everything appended durable."""
        self.file.sync()

    def close(self) -> None:
        """Release the file."""
        self.file.close()


class SlotFile:
    """A few numbers in two slots of a file, written in turn, so that a torn write leaves the other.

    Slot, big-endian: CRC-32C u32 over the log id and what follows, sequence u64, the values; the
    larger sequence counts. Slots are not synced by `write`: they survive the process, and after a
    power failure they may be older than the truth but never newer.
    """

    def __init__(
        self, file: File, log_id: bytes, layout: struct.Struct, positions: tuple[int, int]
    ) -> None:
        """`layout` is that of sequence and values, `positions` are the bytes of the slots."""
        self._file = file
        self._log_id = log_id
        self._layout = layout
        self._positions = positions
        self._sequence = 0

    def read(self) -> tuple[Any, ...] | None:
        """Return the newest values, None if neither slot is intact."""
        slots = [slot for slot in map(self._read_slot, self._positions) if slot is not None]
        if not slots:
            return None
        self._sequence, *values = max(slots)
        return tuple(values)

    def write(self, *values: int) -> None:
        """Write the older slot anew; durable after a sync of the file."""
        sequence = self._sequence + 1
        slot = self.encode(self._log_id, self._layout.pack(sequence, *values))
        # A slot torn by a full disk is written again before the other one, which is whole.
        self._file.write(self._positions[sequence % 2], slot)
        self._sequence = sequence

    @staticmethod
    def encode(log_id: bytes, body: bytes) -> bytes:
        """Return the bytes of a slot; `body` is sequence and values."""
        return int(google_crc32c.value(log_id + body)).to_bytes(4) + body

    def _read_slot(self, position: int) -> tuple[Any, ...] | None:
        data = self._file.read(position, 4 + self._layout.size)
        body = data[4:]
        if len(body) < self._layout.size:
            return None
        if int.from_bytes(data[:4]) != google_crc32c.value(self._log_id + body):
            return None
        return self._layout.unpack(body)
