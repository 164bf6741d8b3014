"""Calls served when four times as many come as a leader can serve, beside those at its capacity.

Three controllers with the product's defaults. Small values are put by unary calls: as fast as they
are answered, which finds the capacity, then at a multiple of that rate whatever is answered, in
alternating turns. Meanwhile one broker sends heartbeats on a connection of its own. The client
shares the machine with the controllers: what it takes for calls that are refused, they have not.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from scripts.benchmarks.bench_cluster import running_cluster, watching
from scripts.benchmarks.figures import Outcome, Table, Target, median, percentile, targets_table
from scripts.benchmarks.http2 import Http2Connection
from scripts.benchmarks.overload_load import Load, connected
from streammeta.v1 import common_pb2, nodes_pb2

VOTERS = 3
SHARE_MIN = 0.8
HEARTBEAT_MS_MAX = 100.0
_WARM_S = 1.0
_BEAT_EVERY_S = 0.05
_MIB = 1 << 20
_NODE = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
_REGISTER = "/streammeta.v1.NodeService/RegisterNode"
_HEARTBEAT = "/streammeta.v1.NodeService/Heartbeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Rate of calls as a multiple of the capacity; turns of each load; seconds of one turn."""

    times: int = 4
    turns: int = 5
    seconds: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Figures of one load for one turn; rates are calls a second."""

    load: str
    offered_per_s: float
    served_per_s: float
    refused_per_s: float
    p50_ms: float
    p99_ms: float
    heartbeat_p99_ms: float
    heartbeat_max_ms: float
    ended_after_s: float
    """Time from the last call made until all have ended."""
    leader_mib: float


@dataclass
class Heartbeats:
    """Sends a heartbeat, waits for the answer and the rest of its interval, and goes on."""

    connection: Http2Connection
    latencies_ms: list[float] = field(default_factory=list)

    async def beat_on(self) -> None:
        """Go on until cancelled."""
        request = nodes_pb2.HeartbeatRequest(node=_NODE).SerializeToString()
        while True:
            began = time.monotonic()
            await self.connection.call(_HEARTBEAT, request)
            took_s = time.monotonic() - began
            self.latencies_ms.append(took_s * 1000)
            await asyncio.sleep(max(0.0, _BEAT_EVERY_S - took_s))


@contextlib.asynccontextmanager
async def beating(endpoint: str) -> AsyncIterator[Heartbeats]:
    """Register a broker and send its heartbeats; a failure of one is raised at the end."""
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


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure both loads in turns.

    Raises:
        ChildFailedError: a controller ended early.
        Http2Error: a heartbeat was not answered.
        UnhealthyError: the cluster was not in order before or after.
    """
    with running_cluster(root, VOTERS) as cluster:
        async with watching(cluster.endpoints) as watch:
            before = await watch.wait_healthy()
            endpoint = cluster.endpoints[before.node_id - 1]
            process = psutil.Process(cluster.children[before.node_id].pid)
            async with connected(endpoint) as load, beating(endpoint) as heartbeats:
                await load.as_answered(_WARM_S)
                await load.drained()
                turns: list[Turn] = []
                for number in range(settings.turns):
                    progress(f"overload: turn {number + 1} of {settings.turns}")
                    turns += await _both(load, heartbeats, process, settings)
            after = await watch.wait_healthy()
    return _outcome(settings, turns, after.epoch - before.epoch)


async def _both(
    load: Load, heartbeats: Heartbeats, process: psutil.Process, settings: Settings
) -> list[Turn]:
    """Return a turn at the capacity, and one beyond it."""
    capacity = await _turn(load, heartbeats, process, settings.seconds, None)
    rate = settings.times * capacity.served_per_s
    return [capacity, await _turn(load, heartbeats, process, settings.seconds, rate)]


async def _turn(
    load: Load,
    heartbeats: Heartbeats,
    process: psutil.Process,
    seconds: float,
    rate: float | None,
) -> Turn:
    """Load for a while, at a rate or as fast as is answered; calls answered later don't count."""
    sent, served, refused = load.sent, load.served, load.refused
    load.latencies_ms.clear()
    heartbeats.latencies_ms.clear()
    began = time.monotonic()
    if rate is None:
        await load.as_answered(seconds)
    else:
        await load.at_rate(rate, seconds)
    took_s = time.monotonic() - began
    counts = (load.sent - sent, load.served - served, load.refused - refused)
    offered, answered, turned_away = (round(count / took_s, 1) for count in counts)
    latencies, beats = list(load.latencies_ms), list(heartbeats.latencies_ms)
    ends = time.monotonic()
    await load.drained()
    return Turn(
        load="as answered" if rate is None else "beyond",
        offered_per_s=offered,
        served_per_s=answered,
        refused_per_s=turned_away,
        p50_ms=round(percentile(latencies, 0.5), 1),
        p99_ms=round(percentile(latencies, 0.99), 1),
        heartbeat_p99_ms=round(percentile(beats, 0.99), 1),
        heartbeat_max_ms=round(max(beats), 1),
        ended_after_s=round(time.monotonic() - ends, 2),
        leader_mib=round(process.memory_info().rss / _MIB, 1),
    )


COLUMNS = {
    "load": "calls come",
    "offered_per_s": "calls/s",
    "served_per_s": "served/s",
    "refused_per_s": "refused/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "heartbeat_p99_ms": "heartbeats p99 ms",
    "heartbeat_max_ms": "heartbeats max ms",
    "ended_after_s": "ended after s",
    "leader_mib": "leader MiB",
}


def _outcome(settings: Settings, turns: list[Turn], elections: int) -> Outcome:
    capacity, beyond = turns[::2], turns[1::2]
    shares = [
        over.served_per_s / at.served_per_s for at, over in zip(capacity, beyond, strict=True)
    ]
    figures = {
        "capacity_per_s": median([turn.served_per_s for turn in capacity]),
        "goodput_beyond_per_s": median([turn.served_per_s for turn in beyond]),
        "goodput_share": round(median(shares), 3),
        "heartbeat_p99_beyond_ms": median([turn.heartbeat_p99_ms for turn in beyond]),
        "elections": elections,
    }
    facts = [asdict(turn) for turn in turns]
    table = Table(
        title=f"Calls at a leader's capacity, and {settings.times} times as many",
        columns=tuple(COLUMNS.values()),
        rows=tuple(tuple(fact[name] for name in COLUMNS) for fact in facts),
    )
    targets = (
        Target("goodput_share", "at least", SHARE_MIN, figures["goodput_share"]),
        Target(
            *("heartbeat_p99_beyond_ms", "at most"),
            *(HEARTBEAT_MS_MAX, figures["heartbeat_p99_beyond_ms"]),
        ),
        Target("elections", "at most", 0, elections),
    )
    return Outcome(
        benchmark="overload",
        settings=asdict(settings),
        figures=figures,
        details={"turns": facts, "shares": [round(share, 3) for share in shares]},
        tables=(table, *targets_table(targets)),
    )
