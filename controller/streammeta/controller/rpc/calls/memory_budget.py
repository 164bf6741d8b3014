"""Memory budgets of requests and of answers: bytes in flight, in all and of each caller.

gRPC hands whole messages over, so a request is counted once it has arrived, until it is answered,
and an answer until gRPC has sent it, which waits for a caller that does not read. Small messages
are not counted: admission control bounds their number, and heartbeats must pass when all memory is
taken. Knows no request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from streammeta.controller.errors import BusyError

REQUEST_MEMORY_BYTES = 512 << 20
"""Default budget of one process, in bytes."""

ANSWER_MEMORY_BYTES = 256 << 20
"""Budget of the answers of one process that are not sent, in bytes."""

SMALL_BYTES = 4 << 10
"""Size up to which a message is not counted, in bytes."""

SHARES = 4
"""One caller may hold a budget's fourth part."""

RETRY_AFTER_MS = 200
"""Time after which memory may be free again, in milliseconds."""


class MemoryBudget:
    """Bytes in flight by holder: a principal, or a connection in plain text."""

    def __init__(
        self,
        bytes_max: int = REQUEST_MEMORY_BYTES,
        on_taken: Callable[[int], None] = lambda _: None,
        what: str = "requests",
    ) -> None:
        """`on_taken` is called with the bytes of each message that is counted."""
        self._what = what
        self._bytes_max = bytes_max
        self._on_taken = on_taken
        self._share = max(1, bytes_max // SHARES)
        self._held: Counter[str] = Counter()
        self._total = 0
        self._fewer = asyncio.Event()

    @property
    def limit(self) -> int:
        """Bytes that may be held."""
        return self._bytes_max

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return self._total

    def require(self, holder: str, size: int) -> None:
        """Take the bytes of a message, if there is room for them.

        A holder without any may take more than its share, and the first of all more than there is.

        Raises:
            BusyError: too many are held already.
        """
        held = self._held[holder]
        for count, limit, whose in (
            (held, self._share, f"{self._what} of {holder}"),
            (self._total, self._bytes_max, self._what),
        ):
            # A single message may be larger than the limit, or it could never be accepted.
            if count and count + size > limit:
                raise BusyError(
                    f"{whose} in flight use {count} of {limit} bytes, {size} more do not fit: "
                    "retry later",
                    RETRY_AFTER_MS,
                )
        self.take(holder, size)

    def take(self, holder: str, size: int) -> None:
        """Count bytes that have arrived, however many are held."""
        self._held[holder] += size
        self._total += size
        # Large messages move the memory of the process faster than its timer looks.
        self._on_taken(size)

    def give_back(self, holder: str, size: int) -> None:
        """Count bytes of a message no longer."""
        self._total -= size
        self._held[holder] -= size
        if not self._held[holder]:
            # Holders in plain text are connections, which come and go.
            del self._held[holder]
        # Wakes all: each checks its own share again.
        self._fewer.set()

    def require_room(self, holder: str) -> None:
        """Require room for another message, however large it will be.

        Raises:
            BusyError: as many bytes are held as may be.
        """
        if self._is_full(holder):
            self.require(holder, 1)

    async def room(self, holder: str) -> None:
        """Wait until a holder may read another message, however large it will be."""
        while self._is_full(holder):
            self._fewer.clear()
            await self._fewer.wait()

    def _is_full(self, holder: str) -> bool:
        if self._total >= self._bytes_max:
            return True
        return self._total > 0 and self._held[holder] >= self._share
