"""Plan and apply as users run them: Spark, a real store, and controllers behind real gRPC."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest

from controller.cli.main import cli
from controller.cli.output import run_cli
from storage.errors import StorageError
from storage.object_format.object_key import cluster_namespace, key_for
from storage.object_store.factory import open_object_store
from storage.reconcile import plan_folder
from storage.reconcile.apply import ApplyConfig, apply
from storage.reconcile.classify import MapState, Verdict
from storage.reconcile.deletion import Outcome
from storage.reconcile.errors import ConfigurationError, PlanError, ReconcileError
from storage.reconcile.plan import PlanConfig, plan
from storage.reconcile.plan_folder import PlanResult, Tally, read_plan_file, write_plan_file
from tests.reconcile.fake_controller import COMMITTED, FakeMap, MapObject, serving
from tests.storage.s3_servers import running_ministack

pytestmark = pytest.mark.timeout(300)

OWN = cluster_namespace("c1")
OTHER = cluster_namespace("c2")
LONG_AGO_S = 1_700_000_000


class LocalBucket:
    """A folder as a bucket; what is put is old unless told otherwise."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.uri = root.as_uri()
        self.store = open_object_store(self.uri)

    def put(self, key: str, size: int = 10, *, young: bool = False) -> str:
        """Store `size` bytes; gives the key."""
        self.store.put(key, b"x" * size)
        if not young:
            os.utime(self.root / "objects" / key, (LONG_AGO_S, LONG_AGO_S))
        return key

    def keys(self) -> set[str]:
        """All keys."""
        return {info.key for info in self.store.list_objects()}


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket")


@pytest.fixture
def state() -> FakeMap:
    return FakeMap()


@pytest.fixture
def endpoint(state: FakeMap) -> Iterator[str]:
    with serving(state) as where:
        yield where


def own(object_id: int) -> str:
    """The key of an object of this cluster."""
    return key_for(object_id, OWN)


def example_plan(store: str, connect: tuple[str, ...]) -> PlanResult:
    """A plan of cluster c1 without a candidate."""
    return PlanResult(
        cluster_id="c1",
        store=store,
        namespace=OWN,
        connect=connect,
        created_at_ms=3,
        listing_started_ms=2,
        young_from_ms=1,
        map_end_offset=9,
        map_epoch=4,
        next_object_id=100,
        map_objects=0,
        classes={},
        unfinished_uploads=0,
        guards=(),
    )


def verdicts_of(folder: Path) -> dict[str, str]:
    """Key -> verdict, from the plan's table."""
    table = pq.read_table(folder / plan_folder.VERDICTS)
    return {row["key"]: row["verdict"] for row in table.to_pylist()}


def candidates_of(folder: Path) -> set[str]:
    """The candidates' keys."""
    table = pq.read_table(folder / plan_folder.CANDIDATES)
    return {row["key"] for row in table.to_pylist()}


