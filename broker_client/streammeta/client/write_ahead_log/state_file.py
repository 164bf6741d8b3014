"""How far the log is on the disk and how far it is trimmed: the file `state`.

After the file header, slots at bytes 4096 and 8192 are written in turn, so a torn write leaves the
other. Slot, big-endian: CRC-32C u32 over the log id and what follows, slot number u64, trimmed end
u64, flushed end u64; the larger slot number counts. The slots are not synced after each flush: they
survive the process, and after a power failure they may be older than the truth but never newer. So
damage can be told from a torn tail.
"""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c

from streammeta.client.write_ahead_log.errors import DamagedLogError
from streammeta.client.write_ahead_log.identity import (
    MAX_HEADER_SIZE,
    STATE_MAGIC,
    BadHeaderError,
    FileHeader,
    decode_file_header,
)
from streammeta.storage.durable_files import File, FileSystem, replace_file

STATE_NAME = "state"
_BODY = struct.Struct(">QQQ")
_CHECKSUM = struct.Struct(">I")
_SLOT_SIZE = _CHECKSUM.size + _BODY.size
_SLOT_POSITIONS = (4096, 8192)


class StateFile:
    """The open state of one log."""

    def __init__(self, file: File, header: FileHeader, slot: int, trimmed: int, flushed: int):
        self._file = file
        self._slot = slot
        self.header = header
        self.trimmed = trimmed
        """Records before this sequence need not be recovered."""
        self.flushed = flushed
        """Records before this sequence were on the disk; perhaps more were."""

    @classmethod
    def create(
        cls, files: FileSystem, path: Path, header: FileHeader, trimmed: int, flushed: int
    ) -> None:
        """Write a new state file, durably."""
        data = header.encode()
        for slot, position in enumerate(_SLOT_POSITIONS):
            data = data.ljust(position, b"\0")
            data += _encode(header.log_id, slot, trimmed, flushed)
        replace_file(files, path, data)
        files.sync_directory(path.parent)

    @classmethod
    def open(cls, files: FileSystem, path: Path) -> StateFile:
        """Open the state; raises `DamagedLogError` or `WrongLogError`."""
        file = files.open(path)
        try:
            header = _read_header(file, path)
            slots = [_read_slot(file, at, header.log_id) for at in _SLOT_POSITIONS]
            slot, trimmed, flushed = max(found for found in slots if found is not None)
        except ValueError:
            file.close()
            raise DamagedLogError(
                path, _SLOT_POSITIONS[0], "neither of its two slots has a valid checksum"
            ) from None
        except BaseException:
            file.close()
            raise
        return cls(file, header, slot, trimmed, flushed)

    def note(self, trimmed: int, flushed: int) -> None:
        """Write the state down; durable after `sync`."""
        if (trimmed, flushed) == (self.trimmed, self.flushed):
            return
        slot = self._slot + 1
        position = _SLOT_POSITIONS[slot % 2]
        self._file.write(position, _encode(self.header.log_id, slot, trimmed, flushed))
        self._slot, self.trimmed, self.flushed = slot, trimmed, flushed

    def sync(self) -> None:
        """Make the state, as it is, durable."""
        self._file.sync()

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_state_header(files: FileSystem, path: Path) -> FileHeader | None:
    """Return whose log it is, None if there is no state file; raises as `StateFile.open`."""
    if path.name not in files.names(path.parent):
        return None
    file = files.open(path)
    try:
        return _read_header(file, path)
    finally:
        file.close()


def _read_header(file: File, path: Path) -> FileHeader:
    try:
        return decode_file_header(file.read(0, MAX_HEADER_SIZE), STATE_MAGIC, path)
    except BadHeaderError as error:
        raise DamagedLogError(path, 0, str(error)) from None


def _encode(log_id: bytes, slot: int, trimmed: int, flushed: int) -> bytes:
    body = _BODY.pack(slot, trimmed, flushed)
    return _CHECKSUM.pack(google_crc32c.value(log_id + body)) + body


def _read_slot(file: File, position: int, log_id: bytes) -> tuple[int, int, int] | None:
    data = file.read(position, _SLOT_SIZE)
    if len(data) < _SLOT_SIZE:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data)
    body = data[_CHECKSUM.size :]
    if checksum != google_crc32c.value(log_id + body):
        return None
    slot, trimmed, flushed = _BODY.unpack(body)
    return slot, trimmed, flushed
