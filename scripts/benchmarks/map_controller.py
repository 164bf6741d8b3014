"""A controller with a large map: how long it takes to come back, and what reads over gRPC take.

One voter, so that a restart is measured and no election among others.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.benchmarks.bench_cluster import UnhealthyError, running_cluster, watching
from scripts.benchmarks.commits import PATIENT
from scripts.benchmarks.committer import STEP, Load
from scripts.benchmarks.figures import percentile
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.streammeta_client import (
    BATCH_MAX,
    UnaryCommitter,
    add_stream_objects,
    get_objects,
    open_streams,
    register_node,
)
from streammeta.cli.local_cluster import LocalCluster

STREAMS_A_SET_OBJECT = 1_000
READS = 1_000
READ_LIMITS = (10, 1_000)
ANSWER_WITHIN_S = 120.0
_POLL_S = 0.01
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A controller killed by `kill -9` and started again on its directory."""

    entities: int
    """Streams, and stream objects."""
    restart_s: float
    """From the start of the process to its first answer to a linearizable read."""
    resident_mb: float
    """Of the process after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """GetObjects of one stream, one call at a time."""

    set_objects: int
    """Of the node, each with a range of every stream."""
    limit: int
    p50_ms: float
    p99_ms: float
    controller_cpu_us: float
    """CPU of the controller for each call."""


async def measure_restart(root: Path, entities: int) -> Restart:
    """Fill a controller's map, kill it, and start it again."""
    with running_cluster(root, 1, PATIENT) as cluster:
        await _healthy(cluster)
        stream_id = await fill(cluster.endpoints[0], entities)
        await asyncio.to_thread(cluster.children[1].kill)
        began = time.monotonic()
        await asyncio.to_thread(cluster.start, 1)
        await _first_answer(cluster.endpoints[0], stream_id)
        restart_s = time.monotonic() - began
        resident = psutil.Process(cluster.children[1].pid).memory_info().rss
    return Restart(
        entities=entities, restart_s=round(restart_s, 3), resident_mb=round(resident / 1e6, 1)
    )


async def measure_reads(
    root: Path, set_objects: Sequence[int], progress: Callable[[str], None]
) -> list[Reads]:
    """Measure GetObjects after each of these numbers of set objects, which ascend."""
    reads: list[Reads] = []
    with running_cluster(root, 1, PATIENT) as cluster:
        await _healthy(cluster)
        load = Load(endpoint=cluster.endpoints[0], ranges=STREAMS_A_SET_OBJECT, in_flight=1)
        committer = UnaryCommitter(load)
        await committer.open()
        try:
            committed = 0
            for count in set_objects:
                progress(f"map: reads over gRPC of {count} set objects")
                while committed < count:
                    await committer.commit(0)
                    committed += 1
                ids = committer.stream_ids(0)
                reads += [await _read(cluster, ids, count, limit) for limit in READ_LIMITS]
        finally:
            await committer.close()
    return reads


async def _read(
    cluster: LocalCluster, stream_ids: Sequence[int], set_objects: int, limit: int
) -> Reads:
    dice = random.Random(SEED)
    connection = await Http2Connection.connect(cluster.endpoints[0])
    controller = psutil.Process(cluster.children[1].pid)
    times_ms: list[float] = []
    before = sum(controller.cpu_times()[:2])
    try:
        for _ in range(READS):
            start = dice.randrange(set_objects) * STEP if limit == READ_LIMITS[0] else 0
            began = time.perf_counter()
            await get_objects(connection, dice.choice(stream_ids), start, limit)
            times_ms.append((time.perf_counter() - began) * 1000)
    finally:
        connection.close()
    cpu_s = sum(controller.cpu_times()[:2]) - before
    return Reads(
        set_objects=set_objects,
        limit=limit,
        p50_ms=round(percentile(times_ms, 0.5), 3),
        p99_ms=round(percentile(times_ms, 0.99), 3),
        controller_cpu_us=round(cpu_s * 1e6 / READS, 1),
    )


async def fill(leader: str, entities: int) -> int:
    """Add streams, each with a stream object, at the leader's endpoint; return the id of one."""
    connection = await Http2Connection.connect(leader)
    try:
        await register_node(connection)
        added = 0
        while added < entities:
            stream_ids = await open_streams(connection, min(BATCH_MAX, entities - added))
            await add_stream_objects(connection, stream_ids)
            added += len(stream_ids)
    finally:
        connection.close()
    return stream_ids[-1]


async def _first_answer(endpoint: str, stream_id: int) -> None:
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < deadline:
        try:
            connection = await Http2Connection.connect(endpoint)
            try:
                async with asyncio.timeout(5.0):
                    if await get_objects(connection, stream_id, 0, 10):
                        return
            finally:
                connection.close()
        except (OSError, Http2Error):
            await asyncio.sleep(_POLL_S)
    raise UnhealthyError(
        f"the controller at {endpoint} gave no answer within {ANSWER_WITHIN_S:.0f} s of its restart"
    )


async def _healthy(cluster: LocalCluster) -> None:
    async with watching(cluster.endpoints) as watch:
        await watch.wait_healthy()
