"""A cluster's brokers: each sends heartbeats and watches the metadata, while commits arrive.

Three controllers with the product's timeouts. Client processes run the brokers over the small
HTTP/2 client: each broker has a connection to the leader for its heartbeats, and one for its watch.
One more process commits on one stream of messages, at a fixed rate. Watches go to the same
controllers as the product's client opens them, which is evenly to all followers, unless the
settings say otherwise. Every watch follows all streams, the most expensive case, and accepts
several changes a message.

The delay of news is the time from a commit's answer until a watch has it, over all commits and all
watches, by the machine's one monotonic clock. CPU times are the operating system's.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from scripts.benchmarks.broker_load import load_at_rate, run_brokers
from scripts.benchmarks.cluster import Leader, find_leader, running_cluster
from scripts.benchmarks.figures import Outcome, Progress, Table, Target
from scripts.benchmarks.http2 import Http2Connection
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import cpu_s, read_result, wait_ready, working
from streammeta.cli.local.local_cluster import Child, LocalCluster
from streammeta.controller.records.codec import decode_records
from streammeta.controller.records.record import StreamSetObjectsCommitted
from streammeta.v1 import metadata_pb2

REPLAY_WITHIN_S = 30.0
LAST_NEWS_S = 1.0
"""Time for the last changes to arrive after the last commit."""

LEADER_CORES_MAX = 0.5
NEWS_P99_MS_MAX = 250.0

WatchAt: TypeAlias = Literal["followers", "leader", "all"]

Times: TypeAlias = npt.NDArray[np.float64]
Offsets: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The brokers, and the commits during the measurement."""

    brokers: int = option(300, "brokers, each with heartbeats and a watch")
    commits_per_s: int = option(2_000, "pipelined commits of one range")
    heartbeat_s: float = seconds(3.0, "between two heartbeats of a broker")
    watch_at: WatchAt = option("followers", "controllers for the watches")
    processes: int = option(3, "client processes for the brokers")
    seconds: float = seconds(10.0, "of commits")


@dataclass(frozen=True, slots=True)
class Run:
    """Reports of the processes for the time that counts."""

    leader_id: int
    cores: Mapping[int, float]
    commits: Mapping[str, Any]
    brokers: Sequence[Mapping[str, Any]]


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure once."""
    with running_cluster(root) as cluster:
        leader = await find_leader(cluster)
        progress(f"brokers: {settings.brokers} join")
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    working(root / f"brokers-{number}.log", run_brokers, **arguments)
                )
                for number, arguments in enumerate(_loads(cluster, leader, settings, root))
            ]
            for client in clients:
                await wait_ready(client)
            progress(f"brokers: {settings.commits_per_s} commits/s for {settings.seconds:g} s")
            run = await _run(cluster, leader, settings, root, clients)
        offsets = await _offsets_by_object(leader.endpoint)
    return _outcome(settings, run, _delays_ms(root, len(clients), offsets))


def _loads(
    cluster: LocalCluster, leader: Leader, settings: Settings, root: Path
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each process of brokers."""
    others = [endpoint for endpoint in cluster.endpoints if endpoint != leader.endpoint]
    watched = {"followers": others, "leader": [leader.endpoint], "all": cluster.endpoints}
    for number in range(settings.processes):
        first = settings.brokers * number // settings.processes
        end = settings.brokers * (number + 1) // settings.processes
        yield {
            "leader": leader.endpoint,
            "watch_at": watched[settings.watch_at],
            "first": first,
            "count": end - first,
            "heartbeat_s": settings.heartbeat_s,
            "output": root / f"seen-{number}.npz",
        }


async def _run(
    cluster: LocalCluster, leader: Leader, settings: Settings, root: Path, clients: Sequence[Child]
) -> Run:
    def spent_s() -> dict[int, float]:
        return {node_id: cpu_s([child.pid]) for node_id, child in cluster.children.items()}

    load = {"rate": settings.commits_per_s, "seconds": settings.seconds}
    output = root / "acknowledged.npz"
    async with working(
        root / "commits.log", load_at_rate, leader=leader.endpoint, output=output, **load
    ) as committer:
        await wait_ready(committer)
        before = spent_s()
        await wait_ready(committer)
        after = spent_s()
        commits = await read_result(committer)

    # Brokers watch on until the last commit's news had time to arrive.
    await asyncio.sleep(LAST_NEWS_S)
    for client in clients:
        client.process.terminate()
    brokers = [await read_result(client) for client in clients]
    cores = {
        node_id: (spent - before[node_id]) / settings.seconds for node_id, spent in after.items()
    }
    return Run(leader.node_id, cores, commits, brokers)


