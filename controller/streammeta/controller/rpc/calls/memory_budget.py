"""Memory of calls: budgets of requests and answers in flight, and a guard near the process's limit.

gRPC passes whole messages, so a request is counted once it has arrived, until it is answered, and
an answer until gRPC has sent it, which waits for a caller that does not read. Small messages are
not counted: admission control bounds their number, and heartbeats must pass when all memory is in
use. Messages between controllers do not pass the guard.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from streammeta.controller.errors import BusyError, MemoryHighError
from streammeta.controller.runtime.load.process_memory import Pressure, ProcessMemory
from streammeta.rpc.method_facts import MemoryClass

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


GUARD_RETRY_AFTER_MS = 2_000
"""Time after which a rejected caller may retry, in milliseconds."""


class MemoryGuard:
    """Rejects calls by their memory class, their size, and the memory of the process."""

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory

    @property
    def is_easy(self) -> bool:
        """Whether every call is accepted."""
        return not self._memory.pressure

    def require(self, memory: MemoryClass, size: int = 0) -> None:
        """Accept a call whose request has `size` bytes.

        Raises:
            MemoryHighError: calls of this class and size are rejected at present.
        """
        pressure = self._memory.pressure
        # Heartbeats and calls that free memory pass always: rejecting them would make it worse.
        if pressure is Pressure.NONE or memory is MemoryClass.VITAL:
            return
        # Small ordinary calls still pass under high pressure, since they hardly allocate.
        is_large = memory is MemoryClass.ORDINARY and size > SMALL_BYTES
        if pressure is Pressure.FULL or memory is MemoryClass.BULK or is_large:
            raise MemoryHighError(
                self._memory.limit_bytes, self._memory.rss_bytes, GUARD_RETRY_AFTER_MS
            )
