"""Cost of metadata as it grows: memory, commits, freezing, checkpoints, restart and reads.

Each size is measured in a process of its own (`metadata_probe`), restarts and reads over gRPC on a
real controller (`metadata_controller`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks import metadata_controller
from scripts.benchmarks.figures import Outcome, Progress, Table, Target
from scripts.benchmarks.metadata_controller import Reads, Restart
from scripts.benchmarks.metadata_probe import (
    COMMITS,
    READ_LIMITS,
    STREAMS_OF_AN_SSO,
    measure_metadata,
    measure_reads,
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
    plot: Path | None = option(None, "write PNG plots there, which needs matplotlib")


@dataclass(frozen=True, slots=True)
class Growth:
    """All measurements, with figures as `metadata_probe` names them."""

    sizes: Sequence[Mapping[str, float]]
    restarts: Sequence[Restart]
    reads: Sequence[Mapping[str, float]]
    calls: Sequence[Reads]


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure all sizes.

    Raises:
        ChildFailedError: a measuring process or a controller ended early.
        UnhealthyError: a restarted controller did not answer.
        PlotError: plots are wanted and matplotlib is not installed.
    """
    if settings.plot is not None:
        require_library()
    log = root / "probe.log"
    sizes, restarts, reads = [], [], []
    for size in sorted({*settings.sizes, *([LARGE] if settings.large else [])}):
        progress(f"map: {size} streams and objects")
        sizes.append(await run_worker(log, measure_metadata, entities=size, directory=root))
        progress(f"map: restart with {size} streams and objects")
        restarts.append(await metadata_controller.measure_restart(root / f"restart-{size}", size))
    for count in settings.set_objects:
        progress(f"map: reads of {count} SSOs")
        reads.append(await run_worker(log, measure_reads, set_objects=count))
    calls = await metadata_controller.measure_reads(root / "reads", settings.set_objects, progress)

    growth = Growth(sizes, restarts, reads, calls)
    if settings.plot is not None:
        _draw(settings.plot, growth)
    return _outcome(growth)


def _outcome(growth: Growth) -> Outcome:
    figures: dict[str, float] = {}
    for size in growth.sizes:
        figures |= {f"map_{int(size['entities'])}_{name}": value for name, value in size.items()}
    for restart in growth.restarts:
        figures[f"restart_{restart.entities}_s"] = restart.restart_s
    for read in growth.reads:
        prefix = f"reads_{int(read['set_objects'])}"
        figures |= {f"{prefix}_{name}": value for name, value in read.items()}
    return Outcome(
        benchmark="map",
        figures=figures,
        details={
            "maps": list(growth.sizes),
            "restarts": [asdict(restart) for restart in growth.restarts],
            "reads": list(growth.reads),
            "calls": [asdict(call) for call in growth.calls],
        },
        tables=list(_tables(growth)),
        targets=list(_targets(growth)),
    )


Cell = str | Callable[[Any], object]


