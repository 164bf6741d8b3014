"""Files with explicit durability: file system protocol, POSIX files, atomic replacement.

Logs keep their records in such files. Tests replace the file system with a disk that loses, tears
and fails writes. Nothing is retried, because the state of the disk is unknown after a failed sync.
Only a full disk leaves everything unchanged, so it has a separate error.

New files and directories are private: they contain data, which only their owner may read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shlex
import stat
import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
"""Modes of new files and directories with data: only the owner has access."""

READABLE_MODE = 0o644
"""Mode of new files for other programs, such as metrics collectors."""

_LOOKED_AT_MAX = 10_000
"""Maximum number of checked files in a directory, a bound on the time of a start."""


def advise_private(path: Path) -> str | None:
    """Return the command that makes data private, or None if it is private already.

    Other users can read a file if they can enter its directory and the file's mode allows it.
    """
    if not _is_open(path):
        return None
    # An open directory with private files leaks only their names.
    if any(map(_is_open, islice(_files_at(path), _LOOKED_AT_MAX))):
        return f"chmod -R go= {shlex.quote(str(path))}"
    return None


def _files_at(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name)


def _is_open(path: Path) -> bool:
    """Return whether other users have any permission on a file or directory."""
    try:
        return bool(stat.S_IMODE(path.lstat().st_mode) & 0o077)
    except OSError:
        return False  # deleted meanwhile, or not created yet


# Large enough for the throughput of a disk, small enough for bounded memory.
_PIECE_BYTES = 1 << 20

# EFBIG is a limit of the file system or the process, and ends like the other two.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFullError(OSError):
    """The disk or a quota is full. A half-written call may be repeated."""


class DirectoryInUseError(Exception):
    """Another process has claimed the directory."""


class File(Protocol):
    """An open file. Positions and sizes are in bytes."""

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes, fewer only at the end of the file."""

    def write(self, position: int, data: bytes) -> None:
        """Write all of `data`. It is durable after `sync`.

        Raises DiskFullError if the disk is full. Any part of `data` may have been written.
        """

    def size(self) -> int:
        """Return the file's length."""

    def truncate(self, size: int) -> None:
        """Shorten the file, never extend it. The new size is durable after `sync`."""

    def sync(self) -> None:
        """Make all writes and the length durable."""

    def close(self) -> None:
        """Close the file without a sync."""


class Lock(Protocol):
    """An exclusive lock on a directory."""

    def release(self) -> None:
        """Release the lock."""


class FileSystem(Protocol):
    """A file system. Created, renamed and removed names are durable after `sync_directory`."""

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, an empty list if it does not exist."""

    def make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably, unless it exists.

        Raises DiskFullError if the disk is full.
        """

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file for reading and writing.

        Raises FileNotFoundError if it does not exist, unless `create`. Raises DiskFullError if
        the disk has no room for a new name.
        """

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` atomically. Raises DiskFullError, with nothing changed."""

    def remove(self, path: Path) -> None:
        """Remove a file that exists."""

    def remove_directory(self, directory: Path) -> None:
        """Remove an empty directory that exists."""

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    def lock(self, path: Path) -> Lock:
        """Lock the file `path`, creating it. Raises DirectoryInUseError."""


class PosixFile:
    """A file descriptor that closes with its last reference, like Python's own files.

    A recovery that fails can leave open files at any point.
    """

    def __init__(
        self, path: Path, *, create: bool, read_only: bool = False, mode: int = FILE_MODE
    ) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | (os.O_CREAT if create else 0)
        with _DiskFullAware(path):
            self._fd = os.open(path, flags | os.O_CLOEXEC, mode)
        self._path = path
        # `finalize` runs at most once, so a second close can't hit a reused descriptor.
        self._close = weakref.finalize(self, os.close, self._fd)

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes, fewer only at the end of the file."""
        parts: list[bytes] = []
        with _NamingFile(self._path):
            # Linux reads at most 2 GiB per call.
            while size > 0 and (part := os.pread(self._fd, size, position)):
                parts.append(part)
                position += len(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, position: int, data: bytes) -> None:
        """Write all of `data`. It is durable after `sync`."""
        view = memoryview(data)
        with _DiskFullAware(self._path):
            while view:
                written = os.pwrite(self._fd, view, position)
                view = view[written:]
                position += written

    def size(self) -> int:
        """Return the file's length."""
        with _NamingFile(self._path):
            return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        """Shorten the file, never extend it. The new size is durable after `sync`."""
        with _NamingFile(self._path):
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Make all writes and the length durable."""
        with _NamingFile(self._path):
            # Also covers the length, but not the times, which would cost another write of metadata.
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file without a sync. A second close does nothing."""
        self._close()


