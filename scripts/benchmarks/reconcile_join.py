"""Join and verdicts of one engine in a process of its own, on tables that lie in a folder.

Usage: python -m scripts.benchmarks.reconcile_join ENGINE FOLDER; prints one JSON object. ENGINE is
`local`, or DuckDB as a measure of what the machine can do: `duckdb-anti-join` finds the keys that
the map lacks and writes those alone, `duckdb-verdicts` writes a row for each key, as `local` does,
by a rule that knows orphans and live objects only.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.listed_bucket import MODIFIED_MS, NAMESPACE
from streammeta.reconcile import plan_folder

_LATE_MS = MODIFIED_MS + 1
_FROM = (
    "from read_parquet('{listing}/*.parquet') l {how} join read_parquet('{of_map}/*.parquet') m"
    " using (object_id)"
)
_ROWS = (
    "key, object_id, case when map_state is null then 'orphan' else 'live' end as verdict, note,"
    " size, modified_ms, etag, map_state, map_size, map_node"
)
_COLUMNS = {
    "duckdb-anti-join": ("key, object_id, size, modified_ms, etag", "anti"),
    "duckdb-verdicts": (_ROWS, "left"),
}
ENGINES = ("local", *_COLUMNS)


def run(engine: str, folder: Path) -> dict[str, float]:
    """Do the work; returns orphans, seconds, CPU seconds, and MiB of memory at the peak."""
    work: Callable[[Path], int] = _local if engine == "local" else lambda at: _duckdb(engine, at)
    begun, cpu_begun = time.perf_counter(), time.process_time()
    orphans = work(folder)
    return {
        "orphans": orphans,
        "wall_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu_begun,
        "peak_mib": _peak_kib() / 1024,
    }


def _peak_kib() -> int:
    """The peak of this program; what `getrusage` tells begins with that of the parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    return int(found[1])


def _local(folder: Path) -> int:
    from streammeta.reconcile.arrow_start import start_arrow
    from streammeta.reconcile.local_engine import LocalEngine
    from streammeta.reconcile.verdicts import Rules, Verdict

    start_arrow()
    rules = Rules(next_object_id=1 << 40, young_from_ms=_LATE_MS, unlisted_from_ms=_LATE_MS)
    return LocalEngine().judge(folder, rules, NAMESPACE)[Verdict.ORPHAN].keys


def _duckdb(engine: str, folder: Path) -> int:
    import duckdb

    columns, how = _COLUMNS[engine]
    source = _FROM.format(
        how=how, listing=folder / plan_folder.LISTING, of_map=folder / plan_folder.MAP
    )
    with tempfile.TemporaryDirectory(dir=folder) as place, duckdb.connect() as database:
        out = f"{place}/rows.parquet"
        database.execute(f"copy (select {columns} {source}) to '{out}' (format parquet)")
        rule = "" if how == "anti" else "where verdict = 'orphan'"
        found = database.execute(f"select count(*) from read_parquet('{out}') {rule}").fetchone()
    return int(found[0]) if found else 0


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]))))
