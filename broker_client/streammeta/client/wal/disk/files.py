"""File formats of a write-ahead log: file header, segments, frame bodies and the state file.

File header, big-endian: magic of 4 bytes, CRC-32C u32 of the rest of the header, version u16,
namespace length u16, node id i32, random log id of 16 bytes, offset of the first record u64,
namespace in UTF-8. Then come frames of `streammeta.storage.segmented_log` with the magic `SMWF`,
their flushed end before the node epoch. Bodies: kind 1 is records of the object format, back to
back. Kind 2 is empty and stands for lost records. Kind 3, with a count of 0, is a text in UTF-8.

A segment gets its name once its header is durable. The previous segment is fully synced by then.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import google_crc32c

from streammeta.client.errors import DamagedLogError, WrongLogError
from streammeta.client.wal.disk.config import MAX_NAMESPACE_BYTES, LogIdentity
from streammeta.storage.durable_files import File, FileSystem, replace_file
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.record import RecordBatch, decode_record
from streammeta.storage.segmented_log import (
    BadFrameError,
    FrameCodec,
    FrameHeader,
    Segment,
    SlotFile,
    segment_base,
    segment_path,
)

SEGMENT_MAGIC = b"SMWL"
STATE_MAGIC = b"SMWS"
SET_ASIDE_MAGIC = b"SMWA"
VERSION = 1

STATE_NAME = "state"
SUFFIX = ".wal"

_PREFIX = struct.Struct(">4sI")
_FIELDS = struct.Struct(">HHi16sQ")
_FIXED_SIZE = _PREFIX.size + _FIELDS.size
MAX_HEADER_SIZE = _FIXED_SIZE + MAX_NAMESPACE_BYTES

_STATE_LAYOUT = struct.Struct(">QQQ")  # slot number, trimmed end, flushed end
_STATE_SLOTS = (4096, 8192)

_KEPT_NAME = re.compile(r"([0-9]{20}-[0-9]+\.aside|([0-9]{20}\.wal|state)\.damaged)")
_TEMPORARY_NAME = re.compile(r"([0-9]{20}-[0-9]+\.aside|([0-9]{20}\.wal|state)(\.damaged)?)\.tmp")


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Header of one file. The first record in the file, if any, has `base_offset`."""

    magic: bytes
    namespace: str
    node_id: int
    log_id: bytes
    base_offset: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        name = self.namespace.encode()
        fields = _FIELDS.pack(VERSION, len(name), self.node_id, self.log_id, self.base_offset)
        return _PREFIX.pack(self.magic, google_crc32c.value(fields + name)) + fields + name

    @property
    def size(self) -> int:
        """Bytes of the encoded header."""
        return _FIXED_SIZE + len(self.namespace.encode())


class BadHeaderError(Exception):
    """The bytes are not a valid header of a log's file. The message says why."""


def decode_file_header(data: bytes, magic: bytes, path: Path) -> FileHeader:
    """Read the header at the beginning of `data`.

    Raises:
        BadHeaderError: the header is damaged.
        WrongLogError: another release wrote it. `path` is for the message.
    """
    if len(data) < _FIXED_SIZE:
        raise BadHeaderError(f"{len(data)} bytes, a header has at least {_FIXED_SIZE}")

    found, checksum = _PREFIX.unpack_from(data)
    if found != magic:
        raise BadHeaderError(f"starts with {bytes(found)!r}, expected {magic!r}")

    version, length, node_id, log_id, first = _FIELDS.unpack_from(data, _PREFIX.size)
    end = _FIXED_SIZE + length
    # The checksum first: the version of a damaged header means nothing.
    if checksum != google_crc32c.value(data[_PREFIX.size : end]) or len(data) < end:
        raise BadHeaderError("the checksum of the file's header does not match")

    if version != VERSION:
        raise WrongLogError(
            f"{path} has version {version}, this release reads {VERSION}. Use the release that"
            " wrote it"
        )

    return FileHeader(magic, data[_FIXED_SIZE:end].decode(), node_id, log_id, first)


def check_owner(header: FileHeader, identity: LogIdentity, path: Path) -> None:
    """Raise `WrongLogError` unless the file belongs to the node and namespace of `identity`."""
    if header.namespace != identity.namespace:
        raise WrongLogError(
            f"{path} belongs to namespace {header.namespace!r}, this broker to"
            f" {identity.namespace!r}. Use a separate directory, or connect it to its cluster"
        )
    if header.node_id != identity.node_id:
        raise WrongLogError(
            f"{path} belongs to node {header.node_id}, this broker is node {identity.node_id}."
            " use a separate directory, or correct its node id"
        )


class FrameKind(IntEnum):
    """Contents of a frame's body."""

    RECORDS = 1
    LOST = 2
    TEXT = 3


def frame_codec(log_id: bytes) -> FrameCodec:
    """Return the layout of a write-ahead log's frames."""
    return FrameCodec(b"SMWF", log_id, has_epoch_first=False)


