"""Reserved disk space for urgent writes on a full disk.

A file of meaningless bytes. Truncating it makes room for elections, and for batches that a leader
had appended when the disk became full. Its last part is kept for the quorum-state, which is
replaced repeatedly. The disk counts as full until the file has its full size again.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from streammeta.storage.durable_files import DiskFullError, File, FileSystem

RESERVE_NAME = "reserve"

DEFAULT_RESERVE_BYTES = 1 << 20
"""Size in bytes: many times the writes of an election, and small compared with a segment."""

_STATE_SHARE = 8
"""Divisor: this share of the reserve is kept for the quorum-state."""
_PIECE_BYTES = 64 << 10


class Reserve:
    """The reserve of a directory. Only its length matters, so a crash cannot damage it."""

    def __init__(self, files: FileSystem, path: Path, size: int) -> None:
        """Open the reserve as it is. `size` is its full size in bytes, 0 for none."""
        self._files = files
        self._path = path
        self._wanted = size
        self._file: File | None = None
        if size and path.name in files.names(path.parent):
            self._file = files.open(path)
        self.shortage: DiskFullError | None = None
        """The reason why the reserve is short, None if it is complete."""

    def refill(self) -> None:
        """Allocate as much free space as possible, up to the full reserve."""
        try:
            self._grow(self._wanted)
        except DiskFullError as error:
            # Keep the first reason: it shows when the disk became full.
            self.shortage = self.shortage or error
        else:
            self.shortage = None

    def release_for_log(self, why: DiskFullError) -> bool:
        """Release all but the last part and return whether that freed space."""
        return self._cut(self._wanted // _STATE_SHARE, why)

    def release_for_state(self, why: DiskFullError) -> bool:
        """Release the rest and return whether that freed space."""
        return self._cut(0, why)

    def keep_for_state(self) -> None:
        """Allocate the last part again, as far as possible, before another write uses the space."""
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
        # File systems may free the blocks only once the truncation is durable.
        self._file.sync()
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
                # Pieces, so that a nearly full disk still yields a part.
                size = min(_PIECE_BYTES, wanted - length)
                self._file.write(length, _filling(size))
                length += size
        finally:
            self._file.sync()


def _filling(size: int) -> bytes:
    """Return bytes that a file system neither compresses nor omits."""
    return hashlib.shake_128(b"reserve").digest(size)