class PosixLock:
    """An flock. The kernel releases it however the process ends."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # May be the pid of a former holder, if the present one has not written its own yet.
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise DirectoryInUseError(
                f"{path.parent} is in use by another process (pid {holder}). Stop that process or"
                " use another directory"
            ) from None

        if read_only:
            return

        # The pid is only for the operator's information, so a full disk does not matter.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


class PosixFileSystem:
    """The machine's file system."""

    def __init__(self, *, read_only: bool = False, mode: int = FILE_MODE) -> None:
        """With `read_only`, open files for reading and write nothing to lock files.

        New files get the mode `mode`.
        """
        self._read_only = read_only
        self._mode = mode

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, an empty list if it does not exist."""
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 (names, not paths)
        except FileNotFoundError:
            return []

    def make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably, unless it exists."""
        if directory.is_dir():
            return
        # From the top, each level durable before the next.
        self.make_directory(directory.parent)
        with _DiskFullAware(directory):
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        self.sync_directory(directory.parent)

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises FileNotFoundError unless `create`."""
        return PosixFile(path, create=create, read_only=self._read_only, mode=self._mode)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` atomically."""
        with _DiskFullAware(target):
            source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file that exists."""
        path.unlink()

    def remove_directory(self, directory: Path) -> None:
        """Remove an empty directory that exists."""
        directory.rmdir()

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        sync_directory(directory)

    def lock(self, path: Path) -> Lock:
        """Lock the file `path`, creating it. Raises DirectoryInUseError."""
        return PosixLock(path, read_only=self._read_only)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    # fsync of a file does not cover its name, which belongs to the directory.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _NamingFile(directory):
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(files: FileSystem, path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the content of `path` with `pieces`, durably and atomically.

    A crash leaves the old or the new content. Raises DiskFullError with the old content in place.
    """
    temporary = path.with_name(path.name + ".tmp")
    file = files.open(temporary, create=True)
    try:
        # A killed process may have left a longer temporary file.
        file.truncate(0)
        position = 0
        for piece in pieces:
            file.write(position, piece)
            position += len(piece)
        # The data has to be durable before the name: after a crash a renamed file is complete.
        file.sync()
        files.rename(temporary, path)
    except DiskFullError:
        # Frees the space, so that a smaller write can succeed.
        files.remove(temporary)
        raise
    finally:
        file.close()

    # Only now does the new content survive a power failure.
    files.sync_directory(path.parent)


def pieces_of(file: File, position: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from a position on, in pieces of bounded size."""
    while piece := file.read(position, _PIECE_BYTES):
        yield piece
        position += len(piece)


def as_binary_io(file: File, *, closes: bool = True) -> BinaryIO:
    """Return a buffered, seekable reader of `file`. Closing it closes `file` if `closes`."""
    return io.BufferedReader(_FileReader(file, closes=closes), _PIECE_BYTES)


class _FileReader(io.RawIOBase):
    def __init__(self, file: File, *, closes: bool) -> None:
        self._file = file
        self._closes = closes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size()}
        self._position = max(0, origins[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        # One piece at a time: the next piece reuses the same memory, which is then in the cache.
        data = self._file.read(self._position, min(len(buffer), _PIECE_BYTES))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed and self._closes:
            self._file.close()
        super().close()


class _NamingFile:
    """Adds the file name to the errors of calls on a descriptor.

    Each commit creates two of these, and a generator-based context manager costs four times as
    much as this class.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # Calls on a descriptor raise errors without a file name, which an operator needs.
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)


class _DiskFullAware(_NamingFile):
    """Also turns the errors of a full disk into DiskFullError."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise DiskFullError(error.errno, error.strerror, str(self._path)) from error
        super().__exit__(kind, error, traceback)