def records_in(header: FrameHeader, body: bytes) -> Iterator[RecordBatch]:
    """Yield the records of a valid frame. Raise `BadFrameError` if their number is not `count`."""
    if header.kind in (FrameKind.LOST, FrameKind.TEXT):
        return
    # A newer release may have written it, so it is not skipped silently.
    if header.kind != FrameKind.RECORDS:
        raise BadFrameError(f"its kind is {header.kind}, this release knows 1 to 3")

    view = memoryview(body)
    position = 0
    # The count is part of the frame's checksum, so a difference is a defect of the writer.
    for _ in range(header.count):
        try:
            record = decode_record(view, position)
        except CorruptObjectError as error:
            raise BadFrameError(f"a record in it is malformed: {error.problem}") from error
        position += record.encoded_size
        yield record
    if position != len(body):
        raise BadFrameError(f"{len(body) - position} bytes follow its last record")


def is_leftover(name: str) -> bool:
    """Return whether this is an unfinished file that a crash left."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def is_kept_aside(name: str) -> bool:
    """Return whether the log created this file for the operator, and never touches it again."""
    return _KEPT_NAME.fullmatch(name) is not None


def segment_paths(files: FileSystem, directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first."""
    names = files.names(directory)
    return [directory / name for name in names if segment_base(name, SUFFIX) is not None]


class LogSegment(Segment):
    """An open segment of a write-ahead log."""

    def __init__(self, path: Path, file: File, header: FileHeader) -> None:
        super().__init__(path, file, frame_codec(header.log_id), header.base_offset, header.size)
        self.header = header

    @classmethod
    def create(cls, files: FileSystem, directory: Path, header: FileHeader) -> LogSegment:
        """Create an empty segment, durably."""
        path = segment_path(directory, header.base_offset, SUFFIX)
        # The header is durable before the file has its name.
        replace_file(files, path, [header.encode()])
        return cls(path, files.open(path), header)

    @classmethod
    def open(cls, files: FileSystem, path: Path) -> LogSegment:
        """Open a segment. Raise `BadHeaderError` if its header contradicts its name."""
        file = files.open(path)
        try:
            header = decode_file_header(file.read(0, MAX_HEADER_SIZE), SEGMENT_MAGIC, path)
            # A renamed or copied segment would place its records at wrong offsets.
            if header.base_offset != segment_base(path.name, SUFFIX):
                raise BadHeaderError(
                    f"its header has first record {header.base_offset}, which its name contradicts"
                )
        except BaseException:
            file.close()
            raise
        return cls(path, file, header)


class StateFile:
    """Position up to which the log is on the disk, and up to which it is trimmed."""

    def __init__(self, file: File, header: FileHeader) -> None:
        self._file = file
        self._slots = SlotFile(file, header.log_id, _STATE_LAYOUT, _STATE_SLOTS)
        self.header = header
        self.trimmed = 0
        """Records before this offset need not be recovered."""
        self.flushed = 0
        """Records before this offset were on the disk, perhaps also later ones."""

    @classmethod
    def create(
        cls, files: FileSystem, path: Path, header: FileHeader, trimmed: int, flushed: int
    ) -> None:
        """Write a new state file, durably."""
        data = header.encode()
        # Two slots on separate pages: a torn write damages only the older state.
        for sequence, position in enumerate(_STATE_SLOTS):
            data = data.ljust(position, b"\0")
            data += SlotFile.encode(header.log_id, _STATE_LAYOUT.pack(sequence, trimmed, flushed))
        replace_file(files, path, [data])

    @classmethod
    def open(cls, files: FileSystem, path: Path) -> StateFile:
        """Open the state. Raises `DamagedLogError` or `WrongLogError`."""
        file = files.open(path)
        try:
            state = cls(file, _read_header(file, path))
            values = state._slots.read()
            if values is None:
                raise DamagedLogError(
                    path, _STATE_SLOTS[0], "neither of its two slots has a valid checksum"
                )
        except BaseException:
            file.close()
            raise
        state.trimmed, state.flushed = values
        return state

    def note(self, trimmed: int, flushed: int) -> None:
        """Write the state. `sync` makes it durable."""
        if (trimmed, flushed) != (self.trimmed, self.flushed):
            self._slots.write(trimmed, flushed)
            self.trimmed, self.flushed = trimmed, flushed

    def sync(self) -> None:
        """Make the last written state durable."""
        self._file.sync()

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_state_header(files: FileSystem, path: Path) -> FileHeader | None:
    """Return the log's header, None if there is no state file. Raises as `StateFile.open`."""
    if path.name not in files.names(path.parent):
        return None
    with closing(files.open(path)) as file:
        return _read_header(file, path)


def _read_header(file: File, path: Path) -> FileHeader:
    try:
        return decode_file_header(file.read(0, MAX_HEADER_SIZE), STATE_MAGIC, path)
    except BadHeaderError as error:
        raise DamagedLogError(path, 0, str(error)) from None
