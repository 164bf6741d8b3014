"""Disks for tests of logs: one in memory that crashes and fills up, and real files with a hook.

The disk in memory stops at an ordered call, is full at an ordered byte, and forgets what was not
synced. Unlike the simulator's it leaves nothing to chance: a test walks through every call, and for
each through everything that may be left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from streammeta.storage import durable_files

SECTOR = 64
"""Bytes that are written over as a whole or not at all; few, so that small batches tear."""


class PowerFailure(BaseException):
    """The machine stopped at the ordered call."""


class Left(Enum):
    """What a power failure leaves of what was not synced: (names, data)."""

    NOTHING = (False, "lost")
    ALL = (True, "kept")
    NAMES = (True, "lost")
    DATA = (False, "kept")
    HALF = (True, "half")


@dataclass
class Inode:
    content: bytes = b""
    durable: bytes = b""

    def left(self, what: str) -> bytes:
        if what == "half" and len(self.content) > len(self.durable):
            return self.content[: (len(self.content) + len(self.durable)) // 2]
        if what == "half" and len(self.content) == len(self.durable):
            return self._half_overwritten()
        return self.durable if what == "lost" else self.content

    def _half_overwritten(self) -> bytes:
        """Return the durable bytes with the first half of those that differ written over."""
        both = enumerate(zip(self.content, self.durable, strict=True))
        changed = [at for at, (now, before) in both if now != before]
        middle = changed[len(changed) // 2] // SECTOR * SECTOR if changed else 0
        return self.content[:middle] + self.durable[middle:]


@dataclass
class CrashDisk:
    """The journal's `FileSystem`; every change of a file or name is a call that counts."""

    names_now: dict[Path, Inode] = field(default_factory=dict)
    names_durable: dict[Path, Inode] = field(default_factory=dict)
    calls: int = 0
    crash_at: int | None = None
    crash_comes_first: bool = False
    """Whether the ordered call fails before it had its effect, or after."""
    space: int | None = None
    """Bytes that may still be written; every name takes one."""
    charges_overwriting: bool = False
    """Whether bytes written over others take room too, as where files are copied on write."""
    locked: bool = False

    def after_crash(self, left: Left) -> CrashDisk:
        """Return what the machine finds when it is started again."""
        keeps_names, data = left.value
        names = self.names_now if keeps_names else self.names_durable
        found = {path: inode.left(data) for path, inode in names.items()}
        return CrashDisk.holding(found)

    def after_kill(self) -> CrashDisk:
        """Return what another process finds: everything, of which not all is durable yet."""
        inodes = {
            id(inode): Inode(inode.content, inode.durable)
            for inode in (*self.names_now.values(), *self.names_durable.values())
        }
        return CrashDisk(
            {path: inodes[id(inode)] for path, inode in self.names_now.items()},
            {path: inodes[id(inode)] for path, inode in self.names_durable.items()},
        )

    @classmethod
    def holding(cls, contents: dict[Path, bytes]) -> CrashDisk:
        inodes = {path: Inode(data, data) for path, data in contents.items()}
        return cls(dict(inodes), dict(inodes))

    def contents(self) -> dict[Path, bytes]:
        return {path: inode.content for path, inode in self.names_now.items()}

    def copy(self) -> CrashDisk:
        """Return another disk with the same files, all of it synced."""
        return CrashDisk.holding(self.contents())

    def begin_call(self) -> None:
        self.calls += 1
        if self.calls == self.crash_at and self.crash_comes_first:
            raise PowerFailure

    def end_call(self) -> None:
        if self.calls == self.crash_at:
            raise PowerFailure

    def take_space(self, wanted: int) -> int:
        """Return how much of `wanted` fits."""
        if self.space is None:
            return wanted
        fits = min(wanted, self.space)
        self.space -= fits
        return fits

    def with_file(self, path: Path, data: bytes | None) -> CrashDisk:
        """Return another disk, all of it synced, where one file is different, or gone for None."""
        contents = self.contents()
        contents.pop(path, None)
        return CrashDisk.holding(contents if data is None else {**contents, path: data})

    def segments(self) -> list[Path]:
        """Return the segments of the log on the disk, oldest first."""
        return sorted(path for path in self.names_now if path.suffix in {".log", ".wal"})

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Put the ordered crash off: its calls are counted from the end of this on."""
        crash_at, self.crash_at = self.crash_at, None
        yield
        self.calls, self.crash_at = 0, crash_at

    # -- FileSystem

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self.names_now if path.parent == directory)

    def make_directory(self, directory: Path) -> None:
        pass

    def remove_directory(self, directory: Path) -> None:
        assert not self.names(directory)

    def open(self, path: Path, *, create: bool = False) -> CrashFile:
        if path not in self.names_now:
            if not create:
                raise FileNotFoundError(path)
            self.begin_call()
            if not self.take_space(1):
                raise durable_files.DiskFullError(28, "no room for a name", str(path))
            self.names_now[path] = Inode()
            self.end_call()
        return CrashFile(self, self.names_now[path])

    def rename(self, source: Path, target: Path) -> None:
        self.begin_call()
        if not self.take_space(1):
            raise durable_files.DiskFullError(28, "no room for a name", str(target))
        self.names_now[target] = self.names_now.pop(source)
        self.end_call()

    def remove(self, path: Path) -> None:
        self.begin_call()
        del self.names_now[path]
        self.end_call()

    def sync_directory(self, directory: Path) -> None:
        self.begin_call()
        self.names_durable = dict(self.names_now)
        self.end_call()

    def lock(self, path: Path) -> CrashLock:
        if self.locked:
            raise durable_files.DirectoryInUseError(f"{path} is in use")
        self.locked = True
        return CrashLock(self)


@dataclass
class CrashLock:
    disk: CrashDisk

    def release(self) -> None:
        self.disk.locked = False


@dataclass
class CrashFile:
    """An open file of a `CrashDisk`."""

    disk: CrashDisk
    inode: Inode
    is_closed: bool = False

    def read(self, position: int, size: int) -> bytes:
        assert not self.is_closed
        return self.inode.content[position : position + size]

    def write(self, position: int, data: bytes) -> None:
        assert not self.is_closed
        self.disk.begin_call()
        content = self.inode.content.ljust(position, b"\0")
        growth = max(0, position + len(data) - len(content))
        charged = len(data) if self.disk.charges_overwriting else growth
        fits = len(data) - charged + self.disk.take_space(charged)
        self.inode.content = content[:position] + data[:fits] + content[position + fits :]
        if fits < len(data):
            raise durable_files.DiskFullError(28, "no room")
        self.disk.end_call()

    def size(self) -> int:
        return len(self.inode.content)

    def truncate(self, size: int) -> None:
        assert size <= len(self.inode.content), "files are never lengthened by truncation"
        self.disk.begin_call()
        if self.disk.space is not None:
            self.disk.space += len(self.inode.content) - size
        self.inode.content = self.inode.content[:size]
        self.disk.end_call()

    def sync(self) -> None:
        self.disk.begin_call()
        self.inode.durable = self.inode.content
        self.disk.end_call()

    def close(self) -> None:
        self.is_closed = True


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    """Return the bytes with one bit of the one at `at` turned over; -1 is the last."""
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def crashes(disk: CrashDisk, act: Callable[[CrashDisk], object]) -> Iterator[tuple[str, CrashDisk]]:
    """Yield every disk that a crash during `act` can leave, with where it crashed."""
    call = 0
    while True:
        call += 1
        has_crashed = False
        for comes_first in (True, False):
            victim = disk.copy()
            victim.crash_at, victim.crash_comes_first = call, comes_first
            try:
                act(victim)
            except PowerFailure:
                has_crashed = True
            for left in Left:
                when = "before" if comes_first else "after"
                yield f"{when} call {call}, {left.name} left", victim.after_crash(left)
        if not has_crashed:
            return


Hook = Callable[[str, range], None]
"""Called before a `write` (with its bytes), a `sync`, a `remove`, and when `synced`; may raise."""


class WatchedFiles(durable_files.PosixFileSystem):
    """The machine's files; a hook watches those of the write-ahead log, or all of them."""

    def __init__(self, hook: Hook, *, suffix: str = ".wal") -> None:
        super().__init__()
        self._hook = hook
        self._suffix = suffix

    def open(self, path: Path, *, create: bool = False) -> durable_files.File:
        if path.name.endswith(self._suffix):
            return _WatchedFile(path, self._hook, create=create)
        return super().open(path, create=create)

    def remove(self, path: Path) -> None:
        self._hook("remove", range(0))
        super().remove(path)


class _WatchedFile(durable_files.PosixFile):
    def __init__(self, path: Path, hook: Hook, *, create: bool) -> None:
        super().__init__(path, create=create)
        self._hook = hook

    def write(self, position: int, data: bytes) -> None:
        self._hook("write", range(position, position + len(data)))
        super().write(position, data)

    def sync(self) -> None:
        self._hook("sync", range(0))
        super().sync()
        self._hook("synced", range(0))
