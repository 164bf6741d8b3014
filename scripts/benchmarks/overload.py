"""Calls served when four times as many come as a leader can serve, compared with its capacity.

Three controllers with the product's defaults. Small values are put by unary calls: as fast as they
are answered, which finds the capacity, then at a multiple of that rate regardless of the answers,
in alternating turns. Meanwhile one broker sends heartbeats on a separate connection. The client
shares the machine with the controllers, so rejected calls cost the controllers CPU time twice.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from scripts.benchmarks.cluster import running_cluster, watching
from scripts.benchmarks.figures import Bound, Outcome, Progress, Table, Target, median, percentile
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import rss_bytes
from streammeta.v1 import common_pb2, kv_pb2, nodes_pb2

SHARE_MIN = 0.8
HEARTBEAT_MS_MAX = 100.0
_WARM_S = 1.0
_BEAT_EVERY_S = 0.05
_NODE = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
_REGISTER = "/streammeta.v1.NodeService/RegisterNode"
_HEARTBEAT = "/streammeta.v1.NodeService/Heartbeat"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Rate of calls and turns."""

    times: int = option(4, "calls, as a multiple of the capacity")
    turns: int = option(5, "turns of each load")
    seconds: float = seconds(4.0, "of each turn")


Turn: TypeAlias = Mapping[str, Any]
"""Figures of one load for one turn. `ended_after_s` is the time from the last call to its end."""


@dataclass
class Heartbeats:
    """Sends a heartbeat, waits for the answer and the rest of its interval, and repeats."""

    connection: Http2Connection
    latencies_ms: list[float] = field(default_factory=list)

    async def beat_on(self) -> None:
        """Send heartbeats until cancelled."""
        request = nodes_pb2.HeartbeatRequest(node=_NODE).SerializeToString()
        while True:
            began = time.monotonic()
            await self.connection.call(_HEARTBEAT, request)
            took_s = time.monotonic() - began
            self.latencies_ms.append(took_s * 1000)
            await asyncio.sleep(max(0.0, _BEAT_EVERY_S - took_s))


@contextlib.asynccontextmanager
async def beating(endpoint: str) -> AsyncIterator[Heartbeats]:
    """Register a broker and send its heartbeats. A failed one is raised at the end."""
    connection = await Http2Connection.connect(endpoint)
    request = nodes_pb2.RegisterNodeRequest(node=_NODE)
    await connection.call(_REGISTER, request.SerializeToString())
    heartbeats = Heartbeats(connection)
    running = asyncio.create_task(heartbeats.beat_on())
    try:
        yield heartbeats
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        connection.close()


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure both loads in turns."""
    turns: list[Turn] = []
    with running_cluster(root) as cluster:
        async with watching(cluster) as watch:
            before = await watch.wait_healthy()
            pid = cluster.children[before.node_id].pid
            async with connected(before.endpoint) as load, beating(before.endpoint) as heartbeats:
                await load.as_answered(_WARM_S)
                await load.drained()
                for number in range(settings.turns):
                    progress(f"overload: turn {number + 1} of {settings.turns}")
                    capacity = await _turn(load, heartbeats, pid, settings.seconds, None)
                    rate = settings.times * capacity["served_per_s"]
                    turns.append(capacity)
                    turns.append(await _turn(load, heartbeats, pid, settings.seconds, rate))
            after = await watch.wait_healthy()
    return _outcome(settings, turns, after.epoch - before.epoch)


async def _turn(
    load: Load, heartbeats: Heartbeats, pid: int, seconds: float, rate: float | None
) -> Turn:
    """Load at a rate, or as fast as calls are answered. Calls that end later don't count."""
    before = (load.sent, load.served, load.refused)
    load.latencies_ms.clear()
    heartbeats.latencies_ms.clear()
    began = time.monotonic()
    if rate is None:
        await load.as_answered(seconds)
    else:
        await load.at_rate(rate, seconds)
    took_s = time.monotonic() - began
    offered, served, refused = (
        round((now - then) / took_s, 1)
        for now, then in zip((load.sent, load.served, load.refused), before, strict=True)
    )
    latencies, beats = list(load.latencies_ms), list(heartbeats.latencies_ms)
    ends = time.monotonic()
    await load.drained()

    return {
        "load": "as answered" if rate is None else "beyond",
        "offered_per_s": offered,
        "served_per_s": served,
        "refused_per_s": refused,
        "p50_ms": round(percentile(latencies, 0.5), 1),
        "p99_ms": round(percentile(latencies, 0.99), 1),
        "heartbeat_p99_ms": round(percentile(beats, 0.99), 1),
        "heartbeat_max_ms": round(max(beats), 1),
        "ended_after_s": round(time.monotonic() - ends, 2),
        "leader_mib": round(rss_bytes(pid) / 2**20, 1),
    }


COLUMNS = (
    "calls come = load | calls/s = offered_per_s | served/s = served_per_s"
    " | refused/s = refused_per_s | p50 ms = p50_ms | p99 ms = p99_ms"
    " | heartbeats p99 ms = heartbeat_p99_ms | heartbeats max ms = heartbeat_max_ms"
    " | ended after s = ended_after_s | leader MiB = leader_mib"
)


def _outcome(settings: Settings, turns: Sequence[Turn], elections: int) -> Outcome:
    capacity, beyond = (
        {
            name: median([turn[name] for turn in part])
            for name in ("served_per_s", "heartbeat_p99_ms")
        }
        for part in (turns[::2], turns[1::2])
    )
    shares = [
        over["served_per_s"] / at["served_per_s"]
        for at, over in zip(turns[::2], turns[1::2], strict=True)
    ]
    figures = {
        "capacity_per_s": capacity["served_per_s"],
        "goodput_beyond_per_s": beyond["served_per_s"],
        "goodput_share": round(median(shares), 3),
        "heartbeat_p99_beyond_ms": beyond["heartbeat_p99_ms"],
        "elections": elections,
    }
    bounds: Sequence[tuple[str, Bound, float]] = (
        ("goodput_share", "at least", SHARE_MIN),
        ("heartbeat_p99_beyond_ms", "at most", HEARTBEAT_MS_MAX),
        ("elections", "at most", 0),
    )
    title = f"Calls at a leader's capacity, and {settings.times} times as many"

    return Outcome(
        benchmark="overload",
        figures=figures,
        details={"turns": turns, "shares": [round(share, 3) for share in shares]},
        tables=[Table.of(title, turns, COLUMNS)],
        targets=[Target(name, bound, wanted, figures[name]) for name, bound, wanted in bounds],
    )
