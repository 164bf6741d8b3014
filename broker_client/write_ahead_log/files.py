"""The few file operations the log needs, and their POSIX implementation.

A disk that loses, tears and fails takes this place in tests. Nothing here is retried.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import Protocol

from broker_client.write_ahead_log.errors import LogLockedError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_want_of_room(error: OSError) -> bool:
    """Tell whether the disk, a quota or a limit of file sizes has no room left."""
    return error.errno in _NO_ROOM


class File(Protocol):
    """An open file; positions and sizes are bytes. Failures are `OSError`."""

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        ...

    def write(self, position: int, data: bytes) -> None:
        """Write all of `data`, durable after `sync`; after an error any part may be written."""
        ...

    def size(self) -> int:
        """Return the file's length."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file, never lengthen it; durable after `sync`."""
        ...

    def sync(self) -> None:
        """Make everything written durable, with the length."""
        ...

    def close(self) -> None:
        """Release the file; does not sync."""
        ...


class Lock(Protocol):
    """An exclusive claim on a directory."""

    def release(self) -> None:
        """Let others have it."""
        ...


class FileSystem(Protocol):
    """Where files are. Created, renamed and removed names are durable after `sync_directory`."""

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted; none if it does not exist."""
        ...

    def make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably, unless it exists."""
        ...

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open for reading and writing; raises FileNotFoundError unless `create`."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` atomically."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file that exists."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def lock(self, path: Path) -> Lock:
        """Claim the lock file `path`, creating it; raises `LogLockedError`."""
        ...


class PosixFile:
    """A file descriptor, closed at the latest when nobody refers to it any more."""

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o644)
        self._close = weakref.finalize(self, os.close, self._fd)

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        parts: list[bytes] = []
        while size > 0 and (part := os.pread(self._fd, size, position)):
            parts.append(part)
            position += len(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, position: int, data: bytes) -> None:
        """Write all of `data`; durable after `sync`."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, position)
            view = view[written:]
            position += written

    def size(self) -> int:
        """Return the file's length."""
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        """Cut the file, never lengthen it; durable after `sync`."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Make everything written durable, with the length."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Release the file; closing it again does nothing."""
        self._close()


class PosixLock:
    """An flock, released by the kernel however the process ends."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise LogLockedError(
                f"the write-ahead log in {path.parent} is in use by another process (pid {holder});"
                " stop that one, or give this one a directory of its own"
            ) from None
        with contextlib.suppress(OSError):  # the pid is for people; a full disk has no room for it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it."""
        os.close(self._fd)


class PosixFileSystem:
    """The machine's file system."""

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted; none if it does not exist."""
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 - names, not paths
        except FileNotFoundError:
            return []

    def make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably, unless it exists."""
        if directory.is_dir():
            return
        self.make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        self.sync_directory(directory.parent)

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open for reading and writing; raises FileNotFoundError unless `create`."""
        return PosixFile(path, create=create)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` atomically."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file that exists."""
        path.unlink()

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: Path) -> Lock:
        """Claim the lock file `path`, creating it; raises `LogLockedError`."""
        return PosixLock(path)


def write_new_file(files: FileSystem, path: Path, data: bytes) -> None:
    """Make `path` with `data`, durable before it has its name; the name itself is synced, too."""
    temporary = path.with_name(path.name + ".tmp")
    file = files.open(temporary, create=True)
    try:
        file.truncate(0)
        file.write(0, data)
        file.sync()
    except OSError:
        with contextlib.suppress(OSError):  # the first error counts
            files.remove(temporary)
        raise
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_directory(path.parent)
