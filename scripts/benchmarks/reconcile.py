"""Reconciliation on each engine: time, CPU and memory of a plan and of its parts, by keys.

Every run is a separate process (`reconcile_run`), so that imports and the start of Spark count,
and its memory is sampled from outside: the driver, Spark's JVM and its Python workers. One of a
hundred objects is unknown to the metadata.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote

import psutil

from scripts.benchmarks import reconcile_deletions, reconcile_inputs, reconcile_run
from scripts.benchmarks.figures import BenchmarkError, Outcome, Progress, Table, medians
from scripts.benchmarks.listed_bucket import serve
from scripts.benchmarks.options import option
from scripts.benchmarks.plots import plot, require_library
from scripts.benchmarks.processes import read_result, wait_ready, working
from streammeta.reconcile.engines.engine import EngineName

Load: TypeAlias = Literal["plan", "join", "inventory"]
"""Listing and join, the join of tables alone, or a plan of an inventory."""
Engine: TypeAlias = Literal["local", "spark"]
JOINED_ENGINES = ("local", "duckdb-anti-join", "duckdb-verdicts")
_MEMORY = ("driver_mib", "jvm_mib", "workers_mib")
_SAMPLE_S = 0.1
COLUMNS = (
    "keys | engine | whole process = whole_s | start = start_s | map = map_s | listing = listing_s"
    " | join = join_s | report = report_s | CPU, us a key listed = listing_cpu_us_a_key"
    " | driver MiB = driver_mib | JVM MiB = jvm_mib | workers MiB = workers_mib"
)

Runs: TypeAlias = dict[tuple[int, str], list[dict[str, float]]]
"""Figures of each run, by keys and engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Loads, sizes, engines and runs, or other measurements instead."""

    keys: tuple[int, ...] = option((6, 1_000_000), "sizes of the bucket")
    engines: tuple[Engine, ...] = option(get_args(Engine), "engines, in turns")
    loads: tuple[Load, ...] = option(("plan",), "loads: listing and join, join alone, inventory")
    joined: tuple[int, ...] = option((), "measure only joins of so many keys, with DuckDB's")
    deletions: int | None = option(None, "measure only so many deletions")
    runs: int = option(3, "runs of each engine and size")
    plot: Path | None = option(None, "write plots of growth there, which needs matplotlib")


async def measure(root: Path, settings: Settings, progress: Progress) -> list[Outcome]:
    """Measure every engine with every load at every size, in turns."""
    if settings.plot is not None:
        require_library()
    if settings.deletions is not None:
        return [
            await asyncio.to_thread(
                reconcile_deletions.measure, root, settings.deletions, settings.runs, progress
            )
        ]

    if settings.joined:
        runs = await _measure_load(
            root, "join", settings.joined, JOINED_ENGINES, settings.runs, progress
        )
        return [_joined_outcome(settings, runs)]
    outcomes = []
    for load in settings.loads:
        runs = await _measure_load(
            root, load, settings.keys, settings.engines, settings.runs, progress
        )
        outcomes.append(_outcome(load, settings, runs))
    return outcomes


async def _measure_load(
    root: Path,
    load: Load,
    sizes: Sequence[int],
    engines: Sequence[str],
    count: int,
    progress: Progress,
) -> Runs:
    runs: Runs = {}
    for keys in sizes:
        progress(f"reconcile: {load} of {keys} keys, writing the input")
        async with _input(root / f"{load}-{keys}", load, keys) as source:
            for number in range(count):
                for engine in engines:
                    progress(f"reconcile: {load} of {keys} keys, {engine}, run {number + 1}")
                    found = await run_once(root, load, engine, source, keys)
                    runs.setdefault((keys, engine), []).append(found)
    return runs


@contextlib.asynccontextmanager
async def _input(folder: Path, load: Load, keys: int) -> AsyncIterator[tuple[str, Path]]:
    """Make the input of a load and yield the bucket's address, if any, and the folder of files."""
    if load == "plan":
        await asyncio.to_thread(reconcile_inputs.write_metadata, folder, keys)
        async with working(folder / "bucket.log", serve, keys=keys) as bucket:
            endpoint = quote(f"http://127.0.0.1:{await wait_ready(bucket)}", safe="")
            yield f"s3://bench?endpoint={endpoint}&accessKey=a&secretKey=s", folder
    else:
        writers = {
            "join": reconcile_inputs.write_tables,
            "inventory": reconcile_inputs.write_inventory,
        }
        await asyncio.to_thread(writers[load], folder, keys)
        yield "", folder
    shutil.rmtree(folder)


