"""How far the log was flushed, so that damage can be told from a torn tail.

The mark is written after each flush and not itself flushed: it survives the death of the process,
and after a power failure it may be older than the truth but never newer. Two slots are written in
turn, so a torn write leaves the other.
"""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c

from controller.ids import EndOffset
from controller.journal.errors import JournalDamagedError
from controller.journal.files import File, FileSystem

_SLOT = struct.Struct(">IQQ")  # checksum, sequence, end offset
_SLOT_POSITIONS = (0, 4096)


class FlushedMark:
    """The open mark of one log."""

    def __init__(self, file: File, log_id: bytes, sequence: int, end_offset: EndOffset) -> None:
        self._file = file
        self._log_id = log_id
        self._sequence = sequence
        self.end_offset = end_offset

    @classmethod
    def create(cls, files: FileSystem, path: Path, log_id: bytes) -> None:
        """Write a new mark at 0, durably."""
        file = files.open(path, create=True)
        try:
            mark = cls(file, log_id, 0, EndOffset(0))
            mark.advance(EndOffset(0))
            mark.advance(EndOffset(0))
            file.sync()
        finally:
            file.close()
        files.sync_directory(path.parent)

    @classmethod
    def open(cls, files: FileSystem, path: Path, log_id: bytes) -> FlushedMark:
        """Open the mark; raises JournalDamagedError if neither slot is whole."""
        try:
            file = files.open(path)
        except FileNotFoundError:
            raise JournalDamagedError(path, 0, "the file is missing") from None
        slots = [_read_slot(file, position, log_id) for position in _SLOT_POSITIONS]
        valid = [slot for slot in slots if slot is not None]
        if not valid:
            file.close()
            raise JournalDamagedError(path, 0, "neither of its two slots has a valid checksum")
        sequence, end_offset = max(valid)
        return cls(file, log_id, sequence, EndOffset(end_offset))

    def advance(self, end_offset: EndOffset) -> None:
        """Note that the log is flushed up to here."""
        self._sequence += 1
        body = struct.pack(">QQ", self._sequence, end_offset)
        checksum = google_crc32c.value(self._log_id + body)
        position = _SLOT_POSITIONS[self._sequence % 2]
        self._file.write(position, struct.pack(">I", checksum) + body)
        self.end_offset = end_offset

    def lower(self, end_offset: EndOffset) -> None:
        """Take the mark back, durably, before the log is cut to `end_offset`."""
        if end_offset < self.end_offset:
            self.advance(end_offset)
            self._file.sync()

    def close(self) -> None:
        """Make the mark durable and release the file."""
        self._file.sync()
        self._file.close()


def _read_slot(file: File, position: int, log_id: bytes) -> tuple[int, int] | None:
    data = file.read(position, _SLOT.size)
    if len(data) < _SLOT.size:
        return None
    checksum, sequence, end_offset = _SLOT.unpack(data)
    return (sequence, end_offset) if checksum == google_crc32c.value(log_id + data[4:]) else None
