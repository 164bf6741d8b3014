"""Files with explicit durability: the protocol of a file system, POSIX's, and atomic replacement.

Logs keep their records in such files; tests replace the file system by a disk that loses, tears and
fails. Nothing is retried: after a failed sync the state of the disk is unknown. A full disk is the
one failure that leaves everything as it was, and has an error of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from streammeta.storage.private_files import DIRECTORY_MODE, FILE_MODE

_PIECE_BYTES = 1 << 20

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFullError(OSError):
    """The disk or a quota is full; a half-written call may be repeated."""


class DirectoryInUseError(Exception):
    """Another process has claimed the directory."""


class File(Protocol):
    """An open file; positions and sizes are bytes."""

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""

    def write(self, position: int, data: bytes) -> None:
        """Write all of `data`; durable after `sync`.

        Raises DiskFullError when there is no room; any part of `data` may have been written.
        """

    def size(self) -> int:
        """Return the file's length."""

    def truncate(self, size: int) -> None:
        """Cut the file, never lengthen it; durable after `sync`."""

    def sync(self) -> None:
        """Make everything written durable, with the length."""

    def close(self) -> None:
        """Release the file; does not sync."""


class Lock(Protocol):
    """An exclusive claim on a directory."""

    def release(self) -> None:
        """Let others have it."""


class FileSystem(Protocol):
    """Where files are. Created, renamed and removed names are durable after `sync_directory`."""

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory; none if it does not exist."""

    def make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably, unless it exists.

        Raises DiskFullError when there is no room for its name.
        """

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open for reading and writing; raises FileNotFoundError unless `create`.

        Raises DiskFullError when there is no room for a new name.
        """

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` atomically; raises DiskFullError, with nothing changed."""

    def remove(self, path: Path) -> None:
        """Remove a file that exists."""

    def remove_directory(self, directory: Path) -> None:
        """Remove an empty directory that exists."""

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    def lock(self, path: Path) -> Lock:
        """Claim the lock file `path`, creating it; raises DirectoryInUseError."""


class PosixFile:
    """A file descriptor; it is closed with the last reference, as Python's own files are.

    A recovery that ends in an error leaves its files behind at any point.
    """

    def __init__(
        self, path: Path, *, create: bool, read_only: bool = False, mode: int = FILE_MODE
    ) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | (os.O_CREAT if create else 0)
        with _TellingNoRoom(path):
            self._fd = os.open(path, flags | os.O_CLOEXEC, mode)
        self._path = path
        self._close = weakref.finalize(self, os.close, self._fd)

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        parts: list[bytes] = []
        with _NamingFile(self._path):
            while size > 0 and (part := os.pread(self._fd, size, position)):
                parts.append(part)
                position += len(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, position: int, data: bytes) -> None:
        """Write all of `data`; durable after `sync`."""
        view = memoryview(data)
        with _TellingNoRoom(self._path):
            while view:
                written = os.pwrite(self._fd, view, position)
                view = view[written:]
                position += written

    def size(self) -> int:
        """Return the file's length."""
        with _NamingFile(self._path):
            return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        """Cut the file, never lengthen it; durable after `sync`."""
        with _NamingFile(self._path):
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Make everything written durable, with the length."""
        with _NamingFile(self._path):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Release the file; does not sync. Closing it again does nothing."""
        self._close()


class PosixLock:
    """An flock, released by the kernel however the process ends."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise DirectoryInUseError(
                f"{path.parent} is in use by another process (pid {holder}); stop that one or "
                "give this one a directory of its own"
            ) from None

        if read_only:
            return

        with contextlib.suppress(
            OSError
        ):  # the pid is for the operator; a full disk has no room for it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it."""
        os.close(self._fd)


class PosixFileSystem:
    """The machine's file system."""

    def __init__(self, *, read_only: bool = False, mode: int = FILE_MODE) -> None:
        """With `read_only`, files are opened for reading and a lock leaves no trace.

        `mode` is that of new files.
        """
        self._read_only = read_only
        self._mode = mode

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 (names, not paths)
        except FileNotFoundError:
            return []

    def make_directory(self, directory: Path) -> None:
        """Create a directory with its parents, durably, unless it exists."""
        if directory.is_dir():
            return
        self.make_directory(directory.parent)
        with _TellingNoRoom(directory):
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        self.sync_directory(directory.parent)

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open for reading and writing; raises FileNotFoundError unless `create`."""
        return PosixFile(path, create=create, read_only=self._read_only, mode=self._mode)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` atomically."""
        with _TellingNoRoom(target):
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
        """Claim the lock file `path`, creating it; raises DirectoryInUseError."""
        return PosixLock(path, read_only=self._read_only)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory of the machine's file system durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _NamingFile(directory):
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(files: FileSystem, path: Path, pieces: Iterable[bytes]) -> None:
    """Replace `path` by a file of `pieces`, durably and atomically: the data first, then the name.

    A crash leaves the old contents or the new. Raises DiskFullError with the old contents in place.
    """
    temporary = path.with_name(path.name + ".tmp")
    file = files.open(temporary, create=True)
    try:
        file.truncate(0)
        position = 0
        for piece in pieces:
            file.write(position, piece)
            position += len(piece)
        file.sync()
        files.rename(temporary, path)
    except DiskFullError:
        files.remove(temporary)
        raise
    finally:
        file.close()

    files.sync_directory(path.parent)


def pieces_of(file: File, position: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from a position on, in pieces of a bounded size."""
    while piece := file.read(position, _PIECE_BYTES):
        yield piece
        position += len(piece)


def as_binary_io(file: File, *, closes: bool = True) -> BinaryIO:
    """Return a buffered, seekable reader of `file`; closing it closes `file` if `closes`."""
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
        # A piece at a time: the next one gets the same memory, which is in the cache by then.
        data = self._file.read(self._position, min(len(buffer), _PIECE_BYTES))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed and self._closes:
            self._file.close()
        super().close()


class _NamingFile:
    """Names the file in errors of calls that know a descriptor alone.

    A class of its own: each commit makes two of them, and a generator's costs four times as much.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)


class _TellingNoRoom(_NamingFile):
    """Turns the error of a call that found no room into a DiskFullError as well."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise DiskFullError(error.errno, error.strerror, str(self._path)) from error
        super().__exit__(kind, error, traceback)
