"""Time limits of the connections to one peer.

A peer short of CPU time needs longer for a handshake, and an interrupted handshake must start
again. The limit therefore doubles each time it cuts off a peer whose host answers, and shrinks as
soon as answers are fast.
"""

from __future__ import annotations

_DOUBLINGS_MAX = 3
_SHARE_OF_ANSWER = 4
"""Factor between the last answer's duration and the limit, when the limit shrinks."""


class Patience:
    """The time limit, in seconds."""

    def __init__(self, base_s: float) -> None:
        self.base_s = base_s
        """Limit for a host that does not answer at all, and for a healthy peer."""
        self._doublings = 0

    @property
    def limit_s(self) -> float:
        """Return the current limit."""
        return self.base_s * (1 << self._doublings)

    def cut_off(self) -> None:
        """Record that a peer whose host is up did not answer within the limit."""
        self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)

    def record_answer(self, took_s: float) -> None:
        """Record an answer and its duration."""
        while self._doublings and took_s * _SHARE_OF_ANSWER <= self.limit_s / 2:
            self._doublings -= 1
