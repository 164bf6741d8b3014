"""Plan and apply as users run them: Spark, a real store, and controllers behind real gRPC."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest

from streammeta.cli.output import run_cli
from streammeta.cli.root import cli
from streammeta.reconcile import plan_folder
from streammeta.reconcile.apply import ApplyConfig, apply
from streammeta.reconcile.deletion import Outcome
from streammeta.reconcile.errors import ConfigurationError, PlanError, ReconcileError
from streammeta.reconcile.identity import place_of
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plan_folder import Tally, read_plan_file, write_plan_file
from streammeta.reconcile.verdicts import Verdict
from streammeta.storage.bucket_marker import claim_key, marker_key
from streammeta.storage.errors import AccessDeniedError, StorageError, WrongBucketError
from streammeta.storage.object_format.object_key import cluster_namespace, key_for
from streammeta.storage.object_store.address import open_object_store
from streammeta.storage.object_store.base import MultipartUpload
from streammeta.v1 import common_pb2
from tests.reconcile.fake_controller import COMMITTED, FakeMap, MapObject, serving
from tests.reconcile.plans import example_plan
from tests.storage.s3_servers import running_ministack

pytestmark = pytest.mark.timeout(300)

OWN = cluster_namespace("c1")
OTHER = cluster_namespace("c2")
LONG_AGO_S = 1_700_000_000


def is_marker(key: str) -> bool:
    """Whether it is the marker of any cluster."""
    return key.endswith("/cluster.json")


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
        """All keys but the markers'."""
        return {key for info in self.store.list_objects() if not is_marker(key := info.key)}


@pytest.fixture
def state() -> FakeMap:
    return FakeMap()


@pytest.fixture
def bucket(state: FakeMap, tmp_path: Path) -> LocalBucket:
    """An empty bucket of the cluster."""
    made = LocalBucket(tmp_path / "bucket")
    state.mark(made.store)
    return made


@pytest.fixture
def endpoint(state: FakeMap) -> Iterator[str]:
    with serving(state) as where:
        yield where


def marker_size(bucket: LocalBucket) -> int:
    """Bytes of the cluster's marker."""
    return bucket.store.head(marker_key(OWN)).size


