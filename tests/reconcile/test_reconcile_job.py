"""Plan and apply on both engines, with a real store and controllers behind real gRPC."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.cluster.lease import held_lease, is_lease_key
from streammeta.reconcile.deletion.order import Outcome
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import read_plan_file
from streammeta.reconcile.vocabulary.errors import LeaseError, PlanError, ReconcileError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Verdict
from streammeta.storage.cluster_files.bucket_marker import marker_key
from streammeta.storage.errors import AccessDeniedError, StorageError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import MultipartUpload
from streammeta.storage.object_store.s3.s3 import S3ObjectStore
from streammeta.v1 import common_pb2
from tests.kit.real_cluster import streammeta
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import (
    COMMITTED,
    OTHER,
    OWN,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    own,
)
from tests.reconcile.spark_when_slow import spark_when_slow
from tests.storage.s3_servers import running_ministack

pytestmark = pytest.mark.timeout(300)


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
        **{i: MapObject(COMMITTED, size=1) for i in range(300, 500)},
        130: MapObject(common_pb2.OBJECT_STATE_LINKED, size=10),
        131: MapObject(common_pb2.OBJECT_STATE_PREPARED),
        132: MapObject(common_pb2.OBJECT_STATE_MARK_DESTROYED, size=10),
        133: MapObject(COMMITTED, size=11),
        134: MapObject(COMMITTED, size=5000, attributes=1),
        140: MapObject(COMMITTED, size=10),
        141: MapObject(common_pb2.OBJECT_STATE_PREPARED),
        142: MapObject(COMMITTED, size=10, time_ms=2**52),
    }
    expected = {bucket.put(own(i)): Verdict.LIVE for i in range(100, 130)}
    expected |= {bucket.put(own(i), size=1): Verdict.LIVE for i in range(300, 500)}
    expected |= {
        marker_key(OWN): Verdict.MARKER,
        bucket.put(own(130)): Verdict.LINKED,
        bucket.put(own(131)): Verdict.IN_FLIGHT,
        bucket.put(own(132)): Verdict.DELETING,
        bucket.put(own(133)): Verdict.SIZE_MISMATCH,
        bucket.put(own(134)): Verdict.LIVE,
        bucket.put(own(200)): Verdict.ORPHAN,
        bucket.put(own(201), size=0): Verdict.ORPHAN,
        bucket.put(own(999)): Verdict.ORPHAN,
        bucket.put(own(202), young=True): Verdict.TOO_YOUNG,
        bucket.put(key_for(200, OTHER)): Verdict.OTHER_CLUSTER,
        bucket.put(f"{own(203)}.bak"): Verdict.FOREIGN,
        bucket.put(f"0{own(204)}"): Verdict.FOREIGN,
        bucket.put("zoo/readme"): Verdict.FOREIGN,
        bucket.put("Ümlaut"): Verdict.FOREIGN,
        own(140): Verdict.MISSING,
        own(142): Verdict.UNLISTED,
    }
    return expected


def test_plan_and_apply_over_every_kind_of_key(
    engine: EngineName, bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    expected = plant(bucket, state)
    before = bucket.keys()
    folder = tmp_path / "plans" / "p"
    config = PlanConfig(store=bucket.address, connect=(endpoint,), folder=folder, engine=engine)
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
    assert f"listed {len(before) + 1} keys" in lines

    dry = apply(ApplyConfig(folder, engine=engine))
    assert dry.outcomes == {Outcome.WOULD_DELETE: Tally(3, 20)}
    assert set(dry.examples) == orphans
    assert bucket.keys() == before, "a dry run deletes nothing"

    state.objects[200] = MapObject(COMMITTED, size=10)
    done = apply(ApplyConfig(folder, engine=engine, delete=True))
    assert done.complete
    assert done.outcomes == {Outcome.DELETED: Tally(2, 10), Outcome.KEPT: Tally(1, 10)}
    assert bucket.keys() == before - orphans | {own(200)}
    undo = [
        json.loads(line)
        for p in done.run_folder.glob("undo/*")
        for line in p.read_text().splitlines()
    ]
    assert {record["key"] for record in undo} == orphans - {own(200)}

    again = apply(ApplyConfig(folder, engine=engine, delete=True))
    assert again.outcomes == {Outcome.GONE: Tally(2, 10), Outcome.KEPT: Tally(1, 10)}
    assert bucket.keys() == before - orphans | {own(200)}

    state.refuse = grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(ReconcileError, match="rejected"):
        apply(ApplyConfig(folder, engine=engine, delete=True))


def test_names_that_are_not_utf_8_are_foreign_and_stay(
    engine: EngineName, bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    plant(bucket, state)
    names = (b"\xff\xfe", b"zoo/\xe4", os.fsencode(own(200)) + b"\xff", b"a\xff/x")
    files = [bucket.root / "objects" / os.fsdecode(name) for name in names]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"by hand")
        os.utime(file, (1, 1))
    config = PlanConfig(
        store=bucket.address, connect=(endpoint,), folder=tmp_path / "p", engine=engine
    )
    plan(config)

    found = verdicts_of(tmp_path / "p")
    shown = {r"\xff\xfe", r"zoo/\xe4", own(200) + r"\xff", r"a\xff/x"}
    assert {found[key] for key in shown} == {Verdict.FOREIGN}
    done = apply(ApplyConfig(tmp_path / "p", engine=engine, delete=True))
    assert done.outcomes == {Outcome.DELETED: Tally(3, 20)}
    assert all(file.exists() for file in files)


@spark_when_slow
def test_when_the_leader_refuses_during_apply_nothing_is_deleted(
    engine: EngineName, bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    plant(bucket, state)
    before = bucket.keys()
    config = PlanConfig(
        store=bucket.address, connect=(endpoint,), folder=tmp_path / "p", engine=engine
    )
    plan(config)

    def refuse_from_now(line: str) -> None:
        if line.startswith("checking"):
            state.refuse = grpc.StatusCode.FAILED_PRECONDITION

    done = apply(ApplyConfig(tmp_path / "p", engine=engine, delete=True), refuse_from_now)
    assert not done.complete
    assert set(done.outcomes) <= {Outcome.FAILED, Outcome.SKIPPED}
    assert "told to refuse" in done.problems[0]
    assert bucket.keys() == before


@spark_when_slow
def test_while_another_run_deletes_nothing_is_deleted_by_this_one(
    engine: EngineName, bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    plant(bucket, state)
    before = bucket.keys()
    plan(
        PlanConfig(store=bucket.address, connect=(endpoint,), folder=tmp_path / "p", engine=engine)
    )

    with held_lease(bucket.store, OWN, "another"):
        with pytest.raises(LeaseError, match="another"):
            apply(ApplyConfig(tmp_path / "p", engine=engine, delete=True))
        dry = apply(ApplyConfig(tmp_path / "p", engine=engine))
        assert set(dry.outcomes) == {Outcome.WOULD_DELETE}
        assert bucket.keys() == before

    assert apply(ApplyConfig(tmp_path / "p", engine=engine, delete=True)).complete


@pytest.mark.timeout(300)
def test_a_run_that_is_to_end_finishes_its_batches_and_tells_what_is_left(
    engine: EngineName, bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    state.objects = {i: MapObject(COMMITTED, size=10) for i in range(40)}
    live = {bucket.put(own(i)) for i in range(40)}
    orphans = {bucket.put(own(i)) for i in range(100, 140)}
    folder = tmp_path / "p"
    plan(PlanConfig(bucket.address, (endpoint,), folder, max_share=0.5, engine=EngineName.LOCAL))
    settings = ApplyConfig(folder, delete=True, keys_per_s=4, engine=engine)

    ended = apply(replace(settings, is_ending=lambda: not orphans <= bucket.keys()))

    left = orphans & bucket.keys()
    assert 0 < ended.left == len(left)
    assert ended.outcomes.keys() == {Outcome.DELETED}
    assert not ended.complete
    assert apply(replace(settings, keys_per_s=500)).complete, "the lease is free"
    assert bucket.keys() == live


@pytest.mark.process
def test_apply_that_was_killed_is_finished_by_the_next_one(
    bucket: LocalBucket, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    state.objects = {i: MapObject(COMMITTED, size=10) for i in range(40)}
    live = {bucket.put(own(i)) for i in range(40)}
    orphans = {bucket.put(own(i)) for i in range(100, 140)}
    folder = tmp_path / "p"
    plan(PlanConfig(store=bucket.address, connect=(endpoint,), folder=folder, max_share=0.5))
    words = ["reconcile", "apply", "--plan", str(folder), "--yes", "--rate", "4"]
    child = subprocess.Popen([sys.executable, "-m", "streammeta.cli.main", *words])
    try:
        wait_until(lambda: len(bucket.keys()) < 80, "the first batch is deleted")
    finally:
        child.kill()
        child.wait()

    left = bucket.keys() & orphans
    assert left, "killed on the way"
    recorded = {
        json.loads(line)["key"]
        for path in folder.glob("runs/*/undo/*.jsonl")
        for line in path.read_text().splitlines()
    }
    assert orphans - left <= recorded, "what was deleted is on record"
    done = apply(ApplyConfig(folder, delete=True))
    assert done.complete
    assert {outcome: tally.keys for outcome, tally in done.outcomes.items()} == {
        Outcome.DELETED: len(left),
        Outcome.GONE: len(orphans) - len(left),
    }
    assert bucket.keys() == live


@pytest.mark.s3
def test_a_random_bucket_in_s3_agrees_with_the_map_it_was_made_from(
    engine: EngineName, state: FakeMap, endpoint: str, tmp_path: Path
) -> None:
    seed = 20_261
    print(f"seed {seed}")
    chance = random.Random(seed)
    with running_ministack() as server:
        server.create_bucket("data")
        uri = server.uri("data")
        store = open_object_store(uri)
        state.mark(store)
        known = set(chance.sample(range(1000), 250))
        stored = set(chance.sample(sorted(known), 248)) | set(chance.sample(range(1000), 20))
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
            store=StoreAddress.parse(uri),
            connect=(endpoint,),
            folder=tmp_path / "p",
            engine=engine,
            grace_ms=0,
            unsafe_grace=True,
            max_share=1.0,
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
        done = apply(ApplyConfig(config.folder, config.store, engine=engine, delete=True))
        assert done.outcomes[Outcome.DELETED].keys == len(orphans)
        left = {key for info in store.list_objects() if not is_lease_key(key := info.key, OWN)}
        assert left == {own(i) for i in known & stored} | {own(late), marker_key(OWN)}
        for path in (tmp_path / "p").rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert b"secretKey" not in content
                assert b"accessKey" not in content
        nobucket = StoreAddress.parse(server.uri("nobucket"))
        missing = replace(config, store=nobucket, folder=tmp_path / "q")
        with pytest.raises(StorageError, match="nobucket"):
            plan(missing)
        assert not (tmp_path / "q").exists()


@pytest.mark.s3
def test_versions_that_are_not_current_are_counted_and_stay(scene: Scene, tmp_path: Path) -> None:
    with running_ministack() as server:
        server.create_bucket("data")
        store = open_object_store(server.uri("data"))
        assert isinstance(store, S3ObjectStore)
        store._client.put_bucket_versioning(
            Bucket="data", VersioningConfiguration={"Status": "Enabled"}
        )
        scene.state.mark(store)
        for object_id in range(5):
            store.put(own(object_id), b"123")
        for size in range(1040):  # more than a page of one key's versions
            store.put("hand", b"x" * (size % 2))
        store.put(own(900), b"orphan")
        store.delete_many([own(900)])
        scene.state.objects = {i: MapObject(COMMITTED, size=3) for i in range(5)}
        config = PlanConfig(
            store=StoreAddress.parse(server.uri("data")),
            connect=(scene.endpoint,),
            folder=tmp_path / "p",
            engine=EngineName.LOCAL,
            versions=True,
        )
        made = plan(config)
        assert made.classes[Verdict.OLD_VERSION] == Tally(1040, 519 + 6)
        assert made.classes[Verdict.DELETE_MARKER] == Tally(1, 0)
        assert made.classes[Verdict.LIVE] == Tally(5, 15)
        rows = pq.read_table(tmp_path / "p" / "verdicts").to_pylist()
        (mark,) = [row for row in rows if row["verdict"] == "delete_marker"]
        assert (mark["key"], mark["object_id"]) == (own(900), 900)
        assert mark["note"]
        without = plan(replace(config, folder=tmp_path / "q", versions=False))
        assert Verdict.OLD_VERSION not in without.classes


@spark_when_slow
def test_a_plan_whose_guards_failed_is_a_report_that_can_t_be_applied(
    engine: EngineName, scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.bucket.put(own(1))
    never_issued = scene.bucket.put(own(1000))
    words = ["reconcile", "plan", "--engine", engine.value]
    words += ["--store", scene.bucket.uri, "--connect", scene.endpoint]
    words += ["--plan", str(tmp_path / "p")]

    said = streammeta(*words)
    assert said["exit_code"] == 1
    assert said["error"]["code"] == "GUARD"
    assert "empty_map, not_issued, max_share" in said["error"]["message"]
    assert said["classes"] == [
        {"verdict": "orphan", "keys": 1, "bytes": 10},
        {"verdict": "not_issued", "keys": 1, "bytes": 10},
        {"verdict": "marker", "keys": 1, "bytes": scene.bucket.store.head(marker_key(OWN)).size},
    ]
    findings = {guard["guard"]: guard["finding"] for guard in said["guards"]}
    assert findings == {
        **dict.fromkeys(("empty_map", "not_issued", "max_share"), "failed"),
        **dict.fromkeys(("missing_objects", "map_age", "max_candidates"), "passed"),
    }
    assert candidates_of(tmp_path / "p") == {own(1)}
    with pytest.raises(PlanError, match=r"empty_map.*--allow-empty-map"):
        apply(ApplyConfig(tmp_path / "p", engine=engine, delete=True))
    assert run_cli(cli, words) == 1
    assert "never overwritten" in capsys.readouterr().err
    assert scene.bucket.keys() == {own(1), never_issued}
    scene.bucket.store.delete_many([never_issued])

    words[-1] = str(tmp_path / "q")
    assert run_cli(cli, [*words, "--allow-empty-map", "--max-share", "1"]) == 0
    assert "orphan\t1\t10" in capsys.readouterr().out
    dry = ("reconcile", "apply", "--engine", engine.value, "--plan", str(tmp_path / "q"))
    said = streammeta(*dry)
    assert said["examples"] == [{"key": own(1)}]
    assert said["outcomes"] == [{"outcome": "would_delete", "keys": 1, "bytes": 10}]
    assert scene.bucket.keys() == {own(1)}
    assert streammeta(*dry, "--yes")["exit_code"] == 0
    assert scene.bucket.keys() == set()


def test_what_can_t_be_read_after_the_listing_makes_a_report_of_the_rest(
    engine: EngineName,
    bucket: LocalBucket,
    state: FakeMap,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(bucket, state)

    def refuse(_self: object, _prefix: str = "") -> Iterator[MultipartUpload]:
        yield MultipartUpload(own(1), "u", 1)
        raise AccessDeniedError("s3:ListBucketMultipartUploads is not allowed")

    monkeypatch.setattr(type(bucket.store), "list_multipart_uploads", refuse)
    words = ["reconcile", "plan", "--engine", engine.value]
    words += ["--store", bucket.uri, "--connect", endpoint]
    words += ["--wait", "0.5", "--plan"]

    said = streammeta(*words, str(tmp_path / "p"))
    assert (said["exit_code"], said["error"]["code"]) == (3, "MISSING_OBJECTS")
    assert (
        "2 objects of the metadata are missing in the bucket or damaged" in said["error"]["message"]
    )
    assert said["unfinished_uploads"] is None
    assert ["ListBucketMultipartUploads" in one["unknown"] for one in said["unknown"]] == [True]
    assert not (tmp_path / "p" / "uploads").exists()
    assert apply(ApplyConfig(tmp_path / "p", engine=engine)).complete, (
        "uploads are no part of what apply does"
    )

    def go_away() -> None:
        state.refuse = grpc.StatusCode.UNAVAILABLE

    state.on_snapshot = go_away
    said = streammeta(*words, str(tmp_path / "q"))
    assert (said["exit_code"], said["error"]["code"]) == (1, "GUARD")
    assert "no leader answered" in said["error"]["hint"]
    assert {class_["verdict"]: class_["keys"] for class_ in said["classes"]} == {
        "uncompared": 239,
        "other_cluster": 1,
        "foreign": 4,
        "marker": 1,
    }
    assert [guard["guard"] for guard in said["guards"]] == ["map_copied"]
    assert [problem["unknown"].partition(":")[0] for problem in said["unknown"]] == [
        "unfinished multipart uploads could not be listed",
        "the metadata could not be copied",
    ]
    listed = pq.read_table(tmp_path / "q" / "listing")["key"].to_pylist()
    assert set(listed) == bucket.keys() | {marker_key(OWN)}
    assert {path.name for path in (tmp_path / "q").iterdir()} == {
        "plan.json",
        "report.html",
        "listing",
    }
    with pytest.raises(PlanError, match="map_copied"):
        apply(ApplyConfig(tmp_path / "q", engine=engine))

    def become_another() -> None:
        state.cluster_uuid = "uuid-2"

    state.refuse, state.on_snapshot = None, become_another
    with pytest.raises(PlanError, match=r"'c1'.*uuid-2"):
        plan(
            PlanConfig(
                store=bucket.address, connect=(endpoint,), folder=tmp_path / "r", engine=engine
            )
        )
    assert not (tmp_path / "r").exists()
