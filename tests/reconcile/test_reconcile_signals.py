"""Signals while a plan is made: an error that says what to do, no half plan, no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from streammeta.cli.framework.output import CommandError
from streammeta.cli.reconcile.reconcile_options import ending_event, interruptible
from streammeta.reconcile.engines.local_engine import LocalEngine, _Budget, _write_parts
from streammeta.reconcile.listing import inventory as inventory_module
from streammeta.reconcile.listing.inventory import Inventory, InventoryFile
from streammeta.reconcile.vocabulary.tables import LISTING_COLUMNS, arrow_schema
from streammeta.storage.errors import StoreRejectedError
from tests.kit.hung_process import output_of
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import Scene

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.process
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("listing file:", signal.SIGTERM),
        ("comparing with", signal.SIGINT),
        pytest.param("starting Spark", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("starting Spark", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("listing file:", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("comparing with", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_spark_plan_without_a_trace(scene: Scene, stage: str, number: int) -> None:
    scene.fill(range(200))
    folder = scene.root / "plans" / "plan"
    words = [
        *(sys.executable, "-m", "streammeta.cli.main", "reconcile", "plan", "--format", "json"),
        *("--store", scene.bucket.uri, "--connect", scene.endpoint, "--plan", str(folder)),
        *("--engine", "spark"),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith(stage) for line in process.stderr), "the stage never came"
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said, rest = output_of(process, 120)
    assert process.returncode == 1, rest
    error = json.loads(said)["error"]
    assert error["code"] == "INTERRUPTED", (error, rest)
    assert error["message"].startswith(f"ended by {signal.Signals(number).name}: no plan was")
    assert error["hint"] == "run the command again"
    assert "Traceback" not in rest
    wait_until(lambda: not _alive(started), "Spark's processes to end", 120)
    assert list(folder.parent.glob("*")) == []
    assert list(folder.parent.glob(".*")) == []


def _environment() -> dict[str, str]:
    """An environment without what the session of other tests has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK")}


def _alive(started: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.timeout(60)
def test_a_signal_during_a_local_listing_has_all_shards_give_up(tmp_path: Path) -> None:
    nothing = arrow_schema(LISTING_COLUMNS).empty_table().combine_chunks().to_batches()
    (rows,) = nothing or [pa.RecordBatch.from_pylist([], arrow_schema(LISTING_COLUMNS))]
    signalled = threading.Event()

    def endless(is_first: bool) -> Iterator[pa.RecordBatch]:
        yield rows
        if is_first:
            os.kill(os.getpid(), signal.SIGTERM)
            signalled.set()
        while True:
            yield rows

    parts = [endless(number == 0) for number in range(30)]
    with pytest.raises(CommandError, match="SIGTERM"):  # noqa: SIM117
        with interruptible("nothing", "go on"):
            _write_parts(parts, _Budget(None), tmp_path / "listing", 2)  # type: ignore[arg-type]
    assert signalled.is_set()


MANY_PIECES = 300_000


class Endless:
    """A bucket in which a file has very many pieces; a signal comes with the first."""

    def __init__(self) -> None:
        self.pieces = 0

    def get_range(self, _key: str, _start: int, _end: int) -> bytes:
        self.pieces += 1
        if self.pieces == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.0002)  # so that all pieces take longer than a starved main thread waits
        if self.pieces == MANY_PIECES:
            raise StoreRejectedError("all pieces were loaded")
        return b""

    def close(self) -> None:
        pass


@pytest.mark.timeout(300)
def test_a_signal_ends_an_inventory_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Endless()
    monkeypatch.setattr(inventory_module, "open_with_path", lambda _address: (store, ""))
    file = InventoryFile("one.parquet", 2**62)
    listed = Inventory("s3://lists/manifest.json", "b", 1, "parquet", (), (file,), True)
    with pytest.raises(CommandError, match="SIGTERM"):  # noqa: SIM117
        with interruptible("nothing", "go on"):
            LocalEngine().list_inventory(listed, "namespace", tmp_path / "listing")
    assert 0 < store.pieces < MANY_PIECES


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_breaks_off_and_a_second_is_as_before(number: int) -> None:
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in SIGNALS}
    try:
        with pytest.raises(CommandError) as told, interruptible("half of it", "begin again"):
            _raise_twice(number)
        assert (told.value.code, told.value.hint) == ("INTERRUPTED", "begin again")
        assert str(told.value) == f"ended by {signal.Signals(number).name}: half of it"
        with ending_event() as ending:
            assert not ending.is_set()
            signal.raise_signal(number)
            assert ending.is_set()
        signal.raise_signal(number)
        assert seen == [number] * 2
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_is_as_before_where_a_library_puts_the_handler_back(number: int) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, _: seen.append(number))
    try:
        with ending_event() as ending:
            handler = signal.getsignal(number)
            signal.raise_signal(number)
            signal.signal(number, handler)
            assert (ending.by, seen) == (signal.Signals(number).name, [])
            signal.raise_signal(number)
            assert seen == [number]
    finally:
        signal.signal(number, before)


def _raise_twice(number: int) -> None:
    """The second comes while what the first has ended is put in order."""
    try:
        signal.raise_signal(number)
    finally:
        signal.raise_signal(number)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_session_leaves_the_handler_of_ctrl_c_as_it_was() -> None:
    from pyspark import SparkContext

    handler = signal.getsignal(signal.SIGINT)
    assert SparkContext._active_spark_context is not None
    assert getattr(handler, "__module__", "") != "pyspark.core.context"


@contextmanager
def breaking_off() -> Iterator[None]:
    """What a library may do when it is broken off: end by another error."""
    try:
        yield
    except KeyboardInterrupt:
        raise ConnectionError("the signal has broken the connection") from None


def test_an_error_of_what_a_signal_breaks_off_is_no_other_end() -> None:
    ends = interruptible("nothing was done", "again")
    with pytest.raises(CommandError) as ended, ends, breaking_off():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == "INTERRUPTED"
    assert "ended by SIGTERM: nothing was done" in str(ended.value)


def test_an_error_without_a_signal_stays_what_it_is() -> None:
    with pytest.raises(ConnectionError), interruptible("nothing was done", "again"):
        raise ConnectionError("no route")
