"""Modes of data files: its owner's alone, and the advice for directories that others can read."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
"""Modes of new files and directories that hold data."""

READABLE_MODE = 0o644
"""Mode of new files that are made for programs of others, such as collectors of metrics."""

_LOOKED_AT_MAX = 10_000
"""Files of a directory that are looked at."""


def advise_private(path: Path) -> str | None:
    """Return the command that keeps others than the owner from data, None if they can't read it.

    Others read what lies in a directory if they can enter it and a file in it is open to them.
    """
    if not _is_open(path):
        return None
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
    """Return whether others than the owner may do anything with a file or directory."""
    try:
        return bool(stat.S_IMODE(path.lstat().st_mode) & 0o077)
    except OSError:
        return False  # gone by now, or not there yet
