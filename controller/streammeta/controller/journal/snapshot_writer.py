"""A snapshot file while it comes into being: written here, or downloaded from a leader.

Owns the bytes and their digest, never the name: a file gets its name, and counts, once it is
complete and durable. What a crash leaves is removed at the next start.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from streammeta.controller.quorum.messages import SnapshotId
from streammeta.storage.durable_files import DiskFullError, File, FileSystem

_SYNC_EVERY_BYTES = 16 << 20
"""Written and not flushed at most, so that no flush of the log waits behind a whole snapshot."""


class SnapshotWriter:
    """Takes the bytes of one snapshot, in order; used by one thread at a time."""

    def __init__(self, files: FileSystem, path: Path, snapshot_id: SnapshotId) -> None:
        """Begin an empty file; raises DiskFullError."""
        self.snapshot_id = snapshot_id
        self.path = path
        self.size = 0
        self._files = files
        self._file: File = files.open(path, create=True)
        self._file.truncate(0)
        self._synced_size = 0
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> bytes:
        """SHA-256 of what was written."""
        return self._digest.digest()

    def write(self, data: bytes) -> int:
        """Take all of `data`; return its length. Raises DiskFullError with none of it taken."""
        try:
            self._file.write(self.size, data)
        except DiskFullError:
            if self._file.size() > self.size:
                self._file.truncate(self.size)
            raise
        self.size += len(data)
        self._digest.update(data)
        if self.size - self._synced_size >= _SYNC_EVERY_BYTES:
            self.seal()
        return len(data)

    def seal(self) -> None:
        """Make everything written durable."""
        self._file.sync()
        self._synced_size = self.size

    def publish(self, path: Path) -> None:
        """Give the sealed file its name, durably; raises DiskFullError with nothing changed."""
        self._files.rename(self.path, path)
        self._files.sync_directory(path.parent)
        self._file.close()

    def abandon(self) -> None:
        """Remove the file."""
        self._file.close()
        self._files.remove(self.path)
