"""Writes of a replica that are not durable yet, and their durations.

A replica can't vote, campaign or lead before its quorum-state is durable. Time that passes until
then must not count as anyone's silence, so deadlines move by the duration of the write.
"""

from __future__ import annotations

from collections import deque


class PendingWrites:
    """Tokens of writes in progress, each with its start time."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, int]] = deque()
        self._state: tuple[int, int] | None = None
        """Newest quorum-state in progress."""

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
        """Return the start time of the oldest write in progress."""
        return self._begun[0][1] if self._begun else None

    def begin(self, token: int, now: int, *, is_state: bool) -> None:
        """Record a write. `is_state` says whether it includes the quorum-state."""
        assert not self._begun or self._begun[-1][0] < token, "tokens of writes must ascend"
        self._begun.append((token, now))
        if is_state:
            self._state = (token, now)

    def done(self, token: int, now: int) -> int:
        """Record that everything up to `token` is durable. Returns the same as `state_done`."""
        while self._begun and self._begun[0][0] <= token:
            self._begun.popleft()
        return self.state_done(token, now)

    def state_done(self, token: int, now: int) -> int:
        """Record a durable quorum-state.

        Returns how long the newest one took, 0 while it is pending.
        """
        # An older state proves nothing: the newest may contain another vote or epoch.
        if self._state is None or self._state[0] > token:
            return 0
        took = now - self._state[1]
        self._state = None
        return took
