"""Modes of data files, and advice for directories that other users can read."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

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
