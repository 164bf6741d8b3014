"""Growth of a plan's join and verdicts in the process, beside DuckDB, by keys in the bucket.

The listing and the map lie in tables, as a listing of the bucket or an inventory leaves them; one
object in a hundred is unknown to the map. Each run has a process of its own, so that its memory is
its own.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from scripts.benchmarks.figures import Outcome, Table, median
from scripts.benchmarks.listed_bucket import MODIFIED_MS, NAMESPACE, OBJECT_BYTES
from scripts.benchmarks.reconcile_join import ENGINES
from scripts.benchmarks.reconciling import ORPHANS_ONE_IN, ReconcilingError
from streammeta.reconcile import plan_folder
from streammeta.reconcile.tables import (
    LISTING_COLUMNS,
    MAP_COLUMNS,
    ROWS_A_GROUP,
    arrow_schema,
    record_batch,
    table_writer,
)
from streammeta.reconcile.verdicts import Int64Column
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import common_pb2

_SHARDS = 16
_MAP_ROWS = 100_000
_ODD = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""Multiplier that makes etags of ids: all different, and without a pattern."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bucket, runs of each engine, and where to write plots; None for none."""

    keys: tuple[int, ...]
    runs: int = 3
    plot: Path | None = None


def measure(place: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure every engine at every size, in turns.

    Raises:
        ReconcilingError: a run failed, or found other orphans than there are.
        PlotError: plots are wanted and can't be drawn.
    """
    from scripts.benchmarks.map_plots import drawing_library, plot

    if settings.plot is not None:
        drawing_library()
    place.mkdir()
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    for keys in settings.keys:
        folder = place / str(keys)
        progress(f"reconcile: tables of {keys} keys")
        write_tables(folder, keys)
        for number in range(settings.runs):
            for engine in ENGINES:
                progress(f"reconcile: join of {keys} keys, {engine}, run {number + 1}")
                runs.setdefault((keys, engine), []).append(_run(engine, folder, keys))
        shutil.rmtree(folder)
    medians = {
        at: {what: median([one[what] for one in found]) for what in found[0]}
        for at, found in runs.items()
    }
    if settings.plot is not None:
        settings.plot.mkdir(parents=True, exist_ok=True)
        for what, label in (("wall_s", "seconds"), ("peak_mib", "MiB at the peak")):
            lines = {
                engine: [medians[keys, engine][what] for keys in settings.keys]
                for engine in ENGINES
            }
            path = settings.plot / f"reconcile-{what.replace('_', '-')}.png"
            plot(path, ("keys, and about as many objects", label), settings.keys, lines)
    return Outcome(
        benchmark="reconcile-join",
        settings={"runs": settings.runs, "orphans_one_in": ORPHANS_ONE_IN},
        figures={
            f"{engine}_{keys}_{what}": round(value, 4)
            for (keys, engine), found in medians.items()
            for what, value in found.items()
            if what != "orphans"
        },
        details={f"{engine}_{keys}": found for (keys, engine), found in runs.items()},
        tables=(
            Table(
                title="Join and verdicts, p50",
                columns=("keys", "engine", "seconds", "CPU, s", "MiB at the peak", "of anti-join"),
                rows=tuple(
                    (
                        keys,
                        engine,
                        round(found["wall_s"], 2),
                        round(found["cpu_s"], 2),
                        round(found["peak_mib"]),
                        round(found["wall_s"] / medians[keys, "duckdb-anti-join"]["wall_s"], 2),
                    )
                    for (keys, engine), found in medians.items()
                ),
            ),
        ),
    )


def write_tables(folder: Path, keys: int) -> None:
    """Write the listing of a bucket, in the order of keys, and its map."""
    listing, of_map = folder / plan_folder.LISTING, folder / plan_folder.MAP
    listing.mkdir(parents=True)
    of_map.mkdir()
    for shard in range(_SHARDS):
        ids = np.arange(shard, keys, _SHARDS, dtype=np.int64)
        ids = ids[np.argsort(_turned_round(ids), kind="stable")]
        path = listing / f"shard-{shard:05d}.parquet"
        with table_writer(path, LISTING_COLUMNS) as writer:
            for first in range(0, len(ids), ROWS_A_GROUP):
                writer.write_batch(_listed(ids[first : first + ROWS_A_GROUP]))
    with table_writer(of_map / "objects.parquet", MAP_COLUMNS) as writer:
        for first in range(0, keys, _MAP_ROWS):
            part = np.arange(first, min(first + _MAP_ROWS, keys), dtype=np.int64)
            writer.write_batch(_mapped(part[part % ORPHANS_ONE_IN != 0]))


def _turned_round(ids: Int64Column) -> Int64Column:
    """The number that the eight hex digits which begin a key are."""
    turned = np.zeros_like(ids)
    for digit in range(8):
        turned = turned << 4 | ids >> 4 * digit & 15
    return turned


def _listed(ids: Int64Column) -> pa.RecordBatch:
    count = len(ids)
    return record_batch(
        LISTING_COLUMNS,
        {
            "key": [key_for(object_id, NAMESPACE) for object_id in ids.tolist()],
            "size": np.full(count, OBJECT_BYTES),
            "modified_ms": np.full(count, MODIFIED_MS),
            "etag": [f"{object_id * _ODD % (1 << 128):032x}" for object_id in ids.tolist()],
            "owner": np.zeros(count, dtype=np.int64),
            "object_id": ids,
            "note": [""] * count,
        },
    )


def _mapped(ids: Int64Column) -> pa.RecordBatch:
    count = len(ids)
    columns = {name: np.zeros(count, np.int64) for name in arrow_schema(MAP_COLUMNS).names}
    columns |= {
        "object_id": ids,
        "map_state": np.full(count, common_pb2.OBJECT_STATE_COMMITTED, np.int64),
        "map_size": np.full(count, OBJECT_BYTES, np.int64),
        "map_time_ms": np.full(count, MODIFIED_MS, np.int64),
    }
    return record_batch(MAP_COLUMNS, columns)


def _run(engine: str, folder: Path, keys: int) -> dict[str, float]:
    for table in (plan_folder.VERDICTS, plan_folder.CANDIDATES):
        shutil.rmtree(folder / table, ignore_errors=True)
    words = [sys.executable, "-m", "scripts.benchmarks.reconcile_join", engine, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.strip().splitlines()[-1:])
        raise ReconcilingError(f"{engine} with {keys} keys failed: {said}")
    found: dict[str, float] = json.loads(done.stdout)
    if found["orphans"] != -(-keys // ORPHANS_ONE_IN):
        raise ReconcilingError(f"{engine} found {found['orphans']:g} orphans among {keys} keys")
    return found