async def _offsets_by_object(endpoint: str) -> dict[int, int]:
    """Return the offset of each object's commit in the log, from a watch of all changes."""
    found: dict[int, int] = {}
    is_done = asyncio.Event()

    def note(message: bytes) -> None:
        response = metadata_pb2.WatchResponse.FromString(message)
        for record in decode_records(response.records):
            if isinstance(record, StreamSetObjectsCommitted):
                found.update(dict.fromkeys(record.object_id.tolist(), response.offset))
        if response.offset + 1 >= response.high_watermark:
            is_done.set()

    connection = await Http2Connection.connect(endpoint)
    try:
        request = metadata_pb2.WatchRequest(kinds=[metadata_pb2.ENTITY_KIND_STREAM])
        connection.begin_watch(request, note, is_done.set)
        await asyncio.wait_for(is_done.wait(), REPLAY_WITHIN_S)
    finally:
        connection.close()
    return found


def _delays_ms(root: Path, processes: int, offsets: Mapping[int, int]) -> Times:
    """Return the delay of each commit at each watch in ms, infinite if it never arrived."""
    acknowledged = np.load(root / "acknowledged.npz")
    object_ids = acknowledged["object_id"].tolist()
    committed = np.array([offsets[object_id] for object_id in object_ids]), acknowledged["at"]
    delays = []
    for process in range(processes):
        seen = np.load(root / f"seen-{process}.npz")
        for watch in np.unique(seen["watch"]):
            chosen = seen["watch"] == watch
            delays.append(delays_of_watch(committed, (seen["offset"][chosen], seen["at"][chosen])))
    return np.concatenate(delays) * 1000


def delays_of_watch(committed: tuple[Offsets, Times], seen: tuple[Offsets, Times]) -> Times:
    """Return the seconds from each commit's answer until it was seen, never less than 0.

    Both arguments are offsets of the log with times. Those of `seen` ascend, and everything up to
    each offset has arrived by its time.
    """
    offsets, answered_at = committed
    seen_offsets, seen_at = seen
    first = np.searchsorted(seen_offsets, offsets)
    came_at = np.append(seen_at, np.inf)[first]
    return np.maximum(came_at - answered_at, 0.0)


def _outcome(settings: Settings, run: Run, delays_ms: Times) -> Outcome:
    followers = {
        node_id: round(cores, 3) for node_id, cores in run.cores.items() if node_id != run.leader_id
    }
    sent, missed, messages = (
        sum(report[name] for report in run.brokers) for name in ("sent", "missed", "messages")
    )
    p50, p99 = (float(np.percentile(delays_ms, share, method="lower")) for share in (50, 99))
    never_seen = int(np.isinf(delays_ms).sum())
    figures = {
        "commits_per_s": run.commits["commits_per_s"],
        "leader_cores": round(run.cores[run.leader_id], 3),
        "follower_cores": max(followers.values()),
        "news_p50_ms": round(p50, 2),
        "news_p99_ms": round(p99, 2),
        "news_max_ms": round(float(delays_ms.max()), 2),
        "heartbeat_p99_ms": max(report["heartbeat_p99_ms"] for report in run.brokers),
    }
    news = ", ".join(str(figures[f"news_{name}_ms"]) for name in ("p50", "p99", "max"))
    rows = {
        "leader, cores": figures["leader_cores"],
        **{f"follower {node_id}, cores": cores for node_id, cores in followers.items()},
        "commits/s": figures["commits_per_s"],
        "commit p50, p99 ms": f"{run.commits['p50_ms']}, {run.commits['p99_ms']}",
        "news p50, p99, max ms": news,
        "messages to watches": messages,
        "news never seen": never_seen,
        "heartbeats sent, missed": f"{sent}, {missed}",
        "heartbeat p99 ms": figures["heartbeat_p99_ms"],
    }
    title = f"{settings.brokers} brokers, watches at: {settings.watch_at}"

    return Outcome(
        benchmark="brokers",
        figures=figures,
        details={
            "cores": {str(node_id): round(cores, 3) for node_id, cores in run.cores.items()},
            "leader_id": run.leader_id,
            "heartbeats_sent": sent,
            "heartbeats_missed": missed,
            "messages": messages,
            "news": len(delays_ms),
            "news_never_seen": never_seen,
            "commit_p50_ms": run.commits["p50_ms"],
            "commit_p99_ms": run.commits["p99_ms"],
        },
        tables=[Table(title=title, columns=("figure", "value"), rows=tuple(rows.items()))],
        targets=[
            Target("leader, cores", "at most", LEADER_CORES_MAX, figures["leader_cores"]),
            Target("news p99 ms", "at most", NEWS_P99_MS_MAX, figures["news_p99_ms"]),
            Target("heartbeats missed", "at most", 0, missed),
            Target("news never seen", "at most", 0, never_seen),
        ],
    )
