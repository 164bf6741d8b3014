"""Start of a command of reconciliation: what it leaves unloaded, and that it works without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.reconcile.fake_controller import COMMITTED, FakeMap, LocalBucket, MapObject, own

RUN = """
import atexit, sys
from importlib.machinery import PathFinder

HEAVY = ("pandas", "pyspark", "psutil", "boto3")
found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name in {absent!r} else found(name, path, target)

PathFinder.find_spec = find_spec
atexit.register(lambda: print("loaded", *(name for name in HEAVY if name in sys.modules)))
sys.argv = ["streammeta", *{words!r}]
from streammeta.cli.main import main
main()
"""


@pytest.mark.process
@pytest.mark.parametrize("absent", [(), ("pandas", "pyspark", "psutil")], ids=["spark", "no spark"])
def test_a_small_plan_is_made_and_applied_without_pandas_and_spark(
    absent: tuple[str, ...], bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    state.objects = {i: MapObject(COMMITTED, size=10) for i in range(30)}
    for object_id in range(31):
        bucket.put(own(object_id))
    folder = str(tmp_path / "p")
    plan = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint, "--plan", folder]
    for words in (plan, ["reconcile", "apply", "--plan", folder, "--yes"]):
        code = RUN.format(absent=absent, words=words)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "loaded", done.stdout
    assert bucket.keys().isdisjoint({own(30)})


PANDAS_AFTERWARDS = """
from streammeta.reconcile.parquet.arrow_start import start_arrow
start_arrow()
import pyarrow as pa
assert pa.table({"a": [1, 2]}).to_pandas()["a"].tolist() == [1, 2]
import pandas
assert pa.array(pandas.Series([1, 2])).to_pylist() == [1, 2]
"""


@pytest.mark.process
def test_arrow_converts_to_pandas_once_that_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PANDAS_AFTERWARDS],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