def own(object_id: int) -> str:
    """The key of an object of this cluster."""
    return key_for(object_id, OWN)


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
    expected = {bucket.put(own(i)): Verdict.LIVE for i in range(100, 131)}
    expected |= {bucket.put(own(i), size=1): Verdict.LIVE for i in range(300, 500)}
    expected |= {
        marker_key(OWN): Verdict.MARKER,
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
    assert f"listed {len(before) + 1} keys" in lines

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
            store=uri,
            connect=(endpoint,),
            folder=tmp_path / "p",
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
        done = apply(ApplyConfig(tmp_path / "p", store=uri, delete=True))
        assert done.outcomes[Outcome.DELETED].keys == len(orphans)
        left = {info.key for info in store.list_objects()}
        assert left == {own(i) for i in known & stored} | {own(late), marker_key(OWN)}
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
    never_issued = bucket.put(own(1000))
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint]
    words += ["--plan", str(tmp_path / "p")]

    assert run_cli(cli, [*words, "--format", "json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["error"]["code"] == "GUARD"
    assert "empty_map, not_issued, max_share" in said["error"]["message"]
    assert said["classes"] == [
        {"verdict": "orphan", "keys": 1, "bytes": 10},
        {"verdict": "not_issued", "keys": 1, "bytes": 10},
        {"verdict": "marker", "keys": 1, "bytes": marker_size(bucket)},
    ]
    findings = {guard["guard"]: guard["finding"] for guard in said["guards"]}
    assert findings == {
        **dict.fromkeys(("empty_map", "not_issued", "max_share"), "failed"),
        **dict.fromkeys(("missing_objects", "map_age", "max_candidates"), "passed"),
    }
    assert candidates_of(tmp_path / "p") == {own(1)}
    with pytest.raises(PlanError, match=r"report only.*empty_map.*--allow-empty-map"):
        apply(ApplyConfig(tmp_path / "p", delete=True))
    assert run_cli(cli, words) == 1
    assert "never overwritten" in capsys.readouterr().err
    assert bucket.keys() == {own(1), never_issued}
    bucket.store.delete_many([never_issued])

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


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_what_can_t_be_read_after_the_listing_makes_a_report_of_the_rest(
    bucket: LocalBucket,
    state: FakeMap,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(bucket, state)

    def refuse(_self: object, _prefix: str = "") -> Iterator[MultipartUpload]:
        yield MultipartUpload(own(1), "u", 1)
        raise AccessDeniedError("s3:ListBucketMultipartUploads is not allowed")

    monkeypatch.setattr(type(bucket.store), "list_multipart_uploads", refuse)
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint]
    words += ["--wait", "0.5", "--format", "json", "--plan"]

    assert run_cli(cli, [*words, str(tmp_path / "p")]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["error"]["code"] == "MISSING_OBJECTS"
    assert "1 are missing in the bucket and 1 have another size" in said["error"]["message"]
    assert said["unfinished_uploads"] is None
    assert ["ListBucketMultipartUploads" in one["unknown"] for one in said["unknown"]] == [True]
    assert not (tmp_path / "p" / "uploads").exists()
    assert apply(ApplyConfig(tmp_path / "p")).complete, "uploads are no part of what apply does"

    def go_away() -> None:
        state.refuse = grpc.StatusCode.UNAVAILABLE

    state.on_snapshot = go_away
    assert run_cli(cli, [*words, str(tmp_path / "q")]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["error"]["code"] == "GUARD"
    assert "no leader answered" in said["error"]["hint"]
    assert {one["verdict"]: one["keys"] for one in said["classes"]} == {
        "uncompared": 239,
        "other_cluster": 1,
        "foreign": 4,
        "marker": 1,
    }
    assert [one["guard"] for one in said["guards"]] == ["map_copied"]
    assert [one["unknown"].partition(":")[0] for one in said["unknown"]] == [
        "unfinished multipart uploads could not be listed",
        "the map could not be copied",
    ]
    listed = pq.read_table(tmp_path / "q" / "listing")["key"].to_pylist()
    assert set(listed) == bucket.keys() | {marker_key(OWN)}
    assert {path.name for path in (tmp_path / "q").iterdir()} == {"plan.json", "listing"}
    with pytest.raises(PlanError, match=r"report only.*map_copied"):
        apply(ApplyConfig(tmp_path / "q"))

    def become_another() -> None:
        state.cluster_uuid = "uuid-2"

    state.refuse, state.on_snapshot = None, become_another
    with pytest.raises(PlanError, match=r"copy of the map is of cluster 'c1', UUID uuid-2, but"):
        plan(PlanConfig(store=bucket.uri, connect=(endpoint,), folder=tmp_path / "r"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("counts", "unknown", "code"),
    [
        ({Verdict.LIVE: Tally(5, 5)}, (), None),
        ({Verdict.MISSING: Tally(1, 0)}, (), "MISSING_OBJECTS"),
        ({Verdict.SIZE_MISMATCH: Tally(1, 9)}, ("uploads",), "MISSING_OBJECTS"),
        ({Verdict.UNLISTED: Tally(1, 0)}, ("uploads",), "INCOMPLETE"),
    ],
)
def test_what_the_exit_code_of_plan_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    counts: dict[Verdict, Tally],
    unknown: tuple[str, ...],
    code: str | None,
) -> None:
    made = example_plan(classes=counts, unknown=unknown)
    monkeypatch.setattr("streammeta.reconcile.plan.plan", lambda *_: made)
    words = ["reconcile", "plan", "--store", "s3://b", "--connect", "h:1", "--plan", "p"]
    got = run_cli(cli, [*words, "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    assert got == (0 if code is None else 1)
    assert said.get("error", {}).get("code") == code
    assert said["classes"] != []


@pytest.fixture
def planned(bucket: LocalBucket, endpoint: str, tmp_path: Path) -> Path:
    """The folder of a plan without a candidate that was made just now."""
    made = example_plan(
        time.time_ns() // 1_000_000,
        store=bucket.uri,
        place=place_of(bucket.uri),
        connect=(endpoint,),
        classes={},
    )
    (tmp_path / "made").mkdir()
    write_plan_file(tmp_path / "made", made)
    return tmp_path / "made"


class StartedError(Exception):
    """Apply has got as far as starting Spark."""


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plan and apply end where they would start Spark."""

    def start(_config: object) -> None:
        raise StartedError

    monkeypatch.setattr("streammeta.reconcile.apply.spark_session", start)
    monkeypatch.setattr("streammeta.reconcile.plan.spark_session", start)


@pytest.mark.usefixtures("no_spark")
def test_a_plan_of_this_cluster_and_bucket_is_applied(planned: Path) -> None:
    with pytest.raises(StartedError):
        apply(ApplyConfig(planned))


@pytest.mark.usefixtures("no_spark")
def test_a_plan_is_not_applied_to_another_bucket(planned: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="plan is of the store"):
        apply(ApplyConfig(planned, store=f"{tmp_path.as_uri()}/other"))


@pytest.mark.usefixtures("no_spark")
def test_an_old_plan_is_not_applied(planned: Path) -> None:
    made = read_plan_file(planned)
    write_plan_file(planned, replace(made, created_at_ms=3, listing_started_ms=2, young_from_ms=1))
    with pytest.raises(PlanError, match=r"h old, wanted at most 24 h; make a new plan"):
        apply(ApplyConfig(planned))


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("cluster_id", "c2", "plan is of cluster 'c1'.* is cluster 'c2'"),
        ("cluster_uuid", "uuid-2", "plan is of cluster 'c1', UUID uuid-1.* UUID uuid-2"),
        ("namespace", OTHER, f"plan is of .*, namespace '{OWN}', but .* namespace '{OTHER}'"),
        ("next_object_id", 99, "plan saw 100: the map was restored"),
        ("bucket_problem", "the map is older", "does not trust its bucket: the map is older"),
    ],
)
def test_a_plan_is_not_applied_by_another_map(
    state: FakeMap, planned: Path, field: str, value: object, complaint: str
) -> None:
    setattr(state, field, value)
    with pytest.raises(ReconcileError, match=complaint):
        apply(ApplyConfig(planned, patience_s=0.1))


@pytest.mark.usefixtures("no_spark")
def test_a_plan_is_not_applied_to_what_took_the_bucket_s_place(
    bucket: LocalBucket, state: FakeMap, planned: Path
) -> None:
    bucket.store.put(claim_key(OWN, state.issued_below + 1), b"")
    with pytest.raises(ReconcileError, match=r"claims reach 2001.*restored"):
        apply(ApplyConfig(planned))
    bucket.store.delete_many([marker_key(OWN)])
    with pytest.raises(WrongBucketError, match="no marker"):
        apply(ApplyConfig(planned))
    replace(state, cluster_uuid="uuid-2").mark(bucket.store)
    with pytest.raises(WrongBucketError, match="uuid-2"):
        apply(ApplyConfig(planned))


@pytest.mark.usefixtures("no_spark")
def test_the_namespace_can_only_be_confirmed(
    bucket: LocalBucket, endpoint: str, tmp_path: Path
) -> None:
    confirming = PlanConfig(
        store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p", namespace=OWN
    )
    with pytest.raises(StartedError):
        plan(confirming)
    for other in (OTHER, "", "data"):
        with pytest.raises(ConfigurationError, match=f"--namespace is '{other}', but"):
            plan(replace(confirming, namespace=other))
    assert not (tmp_path / "p").exists()


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize("is_marked", [False, True], ids=["no marker", "another dev's marker"])
def test_the_bucket_of_another_cluster_of_the_same_name_makes_no_plan(
    state: FakeMap, endpoint: str, tmp_path: Path, is_marked: bool
) -> None:
    other = LocalBucket(tmp_path / "other")
    if is_marked:
        replace(state, cluster_uuid="uuid-2").mark(other.store)
    config = PlanConfig(store=other.uri, connect=(endpoint,), folder=tmp_path / "p")
    with pytest.raises(WrongBucketError):
        plan(config)
    assert not (tmp_path / "p").exists()


def test_unreachable_controllers_make_no_plan(bucket: LocalBucket, tmp_path: Path) -> None:
    with serving(FakeMap()) as gone:
        pass
    config = PlanConfig(store=bucket.uri, connect=(gone,), folder=tmp_path / "p", patience_s=0.3)
    with pytest.raises(ReconcileError, match="no leader answered"):
        plan(config)
    assert list(tmp_path.iterdir()) == [bucket.root]


def test_a_short_grace_period_has_to_be_called_unsafe(
    bucket: LocalBucket, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reconcile", "plan", "--store", bucket.uri, "--connect", endpoint]
    words += ["--plan", str(tmp_path / "p"), "--grace", "0s"]
    assert run_cli(cli, words) == 1
    assert "--grace is 0 s, wanted at least 15m" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"connect": ()},
        {"grace_ms": -1},
        {"grace_ms": 899_999},
        {"max_share": 1.1},
        {"max_candidates": -1},
        {"store": "b"},
    ],
)
def test_what_makes_no_sense_is_refused(
    bucket: LocalBucket, endpoint: str, tmp_path: Path, change: dict[str, object]
) -> None:
    config = PlanConfig(store=bucket.uri, connect=(endpoint,), folder=tmp_path / "p")
    with pytest.raises(ConfigurationError):
        plan(replace(config, **change))  # type: ignore[arg-type]
