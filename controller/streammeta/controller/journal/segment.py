"""Segment of the journal: header, batches, and a sparse index of their positions.

A segment appears under its name only once its header is durable, so a bad header is always damage.
Header, big-endian: magic `SMS2` · log id of 16 bytes · base offset u64 · epoch of the batch before
the segment u64 (for a log that begins here) · CRC-32C u32 of these fields. A batch is a frame of
`streammeta.storage.segmented_log` with the magic `SMB1` and its epoch before its flushed end. The
body is one u32 length for each payload, followed by the payloads. After the last batch of the last
segment there may be room: zeros that the next small batches overwrite.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.errors import RESTART_REPAIRS, JournalDamagedError
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.storage import segmented_log
from streammeta.storage.durable_files import DiskFullError, File, FileSystem, replace_file

_SUFFIX = ".log"
_TEMPORARY_NAME = re.compile(r"[0-9]{20}\.log\.(damaged\.)?tmp")
_FIELDS = struct.Struct(">4s16sQQ")
_CHECKSUM = struct.Struct(">I")
SEGMENT_HEADER_SIZE = _FIELDS.size + _CHECKSUM.size
_HEADER_MAGIC = b"SMS2"
# Bytes between entries of the index, a trade of memory for short scans.
_INDEX_INTERVAL = 16 << 10

ROOM_BYTES = 256 << 10
"""Size of room allocated at once, in bytes: enough for more than a thousand single commits."""

SMALL_BYTES = 8 << 10
"""Maximum size of a batch that allocates room, in bytes.

The flush time of a larger batch depends on its bytes, and room would double them.
"""


class BadSegmentError(Exception):
    """A segment's header does not belong to this log and offset. The message says why."""


def is_temporary_segment(name: str) -> bool:
    """Return whether a crash while a segment was created or copied left this file."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def batch_codec(log_id: bytes) -> segmented_log.FrameCodec:
    """Return the layout of a journal's batches."""
    return segmented_log.FrameCodec(b"SMB1", log_id, has_epoch_first=True)


class JournalSegment(segmented_log.Segment):
    """An open segment with its index. `size` is the position of the next batch."""

    def __init__(
        self,
        path: Path,
        file: File,
        codec: segmented_log.FrameCodec,
        base_offset: int,
        previous_epoch: Epoch,
    ) -> None:
        super().__init__(path, file, codec, base_offset, SEGMENT_HEADER_SIZE)
        self.previous_epoch = previous_epoch
        self._room_end = 0
        """End of the allocated room. It only affects the duration of flushes."""
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
    ) -> JournalSegment:
        """Create an empty segment, durably. Raises DiskFullError without leaving a file."""
        path = segmented_log.segment_path(directory, base_offset, _SUFFIX)
        fields = _FIELDS.pack(_HEADER_MAGIC, log_id, base_offset, previous_epoch)
        replace_file(files, path, [fields, _CHECKSUM.pack(google_crc32c.value(fields))])
        return cls(path, files.open(path), batch_codec(log_id), base_offset, previous_epoch)

    @classmethod
    def open(cls, files: FileSystem, path: Path, log_id: bytes, base_offset: int) -> JournalSegment:
        """Open a segment. Raises BadSegmentError unless its header matches name and log."""
        file = files.open(path)
        try:
            previous_epoch = _read_header(file, log_id, base_offset)
        except BadSegmentError:
            file.close()
            raise
        return cls(path, file, batch_codec(log_id), base_offset, previous_epoch)

    def scan(self) -> Iterator[Batch]:
        """Yield all batches, and add them to the index.

        Raises:
            BadFrameError: the bytes after the last yielded batch, at `size`, are not a batch.
        """
        self.rewind(self.header_size)
        frames = self.codec.frames(self.file, self.size)
        while frame := frames.next():
            batch = decode_batch(*frame)
            self._note(batch.base_offset, self.size)
            self.size = frames.position
            yield batch

    def rewind(self, size: int) -> None:
        """Set the end back to `size`. Later batches leave the index."""
        keep = bisect_right(self._positions, size - 1)
        del self._offsets[keep:], self._positions[keep:]
        self.size = size

    def append_batch(self, batch: Batch, flushed_end: EndOffset, room: int = 0) -> None:
        """Write a batch at the end, durable after `sync`.

        A small batch without room allocates `room` bytes if the disk has them. A flush that does
        not extend the file has no metadata to write.

        Raises DiskFullError after removing a partly written batch.
        """
        assert batch.base_offset >= self.base_offset, "the batch belongs to an earlier segment"
        position = self.size
        frame = self.codec.encode(
            encode_body(batch.payloads),
            base_offset=batch.base_offset,
            epoch=batch.epoch,
            flushed_end=flushed_end,
            kind=batch.kind,
            count=len(batch.payloads),
        )

        # Room saves the file system a metadata write at each flush of a small batch.
        if room and len(frame) <= SMALL_BYTES and position + len(frame) > self._room_end:
            self._append_with_room(frame, room)
        else:
            self.append(frame)
        self._note(batch.base_offset, position)

    def _append_with_room(self, frame: bytes, room: int) -> None:
        self._room_end = self.size + len(frame) + room
        try:
            self.append(frame, room)
        except DiskFullError:
            # `_room_end` is kept: no room is requested until the log has grown by that much.
            self.append(frame)

    def seal(self) -> None:
        """Remove the remaining room, durably: only a log's last segment may have a tail.

        The file's length is not checked: a killed process may have cut it without a flush.
        """
        self.cut(self.size)

    def cut(self, size: int) -> None:
        """Cut the file after `size` bytes, durably."""
        self.file.truncate(size)
        self.sync()
        self.rewind(size)
        self._room_end = size

    def position_of(self, offset: EndOffset) -> int | None:
        """Return the position of the batch that begins at `offset`, or None."""
        for position, header in self._headers(offset):
            if header.base_offset >= offset:
                return position if header.base_offset == offset else None
        return None

    def epoch_ending_at(self, end_offset: EndOffset) -> Epoch | None:
        """Return the epoch of the batch that ends at `end_offset`, or None."""
        for _, header in self._headers(end_offset - 1):
            if header.end_offset >= end_offset:
                return Epoch(header.epoch) if header.end_offset == end_offset else None
        return None

    def read(self, offset: EndOffset, max_bytes: int) -> list[Batch]:
        """Return whole batches from `offset` on, at least one if available."""
        batches: list[Batch] = []
        budget = max_bytes

        for position, header in self._headers(offset):
            if header.base_offset < offset:
                continue
            # The first batch is returned whatever its size, so that a reader always advances.
            if batches and header.body_length > budget:
                break
            body = self.file.read(position + segmented_log.FRAME_HEADER_SIZE, header.body_length)
            try:
                header.check_body(body)
            except segmented_log.BadFrameError as error:
                raise self._damage_error(position, header.base_offset, error) from None

            batches.append(decode_batch(header, body))
            budget -= header.body_length

        return batches

    def _note(self, base_offset: EndOffset, position: int) -> None:
        """Add the batch at a position to the index, unless an entry shortly before covers it."""
        if not self._positions or position - self._positions[-1] >= _INDEX_INTERVAL:
            self._offsets.append(base_offset)
            self._positions.append(position)

    def _headers(self, offset: int) -> Iterator[tuple[int, segmented_log.FrameHeader]]:
        index = bisect_right(self._offsets, offset) - 1
        position = self._positions[index] if index >= 0 else self.header_size
        following = self._offsets[index] if index >= 0 else self.base_offset

        # Walk from the nearest indexed batch before the offset.
        while position < self.size:
            data = self.file.read(position, segmented_log.FRAME_HEADER_SIZE)
            try:
                header = self.codec.decode_header(data)
            except segmented_log.BadFrameError as error:
                raise self._damage_error(position, following, error) from None
            yield position, header
            position += header.size
            following = header.end_offset

    def _damage_error(
        self, position: int, offset: int, error: segmented_log.BadFrameError
    ) -> JournalDamagedError:
        what = f"the batch at offset {offset}: {error}"
        return JournalDamagedError(self.path, position, what, RESTART_REPAIRS)


