"""Restart of a controller with large metadata, and reads over gRPC.

One voter, so that a restart is measured without an election among others.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.cluster import PATIENT, UnhealthyError, find_leader, running_cluster
from scripts.benchmarks.committer import STEP, Load
from scripts.benchmarks.figures import Progress, latencies
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.metadata_probe import READ_LIMITS, STREAMS_OF_AN_SSO
from scripts.benchmarks.processes import cpu_s, rss_bytes
from scripts.benchmarks.streammeta_client import (
    BATCH_MAX,
    UnaryCommitter,
    add_stream_objects,
    get_objects,
    open_streams,
    register_node,
)

READS = 1_000
ANSWER_WITHIN_S = 120.0
_POLL_S = 0.01


async def measure_restart(root: Path, entities: int) -> dict[str, float]:
    """Fill a controller's metadata, kill the controller, and start it again.

    Return the time from the start of the process to its first answer to a linearizable read, and
    the memory of the process after that. `entities` are streams, and as many stream objects.
    """
    with running_cluster(root, 1, PATIENT) as cluster:
        leader = await find_leader(cluster)
        stream_id = await fill(leader.endpoint, entities)
        await asyncio.to_thread(cluster.children[1].kill)
        began = time.monotonic()
        await asyncio.to_thread(cluster.start, 1)
        await _first_answer(leader.endpoint, stream_id)
        restart_s = time.monotonic() - began
        resident_mb = rss_bytes(cluster.children[1].pid) / 1e6
    return {"restart_s": round(restart_s, 3), "resident_mb": round(resident_mb, 1)}


async def measure_reads(
    root: Path, set_objects: Sequence[int], progress: Progress
) -> list[dict[str, float]]:
    """Measure GetObjects after each of these numbers of SSOs, which ascend."""
    reads: list[dict[str, float]] = []
    with running_cluster(root, 1, PATIENT) as cluster:
        endpoint = (await find_leader(cluster)).endpoint
        pid = cluster.children[1].pid
        committer = UnaryCommitter(Load(endpoint=endpoint, ranges=STREAMS_OF_AN_SSO, in_flight=1))
        await committer.open()

        try:
            committed = 0
            for count in set_objects:
                progress(f"map: reads over gRPC of {count} SSOs")
                for _ in range(count - committed):
                    await committer.commit(0)
                committed = count
                ids = committer.stream_ids(0)
                reads += [await _read(endpoint, pid, ids, count, limit) for limit in READ_LIMITS]
        finally:
            await committer.close()
    return reads


async def _read(
    endpoint: str, pid: int, stream_ids: Sequence[int], set_objects: int, limit: int
) -> dict[str, float]:
    """Measure GetObjects of one stream, one call at a time."""
    dice = random.Random(1)
    connection = await Http2Connection.connect(endpoint)
    times_s: list[float] = []
    before_s = cpu_s([pid])
    try:
        for _ in range(READS):
            start = dice.randrange(set_objects) * STEP if limit == READ_LIMITS[0] else 0
            began = time.perf_counter()
            await get_objects(connection, dice.choice(stream_ids), start, limit)
            times_s.append(time.perf_counter() - began)
    finally:
        connection.close()
    found = latencies(times_s)

    return {
        "set_objects": set_objects,
        "limit": limit,
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "controller_cpu_us": round((cpu_s([pid]) - before_s) * 1e6 / READS, 1),
    }


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
        f"the controller at {endpoint} did not answer within {ANSWER_WITHIN_S:.0f} s of its restart"
    )
