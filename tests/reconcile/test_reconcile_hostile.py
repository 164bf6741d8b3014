"""Hostile rounds: plan and apply again and again while brokers go on and everything misbehaves.

After each round every acknowledged row is read back by its digest, so that nothing live was
deleted; and what had been an orphan beyond its grace is gone two rounds later at the latest. A
round is an attempt with an accident, then one with brokers at work alone.

Accidents that others had, with the tests that have them here, are on docs/reconciliation.md.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.reconcile.apply import ApplyConfig, ApplyResult, apply
from streammeta.reconcile.cluster import identity, lease
from streammeta.reconcile.deletion import tasks
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.engines import local_engine
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans.plan_folder import PLAN_FILE
from streammeta.reconcile.vocabulary.errors import LeaseError
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.address import StoreAddress
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.seeds import seeds
from tests.reconcile.fake_controller import OWN, FakeMap, serving
from tests.reconcile.hostile_world import GRACE_MS, DriverKilledError, Faults, World

# The package has functions of these names.
applying = importlib.import_module("streammeta.reconcile.apply")
planning = importlib.import_module("streammeta.reconcile.plan")

URI = "s3://hostile?endpoint=http://127.0.0.1:1"
DAY_MS = 24 * 3_600_000

pytestmark = pytest.mark.timeout(900)


@dataclass
class Scene:
    """One world, the folders of its plans, and the counts of what happened."""

    world: World
    endpoint: str
    folder: Path
    skew_ms: int = 0
    opened: Any = None
    is_shared: bool = False
    """Whether several runs are at work; else a lease that was left behind is of a dead process."""

    def __post_init__(self) -> None:
        self.numbers = count()
        self.plans: list[Path] = []
        self.said: Counter[str] = Counter()
        self.opened = self.world.bucket

    def plan(self, **changes: Any) -> Path:
        """Make a plan while brokers go on."""
        folder = self.folder / f"plan-{next(self.numbers)}"
        config = PlanConfig(
            store=StoreAddress.parse(URI),
            connect=(self.endpoint,),
            folder=folder,
            grace_ms=GRACE_MS,
            unsafe_grace=True,
            max_share=1,
            patience_s=1,
            engine=EngineName.LOCAL,
        )
        made = plan(replace(config, **changes))
        self.plans.append(folder)
        self.said["plans"] += 1
        self.said["guards"] += bool(made.failed_guards)
        print(f"  {[(str(v), t.keys) for v, t in made.classes.items()]}")
        return folder

    def apply(self, folder: Path) -> ApplyResult:
        """Apply a plan while brokers go on."""
        done = apply(ApplyConfig(folder, delete=True, keys_per_s=100_000, engine=EngineName.LOCAL))
        print(f"  {dict(done.outcomes)} {done.problems}")
        for outcome, tally in done.outcomes.items():
            self.said[outcome] += tally.keys
        return done

    def attempt(self, work: Callable[[], object]) -> None:
        """Do something that may fail as users see failures, and in no other way."""
        self.world.is_quiet = False
        try:
            work()
        except StorageError as error:
            print(f"  {type(error).__name__}: {error}")
            self.said[type(error).__name__] += 1
        except DriverKilledError:
            self.said["killed"] += 1
        finally:
            self.world.is_quiet = True
            self.world.state.refuse = None
            self.world.state.broken_copies = 0


def plan_and_apply(scene: Scene) -> None:
    scene.apply(scene.plan())


def skewed(scene: Scene) -> None:
    scene.skew_ms = scene.world.rng.choice((-1, 1)) * 9 * 60_000
    plan_and_apply(scene)


def with_faults(**faults: Any) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        scene.world.faults = Faults(**faults)
        plan_and_apply(scene)

    return run


def lagging(scene: Scene) -> None:
    scene.world.bucket.stale = list(MemoryObjectStore.list_objects(scene.world.bucket))
    scene.world.pass_time(90_000)
    with_faults(lags=True)(scene)


def killed(scene: Scene) -> None:
    folder = scene.plan()
    for _ in range(3):
        scene.world.faults = Faults(requests_left=scene.world.rng.randrange(4, 25))
        scene.attempt(lambda: scene.apply(folder))
        scene.world.is_quiet = False
    scene.world.faults = Faults()
    scene.apply(folder)


def two_at_once(scene: Scene) -> None:
    folders = [scene.plan(), scene.plan()]
    errors: list[BaseException] = []

    def run(folder: Path) -> None:
        try:
            scene.apply(folder)
        except StorageError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(folder,)) for folder in folders]
    scene.is_shared = True
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scene.is_shared = False
    assert all(isinstance(error, LeaseError) for error in errors)
    assert len(errors) < 2, errors
    scene.said["second run refused"] += len(errors)


def plan_of_yesterday(scene: Scene) -> None:
    folder = scene.plan()
    scene.world.pass_time(300_000)
    scene.apply(folder)  # stale by minutes: harmless
    scene.skew_ms = DAY_MS + 1
    with pytest.raises(StorageError, match="24 h old"):
        scene.apply(folder)
    scene.said["plan of yesterday refused"] += 1


def restored_from_old(scene: Scene) -> None:
    world = scene.world
    folder = scene.plan()
    world.shown = world.map_of_before(world.rng.randrange(len(world.history) // 2))
    try:
        scene.attempt(lambda: scene.apply(folder))
        world.is_quiet = False
        plan_and_apply(scene)
    finally:
        world.shown = world.map


def empty_map(scene: Scene) -> None:
    scene.world.shown = scene.world.map_of_before(1)  # with the claim on the bucket alone
    try:
        plan_and_apply(scene)
    finally:
        scene.world.shown = scene.world.map


def wrong_bucket(scene: Scene) -> None:
    other = MemoryObjectStore()
    FakeMap(cluster_uuid="uuid-2").mark(other)
    folder = scene.plan()
    scene.opened = other
    with pytest.raises(StorageError, match="uuid-2"):
        scene.apply(folder)
    scene.said["wrong bucket refused"] += 1


ACCIDENTS: dict[str, Callable[[Scene], None]] = {
    "none": plan_and_apply,
    "listing ends early": with_faults(ends_early=0.03),
    "listing repeats": with_faults(repeats=0.3),
    "listing lags": lagging,
    "clock skew": skewed,
    "SlowDown": with_faults(slow_down=0.3),
    "500s": with_faults(fails=0.05),
    "leader changes": with_faults(leader_changes=0.3),
    "driver killed": killed,
    "two at once": two_at_once,
    "plan of yesterday": plan_of_yesterday,
    "map of an old backup": restored_from_old,
    "empty map": empty_map,
    "wrong bucket": wrong_bucket,
    "everything": with_faults(
        ends_early=0.01, repeats=0.1, slow_down=0.1, fails=0.01, leader_changes=0.1
    ),
}


@pytest.fixture
def new_scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Scene]]:
    """Make a scene from a seed; the product sees its bucket and its time."""
    shown: dict[str, Scene] = {}

    def now_ms() -> int:
        return shown["scene"].world.now_ms + shown["scene"].skew_ms

    for module in (identity, local_engine, tasks):
        monkeypatch.setattr(module, "open_object_store", lambda _uri: shown["scene"].opened)
    monkeypatch.setattr(planning, "_now_ms", now_ms)
    monkeypatch.setattr(applying, "time", SimpleNamespace(time_ns=lambda: now_ms() * 1_000_000))
    monkeypatch.setattr(local_engine, "_LISTINGS_AT_ONCE", 1)  # the seed is all there is
    monkeypatch.setattr(tasks, "_HEADS_AT_ONCE", 1)
    monkeypatch.setattr(tasks, "_PAUSES_S", (0.001,) * 5)
    monkeypatch.setattr(lease, "_has_ended", lambda _term: not shown["scene"].is_shared)
    served: list[Any] = []

    def make(seed: int) -> Scene:
        world = World(random.Random(seed), time.time_ns() // 1_000_000)
        server = serving(world.state)
        served.append(server)
        shown["scene"] = Scene(world, server.__enter__(), tmp_path)
        return shown["scene"]

    yield make
    for server in served:
        server.__exit__(None, None, None)


def run_rounds(scene: Scene, accidents: list[str]) -> None:
    world = scene.world
    due: list[set[Any]] = [set(), set()]
    for number, name in enumerate(accidents):
        world.pass_time(200_000)
        due.append(world.orphans(world.now_ms - GRACE_MS))
        scene.said["orphans"] += len(due[-1] - due[-2])
        scene.attempt(lambda name=name: ACCIDENTS[name](scene))  # type: ignore[misc]
        world.faults, scene.skew_ms, scene.opened = Faults(), 0, world.bucket
        scene.attempt(lambda: plan_and_apply(scene))
        rows = world.check_rows()
        left = due[-2] & world.orphans(world.now_ms)
        assert not left, f"round {number} ({name}): orphans of the round before are left"
        print(f"round {number}, {name}: {rows} rows, {len(due[-1])} orphans due")


def run_ten(scene: Scene, seed: int) -> None:
    print(f"seed {seed}")
    names = [*ACCIDENTS]
    random.Random(seed).shuffle(names)
    run_rounds(scene, names[:10])
    print(dict(scene.said))
    assert scene.said["orphans"] >= 1
    assert scene.said[Outcome.DELETED] >= 1
    assert all((folder / PLAN_FILE).exists() for folder in scene.plans)


def test_ten_rounds_with_an_accident_each(new_scene: Callable[[int], Scene]) -> None:
    run_ten(new_scene(4_242), 4_242)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_two_hundred_rounds(new_scene: Callable[[int], Scene], seed: int) -> None:
    run_ten(new_scene(seed), seed)


@pytest.mark.parametrize("fault", ["gone", "changed"])
def test_the_check_of_rows_sees_each_loss(new_scene: Callable[[int], Scene], fault: str) -> None:
    world = new_scene(7).world
    world.pass_time(200_000)
    world.check_rows()
    listed: Any = world.map.query(ListStreamSetObjects(node_id=7))
    key = key_for(listed.objects[-1].object_id, OWN)
    data = world.bucket.objects()[key]
    if fault == "gone":
        world.bucket.delete_many([key])
    else:
        world.bucket.put(key, data.replace(b"row ", b"low ", 1))
    with pytest.raises(AssertionError):
        world.check_rows()
