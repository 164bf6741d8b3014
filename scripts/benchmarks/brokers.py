"""A cluster's brokers: each sends heartbeats and watches the map, while commits arrive.

Three controllers with the product's timeouts. Client processes are the brokers, over the small
HTTP/2 client: each broker has a connection to the leader for its heartbeats, and one to the
controller that it watches at; one more process commits on one stream of messages, at a fixed rate.
Watches go where the product's client opens them: evenly to all but the leader, unless told
otherwise. Every watch follows all streams, the dearest case, and takes several changes a message.

The delay of news is the time from a commit's answer until a watch has it, over all commits and all
watches, by the machine's one monotonic clock. CPU is read from the operating system.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import psutil

from scripts.benchmarks.bench_cluster import running_cluster
from scripts.benchmarks.commits import client_result, find_leader
from scripts.benchmarks.figures import Outcome, Table, Target, targets_table
from scripts.benchmarks.http2 import Http2Connection
from streammeta.cli.local_cluster import Child, LocalCluster, start_child
from streammeta.controller.records.codec import decode_records
from streammeta.controller.records.record import StreamSetObjectsCommitted
from streammeta.v1 import metadata_pb2

VOTERS = 3
REPLAY_WITHIN_S = 30.0
LAST_NEWS_S = 1.0
"""Time for the last changes to come, after the last commit."""

LEADER_CORES_MAX = 0.5
NEWS_P99_MS_MAX = 250.0

WatchAt: TypeAlias = Literal["followers", "leader", "all"]
WATCH_AT: tuple[WatchAt, ...] = get_args(WatchAt)

Times: TypeAlias = npt.NDArray[np.float64]
Offsets: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The brokers, and the commits that arrive meanwhile."""

    brokers: int = 300
    commits_per_s: int = 2_000
    heartbeat_s: float = 3.0
    """Between two heartbeats of a broker."""
    watch_at: WatchAt = "followers"
    processes: int = 3
    """Client processes that the brokers are spread over."""
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """What the processes report of the time that counts."""

    leader_id: int
    seconds: float
    cores: Mapping[int, float]
    commits: Mapping[str, Any]
    brokers: Sequence[Mapping[str, Any]]


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure once.

    Raises:
        ChildFailedError: a controller or a client ended early.
        UnhealthyError: the cluster was not in order.
    """
    with running_cluster(root, VOTERS) as cluster:
        leader = await find_leader(cluster)
        progress(f"brokers: {settings.brokers} join")
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(_running(name, words, root))
                for name, words in _commands(cluster, leader.node_id, settings, root)
            ]
            for client in clients:
                await asyncio.to_thread(client.wait_ready)
            progress(f"brokers: {settings.commits_per_s} commits/s for {settings.seconds:g} s")
            run = await _run(cluster, leader.node_id, settings, root, clients)
        offsets = await _offsets_by_object(cluster.endpoints[leader.node_id - 1])
    return _outcome(settings, run, _delays_ms(root, len(clients), offsets))


async def _run(
    cluster: LocalCluster,
    leader_id: int,
    settings: Settings,
    root: Path,
    clients: Sequence[Child],
) -> Run:
    words = [
        *("commits", "--leader", cluster.endpoints[leader_id - 1]),
        *("--rate", str(settings.commits_per_s), "--seconds", str(settings.seconds)),
        *("--output", str(root / "acknowledged.npz")),
    ]
    async with _running("commits", words, root) as committer:
        await asyncio.to_thread(committer.wait_ready)
        before = _cpu_s(cluster)
        await asyncio.to_thread(committer.wait_ready)
        after = _cpu_s(cluster)
        commits = await asyncio.to_thread(client_result, committer)
    await asyncio.sleep(LAST_NEWS_S)
    for client in clients:
        client.process.terminate()
    brokers = [await asyncio.to_thread(client_result, client) for client in clients]
    cores = {each: (after[each] - before[each]) / settings.seconds for each in after}
    return Run(leader_id, settings.seconds, cores, commits, brokers)


def _commands(
    cluster: LocalCluster, leader_id: int, settings: Settings, root: Path
) -> list[tuple[str, list[str]]]:
    leader = cluster.endpoints[leader_id - 1]
    others = [endpoint for endpoint in cluster.endpoints if endpoint != leader]
    watched = {"followers": others, "leader": [leader], "all": cluster.endpoints}
    bounds = [settings.brokers * part // settings.processes for part in range(settings.processes)]
    commands = []
    for at, (first, end) in enumerate(zip(bounds, [*bounds[1:], settings.brokers], strict=True)):
        words = [
            *("brokers", "--leader", leader, "--watch-at", ",".join(watched[settings.watch_at])),
            *("--first", str(first), "--count", str(end - first)),
            *("--heartbeat-s", str(settings.heartbeat_s)),
            *("--output", str(_seen_path(root, at))),
        ]
        commands.append((f"brokers-{at}", words))
    return commands


def _seen_path(root: Path, process: int) -> Path:
    return root / f"seen-{process}.npz"


@contextlib.asynccontextmanager
async def _running(name: str, words: Sequence[str], root: Path) -> AsyncIterator[Child]:
    command = [sys.executable, "-m", "scripts.benchmarks.broker_load", *words]
    child = start_child(name, command, root / f"{name}.log")
    try:
        yield child
    finally:
        await asyncio.to_thread(child.stop)


def _cpu_s(cluster: LocalCluster) -> dict[int, float]:
    times = {at: psutil.Process(child.pid).cpu_times() for at, child in cluster.children.items()}
    return {at: float(spent.user + spent.system) for at, spent in times.items()}


async def _offsets_by_object(endpoint: str) -> dict[int, int]:
    """Return in which log entry each object was committed, by a watch of all there were."""
    found: dict[int, int] = {}
    is_done = asyncio.Event()

    def take(message: bytes) -> None:
        response = metadata_pb2.WatchResponse.FromString(message)
        for record in decode_records(response.records):
            if isinstance(record, StreamSetObjectsCommitted):
                found.update(dict.fromkeys(record.object_id.tolist(), response.offset))
        if response.offset + 1 >= response.high_watermark:
            is_done.set()

    connection = await Http2Connection.connect(endpoint)
    try:
        path = "/streammeta.v1.MetadataService/Watch"
        stream_id = connection.open(path, take, is_done.set)
        request = metadata_pb2.WatchRequest(kinds=[metadata_pb2.ENTITY_KIND_STREAM])
        connection.send(stream_id, request.SerializeToString(), is_last=True)
        await asyncio.wait_for(is_done.wait(), REPLAY_WITHIN_S)
    finally:
        connection.close()
    return found


def _delays_ms(root: Path, processes: int, offsets: Mapping[int, int]) -> Times:
    """Return how late each watch had each commit, in ms; infinite if it never did."""
    acknowledged = np.load(root / "acknowledged.npz")
    committed = np.array([offsets[each] for each in acknowledged["object_id"].tolist()])
    delays = []
    for process in range(processes):
        seen = np.load(_seen_path(root, process))
        for watch in np.unique(seen["watch"]):
            chosen = seen["watch"] == watch
            delays.append(
                delays_of_watch(
                    (committed, acknowledged["at"]), (seen["offset"][chosen], seen["at"][chosen])
                )
            )
    return np.concatenate(delays) * 1000


def delays_of_watch(committed: tuple[Offsets, Times], seen: tuple[Offsets, Times]) -> Times:
    """Return how much later than its answer each commit was seen, in seconds; never less than 0.

    Both are offsets of the log with times; those of `seen` ascend, and each says that everything
    up to its offset has come.
    """
    offsets, answered_at = committed
    seen_offsets, seen_at = seen
    first = np.searchsorted(seen_offsets, offsets)
    came_at = np.append(seen_at, np.inf)[first]
    return np.maximum(came_at - answered_at, 0.0)


def _outcome(settings: Settings, run: Run, delays_ms: Times) -> Outcome:
    followers = [cores for each, cores in run.cores.items() if each != run.leader_id]
    sent, missed, messages = (
        sum(each[name] for each in run.brokers) for name in ("sent", "missed", "messages")
    )
    p50, p99 = (float(np.percentile(delays_ms, share, method="lower")) for share in (50, 99))
    figures = {
        "commits_per_s": run.commits["commits_per_s"],
        "leader_cores": round(run.cores[run.leader_id], 3),
        "follower_cores": round(max(followers), 3),
        "news_p50_ms": round(p50, 2),
        "news_p99_ms": round(p99, 2),
        "news_max_ms": round(float(delays_ms.max()), 2),
        "heartbeat_p99_ms": max(each["heartbeat_p99_ms"] for each in run.brokers),
    }
    details = {
        "cores": {str(each): round(cores, 3) for each, cores in run.cores.items()},
        "leader_id": run.leader_id,
        "heartbeats_sent": sent,
        "heartbeats_missed": missed,
        "messages": messages,
        "news": len(delays_ms),
        "news_never_seen": int(np.isinf(delays_ms).sum()),
        "commit_p50_ms": run.commits["p50_ms"],
        "commit_p99_ms": run.commits["p99_ms"],
    }
    rows = (
        ("leader, cores", figures["leader_cores"]),
        *(
            (f"follower {each}, cores", round(cores, 3))
            for each, cores in run.cores.items()
            if each != run.leader_id
        ),
        ("commits/s", figures["commits_per_s"]),
        ("commit p50, p99 ms", f"{details['commit_p50_ms']}, {details['commit_p99_ms']}"),
        (
            "news p50, p99, max ms",
            f"{figures['news_p50_ms']}, {figures['news_p99_ms']}, {figures['news_max_ms']}",
        ),
        ("messages to watches", messages),
        ("news never seen", details["news_never_seen"]),
        ("heartbeats sent, missed", f"{sent}, {missed}"),
        ("heartbeat p99 ms", figures["heartbeat_p99_ms"]),
    )
    targets = [
        Target("leader, cores", "at most", LEADER_CORES_MAX, figures["leader_cores"]),
        Target("news p99 ms", "at most", NEWS_P99_MS_MAX, figures["news_p99_ms"]),
        Target("heartbeats missed", "at most", 0, missed),
        Target("news never seen", "at most", 0, details["news_never_seen"]),
    ]
    title = f"{settings.brokers} brokers, watches at: {settings.watch_at}"
    return Outcome(
        benchmark="brokers",
        settings=asdict(settings),
        figures=figures,
        details=details,
        tables=(Table(title=title, columns=("what", "value"), rows=rows), *targets_table(targets)),
    )
