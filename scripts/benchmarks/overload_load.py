"""Small unary writes at one leader, as fast as it answers, or at a rate regardless of its answers.

Counts how the calls end. Independent of the leader's process.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from scripts.benchmarks.http2 import Http2Connection, Http2Error
from streammeta.v1 import kv_pb2

CONNECTIONS = 16
CALLERS = 64
"""Calls in flight of a load that waits for answers."""
AT_ONCE_MAX = 200
"""Most calls in one turn of the event loop, which heartbeats share."""
_TURN_S = 0.001
_KEYS = 100
_DRAINED_S_MAX = 30
_PUT = "/streammeta.v1.KVService/PutKVs"


@dataclass
class Load:
    """Calls over connections to one leader, and how they have ended so far."""

    connections: Sequence[Http2Connection]
    sent: int = 0
    served: int = 0
    refused: int = 0
    waiting: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    """Latencies of served calls."""

    def fire(self) -> None:
        """Make a call, and count how it ends."""
        self.sent += 1
        self.waiting += 1
        item = kv_pb2.KVToPut(key=f"k{self.sent % _KEYS}", value=bytes(50), overwrite=True)
        request = kv_pb2.PutKVsRequest(items=[item])
        connection = self.connections[self.sent % len(self.connections)]
        began = time.monotonic()

        def ended(call: "asyncio.Future[bytes]") -> None:
            self._ended(call, began)

        connection.call(_PUT, request.SerializeToString()).add_done_callback(ended)

    async def as_answered(self, seconds: float) -> None:
        """Call as fast as the leader answers."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            while self.waiting < CALLERS:
                self.fire()
            await asyncio.sleep(_TURN_S)

    async def at_rate(self, rate: float, seconds: float) -> None:
        """Make `rate` calls a second, regardless of the answers."""
        began = now = time.monotonic()
        due = 0.0
        while now - began < seconds:
            await asyncio.sleep(_TURN_S)
            passed, now = time.monotonic() - now, time.monotonic()
            # A stall of the loop is not made up for at once: heartbeats share the loop.
            due = min(due + passed * rate, AT_ONCE_MAX)
            for _ in range(int(due)):
                self.fire()
            due %= 1

    async def drained(self) -> None:
        """Wait until every call has ended; raises TimeoutError after 30 s."""
        async with asyncio.timeout(_DRAINED_S_MAX):
            while self.waiting:  # noqa: ASYNC110 (a number, not an event)
                await asyncio.sleep(0.01)

    def _ended(self, call: "asyncio.Future[bytes]", began: float) -> None:
        self.waiting -= 1
        if call.exception() is None:
            self.served += 1
            self.latencies_ms.append((time.monotonic() - began) * 1000)
        else:
            assert isinstance(call.exception(), Http2Error)
            self.refused += 1


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[Load]:
    """Connect to a leader until the block ends."""
    connections = [await Http2Connection.connect(endpoint) for _ in range(CONNECTIONS)]
    try:
        yield Load(connections)
    finally:
        for connection in connections:
            connection.close()
