"""Reserved disk space for urgent writes on a full disk.

A file of meaningless bytes: cut short, it makes room for elections and for the batches that a
leader had appended when the disk became full. Its last part is kept for the quorum-state, which is
replaced again and again. While the file is not whole the disk counts as full.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from streammeta.storage.durable_files import DiskFullError, File, FileSystem

RESERVE_NAME = "reserve"

DEFAULT_RESERVE_BYTES = 1 << 20
"""Bytes; many times the writes of an election, and little beside one segment."""

_STATE_SHARE = 8
"""Divisor: this share of the reserve is kept for the quorum-state."""
_PIECE_BYTES = 64 << 10


class Reserve:
    """The reserve of one directory; its length alone counts, so a crash can't damage it."""

    def __init__(self, files: FileSystem, path: Path, size: int) -> None:
        """Take the reserve as it is; `size` is how large it should be in bytes, 0 for none."""
        self._files = files
        self._path = path
        self._wanted = size
        self._file: File | None = None
        if size and path.name in files.names(path.parent):
            self._file = files.open(path)
        self.shortage: DiskFullError | None = None
        """Why the reserve is not whole; None while it is."""

    def refill(self) -> None:
        """Take as much room as there is, up to the whole reserve."""
        try:
            self._grow(self._wanted)
        except DiskFullError as error:
            self.shortage = self.shortage or error
        else:
            self.shortage = None

    def release_for_log(self, why: DiskFullError) -> bool:
        """Give up all but the last part; return whether that made room."""
        return self._cut(self._wanted // _STATE_SHARE, why)

    def release_for_state(self, why: DiskFullError) -> bool:
        """Give up the rest; return whether that made room."""
        return self._cut(0, why)

    def keep_for_state(self) -> None:
        """Take the last part again, as far as there is room, before anything else takes it."""
        if self._file is not None:
            with contextlib.suppress(DiskFullError):
                self._grow(self._wanted // _STATE_SHARE)

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()

    def _cut(self, size: int, why: DiskFullError) -> bool:
        if self._file is None or self._file.size() <= size:
            return False
        self._file.truncate(size)
        self._file.sync()  # file systems may give blocks away only once the cut is durable
        self.shortage = why
        return True

    def _grow(self, wanted: int) -> None:
        if self._file is None:
            if not self._wanted:
                return
            self._file = self._files.open(self._path, create=True)
            self._files.sync_directory(self._path.parent)
        length = self._file.size()
        if length >= wanted:
            return
        try:
            while length < wanted:
                size = min(_PIECE_BYTES, wanted - length)
                self._file.write(length, _filling(size))
                length += size
        finally:
            self._file.sync()


def _filling(size: int) -> bytes:
    """Return bytes that a file system neither compresses nor leaves out."""
    return hashlib.shake_128(b"reserve").digest(size)
