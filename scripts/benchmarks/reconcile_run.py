"""One load of reconciliation on one engine, in a separate process.

Engines are the product's, and DuckDB as a measure of the machine's abilities: `duckdb-anti-join`
finds the keys that are not in the metadata and writes only those, `duckdb-verdicts` writes a row
for each key, as `local` does, by a rule for orphans and live objects only.
"""

import itertools
import os
import shutil
import time
from pathlib import Path

from scripts.benchmarks.listed_bucket import MODIFIED_MS, NAMESPACE
from scripts.benchmarks.processes import status_bytes
from scripts.benchmarks.reconcile_inputs import CHECKPOINT, INVENTORY, TAKEN_MS
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.engines.engine_choice import AUTO_KEYS, open_engine
from streammeta.reconcile.engines.spark_session import SparkConfig
from streammeta.reconcile.listing.inventory import read_inventory
from streammeta.reconcile.listing.shards import shards_of
from streammeta.reconcile.metadata.export import write_objects
from streammeta.reconcile.parquet.arrow_start import start_arrow
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.reports.page import FIGURE_COLUMNS, figures_of
from streammeta.reconcile.vocabulary.tables import read_batches
from streammeta.reconcile.vocabulary.verdicts import Rules
from streammeta.storage.object_store.protocol.address import StoreAddress

_LATE_MS = MODIFIED_MS + 1
_RULES = Rules(next_object_id=1 << 40, young_from_ms=_LATE_MS, unlisted_from_ms=_LATE_MS)
_ROWS = (
    "key, object_id, case when map_state is null then 'orphan' else 'live' end as verdict, note,"
    " size, modified_ms, etag, map_state, map_size, map_node"
)
_DUCKDB = {
    "duckdb-anti-join": ("key, object_id, size, modified_ms, etag", "anti"),
    "duckdb-verdicts": (_ROWS, "left"),
}
"""Columns and kind of join of each engine."""


def run(*, load: str, engine: str, store: str, source: str, folder: str) -> dict[str, object]:
    """Run a load on files in `source` and return seconds, peak of memory and keys of each verdict.

    `store` is the bucket to list, for a plan. `folder` is where the tables go.
    """
    given, place = Path(source), Path(folder)
    place.mkdir()
    if engine in _DUCKDB:
        return _run_duckdb(engine, given, place)
    start_arrow()  # as each command does
    times, cpu_times = [time.perf_counter()], [time.process_time()]

    def mark() -> None:
        times.append(time.perf_counter())
        cpu_times.append(time.process_time())

    with open_engine(EngineName(engine), SparkConfig(), lambda _: None, AUTO_KEYS) as opened:
        mark()
        listing, of_map = place / plan_folder.LISTING, place / plan_folder.MAP
        if load == "plan":
            opened.list_bucket(StoreAddress.parse(store), NAMESPACE, shards_of(1), listing)
        elif load == "inventory":
            listed = read_inventory(str(given / INVENTORY), "bench", TAKEN_MS, TAKEN_MS)
            opened.list_inventory(listed, NAMESPACE, listing)
        else:
            shutil.copytree(given / plan_folder.LISTING, listing, copy_function=os.link)
        mark()
        if load == "inventory":
            of_map.mkdir()
            copy = given / CHECKPOINT
            with CheckpointReader.open(copy) as checkpoint, CheckpointReader.open(copy) as second:
                checkpoint.verify()
                write_objects(checkpoint, second, of_map / "objects.parquet")
        else:
            shutil.copytree(given / plan_folder.MAP, of_map, copy_function=os.link)
        mark()
        classes = opened.judge(place, _RULES, NAMESPACE)
        mark()
        figures_of(read_batches(place / plan_folder.VERDICTS, FIGURE_COLUMNS), TAKEN_MS)
        mark()

    names = ("start", "listing", "map", "join", "report")
    spent = [after - before for before, after in itertools.pairwise(times)]
    cpu_spent = [after - before for before, after in itertools.pairwise(cpu_times)]
    found: dict[str, object] = {f"{name}_s": at for name, at in zip(names, spent, strict=True)}
    return found | {
        "listing_cpu_s": cpu_spent[1],
        "join_cpu_s": cpu_spent[3],
        "peak_mib": status_bytes("VmHWM") / 2**20,
        "classes": {str(verdict): tally.keys for verdict, tally in classes.items()},
    }


def _run_duckdb(engine: str, given: Path, place: Path) -> dict[str, object]:
    import duckdb

    columns, how = _DUCKDB[engine]
    source = (
        f"from read_parquet('{given / plan_folder.LISTING}/*.parquet') l {how} join"
        f" read_parquet('{given / plan_folder.MAP}/*.parquet') m using (object_id)"
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    with duckdb.connect() as database:
        out = f"{place}/rows.parquet"
        database.execute(f"copy (select {columns} {source}) to '{out}' (format parquet)")
        rule = "" if how == "anti" else "where verdict = 'orphan'"
        found = database.execute(f"select count(*) from read_parquet('{out}') {rule}").fetchone()
    return {
        "join_s": time.perf_counter() - began,
        "join_cpu_s": time.process_time() - cpu_began,
        "peak_mib": status_bytes("VmHWM") / 2**20,
        "classes": {"orphan": found[0] if found else 0},
    }
