"""Segmented, checksummed logs: frames, segment files, and a two-slot file of positions.

The controller's journal and a broker's write-ahead log are such logs. A segment is a file header
followed by frames. It is named after the offset of its first record and replaced only as a whole,
so only the last segment can have a torn tail. Offsets number the records of a log from 0.

A frame, big-endian: magic of 4 bytes · header CRC-32C u32 · body CRC-32C u32 · body length u32 ·
base offset u64 · epoch and flushed end, u64 each, in the order of the log's codec · kind u8 ·
record count u32 · body. The header's checksum covers the log id, so a frame of another log, or at
another offset, never passes. `flushed end` is the offset up to which the log was known to be
flushed when the frame was written, so later frames prove that earlier ones were durable.

The two logs define the contents of file headers and bodies, and their reaction to damage.
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
"""Bytes that a scan reads at once."""

_PREFIX = struct.Struct(">4sI")
_FIELDS = struct.Struct(">IIQQQBI")
FRAME_HEADER_SIZE = _PREFIX.size + _FIELDS.size

_SEGMENT_NAME = re.compile(r"([0-9]{20})\.([a-z]+)")


class BadFrameError(Exception):
    """The bytes are not a complete frame of this log. The message says why."""


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
        """Size of the whole frame in bytes."""
        return FRAME_HEADER_SIZE + self.body_length

    def check_body(self, body: bytes) -> None:
        """Raise BadFrameError unless this is the frame's body."""
        if len(body) < self.body_length:
            raise BadFrameError(f"body has {len(body)} bytes, its header says {self.body_length}")
        if google_crc32c.value(body) != self.body_checksum:
            raise BadFrameError("checksum of the body does not match")


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """Codec of one log's frames: magic, log id, and the order of two header fields."""

    magic: bytes
    log_id: bytes
    has_epoch_first: bool

    def encode(
        self, body: bytes, *, base_offset: int, epoch: int, flushed_end: int, kind: int, count: int
    ) -> bytes:
        """Encode a frame."""
        first, second = (epoch, flushed_end) if self.has_epoch_first else (flushed_end, epoch)
        fields = _FIELDS.pack(
            google_crc32c.value(body), len(body), base_offset, first, second, kind, count
        )
        # The id is not stored in the frame. It makes the frames of other logs invalid, for example
        # after a copied file.
        checksum = google_crc32c.value(self.log_id + fields)
        return b"".join((_PREFIX.pack(self.magic, checksum), fields, body))

    def decode_header(self, data: bytes) -> FrameHeader:
        """Validate and decode a header. Raises BadFrameError."""
        if len(data) < FRAME_HEADER_SIZE:
            raise BadFrameError(f"header has {len(data)} bytes, expected {FRAME_HEADER_SIZE}")
        magic, checksum = _PREFIX.unpack_from(data)
        if magic != self.magic:
            raise BadFrameError(f"magic is {magic!r}, expected {self.magic!r}")
        fields = data[_PREFIX.size : FRAME_HEADER_SIZE]
        if checksum != google_crc32c.value(self.log_id + fields):
            raise BadFrameError("checksum of the header does not match")
        body_checksum, length, base, first, second, kind, count = _FIELDS.unpack(fields)
        epoch, flushed = (first, second) if self.has_epoch_first else (second, first)
        return FrameHeader(body_checksum, length, base, epoch, flushed, kind, count)

    def frames(self, file: File, position: int) -> FrameReader:
        """Return a reader of the frames of `file` from byte `position` on."""
        return FrameReader(self, file, position)

    def headers_from(self, file: File, position: int) -> Iterator[tuple[int, FrameHeader]]:
        """Yield every intact header from byte `position` on, aligned or not, with its position."""
        kept = FRAME_HEADER_SIZE - 1  # a header may span two pieces
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
                # One byte further: the magic may occur inside a body.
                found = data.find(self.magic, found + 1)
            position += len(data) - kept
            data = data[-kept:] + file.read(position + kept, WINDOW_BYTES)


