"""Time of a plan on each engine: from the start of a process to the verdicts, by keys.

The bucket is a stand-in that only lists, in a process of its own; of its objects one in a hundred
is unknown to the map. Each run has a new process, so that imports and the start of Spark count.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.benchmarks.figures import Outcome, Table, median
from scripts.benchmarks.listed_bucket import MODIFIED_MS, OBJECT_BYTES
from streammeta.cli.local_cluster import start_child
from streammeta.reconcile import plan_folder
from streammeta.reconcile.engine import EngineName
from streammeta.reconcile.tables import MAP_COLUMNS, arrow_schema, record_batch
from streammeta.v1 import common_pb2

ORPHANS_ONE_IN = 100
ENGINES = (EngineName.LOCAL.value, EngineName.SPARK.value)
_PHASES = ("start_s", "listing_s", "join_s")


class ReconcilingError(Exception):
    """A run failed, or found other verdicts than there are."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bucket, the engines, and runs of each."""

    keys: tuple[int, ...] = (6, 1_000_000)
    engines: tuple[str, ...] = ENGINES
    runs: int = 3


def measure(place: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure every engine at every size, in turns. Raises `ReconcilingError`."""
    place.mkdir()
    runs: dict[str, list[dict[str, float]]] = {}
    for keys in settings.keys:
        with _bucket(keys, place) as store:
            for number in range(settings.runs):
                for engine in settings.engines:
                    progress(f"reconcile: {keys} keys, {engine}, run {number + 1}")
                    folder = place / f"{keys}-{engine}-{number}"
                    _write_map(folder / plan_folder.MAP, keys)
                    runs.setdefault(f"{engine}_{keys}", []).append(
                        _run(engine, store, folder, keys)
                    )
    medians = {
        name: {what: median([one[what] for one in found]) for what in found[0]}
        for name, found in runs.items()
    }
    rows = [
        (
            int(name.split("_")[1]),
            name.split("_")[0],
            *(round(value, 2) for value in found.values()),
        )
        for name, found in medians.items()
    ]
    return Outcome(
        benchmark="reconcile",
        settings={"runs": settings.runs, "orphans_one_in": ORPHANS_ONE_IN},
        figures={
            f"{name}_{what}": round(value, 4)
            for name, found in medians.items()
            for what, value in found.items()
        },
        details=runs,
        tables=(
            Table(
                title="A plan on each engine, seconds, p50",
                columns=(
                    "keys",
                    "engine",
                    "whole process",
                    "start",
                    "listing",
                    "join",
                    "CPU, us a key listed",
                ),
                rows=tuple(rows),
            ),
        ),
    )


@contextmanager
def _bucket(keys: int, place: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "scripts.benchmarks.listed_bucket", str(keys)]
    child = start_child("bucket", words, place / "bucket.log")
    try:
        endpoint = f"http://127.0.0.1:{child.wait_ready()}"
        yield f"s3://bench?endpoint={quote(endpoint, safe='')}&accessKey=a&secretKey=s"
    finally:
        child.kill()


def _write_map(folder: Path, keys: int) -> None:
    """A map of the bucket's objects, but for one in a hundred."""
    folder.mkdir(parents=True)
    ids = [object_id for object_id in range(keys) if object_id % ORPHANS_ONE_IN]
    values = {name: [0] * len(ids) for name in arrow_schema(MAP_COLUMNS).names}
    values |= {
        "object_id": ids,
        "map_state": [common_pb2.OBJECT_STATE_COMMITTED] * len(ids),
        "map_size": [OBJECT_BYTES] * len(ids),
        "map_time_ms": [MODIFIED_MS] * len(ids),
    }
    table = pa.Table.from_batches([record_batch(MAP_COLUMNS, values)])
    pq.write_table(table, folder / "objects.parquet")


def _run(engine: str, store: str, folder: Path, keys: int) -> dict[str, float]:
    words = [sys.executable, "-m", "scripts.benchmarks.reconcile_run", engine, store, str(folder)]
    begun = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    whole_s = time.perf_counter() - begun
    if done.returncode != 0:
        said = " ".join(done.stderr.strip().splitlines()[-1:])
        raise ReconcilingError(f"{engine} with {keys} keys failed: {said}")
    found = json.loads(done.stdout)
    orphans = -(-keys // ORPHANS_ONE_IN)
    wanted = {"orphan": orphans, "live": keys - orphans}
    if found["classes"] != {verdict: count for verdict, count in wanted.items() if count}:
        raise ReconcilingError(f"{engine} found {found['classes']} among {keys} keys, not {wanted}")
    phases = {what: float(found[what]) for what in _PHASES}
    cpu_us = float(found["listing_cpu_s"]) / keys * 1e6 if engine == EngineName.LOCAL else 0.0
    return {"whole_s": whole_s, **phases, "listing_cpu_us_a_key": cpu_us}
