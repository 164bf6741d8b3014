"""One open stream of a connection: its windows both ways, and the bytes of its answer that wait.

Does no I/O and knows no rule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Stream:
    """One stream that is not closed."""

    id: int
    granted: int
    """Bytes that the client may still send."""
    call: Any = None
    """Whatever the session's user keeps for it."""
    window: int = 0
    """Bytes that may be sent, relative to the initial window of every stream.

    May be negative.
    """
    unsent: deque[memoryview] = field(default_factory=deque)
    unsent_bytes: int = 0
    last: bytes | None = None
    """Block of headers that ends the stream, sent after its unsent bytes."""
    is_ended_there: bool = False
    length: int | None = None
    """Bytes that its client has still to send, if it said how many there are."""

    def count(self, size: int, *, is_last: bool) -> bool:
        """Count received bytes. Return whether they match the announced length."""
        if self.length is None:
            return True
        self.length -= size
        return self.length == 0 if is_last else self.length >= 0