def plant(bucket: LocalBucket, state: FakeMap) -> dict[str, Verdict]:
    """Put one or more of every kind in bucket and map; gives what each key is."""
    state.objects = {
        **{i: MapObject(COMMITTED, size=10) for i in range(100, 130)},
        130: MapObject(MapState.LINKED, size=10),
        131: MapObject(MapState.PREPARED),
        132: MapObject(MapState.MARK_DESTROYED, size=10),
        133: MapObject(COMMITTED, size=11),
        134: MapObject(COMMITTED, size=5000, attributes=1),
        140: MapObject(COMMITTED, size=10),
        141: MapObject(MapState.PREPARED),
        142: MapObject(COMMITTED, size=10, time_ms=2**52),
    }
    expected = {bucket.put(own(i)): Verdict.LIVE for i in range(100, 131)}
    expected |= {
        bucket.put(own(131)): Verdict.IN_FLIGHT,
        bucket.put(own(132)): Verdict.DELETING,
        bucket.put(own(133)): Verdict.SIZE_MISMATCH,
        bucket.put(own(134)): Verdict.LIVE,
        bucket.put(own(200)): Verdict.ORPHAN,
        bucket.put(own(201), size=0): Verdict.ORPHAN,
        bucket.put(own(999)): Verdict.ORPHAN,
        bucket.put(own(202), young=True): Verdict.TOO_YOUNG,
        bucket.put(own(1000)): Verdict.NOT_ISSUED,
        bucket.put(key_for(200, OTHER)): Verdict.OTHER_CLUSTER,
        bucket.put(f"{own(203)}.bak"): Verdict.FOREIGN,
        bucket.put(f"0{own(204)}"): Verdict.FOREIGN,
        bucket.put("zoo/readme"): Verdict.FOREIGN,
        bucket.put("Ümlaut"): Verdict.FOREIGN,
        own(140): Verdict.MISSING,
        own(142): Verdict.UNLISTED,
    }
    return expected


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_plan_and_apply_over_every_kind_of_key(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    expected = plant(bucket, state)
    before = bucket.keys()
    folder = tmp_path / "plans" / "p"
    config = PlanConfig(store=bucket.uri, connect=(endpoint,), folder=folder)
    lines: list[str] = []

    made = plan(config, lines.append)

    orphans = {key for key, verdict in expected.items() if verdict is Verdict.ORPHAN}
    assert verdicts_of(folder) == expected
    assert candidates_of(folder) == orphans
    assert made == read_plan_file(folder)
    assert made.classes[Verdict.ORPHAN] == Tally(3, 20)
    assert made.classes[Verdict.MISSING] == Tally(1, 0)
    assert {v: t.keys for v, t in made.classes.items()} == {
        v: list(expected.values()).count(v) for v in set(expected.values())
    }
    assert (made.cluster_id, made.map_end_offset, made.next_object_id) == ("c1", 9, 1000)
    assert made.failed_guards == ()
    assert {path.name for path in folder.parent.iterdir()} == {"p"}
    assert bucket.keys() == before, "a plan deletes nothing"
    assert f"listed {len(before)} keys" in lines

    dry = apply(ApplyConfig(folder))
    assert dry.outcomes == {Outcome.WOULD_DELETE: Tally(3, 20)}
    assert set(dry.examples) == orphans
    assert bucket.keys() == before, "a dry run deletes nothing"

    state.objects[200] = MapObject(COMMITTED, size=10)
    done = apply(ApplyConfig(folder, delete=True))
    assert done.complete
    assert done.outcomes == {Outcome.DELETED: Tally(2, 10), Outcome.KEPT: Tally(1, 10)}
    assert bucket.keys() == before - orphans | {own(200)}
    undo = [json.loads(line) for p in done.run_folder.glob("undo/*") for line in p.open()]
    assert {record["key"] for record in undo} == orphans - {own(200)}

    again = apply(ApplyConfig(folder, delete=True))
    assert again.outcomes == {Outcome.GONE: Tally(2, 10), Outcome.KEPT: Tally(1, 10)}
    assert bucket.keys() == before - orphans | {own(200)}

    state.refuse = grpc.StatusCode.INTERNAL
    with pytest.raises(ReconcileError, match="refused"):
        apply(ApplyConfig(folder, delete=True))


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_when_the_leader_refuses_during_apply_nothing_is_deleted(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    plant(bucket, state)
    before = bucket.keys()
    config = PlanConfig(store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p")
    plan(config)

    def refuse_from_now(line: str) -> None:
        if line.startswith("checking"):
            state.refuse = grpc.StatusCode.INTERNAL

    done = apply(ApplyConfig(tmp_path / "p", delete=True), refuse_from_now)
    assert not done.complete
    assert set(done.outcomes) <= {Outcome.FAILED, Outcome.SKIPPED}
    assert "told to refuse" in done.problems[0]
    assert bucket.keys() == before


@pytest.mark.spark
@pytest.mark.s3
@pytest.mark.usefixtures("spark")
def test_a_random_bucket_in_s3_agrees_with_the_map_it_was_made_from(
    state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    seed = 20_261
    print(f"seed {seed}")
    chance = random.Random(seed)
    with running_ministack() as server:
        server.create_bucket("data")
        uri = server.uri("data")
        store = open_object_store(uri)
        known = set(chance.sample(range(1000), 60))
        stored = set(chance.sample(sorted(known), 50)) | set(chance.sample(range(1000), 20))
        late = chance.choice(sorted(set(range(1000)) - known - stored))
        state.objects = {i: MapObject(COMMITTED, size=i % 7) for i in known}
        for object_id in stored:
            store.put(own(object_id), b"x" * (object_id % 7))
        store.start_multipart(own(2000))

        def commit_during_the_listing() -> None:
            store.put(own(late), b"")
            state.objects[late] = MapObject(COMMITTED, size=0, time_ms=2**52)

        state.on_snapshot = commit_during_the_listing
        config = PlanConfig(
            store=uri, connect=(endpoint,), folder=tmp_path / "p", grace_ms=0, max_share=1.0
        )
        made = plan(config)

        found = verdicts_of(tmp_path / "p")
        orphans = {own(i) for i in stored - known}
        assert {key for key, v in found.items() if v == Verdict.MISSING} == {
            own(i) for i in known - stored
        }
        assert {key for key, v in found.items() if v == Verdict.LIVE} == {
            own(i) for i in known & stored
        }
        assert candidates_of(tmp_path / "p") == orphans
        assert found[own(late)] == Verdict.UNLISTED
        assert made.unfinished_uploads == 1
        uploads = pq.read_table(tmp_path / "p" / "uploads")
        assert uploads["key"].to_pylist() == [own(2000)]
        done = apply(ApplyConfig(tmp_path / "p", store=uri, delete=True))
        assert done.outcomes[Outcome.DELETED].keys == len(orphans)
        left = {info.key for info in store.list_objects()}
        assert left == {own(i) for i in known & stored} | {own(late)}
        for path in (tmp_path / "p").rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert b"secretKey" not in content
                assert b"accessKey" not in content
        missing = replace(config, store=server.uri("nobucket"), folder=tmp_path / "q")
        with pytest.raises(StorageError, match="nobucket"):
            plan(missing)
        assert not (tmp_path / "q").exists()


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_plan_whose_guards_failed_is_a_report_that_can_t_be_applied(
    bucket: LocalBucket,
    state: FakeMap,
    endpoint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket.put(own(1))
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint]
    words += ["--plan", str(tmp_path / "p")]

    assert run_cli(cli, [*words, "--format", "json"]) == 1
    failure = json.loads(capsys.readouterr().out)["error"]
    assert failure["code"] == "GUARD"
    assert "empty_map, max_share" in failure["message"]
    assert candidates_of(tmp_path / "p") == {own(1)}
    with pytest.raises(PlanError, match=r"report only.*empty_map.*--allow-empty-map"):
        apply(ApplyConfig(tmp_path / "p", delete=True))
    assert run_cli(cli, words) == 1
    assert "never overwritten" in capsys.readouterr().err
    assert bucket.keys() == {own(1)}

    words[-1] = str(tmp_path / "q")
    assert run_cli(cli, [*words, "--allow-empty-map", "--max-share", "1"]) == 0
    assert "orphan\t1\t10" in capsys.readouterr().out
    dry = ["reconcile", "apply", "--plan", str(tmp_path / "q"), "--format", "json"]
    assert run_cli(cli, dry) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["examples"] == [{"key": own(1)}]
    assert said["outcomes"] == [{"outcome": "would_delete", "keys": 1, "bytes": 10}]
    assert bucket.keys() == {own(1)}
    assert run_cli(cli, [*dry, "--yes"]) == 0
    assert bucket.keys() == set()


def test_a_plan_of_another_cluster_or_bucket_is_not_applied(
    endpoint: str, state: FakeMap, tmp_path: Path
) -> None:
    (tmp_path / "p").mkdir()
    made = example_plan(store=tmp_path.as_uri(), connect=(endpoint,))
    write_plan_file(tmp_path / "p", made)
    with pytest.raises(PlanError, match="plan is of the store"):
        apply(ApplyConfig(tmp_path / "p", store=f"{tmp_path.as_uri()}/other"))
    state.cluster_id = "c2"
    with pytest.raises(PlanError, match="plan is of cluster 'c1'"):
        apply(ApplyConfig(tmp_path / "p"))


def test_the_namespace_of_another_cluster_is_refused(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    other = PlanConfig(
        store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p", namespace=OTHER
    )
    with pytest.raises(ConfigurationError, match="belongs to another cluster"):
        plan(other)
    assert not (tmp_path / "p").exists()


def test_unreachable_controllers_make_no_plan(bucket: LocalBucket, tmp_path: Path) -> None:
    with serving(FakeMap()) as gone:
        pass
    config = PlanConfig(store=bucket.uri, connect=(gone,), folder=tmp_path / "p", patience_s=0.3)
    with pytest.raises(ReconcileError, match="no leader answered"):
        plan(config)
    assert list(tmp_path.iterdir()) == [bucket.root]


@pytest.mark.parametrize(
    "change", [{"connect": ()}, {"grace_ms": -1}, {"max_share": 1.1}, {"store": "b"}]
)
def test_what_makes_no_sense_is_refused(
    bucket: LocalBucket, endpoint: str, tmp_path: Path, change: dict[str, object]
) -> None:
    config = PlanConfig(store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p")
    with pytest.raises(ConfigurationError):
        plan(replace(config, **change))  # type: ignore[arg-type]
