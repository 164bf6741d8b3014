"""One open stream of a connection: its windows both ways, and the bytes of its answer that wait.

Does no I/O and knows no rule.
"""

from __future__ import annotations

from collections import deque
from typing import Any


class Stream:
    """One stream that is not closed."""

    __slots__ = (
        "call",
        "granted",
        "id",
        "is_ended_there",
        "last",
        "length",
        "unsent",
        "unsent_bytes",
        "window",
    )

    def __init__(self, stream_id: int, granted: int) -> None:
        self.id = stream_id
        self.call: Any = None
        """Whatever the session's user keeps for it."""
        self.granted = granted
        """Bytes that the client may still send."""
        self.window = 0
        """Bytes that may be sent, relative to the initial window of every stream.

        May be negative.
        """
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.last: bytes | None = None
        """Block of headers that ends the stream, sent after its unsent bytes."""
        self.is_ended_there = False
        self.length: int | None = None
        """Bytes that its client has still to send, if it said how many there are."""

    def count(self, size: int, *, is_last: bool) -> bool:
        """Count received bytes. Return whether they match the announced length."""
        if self.length is None:
            return True
        self.length -= size
        return self.length == 0 if is_last else self.length >= 0
