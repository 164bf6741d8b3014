"""Cost of metadata as it grows: memory, commits, freezing, checkpoints, restart and reads.

Each size is measured in a separate process (`metadata_probe`), restarts and reads over gRPC on a
real controller. It is one voter, so that a restart is measured without an election among others.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from scripts.benchmarks.cluster import PATIENT, UnhealthyError, find_leader, running_cluster
from scripts.benchmarks.committer import STEP, Load
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, latencies
from scripts.benchmarks.http2 import Http2Connection, Http2Error
from scripts.benchmarks.metadata_probe import (
    COMMITS,
    FOUND_AT_ONCE,
    READ_LIMITS,
    STREAMS_OF_AN_SSO,
    measure_metadata,
    measure_reads,
    measure_tags,
)
from scripts.benchmarks.options import option
from scripts.benchmarks.plots import plot, require_library
from scripts.benchmarks.processes import cpu_s, rss_bytes, run_worker
from scripts.benchmarks.streammeta_client import UnaryCommitter, fill, get_objects

LARGE = 10_000_000
CALLS = 1_000
ANSWER_WITHIN_S = 120.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes to measure, and a folder for plots."""

    sizes: tuple[int, ...] = option((10_000, 100_000, 1_000_000), "streams, and as many objects")
    large: bool = option(False, f"measure {LARGE:,} of each too, with about 3 GB")
    set_objects: tuple[int, ...] = option((10, 500, 5_000), "SSOs of one node to be read")
    tagged: int = option(1_000_000, "streams with two tags to be found")
    plot: Path | None = option(None, "write PNG plots there, which needs matplotlib")


