"""Spool files of snapshots that are being sent: unnamed files in the data directory.

A file's name is removed once it is open, so its space is freed when its reader leaves or the
process ends. A crash in between leaves a name, which the next start removes. Files with other names
are never touched. Snapshots leave part of the disk to the log.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import structlog

from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError
from streammeta.storage.durable_files import FILE_MODE

FREE_BYTES_MIN = 256 << 20
"""Room on the disk that is left to the log, in bytes."""

CHECKED_EVERY_BYTES = 16 << 20
"""Bytes written between two looks at the room that is left."""

_NAME = re.compile(r"^snapshot-\d+-\d+\.spool$")

_log = structlog.get_logger(component="rpc")


def free_bytes(directory: Path) -> int:
    """Return the room on the disk of a directory, in bytes."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


class SnapshotSpool:
    """Files of one process in one directory."""

    def __init__(
        self, directory: Path, read_free_bytes: Callable[[Path], int] = free_bytes
    ) -> None:
        self._directory = directory
        self._read_free_bytes = read_free_bytes
        self._numbers = itertools.count()

    def remove_left_over(self) -> None:
        """Remove files of a crashed process. No other process may use the directory."""
        for path in sorted(self._directory.iterdir()):
            if _NAME.match(path.name):
                path.unlink()
                _log.info("left_over_spool_removed", name=path.name)

    @contextmanager
    def file(self) -> Iterator[SpoolFile]:
        """Give an empty file, which is gone after the block."""
        path = self._directory / f"snapshot-{os.getpid()}-{next(self._numbers)}.spool"
        with open(path, "xb+", opener=_open_private) as file:
            path.unlink()
            yield SpoolFile(file, self._room)

    def _room(self) -> int:
        return self._read_free_bytes(self._directory) - FREE_BYTES_MIN


class SpoolFile:
    """One snapshot's bytes, written from the start and then read."""

    def __init__(self, file: BinaryIO, room: Callable[[], int]) -> None:
        self._file = file
        self._room = room
        self._until_check = 0

    def write(self, data: bytes) -> int:
        """Append bytes and return their number.

        Raises:
            NoDiskSpaceError: no more room may be taken.
        """
        self._until_check -= len(data)
        if self._until_check < 0:
            self._until_check = CHECKED_EVERY_BYTES
            room = self._room()
            if room < max(CHECKED_EVERY_BYTES, len(data)):
                raise NoDiskSpaceError(
                    f"a snapshot needs space, but the disk has {max(0, room)} bytes besides the "
                    f"{FREE_BYTES_MIN} that the log needs. Free space on the disk"
                )

        try:
            return self._file.write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoDiskSpaceError(f"no room for a snapshot: {error}") from error

    def read_at(self, position: int, size: int) -> bytes:
        """Return bytes of the file."""
        self._file.seek(position)
        return self._file.read(size)
