"""Audit log on disk: one growing file, renamed when it is full. The next file continues its chain.

Synchronous, for the one thread of `audit_writer`. Old files belong to the operator and are never
deleted. `reopen` leaves a file that another program has renamed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from streammeta.controller.trust.audit.lines import AuditLine, Chain, line_hash
from streammeta.storage.durable_files import File, FileSystem
from streammeta.storage.parsing import parse_json

FILE_BYTES = 128 << 20
"""Size at which a file is renamed, in bytes."""

_FILES_READ = 3
"""Newest files read for the last line: one may be empty, one hold a torn line alone."""

_TAIL_BYTES = 1 << 20
"""Bytes to read from a file's end to find its last line. No line is longer."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line that waits for its place in the chain, after `dropped` lost lines."""

    line: AuditLine
    dropped: int = 0


class AuditLog(Protocol):
    """Where lines go, in order."""

    @property
    def chain(self) -> Chain:
        """Number and hash of the last line."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Write lines. After OSError none of them is written."""

    def sync(self) -> None:
        """Make all written lines durable. Raises OSError."""

    def reopen(self) -> None:
        """Continue in a file of the log's name, new if it was renamed. Raises OSError."""

    def close(self) -> None:
        """Release the file."""


class AuditFile:
    """An `AuditLog` in files: `path`, and `path`.SEQ for full ones, by their last line's number."""

    def __init__(self, files: FileSystem, path: Path, *, bytes_max: int = FILE_BYTES) -> None:
        """Open or create the file.

        Raises:
            OSError: it can't be opened, read or created.
        """
        self._files = files
        self._path = path
        self._bytes_max = bytes_max
        self._is_renamed = False
        files.make_directory(path.parent)
        self._chain, is_unfinished = _found(files, path)
        self._file = self._opened()
        # A new line must not be glued to the torn one, which would make both unreadable.
        if is_unfinished:
            self._write(b"\n")
        if self._size:
            self.sync()  # a process that was killed may have left lines that are not durable

    @property
    def chain(self) -> Chain:
        """Number and hash of the last line."""
        return self._chain

    def append(self, entries: Sequence[Entry]) -> None:
        """Append lines. The next write overwrites a failed one."""
        if self._size >= self._bytes_max:
            self._rotate()
        # A copy, so that a failed write leaves number and hash of the last written line.
        chain = replace(self._chain)
        self._write(b"".join(chain.link(entry.line, entry.dropped) for entry in entries))
        self._chain = chain

    def sync(self) -> None:
        """Make everything written durable, also lines from before this process."""
        self._file.sync()

    def reopen(self) -> None:
        """Close the file, its lines durable, and open the one of its name."""
        # Whoever renamed the file may archive it at once, and lines in it must be complete.
        self.sync()
        file = self._opened()
        self._file.close()
        self._file = file

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _opened(self) -> File:
        file = self._files.open(self._path, create=True)
        # A created file survives a power loss only when its directory entry is durable.
        self._files.sync_directory(self._path.parent)
        self._size = file.size()
        return file

    def _write(self, data: bytes) -> None:
        self._file.write(self._size, data)
        # Only after success: the next write begins at the same place and replaces partial data.
        self._size += len(data)

    def _rotate(self) -> None:
        # A rename that succeeded is not repeated when opening the new file failed.
        if not self._is_renamed:
            self._file.sync()
            # There is nothing to rename if another program has just done so.
            with contextlib.suppress(FileNotFoundError):
                self._files.rename(self._path, _full_file(self._path, self._chain.seq))
            self._is_renamed = True
        self.reopen()
        # Only after the new file is open, so that a retry continues here.
        self._is_renamed = False


class StandardOutput:
    """An `AuditLog` on a file descriptor. Every process begins its own chain."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdout.fileno() if descriptor is None else descriptor
        self.chain = Chain()

    def append(self, entries: Sequence[Entry]) -> None:
        """Write lines. Bytes written before a failure stay."""
        for entry in entries:
            chain = replace(self.chain)
            rest = memoryview(chain.link(entry.line, entry.dropped))
            while rest:
                # A pipe may accept part of a line.
                rest = rest[os.write(self._descriptor, rest) :]
            self.chain = chain

    def sync(self) -> None:
        """Do nothing: the reader of a pipe decides."""

    def reopen(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: others write to it too."""


def _full_file(path: Path, seq: int) -> Path:
    return path.with_name(f"{path.name}.{seq:012}")


def _found(files: FileSystem, path: Path) -> tuple[Chain, bool]:
    """Return the chain that the newest lines end with, and whether `path` ends within a line."""
    prefix = f"{path.name}."
    full = [
        name
        for name in files.names(path.parent)
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    ]
    # Numbers have a fixed width, so names sort by age.
    newest_first = [path.name, *sorted(full, reverse=True)]
    tails = [
        tail for name in newest_first[:_FILES_READ] if (tail := _tail(files, path.with_name(name)))
    ]
    if not tails:
        return Chain(), False

    lines = [line for tail in tails for line in reversed(_lines(tail))]
    # A torn line has no number, but its bytes are part of the chain: they can't be changed later.
    seqs = (number for line in lines if (number := _seq(line)) is not None)
    # Only the growing file can be continued. Full files end with a newline or stay as they are.
    is_unfinished = not (_tail(files, path) or b"\n").endswith(b"\n")
    return Chain(next(seqs, 0), line_hash(lines[0])), is_unfinished


def _lines(tail: bytes) -> list[bytes]:
    return tail.removesuffix(b"\n").split(b"\n")


def _tail(files: FileSystem, path: Path) -> bytes:
    try:
        file = files.open(path)
    except FileNotFoundError:
        return b""
    try:
        size = file.size()
        # Files have up to 128 MiB, and a start must not read all of it.
        start = max(0, size - _TAIL_BYTES)
        return file.read(start, size - start)
    finally:
        file.close()


def _seq(line: bytes) -> int | None:
    try:
        seq = parse_json(line)["seq"]
    except (ValueError, KeyError, TypeError):
        return None
    return seq if isinstance(seq, int) else None
