"""A disk that forgets: whatever was not synced when the power fails is lost, kept or torn.

Implements the journal's `FileSystem`. A crash can also be ordered in the middle of an operation,
after a number of calls that change anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from controller.journal.errors import DirectoryLockedError

_SECTOR = 64
"""Granularity at which unsynced writes are lost; small, so that small batches tear."""


class PowerFailure(BaseException):
    """The node's machine stopped in the middle of a disk operation."""


@dataclass
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


@dataclass
class _Inode:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)

    def change(self, change: _Change) -> None:
        _apply(self.content, change)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def crash(self, rng: random.Random) -> None:
        if self.pending:
            for change in _survivors(self.pending, rng):
                _apply(self.durable, change)
            self.pending.clear()
            self.content = bytearray(self.durable)


def _survivors(pending: list[_Change], rng: random.Random) -> list[_Change]:
    match rng.randrange(4):
        case 0:
            return []
        case 1:
            return pending
        case 2:
            kept = pending[: rng.randrange(len(pending)) + 1]
            last = kept[-1]
            if last.data:
                kept = [
                    *kept[:-1],
                    _Change(last.position, last.data[: rng.randrange(len(last.data))]),
                ]
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
    def __init__(self, disk: SimDisk, inode: _Inode) -> None:
        self._disk = disk
        self._inode = inode

    def read(self, position: int, size: int) -> bytes:
        return bytes(self._inode.content[position : position + size])

    def write(self, position: int, data: bytes) -> None:
        self._inode.change(_Change(position, bytes(data)))
        self._disk.count()

    def size(self) -> int:
        return len(self._inode.content)

    def truncate(self, size: int) -> None:
        self._inode.change(_Change(size, None))
        self._disk.count()

    def sync(self) -> None:
        self._disk.count()
        self._inode.sync()

    def close(self) -> None:
        pass


class SimLock:
    def __init__(self, disk: SimDisk, path: Path) -> None:
        self._disk = disk
        self._path = path
        if path in disk.locked:
            raise DirectoryLockedError(f"{path} is in use")
        disk.locked.add(path)

    def release(self) -> None:
        self._disk.locked.discard(self._path)


class SimDisk:
    """All files of one node."""

    def __init__(self) -> None:
        self.locked: set[Path] = set()
        self.crash_after: int | None = None
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._name_changes: list[dict[Path, _Inode | None]] = []

    def count(self) -> None:
        """Count one operation; fail the power when its turn has come."""
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after <= 0:
                raise PowerFailure

    def crash(self, rng: random.Random) -> None:
        """Lose what was not synced."""
        self.crash_after = None
        self.locked.clear()
        for change in self._name_changes[: rng.randrange(len(self._name_changes) + 1)]:
            self._make_durable(change)
        self._name_changes.clear()
        self._names = dict(self._durable_names)
        for inode in self._names.values():
            inode.crash(rng)

    # -- FileSystem

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self._names if path.parent == directory)

    def make_directory(self, directory: Path) -> None:
        pass

    def open(self, path: Path, *, create: bool = False) -> SimFile:
        if path not in self._names:
            if not create:
                raise FileNotFoundError(path)
            self._change_names({path: _Inode()})
        return SimFile(self, self._names[path])

    def rename(self, source: Path, target: Path) -> None:
        # One change for the file system's journal: a crash sees both names changed or neither.
        self._change_names({target: self._names[source], source: None})
        self.count()

    def remove(self, path: Path) -> None:
        self._change_names({path: None})
        self.count()

    def sync_directory(self, directory: Path) -> None:
        self.count()
        for change in self._name_changes:
            self._make_durable(change)
        self._name_changes.clear()

    def lock(self, path: Path) -> SimLock:
        return SimLock(self, path)

    def _change_names(self, change: dict[Path, _Inode | None]) -> None:
        _apply_names(self._names, change)
        self._name_changes.append(change)

    def _make_durable(self, change: dict[Path, _Inode | None]) -> None:
        _apply_names(self._durable_names, change)


def _apply_names(names: dict[Path, _Inode], change: dict[Path, _Inode | None]) -> None:
    for path, inode in change.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode
