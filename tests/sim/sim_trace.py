"""The last events of a run, for the reader of a failure, and a hash of all of them."""

from __future__ import annotations

import hashlib
from collections import deque

KEPT = 50
"""Lines that a failure prints."""


class Trace:
    """Lines of one run; taken only when a run is looked at, for they cost much."""

    def __init__(self, kept: int = KEPT) -> None:
        self.lines: deque[str] = deque(maxlen=kept)
        self._hash = hashlib.sha256()

    def add(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)
        self._hash.update(line.encode())

    def digest(self) -> str:
        """A hash of every line there ever was."""
        return self._hash.hexdigest()