@dataclass(slots=True)
class SegmentFile:
    """A segment's file. `segment` is None if its header is bad, for the reason in `problem`."""

    path: Path
    base_offset: EndOffset
    segment: JournalSegment | None
    problem: str = ""

    def close(self) -> None:
        """Release the file."""
        if self.segment is not None:
            self.segment.close()


def open_segments(files: FileSystem, directory: Path, log_id: bytes) -> list[SegmentFile]:
    """Open all segments of a directory, in offset order."""
    found = []
    for name in sorted(files.names(directory)):
        base_offset = segmented_log.segment_base(name, _SUFFIX)
        if base_offset is None:
            continue
        path, problem = directory / name, ""
        try:
            segment = JournalSegment.open(files, path, log_id, base_offset)
        except BadSegmentError as error:
            segment, problem = None, str(error)
        found.append(SegmentFile(path, EndOffset(base_offset), segment, problem))
    return found


def decode_batch(header: segmented_log.FrameHeader, body: bytes) -> Batch:
    """Return the batch in a checked frame."""
    position = 4 * header.count
    payloads: list[bytes] = []
    for length in struct.unpack_from(f">{header.count}I", body):
        payloads.append(body[position : position + length])
        position += length
    return Batch(
        EndOffset(header.base_offset), Epoch(header.epoch), BatchKind(header.kind), tuple(payloads)
    )


def encode_body(payloads: tuple[bytes, ...]) -> bytes:
    """Return the body of a batch's frame."""
    lengths = struct.pack(f">{len(payloads)}I", *map(len, payloads))
    return b"".join((lengths, *payloads))


def _read_header(file: File, log_id: bytes, expected_base: int) -> Epoch:
    data = file.read(0, SEGMENT_HEADER_SIZE)
    if len(data) < SEGMENT_HEADER_SIZE:
        raise BadSegmentError(f"{len(data)} bytes, a header has {SEGMENT_HEADER_SIZE}")
    magic, found_log, base_offset, previous_epoch = _FIELDS.unpack_from(data)
    if _CHECKSUM.unpack(data[_FIELDS.size :]) != (google_crc32c.value(data[: _FIELDS.size]),):
        raise BadSegmentError("its header's checksum does not match")
    # The log id reveals a segment copied from another directory.
    if magic != _HEADER_MAGIC or found_log != log_id:
        raise BadSegmentError("its header belongs to another log")
    if base_offset != expected_base:
        raise BadSegmentError(f"its header has base offset {base_offset}")
    return Epoch(previous_epoch)
