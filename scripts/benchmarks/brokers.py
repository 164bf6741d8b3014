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
import random
import signal
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from scripts.benchmarks.cluster import Leader, find_leader, running_cluster
from scripts.benchmarks.committer import Load, LoadError
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, latencies, percentile
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.processes import cpu_s, read_result, wait_ready, working
from scripts.benchmarks.streammeta_client import PipelinedCommitter, call
from streammeta.cli.local.local_cluster import Child, LocalCluster
from streammeta.controller.records.codec import decode_records
from streammeta.controller.records.record import StreamSetObjectsCommitted
from streammeta.v1 import common_pb2, metadata_pb2, nodes_pb2

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

    with contextlib.closing(await Http2Connection.connect(endpoint)) as connection:
        request = metadata_pb2.WatchRequest(kinds=[metadata_pb2.ENTITY_KIND_STREAM])
        connection.begin_watch(request, note, is_done.set)
        await asyncio.wait_for(is_done.wait(), REPLAY_WITHIN_S)
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


FIRST_NODE_ID = 2_000
JOINING_AT_ONCE = 16
SLOTS = 64
WARM_UP_S = 1.0
SPARE_S = 2.0
"""Seconds of commits for which ids are prepared beyond the measured ones."""


@dataclass(slots=True)
class Seen:
    """Messages of this process's watches: which watch, up to which offset, and when."""

    watch: "array[int]" = field(default_factory=lambda: array("q"))
    offset: "array[int]" = field(default_factory=lambda: array("q"))
    at: "array[float]" = field(default_factory=lambda: array("d"))

    def save(self, path: str) -> None:
        """Write columns for `numpy.load`."""
        watch, offset, at = (np.array(column) for column in (self.watch, self.offset, self.at))
        np.savez(path, watch=watch, offset=offset, at=at)


class Broker:
    """One broker: a connection to the leader, and one to the controller of its watch."""

    def __init__(self, number: int, heartbeat_s: float, seen: Seen) -> None:
        self._number = number
        self._node = common_pb2.NodeIdentity(node_id=FIRST_NODE_ID + number, node_epoch=1)
        self._interval_s = heartbeat_s
        self._seen = seen
        self._has_begun = asyncio.Event()
        self.latencies_s: list[float] = []
        self.missed = 0

    async def join(self, leader: str, watched: str) -> None:
        """Register, send a heartbeat, and watch all streams from now on."""
        self._control = await Http2Connection.connect(leader)
        answer = await call(
            self._control,
            "NodeService/RegisterNode",
            nodes_pb2.RegisterNodeRequest(node=self._node),
            nodes_pb2.RegisterNodeResponse,
        )
        if answer.error != common_pb2.ERROR_CODE_NONE:
            raise LoadError(f"RegisterNode was answered with error {answer.error}")
        await self._send_heartbeat()

        self._watching = await Http2Connection.connect(watched)
        kinds = [metadata_pb2.ENTITY_KIND_STREAM]
        request = metadata_pb2.WatchRequest(kinds=kinds, may_combine=True)
        self._watching.begin_watch(request, self._on_message, self._has_begun.set)
        await self._has_begun.wait()

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled, the first at a random time of the interval."""
        due = time.monotonic() + random.random() * self._interval_s
        while True:
            await asyncio.sleep(due - time.monotonic())
            await self._send_heartbeat()
            # A late heartbeat is not followed by a burst of missed ones.
            due = max(due + self._interval_s, time.monotonic())

    def close(self) -> None:
        """Drop the connections."""
        self._control.close()
        self._watching.close()

    async def _send_heartbeat(self) -> None:
        began = time.monotonic()
        request = nodes_pb2.HeartbeatRequest(node=self._node)
        try:
            async with asyncio.timeout(self._interval_s):
                answer = await call(
                    self._control, "NodeService/Heartbeat", request, nodes_pb2.HeartbeatResponse
                )
        except (TimeoutError, Http2Error):
            self.missed += 1
            return
        self.missed += answer.error != common_pb2.ERROR_CODE_NONE
        self.latencies_s.append(time.monotonic() - began)

    def _on_message(self, message: bytes) -> None:
        self._seen.watch.append(self._number)
        self._seen.offset.append(metadata_pb2.WatchResponse.FromString(message).offset)
        self._seen.at.append(time.monotonic())
        self._has_begun.set()


async def run_brokers(
    *, leader: str, watch_at: Sequence[str], first: int, count: int, heartbeat_s: float, output: str
) -> dict[str, object]:
    """Join, run until SIGTERM, and return counts. Prints `ready watching` once all have joined."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    seen = Seen()
    numbers = range(first, first + count)
    brokers = [Broker(number, heartbeat_s, seen) for number in numbers]
    joining = asyncio.Semaphore(JOINING_AT_ONCE)

    async def join(number: int, broker: Broker) -> None:
        async with joining:
            await broker.join(leader, watch_at[number % len(watch_at)])

    await asyncio.gather(*map(join, numbers, brokers))
    beating = [asyncio.create_task(broker.send_heartbeats()) for broker in brokers]
    print("ready watching", flush=True)
    await stopped.wait()
    for task in beating:
        task.cancel()
    await asyncio.gather(*beating, return_exceptions=True)
    for broker in brokers:
        broker.close()

    await asyncio.to_thread(seen.save, output)
    latencies_s = [seconds for broker in brokers for seconds in broker.latencies_s]
    missed = sum(broker.missed for broker in brokers)
    return {
        "sent": len(latencies_s) + missed,
        "missed": missed,
        "heartbeat_p99_ms": round(percentile(latencies_s, 0.99) * 1000, 2),
        "messages": len(seen.at),
    }


async def load_at_rate(*, leader: str, rate: int, seconds: float, output: str) -> dict[str, float]:
    """Commit at `rate` a second and return figures.

    Prints `ready measuring` and `ready measured` around the time that counts. Writes the object ids
    of its commits and the times of their answers to `output`.
    """
    objects = int(rate * (WARM_UP_S + seconds + SPARE_S))
    load = Load(endpoint=leader, ranges=1, in_flight=SLOTS, objects=objects)
    committer = PipelinedCommitter(load)
    await committer.open()
    object_ids: list[int] = []
    answered_at: list[float] = []
    latencies_s: list[float] = []
    begins = time.monotonic() + WARM_UP_S
    ends = begins + seconds

    async def commit_on(slot: int) -> None:
        interval_s = SLOTS / rate
        # Slots start evenly spread, so that commits arrive at a steady rate.
        due = time.monotonic() + slot / SLOTS * interval_s
        while due < ends:
            await asyncio.sleep(due - time.monotonic())
            asked = time.monotonic()
            object_id = await committer.commit(slot)
            answered = time.monotonic()
            if begins <= answered < ends:
                object_ids.append(object_id)
                answered_at.append(answered)
                latencies_s.append(answered - asked)
            due += interval_s

    async with asyncio.TaskGroup() as group:
        for slot in range(SLOTS):
            group.create_task(commit_on(slot))
        await asyncio.sleep(begins - time.monotonic())
        print("ready measuring", flush=True)
        await asyncio.sleep(ends - time.monotonic())
        print("ready measured", flush=True)
    await committer.close()
    if not answered_at:
        raise LoadError(f"no commit was acknowledged within {seconds:g} s")
    np.savez(output, object_id=np.array(object_ids), at=np.array(answered_at))
    figures = latencies(latencies_s, 2)
    return {
        "commits_per_s": round(len(answered_at) / seconds, 1),
        "p50_ms": figures["p50_ms"],
        "p99_ms": figures["p99_ms"],
    }
