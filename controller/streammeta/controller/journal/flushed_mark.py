"""How far the log was flushed, so that damage can be told from a torn tail.

The mark is written after each flush and not itself flushed: it survives the death of the process,
and after a power failure it may be older than the truth but never newer. Two slots are written in
turn, so a torn write leaves the other. A cut of the log is announced here, durably, before it
begins: one that a crash interrupted is finished at the next start.
"""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import google_crc32c

from streammeta.controller.ids import EndOffset
from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.storage.durable_files import DiskFullError, File, FileSystem

_SLOT = struct.Struct(">IQQ?")  # checksum, sequence, end offset, whether the log is being cut there
_SLOT_POSITIONS = (0, 4096)


class FlushedMark:
    """The open mark of one log."""

    def __init__(self, file: File, log_id: bytes, sequence: int, end_offset: EndOffset) -> None:
        self._file = file
        self._log_id = log_id
        self._sequence = sequence
        self.end_offset = end_offset
        self.is_cutting = False

    @classmethod
    def create(cls, files: FileSystem, path: Path, log_id: bytes) -> None:
        """Write a new mark at 0, durably."""
        file = files.open(path, create=True)
        try:
            mark = cls(file, log_id, 0, EndOffset(0))
            mark._write(EndOffset(0))
            mark._write(EndOffset(0))
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
        sequence, end_offset, is_cutting = max(valid)
        mark = cls(file, log_id, sequence, EndOffset(end_offset))
        mark.is_cutting = is_cutting
        return mark

    def advance(self, end_offset: EndOffset) -> None:
        """Note that the log is flushed up to here; without room the mark stays older."""
        with contextlib.suppress(DiskFullError):
            self._write(end_offset)

    def lower(self, end_offset: EndOffset) -> None:
        """Take the mark back, durably; raises DiskFullError with nothing changed."""
        if end_offset < self.end_offset:
            self._write(end_offset)
            self._file.sync()

    def begin_cut(self, end_offset: EndOffset) -> None:
        """Announce, durably, that a log flushed beyond `end_offset` is cut there."""
        self._write(end_offset, is_cutting=True)
        self._file.sync()

    def end_cut(self) -> None:
        """Note, durably, that the cut was carried out; nothing to do without one."""
        if self.is_cutting:
            self._write(self.end_offset)
            self._file.sync()

    def sync(self) -> None:
        """Make the mark, as it is, durable."""
        self._file.sync()

    def close(self) -> None:
        """Make the mark durable and release the file."""
        self._file.sync()
        self._file.close()

    def _write(self, end_offset: EndOffset, *, is_cutting: bool = False) -> None:
        sequence = self._sequence + 1
        body = struct.pack(">QQ?", sequence, end_offset, is_cutting)
        checksum = google_crc32c.value(self._log_id + body)
        # A slot torn by a full disk is written again before the other one, which is whole.
        self._file.write(_SLOT_POSITIONS[sequence % 2], struct.pack(">I", checksum) + body)
        self._sequence = sequence
        self.end_offset = end_offset
        self.is_cutting = is_cutting


def _read_slot(file: File, position: int, log_id: bytes) -> tuple[int, int, bool] | None:
    data = file.read(position, _SLOT.size)
    if len(data) < _SLOT.size:
        return None
    checksum, sequence, end_offset, is_cutting = _SLOT.unpack(data)
    if checksum != google_crc32c.value(log_id + data[4:]):
        return None
    return sequence, end_offset, is_cutting