Figures: TypeAlias = Mapping[str, float]


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure all sizes."""
    if settings.plot is not None:
        require_library()
    log = root / "probe.log"
    sizes: list[Figures] = []
    for count in sorted({*settings.sizes, *([LARGE] if settings.large else [])}):
        progress(f"map: {count} streams and objects")
        size = await run_worker(log, measure_metadata, entities=count, directory=root)
        progress(f"map: restart with {count} streams and objects")
        sizes.append(size | await measure_restart(root / f"{count}", count))
    reads: list[Figures] = []
    for count in settings.set_objects:
        progress(f"map: reads of {count} SSOs")
        reads.append(await run_worker(log, measure_reads, set_objects=count))
    progress(f"map: look-up of {settings.tagged} streams by tag")
    tags: Figures = await run_worker(log, measure_tags, entities=settings.tagged)
    calls = await measure_calls(root / "reads", settings.set_objects, progress)
    if settings.plot is not None:
        _draw(settings.plot, sizes, reads)

    figures: dict[str, float] = {}
    for size in sizes:
        prefix = f"{int(size['entities'])}"
        figures |= {f"map_{prefix}_{name}": value for name, value in size.items()}
        figures[f"restart_{prefix}_s"] = size["restart_s"]
    for read in reads:
        prefix = f"reads_{int(read['set_objects'])}"
        figures |= {f"{prefix}_{name}": value for name, value in read.items()}
    figures |= {f"tags_{name}": value for name, value in tags.items()}
    return Outcome(
        benchmark="map",
        figures=figures,
        details={"maps": sizes, "reads": reads, "calls": calls, "tags": tags},
        tables=[*_tables(sizes, reads, calls), _table_of_tags(tags)],
        targets=list(_targets(sizes, reads)),
    )


def _tables(
    sizes: Sequence[Figures], reads: Sequence[Figures], calls: Sequence[Figures]
) -> Iterator[Table]:
    rows = [
        {
            **size,
            "entities": f"{size['entities']:,.0f}",
            **{f"commit_{n}": _pair(size, f"commit_{n}", "p50_ms", "p99_ms") for n in COMMITS},
            **{name: _pair(size, name, "p50_ms", "max_ms") for name in ("before", "after")},
        }
        for size in sizes
    ]
    yield Table.of(
        "Memory above empty metadata, by streams and as many stream objects of one range",
        rows,
        "streams and objects = entities | MB = memory_mb | B a stream with its range = stream_bytes"
        " | B an object = object_bytes | MB when loaded = loaded_mb"
        " | controller, MB in all = resident_mb",
    )
    commits = " | ".join(f"{ranges} ranges p50, p99 = commit_{ranges}" for ranges in COMMITS)
    yield Table.of(
        "Deciding, encoding and applying a commit, and freezing: ms of CPU",
        rows,
        f"streams and objects = entities | {commits} | freeze = freeze_ms"
        " | longest stall by it = stall_ms | 100 ranges before it: p50, max = before"
        " | after it = after",
    )
    yield Table.of(
        "Checkpoint, and restart of a controller after kill -9 to its first answer",
        rows,
        "streams and objects = entities | MB = checkpoint_mb | write s = checkpoint_write_s"
        " | load s = checkpoint_load_s | restart s = restart_s",
    )
    by_count = {read["set_objects"]: read for read in reads}
    yield Table.of(
        f"GetObjects of one stream, by SSOs of {STREAMS_OF_AN_SSO} streams each",
        [
            {**call, "read": _pair(by_count[call["set_objects"]], f"read_{call['limit']}")}
            for call in calls
        ],
        "SSOs = set_objects | objects listed at most = limit | read p50, p99 ms of CPU = read"
        " | call over gRPC p50 ms = p50_ms | p99 ms = p99_ms"
        " | controller us of CPU = controller_cpu_us",
    )


def _table_of_tags(tags: Figures) -> Table:
    finds = {name: _pair(tags, name) for name in ("find_own", "find_common")}
    return Table.of(
        "Streams with two tags, one of them common: memory above empty metadata, CPU",
        [{**tags, **finds, "entities": f"{tags['entities']:,.0f}"}],
        "streams = entities | B a stream = stream_bytes | create us a stream = create_us"
        " | delete us a stream = delete_us | find one p50, p99 ms = find_own"
        f" | find {FOUND_AT_ONCE} of the common tag p50, p99 ms = find_common",
    )


def _pair(figures: Figures, name: str, first: str = "p50_ms", second: str = "p99_ms") -> str:
    if f"{name}_{first}" not in figures:
        return "-"
    return f"{figures[f'{name}_{first}']:.3f}, {figures[f'{name}_{second}']:.3f}"


def _targets(sizes: Sequence[Figures], reads: Sequence[Figures]) -> Iterator[Target]:
    for size in sizes:
        if size["entities"] == 1_000_000:
            title = "1M streams and 1M objects: MB above empty"
            yield Target(title, "at most", 250, size["memory_mb"])
            yield Target("the same: longest stall by freezing, ms", "at most", 20, size["stall_ms"])
            yield Target("the same: restart to first answer, s", "at most", 5, size["restart_s"])
    for read in reads:
        if read["set_objects"] == 500:
            title = "GetObjects of all of 500 SSOs: p99 ms without gRPC"
            yield Target(title, "at most", 2, read["read_1000_p99_ms"])


def _draw(folder: Path, sizes: Sequence[Figures], reads: Sequence[Figures]) -> None:
    def line(name: str, rows: Sequence[Figures] = sizes) -> list[float | None]:
        return [row.get(name) for row in rows]

    def total_mb(name: str) -> list[float | None]:
        return [size[name] * size["entities"] / 1e6 for size in sizes]

    counts = [size["entities"] for size in sizes]
    entities = "streams, and as many objects"
    memory = {
        "streams with their ranges": total_mb("stream_bytes"),
        "objects": total_mb("object_bytes"),
    }
    commits = {
        f"{ranges} ranges, {name}": line(f"commit_{ranges}_{name}_ms")
        for ranges in COMMITS
        for name in ("p50", "p99")
    }
    times = {
        "write a checkpoint": line("checkpoint_write_s"),
        "load it": line("checkpoint_load_s"),
        "restart to first answer": line("restart_s"),
    }
    lookups = {
        f"at most {limit} objects, {name}": line(f"read_{limit}_{name}_ms", reads)
        for limit in READ_LIMITS
        for name in ("p50", "p99")
    }
    set_objects = [read["set_objects"] for read in reads]
    plot(folder / "map-memory.png", (entities, "MB above empty"), counts, memory)
    plot(folder / "map-commits.png", (entities, "ms of CPU a commit"), counts, commits)
    plot(folder / "map-checkpoints.png", (entities, "seconds"), counts, times)
    plot(folder / "map-reads.png", ("SSOs", "ms of CPU a read"), set_objects, lookups)


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


async def measure_calls(
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
    times_s: list[float] = []
    before_s = cpu_s([pid])
    with contextlib.closing(await Http2Connection.connect(endpoint)) as connection:
        for _ in range(CALLS):
            start = dice.randrange(set_objects) * STEP if limit == READ_LIMITS[0] else 0
            began = time.perf_counter()
            await get_objects(connection, dice.choice(stream_ids), start, limit)
            times_s.append(time.perf_counter() - began)
    found = latencies(times_s)

    return {
        "set_objects": set_objects,
        "limit": limit,
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "controller_cpu_us": round((cpu_s([pid]) - before_s) * 1e6 / CALLS, 1),
    }


async def _first_answer(endpoint: str, stream_id: int) -> None:
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < deadline:
        try:
            with contextlib.closing(await Http2Connection.connect(endpoint)) as connection:
                async with asyncio.timeout(5.0):
                    if await get_objects(connection, stream_id, 0, 10):
                        return
        except (OSError, Http2Error):
            await asyncio.sleep(_POLL_S)

    raise UnhealthyError(
        f"the controller at {endpoint} did not answer within {ANSWER_WITHIN_S:.0f} s of its restart"
    )
