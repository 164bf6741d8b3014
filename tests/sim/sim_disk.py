"""A disk that forgets, fills up, fails and rots.

Implements the journal's `FileSystem`. Whatever was not synced when the power fails is lost, kept or
torn; names created, renamed or removed are lost unless their directory was synced. A stop can be
ordered in the middle of an operation, after a number of calls that change anything.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path

from streammeta.storage.durable_files import DirectoryInUseError, DiskFullError

_SECTOR = 64
"""Granularity at which unsynced writes are lost; small, so that small batches tear."""


class StoppedError(BaseException):
    """The process, or the machine with it, stopped in the middle of something."""


@dataclass(slots=True)
class _Change:
    """An unsynced write, or a cut when `data` is None."""

    position: int
    data: bytes | None


def _apply(content: bytearray, change: _Change) -> None:
    if change.data is None:
        del content[change.position :]
        return
    if len(content) < change.position:
        content.extend(bytes(change.position - len(content)))
    content[change.position : change.position + len(change.data)] = change.data


@dataclass(slots=True)
class _Inode:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)
    flipped: list[tuple[int, int]] = field(default_factory=list)
    """Positions of bytes that rot has changed, and what they were."""

    @property
    def is_rotten(self) -> bool:
        return any(
            position < len(self.content) and self.content[position] != was
            for position, was in self.flipped
        )

    def change(self, change: _Change) -> None:
        _apply(self.content, change)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def forget(self) -> None:
        """Drop what was not synced, as a kernel may whose write-back failed."""
        if self.pending:
            self.pending.clear()
            self.content = bytearray(self.durable)

    def crash(self, rng: random.Random) -> None:
        if self.pending:
            for change in _survivors(self.pending, rng):
                _apply(self.durable, change)
            self.forget()
            self.content = bytearray(self.durable)


def _survivors(pending: list[_Change], rng: random.Random) -> list[_Change]:
    match rng.randrange(4):
        case 0:
            return []
        case 1:
            return list(pending)
        case 2:
            kept = pending[: rng.randrange(len(pending)) + 1]
            last = kept[-1]
            if last.data:
                torn = last.data[: rng.randrange(len(last.data))]
                kept = [*kept[:-1], _Change(last.position, torn)]
            return kept
    sectors: list[_Change] = []
    for change in pending:
        if change.data is None:
            sectors.append(change)
            continue
        for start in range(0, len(change.data), _SECTOR):
            if rng.random() < 0.5:
                part = change.data[start : start + _SECTOR]
                sectors.append(_Change(change.position + start, part))
    return sectors


class SimFile:
    """An open file; it stays readable after it was removed, as on POSIX."""

    def __init__(self, disk: SimDisk, inode: _Inode) -> None:
        self._disk = disk
        self._inode = inode

    def read(self, position: int, size: int) -> bytes:
        return bytes(self._inode.content[position : position + size])

    def write(self, position: int, data: bytes) -> None:
        disk, inode = self._disk, self._inode
        growth = position + len(data) - len(inode.content)
        if disk.space is not None and growth > disk.space:
            fits = max(0, len(data) - growth + disk.space)
            disk.space = 0
            if fits:
                inode.change(_Change(position, bytes(data[:fits])))
            raise DiskFullError(errno.ENOSPC, "No space left on device")
        if disk.space is not None and growth > 0:
            disk.space -= growth
        inode.change(_Change(position, bytes(data)))
        disk.count()

    def size(self) -> int:
        return len(self._inode.content)

    def truncate(self, size: int) -> None:
        self._disk.free(len(self._inode.content) - size)
        self._inode.change(_Change(size, None))
        self._disk.count()

    def sync(self) -> None:
        self._disk.count()
        if self._disk.sync_fails():
            self._inode.forget()
            raise OSError(errno.EIO, "Input/output error")
        self._inode.sync()

    def close(self) -> None:
        pass


class SimLock:
    """A lock file; a crash releases it."""

    def __init__(self, disk: SimDisk, path: Path) -> None:
        self._disk = disk
        self._path = path
        if path in disk.locked:
            raise DirectoryInUseError(f"{path} is in use")
        disk.locked.add(path)

    def release(self) -> None:
        self._disk.locked.discard(self._path)


class SimDisk:
    """All files of one node, and the faults ordered for them."""

    def __init__(self) -> None:
        self.locked: set[Path] = set()
        self.crash_after: int | None = None
        """Changing calls until the machine stops."""
        self.loses_power = True
        """Whether that stop is one of the machine, not of the process alone."""
        self.fail_sync_after: int | None = None
        """Syncs until one fails and loses what it should have made durable."""
        self.space: int | None = None
        """Bytes left before the disk is full; None for plenty."""
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._name_changes: list[dict[Path, _Inode | None]] = []

    def count(self) -> None:
        """Count one operation; stop the machine when its turn has come."""
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after <= 0:
                raise StoppedError

    def sync_fails(self) -> bool:
        """Whether this sync is the one ordered to fail."""
        if self.fail_sync_after is None:
            return False
        self.fail_sync_after -= 1
        if self.fail_sync_after > 0:
            return False
        self.fail_sync_after = None
        return True

    def free(self, size: int) -> None:
        if self.space is not None and size > 0:
            self.space += size

    def crash(self, rng: random.Random) -> None:
        """Lose what was not synced."""
        self.end_process()
        for change in self._name_changes[: rng.randrange(len(self._name_changes) + 1)]:
            _apply_names(self._durable_names, change)
        self._name_changes.clear()
        self._names = dict(self._durable_names)
        for inode in self._names.values():
            inode.crash(rng)

    def end_process(self) -> None:
        """The process is gone and the machine is not: its page cache stays."""
        self.crash_after = None
        self.fail_sync_after = None
        self.locked.clear()

    # -- what is durable, and what spoils it

    def write_back(self) -> None:
        """Make everything durable, as a kernel may at any time."""
        for change in self._name_changes:
            _apply_names(self._durable_names, change)
        self._name_changes.clear()
        for inode in self._names.values():
            inode.sync()

    def durable_names(self) -> list[Path]:
        """Paths that a power failure now would leave."""
        return sorted(self._durable_names)

    def durable(self, path: Path) -> bytes | None:
        """Contents that a power failure now would leave at least; None without the file."""
        inode = self._durable_names.get(path)
        return None if inode is None else bytes(inode.durable)

    def flip(self, path: Path, position: int, bit: int) -> None:
        """Turn one bit of a file over, on the medium and in the cache."""
        inode = self._durable_names[path]
        inode.sync()
        inode.flipped.append((position, inode.durable[position]))
        inode.durable[position] ^= 1 << bit
        inode.content = bytearray(inode.durable)

    def is_rotten(self) -> bool:
        """Whether a file that is in use has a byte that rot has changed."""
        return any(
            inode.flipped and inode.is_rotten and path.suffix != ".damaged"
            for path, inode in self._names.items()
        )

    # -- FileSystem

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self._names if path.parent == directory)

    def make_directory(self, directory: Path) -> None:
        pass

    def remove_directory(self, directory: Path) -> None:
        assert not self.names(directory)

    def open(self, path: Path, *, create: bool = False) -> SimFile:
        if path not in self._names:
            if not create:
                raise FileNotFoundError(path)
            if self.space is not None and self.space <= 0:
                raise DiskFullError(errno.ENOSPC, "No space left on device")
            self._change_names({path: _Inode()})
        return SimFile(self, self._names[path])

    def rename(self, source: Path, target: Path) -> None:
        # One change for the file system's journal: a crash sees both names changed or neither.
        if target in self._names:
            self.free(len(self._names[target].content))
        self._change_names({target: self._names[source], source: None})
        self.count()

    def remove(self, path: Path) -> None:
        self.free(len(self._names[path].content))
        self._change_names({path: None})
        self.count()

    def sync_directory(self, directory: Path) -> None:
        self.count()
        if self.sync_fails():
            raise OSError(errno.EIO, "Input/output error")
        for change in self._name_changes:
            _apply_names(self._durable_names, change)
        self._name_changes.clear()

    def lock(self, path: Path) -> SimLock:
        return SimLock(self, path)

    def _change_names(self, change: dict[Path, _Inode | None]) -> None:
        _apply_names(self._names, change)
        self._name_changes.append(change)


def _apply_names(names: dict[Path, _Inode], change: dict[Path, _Inode | None]) -> None:
    for path, inode in change.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode
