"""What the map costs as it grows: memory, commits, freezing, checkpoints, restart, reads.

Each map is measured in a process of its own (`map_probe`), restarts and reads over gRPC on a real
controller (`map_controller`).
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.benchmarks import map_controller
from scripts.benchmarks.figures import Outcome, Table, Target, targets_table
from scripts.benchmarks.map_controller import Reads, Restart
from streammeta.cli.local_cluster import ChildFailedError, start_child

LARGE = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    sizes: Sequence[int] = (10_000, 100_000, 1_000_000)
    """Streams, and as many objects."""
    large: bool = False
    """Whether to measure `LARGE` too; takes long and about 3 GB."""
    set_objects: Sequence[int] = (10, 500, 5_000)
    """Of one node, each with ranges of 1000 streams."""
    plot: Path | None = None
    """Where to write plots; None for none."""

    def all_sizes(self) -> list[int]:
        """Return the sizes, ascending."""
        return sorted({*self.sizes, *([LARGE] if self.large else [])})


@dataclass(frozen=True, slots=True)
class Growth:
    """Everything measured, by what was counted; figures are as `map_probe` names them."""

    maps: Sequence[Mapping[str, float]]
    restarts: Sequence[Restart]
    reads: Sequence[Mapping[str, float]]
    calls: Sequence[Reads]


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure all sizes.

    Raises:
        ChildFailedError: a measuring process or a controller ended early.
        UnhealthyError: a restarted controller did not answer.
        PlotError: plots are wanted and can't be drawn.
    """
    # Only plots need the library that draws them; that it is missing is said at once.
    from scripts.benchmarks.map_plots import draw, drawing_library

    if settings.plot is not None:
        drawing_library()
    maps, restarts, reads = [], [], []
    for size in settings.all_sizes():
        progress(f"map: {size} streams and objects")
        maps.append(await _probe(root, "--entities", str(size), "--directory", str(root)))
        progress(f"map: restart with {size} streams and objects")
        restarts.append(await map_controller.measure_restart(root / f"restart-{size}", size))
    for count in settings.set_objects:
        progress(f"map: reads of {count} set objects")
        reads.append(await _probe(root, "--set-objects", str(count)))
    calls = await map_controller.measure_reads(root / "reads", settings.set_objects, progress)
    growth = Growth(maps, restarts, reads, calls)
    if settings.plot is not None:
        draw(settings.plot, growth)
    return _outcome(settings, growth)


async def _probe(root: Path, *arguments: str) -> dict[str, float]:
    child = start_child(
        "map probe",
        [sys.executable, "-m", "scripts.benchmarks.map_probe", *arguments],
        root / "probe.log",
    )
    try:
        said, _ = await asyncio.to_thread(child.process.communicate)
    finally:
        await asyncio.to_thread(child.stop)
    if child.process.returncode != 0:
        raise ChildFailedError(f"the map's measurement failed; its log:\n{child.log_tail()}")
    figures: dict[str, float] = json.loads(said)
    return figures


def _outcome(settings: Settings, growth: Growth) -> Outcome:
    figures: dict[str, float] = {}
    for each in growth.maps:
        prefix = f"map_{int(each['entities'])}"
        figures |= {f"{prefix}_{name}": value for name, value in each.items()}
    for restart in growth.restarts:
        figures[f"restart_{restart.entities}_s"] = restart.restart_s
    for each in growth.reads:
        prefix = f"reads_{int(each['set_objects'])}"
        figures |= {f"{prefix}_{name}": value for name, value in each.items()}
    tables = (
        _memory_table(growth),
        _commits_table(growth),
        _checkpoint_table(growth),
        _reads_table(growth),
    )
    return Outcome(
        benchmark="map",
        settings={"sizes": settings.all_sizes(), "set_objects": list(settings.set_objects)},
        figures=figures,
        details={
            "maps": list(growth.maps),
            "restarts": [asdict(each) for each in growth.restarts],
            "reads": list(growth.reads),
            "calls": [asdict(each) for each in growth.calls],
        },
        tables=(*tables, *targets_table(_targets(growth))),
    )


def _memory_table(growth: Growth) -> Table:
    return Table(
        title="Memory above an empty map, by streams and as many stream objects of one range",
        columns=(
            *("streams and objects", "MB", "B a stream with its range", "B an object"),
            *("MB when loaded", "controller, MB in all"),
        ),
        rows=tuple(
            (
                f"{each['entities']:,.0f}",
                round(each["memory_mb"], 1),
                round(each["stream_bytes"]),
                round(each["object_bytes"]),
                round(each["loaded_mb"], 1),
                restart.resident_mb,
            )
            for each, restart in zip(growth.maps, growth.restarts, strict=True)
        ),
    )


def _commits_table(growth: Growth) -> Table:
    ranges = sorted(
        {int(name.split("_")[1]) for each in growth.maps for name in each if "commit_" in name}
    )
    return Table(
        title="Deciding, encoding and applying a commit, and freezing: ms of CPU",
        columns=(
            "streams and objects",
            *(f"{count} ranges p50, p99" for count in ranges),
            *("freeze", "longest stall by it", "100 ranges before it: p50, max", "after it"),
        ),
        rows=tuple(
            (
                f"{each['entities']:,.0f}",
                *(
                    _pair(each, f"commit_{count}_p50_ms", f"commit_{count}_p99_ms")
                    for count in ranges
                ),
                round(each["freeze_ms"], 2),
                round(each["stall_ms"], 2),
                _pair(each, "before_p50_ms", "before_max_ms"),
                _pair(each, "after_p50_ms", "after_max_ms"),
            )
            for each in growth.maps
        ),
    )


def _pair(figures: Mapping[str, float], first: str, second: str) -> str:
    if first not in figures:
        return "-"
    return f"{figures[first]:.3f}, {figures[second]:.3f}"


def _checkpoint_table(growth: Growth) -> Table:
    return Table(
        title="Checkpoint, and restart of a controller after kill -9 to its first answer",
        columns=("streams and objects", "MB", "write s", "load s", "restart s"),
        rows=tuple(
            (
                f"{each['entities']:,.0f}",
                round(each["checkpoint_mb"], 1),
                round(each["checkpoint_write_s"], 2),
                round(each["checkpoint_load_s"], 2),
                restart.restart_s,
            )
            for each, restart in zip(growth.maps, growth.restarts, strict=True)
        ),
    )


def _reads_table(growth: Growth) -> Table:
    read = {int(each["set_objects"]): each for each in growth.reads}
    return Table(
        title="GetObjects of one stream, by set objects of 1000 streams each",
        columns=(
            *("set objects", "objects listed at most", "read p50, p99 ms of CPU"),
            *("call over gRPC p50 ms", "p99 ms", "controller us of CPU"),
        ),
        rows=tuple(
            (
                call.set_objects,
                call.limit,
                _pair(
                    read[call.set_objects],
                    f"read_{call.limit}_p50_ms",
                    f"read_{call.limit}_p99_ms",
                ),
                call.p50_ms,
                call.p99_ms,
                call.controller_cpu_us,
            )
            for call in growth.calls
        ),
    )


def _targets(growth: Growth) -> Iterator[Target]:
    million = [each for each in growth.maps if each["entities"] == 1_000_000]
    for each in million:
        yield Target("1M streams and 1M objects: MB above empty", "at most", 250, each["memory_mb"])
        yield Target("the same: longest stall by freezing, ms", "at most", 20, each["stall_ms"])
    for restart in growth.restarts:
        if restart.entities == 1_000_000:
            text = "the same: restart to first answer, s"
            yield Target(text, "at most", 5, restart.restart_s)
    for each in growth.reads:
        if each["set_objects"] == 500:
            text = "GetObjects of all of 500 set objects: p99 ms without gRPC"
            yield Target(text, "at most", 2, each["read_1000_p99_ms"])
