"""Spread of watches and session reads over the controllers: the order in which a client asks them.

Any controller answers these from what is committed, and the leader has enough to do with writes.
Each client has an order of its own, so that many clients spread evenly, and one stays with one
controller; the leader comes last. Does no I/O and reads no clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from zlib import crc32


class ControllerSpread:
    """The controllers given and learned, in one client's order."""

    def __init__(self, endpoints: Sequence[str], rng: random.Random) -> None:
        self._given = tuple(endpoints)
        self._learned: tuple[str, ...] = ()
        self._leader = ""
        self._failed: set[str] = set()
        self._salt = f"{rng.getrandbits(64):x}"

    def learn(self, endpoints: Iterable[str], leader: str) -> None:
        """Take a controller's list of all, and of the leader; empty endpoints are unknown ones.

        Those that had failed are as good as any from now on.
        """
        self._learned = tuple(endpoint for endpoint in endpoints if endpoint)
        self._leader = leader
        self._failed.clear()

    def failed(self, endpoint: str) -> None:
        """Prefer others until `learn` or `answered`."""
        self._failed.add(endpoint)

    def answered(self, endpoint: str) -> None:
        """Note that a controller serves."""
        self._failed.discard(endpoint)

    def order(self, leader: str | None) -> list[str]:
        """Return all controllers, the best first; `leader` is the one believed to lead, if any."""
        leads = self._leads(leader)

        def rank(endpoint: str) -> tuple[bool, bool, int]:
            own = crc32(f"{self._salt}{endpoint}".encode())
            return endpoint in leads, endpoint in self._failed, own

        return sorted({*self._given, *self._learned}, key=rank)

    def leads(self, endpoint: str, leader: str | None) -> bool:
        """Whether `endpoint` is that of the leader."""
        return endpoint in self._leads(leader)

    def has_better(self, endpoint: str, leader: str | None) -> bool:
        """Whether `endpoint` leads, and another controller that has not failed does not."""
        leads = self._leads(leader)
        if endpoint not in leads:
            return False
        return any(other not in leads | self._failed for other in {*self._given, *self._learned})

    def _leads(self, leader: str | None) -> set[str]:
        """Return the endpoint that leads; two if it may be known here by another name too."""
        if leader is not None and leader in self._learned:
            return {leader}
        return {leader or "", self._leader} - {""}
