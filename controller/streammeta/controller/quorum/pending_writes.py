"""Writes of a replica that are not durable yet, and how long they have taken.

A replica can't vote, campaign or lead before its quorum-state is durable, so time that passes until
then must not count against anybody: its limits wait for the write, and are put off by its duration.
"""

from __future__ import annotations

from collections import deque


class PendingWrites:
    """The tokens of writes under way, each with the time at which it began."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, int]] = deque()
        self._state: tuple[int, int] | None = None
        """The newest quorum-state under way."""

    @property
    def is_state_pending(self) -> bool:
        """Whether the newest quorum-state is not durable yet."""
        return self._state is not None

    @property
    def is_empty(self) -> bool:
        """Whether everything is durable."""
        return not self._begun

    @property
    def oldest(self) -> int | None:
        """Return the time at which the oldest write under way began."""
        return self._begun[0][1] if self._begun else None

    def begin(self, token: int, now: int, *, is_state: bool) -> None:
        """Note a write; `is_state` says that it is of the quorum-state, or includes it."""
        self._begun.append((token, now))
        if is_state:
            self._state = (token, now)

    def done(self, token: int, now: int) -> int:
        """Note that everything up to `token` is durable; return as `state_done` does."""
        while self._begun and self._begun[0][0] <= token:
            self._begun.popleft()
        return self.state_done(token, now)

    def state_done(self, token: int, now: int) -> int:
        """Note a durable quorum-state; return how long the newest one took, 0 while it waits."""
        if self._state is None or self._state[0] > token:
            return 0
        took = now - self._state[1]
        self._state = None
        return took
