"""Loads of reconciliation without a listing: the join alone, and a whole plan of an inventory.

Each run is a process of its own (`reconcile_load_run`), whose memory is sampled from outside: that
of the driver, and of Spark's JVM and Python workers, which are its children. Of the bucket's
objects one in a hundred is unknown to the map.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.benchmarks.figures import Outcome, Table, median
from scripts.benchmarks.listed_bucket import MODIFIED_MS, NAMESPACE, OBJECT_BYTES
from scripts.benchmarks.map_plots import drawing_library, plot
from scripts.benchmarks.reconcile_joining import write_tables
from scripts.benchmarks.reconciling import ORPHANS_ONE_IN, ReconcilingError
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.checkpoint_file import write_checkpoint
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import common_pb2

LOADS = ("join", "inventory")
TAKEN_MS = MODIFIED_MS + 30 * 86_400_000
CHECKPOINT = "map.checkpoint"
_CHUNK = 500_000
_SAMPLE_S = 0.1
_MIB = 1 << 20
_MEMORY = ("driver_mib", "jvm_mib", "workers_mib")


@dataclass(frozen=True, slots=True)
class Settings:
    """Loads, sizes, engines, runs of each, and the folder of plots, if any are wanted."""

    loads: tuple[str, ...]
    keys: tuple[int, ...]
    engines: tuple[str, ...]
    runs: int
    plot: Path | None = None


def measure(place: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure every engine with every load at every size, in turns.

    Raises:
        ReconcilingError: a run failed.
        PlotError: plots are wanted and can't be drawn; before the first run.
    """
    if settings.plot is not None:
        drawing_library()
    place.mkdir()
    runs: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for load in settings.loads:
        for keys in settings.keys:
            progress(f"reconcile: {load} of {keys} keys, writing its input")
            given = place / f"{load}-{keys}"
            _INPUTS[load](given, keys)
            for number in range(settings.runs):
                for engine in settings.engines:
                    progress(f"reconcile: {load} of {keys} keys, {engine}, run {number + 1}")
                    folder = place / "run"
                    runs.setdefault((load, keys, engine), []).append(
                        _run(load, engine, given, folder, keys)
                    )
                    shutil.rmtree(folder)
            shutil.rmtree(given)
    medians = {
        name: {what: median([one[what] for one in found]) for what in found[0]}
        for name, found in runs.items()
    }
    if settings.plot is not None:
        _draw(settings.plot, settings, medians)
    return Outcome(
        benchmark="reconcile",
        settings={"runs": settings.runs, "orphans_one_in": ORPHANS_ONE_IN},
        figures={
            f"{engine}_{load}_{keys}_{what}": round(value, 4)
            for (load, keys, engine), found in medians.items()
            for what, value in found.items()
        },
        details={f"{engine}_{load}_{keys}": found for (load, keys, engine), found in runs.items()},
        tables=(_table(medians),),
    )


def _table(medians: dict[tuple[str, int, str], dict[str, float]]) -> Table:
    columns = (
        *("load", "keys", "engine", "whole process", "start", "map", "listing", "join", "report"),
        *("driver MiB", "JVM MiB", "workers MiB"),
    )
    names = ("whole_s", "start_s", "map_s", "listing_s", "join_s", "report_s", *_MEMORY)
    rows = tuple(
        (load, keys, engine, *(round(found[name], 2) for name in names))
        for (load, keys, engine), found in medians.items()
    )
    return Table(title="Without a listing, seconds and peaks of memory", columns=columns, rows=rows)


def _draw(
    folder: Path, settings: Settings, medians: dict[tuple[str, int, str], dict[str, float]]
) -> None:
    """Plot time and the driver's memory by keys, each load on its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for load in settings.loads:
        for what, label in (("whole_s", "seconds"), ("driver_mib", "MiB of the driver")):
            lines = {
                engine: [medians[load, keys, engine][what] for keys in settings.keys]
                for engine in settings.engines
            }
            path = folder / f"reconcile-{load}-{what.partition('_')[0]}.png"
            plot(path, ("keys", label), settings.keys, lines)


def _run(load: str, engine: str, given: Path, folder: Path, keys: int) -> dict[str, float]:
    words = [sys.executable, "-m", "scripts.benchmarks.reconcile_load_run"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*words, load, engine, str(given), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with _sampled(process.pid) as peaks:
        output, errors = process.communicate()
    whole_s = time.perf_counter() - begun
    if process.returncode != 0:
        said = " ".join(errors.strip().splitlines()[-1:])
        raise ReconcilingError(f"{engine}: {load} of {keys} keys failed: {said}")
    found = json.loads(output)
    orphans = -(-keys // ORPHANS_ONE_IN)
    if found.pop("classes") != {"orphan": orphans, "live": keys - orphans}:
        raise ReconcilingError(
            f"{engine}: {load} of {keys} keys found other verdicts than there are"
        )
    return {"whole_s": whole_s, **found, **{name: peaks[name] / _MIB for name in _MEMORY}}


@contextmanager
def _sampled(pid: int) -> Iterator[dict[str, int]]:
    """Give the peaks of resident memory of a process, of its JVM, and of all Python workers."""
    peaks = dict.fromkeys(_MEMORY, 0)
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            try:
                driver = psutil.Process(pid)
                now = {"driver_mib": driver.memory_info().rss, "jvm_mib": 0, "workers_mib": 0}
                for child in driver.children(recursive=True):
                    is_jvm = child.name() == "java"
                    now["jvm_mib" if is_jvm else "workers_mib"] += child.memory_info().rss
            except psutil.Error:
                continue
            for name, value in now.items():
                peaks[name] = max(peaks[name], value)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def _chunks(keys: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    for number, start in enumerate(range(0, keys, _CHUNK)):
        yield number, np.arange(start, min(start + _CHUNK, keys), dtype=np.int64)


def _write_inventory(folder: Path, keys: int) -> None:
    """An inventory in Parquet, and a checkpoint of the map, as controllers send it."""
    (folder / "listed").mkdir(parents=True)
    for number, ids in _chunks(keys):
        table = pa.table(
            {
                "path": [key_for(one, NAMESPACE) for one in ids.tolist()],
                "size": np.full(len(ids), OBJECT_BYTES),
                "modified": np.full(len(ids), MODIFIED_MS),
            }
        )
        pq.write_table(table, folder / "listed" / f"part-{number:05d}.parquet")
    ids = np.arange(keys, dtype=np.int64)
    known = ids[ids % ORPHANS_ONE_IN != 0]
    zeros = np.zeros(len(known), np.int64)
    objects = {
        "object_id": known,
        "state": np.full(len(known), common_pb2.OBJECT_STATE_COMMITTED, np.int8),
        "kind": zeros.astype(np.int8),
        "attributes": zeros.astype(np.int32),
        "node_id": zeros.astype(np.int32),
        "object_size": np.full(len(known), OBJECT_BYTES),
        "timestamp_ms": np.full(len(known), MODIFIED_MS),
    }
    sections = {
        "counters": {"next_object_id": np.array([1 << 40])},
        "objects": objects,
        "bucket_claim": {"cluster_uuid": ["bench"], "issued_below": np.array([1 << 40])},
        "object_facts": {"object_id": known, "crc32c": known & 0xFFFFFFFF},
    }
    with (folder / CHECKPOINT).open("wb") as file:
        write_checkpoint(file, SnapshotId(EndOffset(1), Epoch(1)), "bench", sections)


_INPUTS: dict[str, Callable[[Path, int], None]] = {
    "join": write_tables,
    "inventory": _write_inventory,
}
