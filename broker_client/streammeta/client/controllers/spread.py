"""Order in which a client asks the controllers for watches and reads at an offset.

Any controller answers these from its committed state, and the leader is busy with writes. Each
client has a random order, so that many clients spread evenly while each stays with one controller.
The leader comes last. Does no I/O and reads no clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from zlib import crc32


class ControllerSpread:
    """Configured and learned controllers, in one client's order."""

    def __init__(self, endpoints: Sequence[str], rng: random.Random) -> None:
        self._given = tuple(endpoints)
        self._learned: tuple[str, ...] = ()
        self._leader = ""
        self._failed: set[str] = set()
        # The same for the client's lifetime, so its order is stable.
        self._salt = f"{rng.getrandbits(64):x}"

    def learn(self, endpoints: Iterable[str], leader: str) -> None:
        """Apply a controller's list of all endpoints and of the leader. Empty ones are unknown.

        Earlier failures are forgotten.
        """
        self._learned = tuple(endpoint for endpoint in endpoints if endpoint)
        self._leader = leader
        self._failed.clear()

    def prefer_others(self, endpoint: str) -> None:
        """Prefer other controllers until `learn` or `clear_failure`."""
        self._failed.add(endpoint)

    def clear_failure(self, endpoint: str) -> None:
        """Record that a controller serves."""
        self._failed.discard(endpoint)

    def order(self, leader: str | None) -> list[str]:
        """Return all controllers, the best first. `leader` is the presumed leader, if any."""
        leads = self._leads(leader)

        def rank(endpoint: str) -> tuple[bool, bool, int]:
            own = crc32(f"{self._salt}{endpoint}".encode())
            return endpoint in leads, endpoint in self._failed, own

        return sorted({*self._given, *self._learned}, key=rank)

    def leads(self, endpoint: str, leader: str | None) -> bool:
        """Return whether `endpoint` belongs to the leader."""
        return endpoint in self._leads(leader)

    def has_better(self, endpoint: str, leader: str | None) -> bool:
        """Return whether `endpoint` leads, and a follower without a failure exists."""
        leads = self._leads(leader)
        if endpoint not in leads:
            return False
        return any(other not in leads | self._failed for other in {*self._given, *self._learned})

    def _leads(self, leader: str | None) -> set[str]:
        """Return the leader's endpoint, or two if it may also have another name here."""
        if leader is not None and leader in self._learned:
            return {leader}
        return {leader or "", self._leader} - {""}
