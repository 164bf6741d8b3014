"""One plan's work on one engine in a process of its own: list a bucket, join it with a map.

Usage: python -m scripts.benchmarks.reconcile_run ENGINE STORE FOLDER, with a map in FOLDER; prints
one JSON object.
"""

import json
import sys
import time
from pathlib import Path

from scripts.benchmarks.listed_bucket import MODIFIED_MS, NAMESPACE
from streammeta.reconcile import plan_folder
from streammeta.reconcile.arrow_start import start_arrow
from streammeta.reconcile.engine import EngineName
from streammeta.reconcile.engine_choice import AUTO_KEYS, open_engine
from streammeta.reconcile.listing import shards_of
from streammeta.reconcile.session import SparkConfig
from streammeta.reconcile.verdicts import Rules

_LATE_MS = MODIFIED_MS + 1


def run(engine_name: str, store: str, folder: Path) -> dict[str, object]:
    """Do the work; returns seconds, CPU seconds of this process, and the number of keys found."""
    rules = Rules(next_object_id=1 << 40, young_from_ms=_LATE_MS, unlisted_from_ms=_LATE_MS)
    begun = time.perf_counter()
    with open_engine(EngineName(engine_name), SparkConfig(), lambda _: None, AUTO_KEYS) as engine:
        started, cpu_started = time.perf_counter(), time.process_time()
        listed = engine.list_bucket(store, NAMESPACE, shards_of(1), folder / plan_folder.LISTING)
        done, cpu_done = time.perf_counter(), time.process_time()
        classes = engine.judge(folder, rules, NAMESPACE)
        judged = time.perf_counter()
    return {
        "keys": listed,
        "start_s": started - begun,
        "listing_s": done - started,
        "listing_cpu_s": cpu_done - cpu_started,
        "join_s": judged - done,
        "classes": {str(verdict): tally.keys for verdict, tally in classes.items()},
    }


if __name__ == "__main__":
    start_arrow()  # as each command does
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