async def run_once(
    root: Path, load: Load, engine: str, source: tuple[str, Path], keys: int
) -> dict[str, float]:
    """Run one load in a separate process and return seconds and peaks of memory.

    Raises:
        ChildFailedError: the run failed.
        BenchmarkError: it found wrong verdicts.
    """
    folder, peaks = root / "run", dict.fromkeys(_MEMORY, 0.0)
    arguments = {"load": load, "engine": engine, "store": source[0], "source": source[1]}
    began = time.perf_counter()
    async with working(root / "run.log", reconcile_run.run, folder=folder, **arguments) as child:
        sampling = asyncio.create_task(_sample(child.pid, peaks))
        found = await read_result(child)
        sampling.cancel()
    whole_s = time.perf_counter() - began
    shutil.rmtree(folder)

    orphans = -(-keys // reconcile_inputs.ORPHANS_ONE_IN)
    wanted, classes = {"orphan": orphans, "live": keys - orphans}, found.pop("classes")
    if any(classes[verdict] != wanted.get(verdict, 0) for verdict in classes):
        raise BenchmarkError(f"{engine} found {classes} among {keys} keys, not {wanted}")
    if engine == EngineName.LOCAL:
        found["listing_cpu_us_a_key"] = found["listing_cpu_s"] / keys * 1e6
    return {"whole_s": whole_s, **found, **peaks}


async def _sample(pid: int, peaks: dict[str, float]) -> None:
    """Keep the peaks of resident memory of a process, its JVM and its Python workers, in MiB."""
    while True:
        # Workers of Spark come and go between two looks.
        with contextlib.suppress(psutil.Error):
            driver = psutil.Process(pid)
            now = {"driver_mib": driver.memory_info().rss, "jvm_mib": 0, "workers_mib": 0}
            for child in driver.children(recursive=True):
                is_jvm = child.name() == "java"
                now["jvm_mib" if is_jvm else "workers_mib"] += child.memory_info().rss
            for name, value in now.items():
                peaks[name] = max(peaks[name], value / 2**20)
        await asyncio.sleep(_SAMPLE_S)


def _outcome(load: Load, settings: Settings, runs: Runs) -> Outcome:
    found = {at: medians(figures) for at, figures in runs.items()}
    infix = "" if load == "plan" else f"_{load}"
    if settings.plot is not None and load != "plan":
        for name, label in (("whole_s", "seconds"), ("driver_mib", "MiB of the driver")):
            path = settings.plot / f"reconcile-{load}-{name.partition('_')[0]}.png"
            _draw(path, label, name, found)
    title = f"{load.capitalize()} on each engine, seconds and peaks of memory, p50"

    return Outcome(
        benchmark="reconcile",
        settings={"orphans_one_in": reconcile_inputs.ORPHANS_ONE_IN},
        figures={
            f"{engine}{infix}_{keys}_{name}": round(value, 4)
            for (keys, engine), figures in found.items()
            for name, value in figures.items()
        },
        details={f"{engine}{infix}_{keys}": figures for (keys, engine), figures in runs.items()},
        tables=[Table.of(title, _rows(found), COLUMNS)],
    )


def _joined_outcome(settings: Settings, runs: Runs) -> Outcome:
    names = {"wall_s": "join_s", "cpu_s": "join_cpu_s", "peak_mib": "peak_mib"}
    found = {
        at: {name: medians(figures)[source] for name, source in names.items()}
        for at, figures in runs.items()
    }
    if settings.plot is not None:
        for name, label in (("wall_s", "seconds"), ("peak_mib", "MiB at the peak")):
            path = settings.plot / f"reconcile-{name.replace('_', '-')}.png"
            _draw(path, label, name, found)

    rows = _rows(found)
    for row in rows:
        row["share"] = row["wall_s"] / found[row["keys"], "duckdb-anti-join"]["wall_s"]
    table = Table.of(
        "Join and verdicts, p50",
        rows,
        "keys | engine | seconds = wall_s | CPU, s = cpu_s | MiB at the peak = peak_mib"
        " | of anti-join = share",
    )
    return Outcome(
        benchmark="reconcile-join",
        settings={"orphans_one_in": reconcile_inputs.ORPHANS_ONE_IN},
        figures={
            f"{engine}_{keys}_{name}": round(value, 4)
            for (keys, engine), figures in found.items()
            for name, value in figures.items()
        },
        details={f"{engine}_{keys}": figures for (keys, engine), figures in runs.items()},
        tables=[table],
    )


Found = Mapping[tuple[int, str], Mapping[str, float]]
"""Medians of the runs, by keys and engine."""


def _rows(found: Found) -> list[dict[str, Any]]:
    return [
        {"keys": keys, "engine": engine, **figures} for (keys, engine), figures in found.items()
    ]


def _draw(path: Path, label: str, name: str, found: Found) -> None:
    sizes, engines = (list(dict.fromkeys(values)) for values in zip(*found, strict=True))
    lines = {engine: [found[keys, engine][name] for keys in sizes] for engine in engines}
    plot(path, ("keys, and about as many objects", label), sizes, lines)
