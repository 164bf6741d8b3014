"""Time limits of the connections to one peer.

A peer that is starved of processor time needs longer for a handshake, and one that is given up half
way must begin again. So the limit doubles each time that it has cut off a peer whose host answers,
and shrinks as soon as answers are quick.
"""

from __future__ import annotations

_DOUBLINGS_MAX = 3
_SHARE_OF_ANSWER = 4
"""The limit shrinks to this many times as long as the last answer took, not below its base."""


class Patience:
    """The limit, in seconds."""

    def __init__(self, base_s: float) -> None:
        self.base_s = base_s
        """Limit for a host that does not answer at all, and for a peer that is well."""
        self._doublings = 0

    @property
    def limit_s(self) -> float:
        """Return the present limit."""
        return self.base_s * (1 << self._doublings)

    def cut_off(self) -> None:
        """Note that a peer whose host was there did not answer within the limit."""
        self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)

    def answered(self, took_s: float) -> None:
        """Note an answer."""
        while self._doublings and took_s * _SHARE_OF_ANSWER <= self.limit_s / 2:
            self._doublings -= 1