class FrameReader:
    """Reads consecutive frames of a file through a window of bounded size."""

    def __init__(self, codec: FrameCodec, file: File, position: int) -> None:
        self._codec = codec
        self._file = file
        self._window = b""
        self._window_start = position
        self.position = position
        """First byte of the next frame."""

    def next(self) -> tuple[FrameHeader, bytes] | None:
        """Return the next frame, or None at the end of the file. Raises BadFrameError."""
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
        # Sequential reads hit the window, one read of the file per megabyte.
        if start + size > len(self._window):
            # A frame larger than the window is read as a whole.
            self._window = self._file.read(position, max(size, WINDOW_BYTES))
            self._window_start, start = position, 0
        return self._window[start : start + size]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not a frame, and the next intact header after them, or None."""

    problem: str
    next_header: FrameHeader | None


def segment_path(directory: Path, base_offset: int, suffix: str) -> Path:
    """Return the path of the segment that begins at `base_offset`."""
    return directory / f"{base_offset:020d}{suffix}"


def segment_base(name: str, suffix: str) -> int | None:
    """Return the base offset in a segment's file name, or None for other files."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match and name.endswith(suffix) else None


class Segment:
    """An open segment. Frames are appended at byte `size`, over any bytes after it."""

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
        """Append a frame and `room` bytes of zeros after it. Both are durable after `sync`.

        Raises DiskFullError after removing the half-written frame.
        """
        try:
            # Zeros reserve the next blocks, so that a later sync does not have to write the length
            # of the file.
            self.file.write(self.size, frame + bytes(room) if room else frame)
        except DiskFullError:
            self.cut_tail()
            raise
        self.size += len(frame)

    def cut_tail(self) -> None:
        """Cut off the bytes after `size`. The cut is durable after `sync`."""
        if self.file.size() > self.size:
            self.file.truncate(self.size)

    def vouches_beyond(self, end_offset: int) -> bool:
        """Return whether a frame after `size` says that the log was flushed past `end_offset`."""
        later = self.codec.headers_from(self.file, self.size)
        return any(header.flushed_end > end_offset for _, header in later)

    def frames_past_damage(
        self, position: int
    ) -> Iterator[tuple[int, tuple[FrameHeader, bytes] | Damage]]:
        """Yield every intact frame from a byte on, and the damage in between, with positions."""
        while True:
            frames = self.codec.frames(self.file, position)
            try:
                while frame := frames.next():
                    yield position, frame
                    position = frames.position
                return
            except BadFrameError as error:
                problem = str(error)
            # The next header is searched byte by byte, because a damaged length says nothing about
            # its position.
            later = next(self.codec.headers_from(self.file, position + 1), None)
            yield position, Damage(problem, later[1] if later else None)
            if later is None:
                return
            position, _ = later

    def sync(self) -> None:
        """Make all appended frames durable."""
        self.file.sync()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class SlotFile:
    """A few numbers in two slots of a file, written in turn so that a torn write leaves one intact.

    A slot, big-endian: CRC-32C u32 over the log id and the rest, sequence u64, the values. The
    larger sequence counts. `write` does not sync. A slot survives the process, and after a power
    failure it may be older than the last write but never newer.
    """

    def __init__(
        self, file: File, log_id: bytes, layout: struct.Struct, positions: tuple[int, int]
    ) -> None:
        """`layout` describes sequence and values, `positions` are the slots' first bytes."""
        self._file = file
        self._log_id = log_id
        self._layout = layout
        self._positions = positions
        self._sequence = 0

    def read(self) -> tuple[Any, ...] | None:
        """Return the newest values, or None if neither slot is intact."""
        slots = [slot for slot in map(self._read_slot, self._positions) if slot is not None]
        if not slots:
            return None
        # By sequence, the first member.
        self._sequence, *values = max(slots)
        return tuple(values)

    def write(self, *values: int) -> None:
        """Overwrite the older slot. It is durable after a sync of the file."""
        sequence = self._sequence + 1
        slot = self.encode(self._log_id, self._layout.pack(sequence, *values))
        # A slot torn by a full disk is written again before the other one, which is whole.
        self._file.write(self._positions[sequence % 2], slot)
        # Only after the write: a failed one is repeated with the same slot.
        self._sequence = sequence

    @staticmethod
    def encode(log_id: bytes, body: bytes) -> bytes:
        """Encode a slot. `body` is sequence and values."""
        return int(google_crc32c.value(log_id + body)).to_bytes(4) + body

    def _read_slot(self, position: int) -> tuple[Any, ...] | None:
        data = self._file.read(position, 4 + self._layout.size)
        body = data[4:]
        if len(body) < self._layout.size:
            return None
        if int.from_bytes(data[:4]) != google_crc32c.value(self._log_id + body):
            return None
        return self._layout.unpack(body)
