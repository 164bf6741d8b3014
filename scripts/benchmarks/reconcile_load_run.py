"""One load of reconciliation on one engine in a process of its own.

Usage: python -m scripts.benchmarks.reconcile_load_run LOAD ENGINE INPUT FOLDER; prints one JSON
object of seconds.
"""

import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

from scripts.benchmarks.listed_bucket import MODIFIED_MS, NAMESPACE
from scripts.benchmarks.reconcile_loads import CHECKPOINT, TAKEN_MS
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.reconcile import plan_folder
from streammeta.reconcile.arrow_start import start_arrow
from streammeta.reconcile.engine import EngineName
from streammeta.reconcile.engine_choice import AUTO_KEYS, open_engine
from streammeta.reconcile.inventory import read_inventory
from streammeta.reconcile.map_export import write_objects
from streammeta.reconcile.report_figures import FIGURE_COLUMNS, figures_of
from streammeta.reconcile.session import SparkConfig
from streammeta.reconcile.tables import read_batches
from streammeta.reconcile.verdicts import Rules

_LATE_MS = MODIFIED_MS + 1


def run(load: str, engine_name: str, given: Path, folder: Path) -> dict[str, object]:
    """Do the work; returns the seconds of each phase, and the number of keys of each verdict."""
    rules = Rules(next_object_id=1 << 40, young_from_ms=_LATE_MS, unlisted_from_ms=_LATE_MS)
    folder.mkdir()
    moments = [time.perf_counter()]
    with open_engine(EngineName(engine_name), SparkConfig(), lambda _: None, AUTO_KEYS) as engine:
        moments.append(time.perf_counter())
        if load == "join":
            for name in (plan_folder.LISTING, plan_folder.MAP):
                shutil.copytree(given / name, folder / name, copy_function=os.link)
            moments += [time.perf_counter()] * 2
        else:
            listed = read_inventory(str(given / "listed"), "s3://bench", TAKEN_MS, TAKEN_MS)
            engine.list_inventory(listed, NAMESPACE, folder / plan_folder.LISTING)
            moments.append(time.perf_counter())
            (folder / plan_folder.MAP).mkdir()
            copy = given / CHECKPOINT
            with CheckpointReader.open(copy) as checkpoint, CheckpointReader.open(copy) as beside:
                checkpoint.verify()
                write_objects(checkpoint, beside, folder / plan_folder.MAP / "objects.parquet")
            moments.append(time.perf_counter())
        classes = engine.judge(folder, rules, NAMESPACE)
        moments.append(time.perf_counter())
        figures_of(read_batches(folder / plan_folder.VERDICTS, FIGURE_COLUMNS), TAKEN_MS)
        moments.append(time.perf_counter())
    names = ("start_s", "listing_s", "map_s", "join_s", "report_s")
    spent = [after - before for before, after in itertools.pairwise(moments)]
    found: dict[str, object] = dict(zip(names, spent, strict=True))
    return found | {"classes": {str(verdict): tally.keys for verdict, tally in classes.items()}}


if __name__ == "__main__":
    start_arrow()  # as each command does
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