def _tables(growth: Growth) -> Iterator[Table]:
    entities: dict[str, Cell] = {"streams and objects": lambda size: f"{size['entities']:,.0f}"}
    sizes = [
        {**size, "resident_mb": restart.resident_mb, "restart_s": restart.restart_s}
        for size, restart in zip(growth.sizes, growth.restarts, strict=True)
    ]
    yield Table.of(
        "Memory above empty metadata, by streams and as many stream objects of one range",
        sizes,
        entities
        | {
            "MB": _rounded("memory_mb", 1),
            "B a stream with its range": _rounded("stream_bytes", 0),
            "B an object": _rounded("object_bytes", 0),
            "MB when loaded": _rounded("loaded_mb", 1),
            "controller, MB in all": "resident_mb",
        },
    )
    measured = [ranges for ranges in COMMITS if f"commit_{ranges}_p50_ms" in sizes[-1]]
    yield Table.of(
        "Deciding, encoding and applying a commit, and freezing: ms of CPU",
        sizes,
        entities
        | {
            f"{n} ranges p50, p99": _pair(f"commit_{n}_p50_ms", f"commit_{n}_p99_ms")
            for n in measured
        }
        | {
            "freeze": _rounded("freeze_ms", 2),
            "longest stall by it": _rounded("stall_ms", 2),
            "100 ranges before it: p50, max": _pair("before_p50_ms", "before_max_ms"),
            "after it": _pair("after_p50_ms", "after_max_ms"),
        },
    )
    yield Table.of(
        "Checkpoint, and restart of a controller after kill -9 to its first answer",
        sizes,
        entities
        | {
            "MB": _rounded("checkpoint_mb", 1),
            "write s": _rounded("checkpoint_write_s", 2),
            "load s": _rounded("checkpoint_load_s", 2),
            "restart s": "restart_s",
        },
    )
    reads = {read["set_objects"]: read for read in growth.reads}
    calls = [{**asdict(call), **reads[call.set_objects]} for call in growth.calls]
    yield Table.of(
        f"GetObjects of one stream, by SSOs of {STREAMS_OF_AN_SSO} streams each",
        calls,
        {
            "SSOs": "set_objects",
            "objects listed at most": "limit",
            "read p50, p99 ms of CPU": lambda call: _pair(
                f"read_{call['limit']}_p50_ms", f"read_{call['limit']}_p99_ms"
            )(call),
            "call over gRPC p50 ms": "p50_ms",
            "p99 ms": "p99_ms",
            "controller us of CPU": "controller_cpu_us",
        },
    )


def _rounded(name: str, digits: int) -> Cell:
    return lambda item: round(item[name], digits or None)


def _pair(first: str, second: str) -> Callable[[Any], str]:
    return lambda item: f"{item[first]:.3f}, {item[second]:.3f}" if first in item else "-"


def _targets(growth: Growth) -> Iterator[Target]:
    for size, restart in zip(growth.sizes, growth.restarts, strict=True):
        if size["entities"] == 1_000_000:
            title = "1M streams and 1M objects: MB above empty"
            yield Target(title, "at most", 250, size["memory_mb"])
            yield Target("the same: longest stall by freezing, ms", "at most", 20, size["stall_ms"])
            yield Target("the same: restart to first answer, s", "at most", 5, restart.restart_s)
    for read in growth.reads:
        if read["set_objects"] == 500:
            title = "GetObjects of all of 500 SSOs: p99 ms without gRPC"
            yield Target(title, "at most", 2, read["read_1000_p99_ms"])


def _draw(folder: Path, growth: Growth) -> None:
    def of_sizes(name: str, scale: bool = False) -> list[float | None]:
        values = [size.get(name) for size in growth.sizes]
        counts = [size["entities"] / 1e6 if scale else 1.0 for size in growth.sizes]
        return [
            None if value is None else value * count
            for value, count in zip(values, counts, strict=True)
        ]

    counts = [size["entities"] for size in growth.sizes]
    entities = "streams, and as many objects"
    memory = {
        "streams with their ranges": of_sizes("stream_bytes", scale=True),
        "objects": of_sizes("object_bytes", scale=True),
    }
    commits = {
        f"{ranges} ranges, {name}": of_sizes(f"commit_{ranges}_{name}_ms")
        for ranges in COMMITS
        for name in ("p50", "p99")
    }
    times: dict[str, Sequence[float | None]] = {
        "write a checkpoint": of_sizes("checkpoint_write_s"),
        "load it": of_sizes("checkpoint_load_s"),
        "restart to first answer": [restart.restart_s for restart in growth.restarts],
    }
    reads = {
        f"at most {limit} objects, {name}": [
            read[f"read_{limit}_{name}_ms"] for read in growth.reads
        ]
        for limit in READ_LIMITS
        for name in ("p50", "p99")
    }
    set_objects = [read["set_objects"] for read in growth.reads]
    plot(folder / "map-memory.png", (entities, "MB above empty"), counts, memory)
    plot(folder / "map-commits.png", (entities, "ms of CPU a commit"), counts, commits)
    plot(folder / "map-checkpoints.png", (entities, "seconds"), counts, times)
    plot(folder / "map-reads.png", ("SSOs", "ms of CPU a read"), set_objects, reads)
