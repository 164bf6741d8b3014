"""Cost of metadata as it grows: memory, commits, freezing, checkpoints, restart and reads.

Each size is measured in a separate process (`metadata_probe`), restarts and reads over gRPC on a
real controller (`metadata_controller`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from scripts.benchmarks import metadata_controller
from scripts.benchmarks.figures import Outcome, Progress, Table, Target
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
from scripts.benchmarks.processes import run_worker

LARGE = 10_000_000


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
        sizes.append(size | await metadata_controller.measure_restart(root / f"{count}", count))
    reads: list[Figures] = []
    for count in settings.set_objects:
        progress(f"map: reads of {count} SSOs")
        reads.append(await run_worker(log, measure_reads, set_objects=count))
    progress(f"map: look-up of {settings.tagged} streams by tag")
    tags: Figures = await run_worker(log, measure_tags, entities=settings.tagged)
    calls = await metadata_controller.measure_reads(root / "reads", settings.set_objects, progress)
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
