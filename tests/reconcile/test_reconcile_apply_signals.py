"""Signals while a plan is applied or undone: whole batches on record, the rest for the next run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.controller.trust.audit.check import split, verify
from streammeta.reconcile import undo as undo_module
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.cluster.lease import lease_prefix
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.undo import undo
from tests.kit.hung_process import output_of
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import OWN, FakeMap, LocalBucket, Scene, own

LIVE = range(40)
ORPHANS = range(100, 130)
A_SECOND = 10
"""Keys that a run deletes in one second, which is a batch in the process."""

NOTICED = "stopping after the current work. Another signal stops at once"


@pytest.fixture
def folder(scene: Scene) -> Path:
    """A plan with candidates for three batches."""
    scene.fill(LIVE, ORPHANS)
    folder = scene.root / "p"
    plan(
        PlanConfig(
            scene.bucket.address, (scene.endpoint,), folder, max_share=0.5, engine=EngineName.LOCAL
        )
    )
    return folder


class CheckedAt(list[list[int]]):
    """The questions to the controller; each about a batch waits until `act` has been done once."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act
        self._has_acted = False
        self._lock = threading.Lock()

    def append(self, ids: list[int]) -> None:
        super().append(ids)
        with self._lock:
            if len(ids) > 1 and not self._has_acted:
                self._has_acted = True
                self._act()


@contextmanager
def applying(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Apply the plan by the command, in a process of its own."""
    line = [
        *(sys.executable, "-m", "streammeta.cli.main", "reconcile", "apply", "--yes"),
        *("--plan", str(folder), "--rate", str(A_SECOND), "--format", "json", *words),
    ]
    environment = {name: value for name, value in os.environ.items() if "PYSPARK" not in name}
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        yield process


def is_told_to_end(folder: Path) -> bool:
    """Whether the tasks of a run have learned that it is to end."""
    return any(folder.glob("runs/*/signals/ending"))


def terms(bucket: LocalBucket) -> list[dict[str, Any]]:
    """The terms of the lease."""
    prefix = lease_prefix(OWN)
    keys = [info.key for info in bucket.store.list_objects(prefix)]
    return [json.loads(bucket.store.get_range(key)) for key in keys]


def audited(folder: Path) -> Counter[tuple[str, str]]:
    """How often each key has a line of each verdict, in all runs, of which each chain is whole."""
    found: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("runs/*/audit/*.jsonl"):
        (chain,) = verify([split(path.name, path.read_bytes())])
        assert chain.breaks == []
        lines = map(json.loads, path.read_text().splitlines())
        found.update((line["target"]["key"], line["verdict"]) for line in lines)
    return found


def once_each(keys: set[str]) -> Counter[tuple[str, str]]:
    return Counter((key, verdict) for key in keys for verdict in ("BEGUN", "OK"))


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("local", signal.SIGTERM),
        ("local", signal.SIGINT),
        pytest.param("spark", signal.SIGTERM, marks=pytest.mark.spark),
    ],
)
def test_a_signal_ends_an_apply_after_the_batches_under_way_and_the_next_one_goes_on(
    bucket: LocalBucket, state: FakeMap, folder: Path, engine: str, number: int
) -> None:
    orphans = {own(i) for i in ORPHANS}

    def end() -> None:
        process.send_signal(number)
        wait_until(lambda: is_told_to_end(folder), "the sign to all tasks")

    with applying(folder, "--engine", engine) as process:
        state.checks = CheckedAt(end)
        said, rest = output_of(process, 200)

    assert process.returncode == 1, rest
    name = signal.Signals(number).name
    assert f"{name}: {NOTICED}\n" in rest
    assert "Traceback" not in rest
    left = orphans & bucket.keys()
    deleted = orphans - left
    assert 0 < len(deleted) <= A_SECOND, "a batch of each task that was under way, and no more"
    answer = json.loads(said)
    assert answer["error"] == {
        "code": "INTERRUPTED",
        "message": f"ended by {name}: {len(deleted)} of {len(orphans)} candidates were settled,"
        f" {len(left)} remain",
        "hint": "run apply again for the rest",
    }
    assert answer["left"] == len(left)
    assert [(row["outcome"], row["keys"]) for row in answer["outcomes"]] == [
        ("deleted", len(deleted))
    ]
    assert [term["expires_ms"] for term in terms(bucket)] == [0], "the lease is given back"
    assert audited(folder) == once_each(deleted)

    assert apply(ApplyConfig(folder, delete=True, engine=EngineName.LOCAL)).complete
    assert bucket.keys() == {own(i) for i in LIVE}
    assert audited(folder) == once_each(orphans)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("second", "exit_code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)]
)
def test_a_second_signal_ends_an_apply_at_once(
    bucket: LocalBucket, state: FakeMap, folder: Path, second: int, exit_code: int
) -> None:
    def end() -> None:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_told_to_end(folder), "the first to be noticed")
        process.send_signal(second)
        process.wait(timeout=60)  # while the batch is unanswered

    before = bucket.keys()
    with applying(folder, "--engine", "local", "--wait", "600") as process:
        state.checks = CheckedAt(end)
        output_of(process, 100)

    assert process.returncode == exit_code
    assert bucket.keys() == before
    assert apply(ApplyConfig(folder, delete=True, engine=EngineName.LOCAL)).complete
    assert bucket.keys() == {own(i) for i in LIVE}


@pytest.fixture
def kept_signals() -> Iterator[list[int]]:
    """Signals that nothing has taken; the process of the tests lives on."""
    taken: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda n, _: taken.append(n)) for number in numbers}
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_ends_an_undo_after_the_batch_under_way_and_the_next_one_goes_on(
    bucket: LocalBucket,
    folder: Path,
    kept_signals: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = bucket.keys()
    apply(ApplyConfig(folder, delete=True, quarantine=True, engine=EngineName.LOCAL))
    bring_back = undo_module._restore_batch

    def bring_back_and_end(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return bring_back(*arguments)

    monkeypatch.setattr(undo_module, "_BATCH", A_SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(undo_module, "_restore_batch", bring_back_and_end)
        words = ["reconcile", "undo", "--plan", str(folder), "--format", "json"]
        assert run_cli(cli, words) == 1
    said, rest = capfd.readouterr()
    assert kept_signals == []
    assert f"SIGTERM: {NOTICED}\n" in rest
    answer = json.loads(said)
    assert answer["outcomes"] == [{"outcome": "restored", "keys": 10, "bytes": 100}]
    assert answer["error"] == {
        "code": "INTERRUPTED",
        "message": "ended by SIGTERM: 10 objects were settled, up to 20 candidates of the plan"
        " remain",
        "hint": "run undo again for the rest",
    }
    assert len(bucket.keys() - before) == 20, "copies in quarantine"
    assert [term["expires_ms"] for term in terms(bucket)] == [0], "the lease is given back"
    assert undo(folder).complete
    assert bucket.keys() == before


def test_a_signal_in_the_last_batch_leaves_nothing_to_do(bucket: LocalBucket, folder: Path) -> None:
    before = bucket.keys()
    apply(ApplyConfig(folder, delete=True, quarantine=True, engine=EngineName.LOCAL))
    has_begun = threading.Event()
    done = undo(folder, progress=lambda _: has_begun.set(), is_ending=has_begun.is_set)
    assert done.complete
    assert bucket.keys() == before
