"""Candidates with records beyond the map are kept, since the map may be old; a real one too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.cli.root import cli
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT, Method
from streammeta.client.model import node_message
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.reconcile.apply import AHEAD_ADVICE, ApplyConfig, apply
from streammeta.reconcile.deletion import ahead_of_metadata
from streammeta.reconcile.deletion.order import Candidate, Outcome
from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.plan import PlanConfig
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.run_reporter import apply_report
from streammeta.reconcile.watch import RoundOutcome, WatchConfig, watch
from streammeta.storage.errors import AccessDeniedError, StorageError, StoreUnavailableError
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.built_objects import ObjectBuilder
from tests.kit.real_cluster import prepare_object, running_cluster, streammeta
from tests.kit.waiting import wait_until
from tests.reconcile.fake_controller import COMMITTED, FakeMap, LocalBucket, MapObject, Scene, own
from tests.reconcile.spark_when_slow import spark_when_slow
from tests.reconcile.test_reconcile_audit import lines_of
from tests.reconcile.test_reconcile_deletion import NAMESPACE, Bench

AHEAD, DELETED, FAILED = Outcome.AHEAD_OF_METADATA, Outcome.DELETED, Outcome.FAILED


def uploaded(*ranges: tuple[int, int, int], payload: bytes = b"row") -> bytes:
    """An object with the offsets START..END of each STREAM."""
    builder = ObjectBuilder()
    for stream_id, start, end in ranges:
        builder.write([RecordBatch(stream_id, 0, start, end - start, payload)])
    return builder.finish().data


def composed(stream_id: int, start: int, end: int) -> bytes:
    """A composite with a range of one stream."""
    entry = IndexEntry(stream_id, start, end, 1, 0, 100)
    return encode_composite([LinkedObject(7, 0, (entry,))])


class ContentBench(Bench):
    """A bench whose candidates hold what a test puts there."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path, count=0)
        self.audit = tmp_path / "audit"
        self.state.ends = {1: 10, 2: 20}

    def hold(self, *contents: bytes) -> None:
        """Store each as a candidate, the first with the id 0."""
        for object_id, data in enumerate(contents):
            key = key_for(object_id, NAMESPACE)
            self.store.put(key, data)
            info = self.store.head(key)
            self.candidates.append(Candidate(key, object_id, info.size, 5000, info.etag))

    def outcomes(self, fail_at: int | None = None) -> list[Outcome]:
        """What becomes of the candidates, by id."""
        return [outcome for _, outcome in sorted(self.run(fail_at).items())]


@pytest.fixture
def bench(tmp_path: Path) -> ContentBench:
    return ContentBench(tmp_path)


@pytest.mark.parametrize("mode", ["delete", "quarantine", "tag", "dry run"])
def test_an_upload_beyond_the_end_of_its_stream_is_kept(bench: ContentBench, mode: str) -> None:
    bench.order = replace(
        bench.order,
        delete=mode != "dry run",
        quarantine=mode == "quarantine",
        tag=mode == "tag",
    )
    done = bench.order.done if bench.order.delete else Outcome.WOULD_DELETE
    bench.hold(uploaded((1, 8, 10)), uploaded((1, 8, 11)))
    before = bench.store.objects()

    judged = {judgement.candidate.object_id: judgement for judgement in bench.judged()}

    assert (judged[0].outcome, judged[1].outcome) == (done, AHEAD)
    assert "offsets up to 11 of stream 1, which ends at 10" in judged[1].detail
    key = key_for(1, NAMESPACE)
    assert bench.store.objects()[key] == before[key]
    assert bench.store.get_tags(key) == {}
    assert not any("/quarantine/" in item and item.endswith(key) for item in bench.store.objects())
    assert [ids for ids in bench.leader.announced if 1 in ids] == []
    assert [record for record in bench.undo_records() if record["object_id"] == 1] == []


def test_what_is_ahead_is_in_the_audit_trail(bench: ContentBench) -> None:
    bench.hold(uploaded((1, 8, 11)))
    bench.run()
    (line,) = lines_of(bench.audit)
    assert (line["verdict"], line["target"]["key"]) == ("REFUSED", key_for(0, NAMESPACE))
    assert line["reason"].startswith("ahead_of_map: ")
    assert "offsets up to 11 of stream 1" in line["reason"]
    bench.order = replace(bench.order, delete=False)
    bench.run()
    assert len(lines_of(bench.audit)) == 1, "a dry run has no trail"


def test_it_is_deleted_once_its_stream_has_passed_it_or_is_deleted(bench: ContentBench) -> None:
    bench.hold(uploaded((1, 8, 11)), uploaded((2, 18, 25)))
    assert bench.outcomes() == [AHEAD, AHEAD]
    bench.state.ends = {1: 11, 2: 20}
    assert bench.outcomes() == [DELETED, AHEAD]
    bench.state.ends = {1: 11}
    assert bench.outcomes() == [Outcome.GONE, DELETED]


def test_an_unissued_stream_is_ahead_and_a_deleted_one_is_not(bench: ContentBench) -> None:
    bench.order = replace(bench.order, next_stream_id=50)
    bench.hold(uploaded((49, 0, 1)), uploaded((50, 0, 1)), uploaded((2**40, 0, 1)))
    assert bench.outcomes() == [DELETED, AHEAD, AHEAD]
    bench.state.ends[50] = 1  # issued since the plan
    assert bench.outcomes() == [Outcome.GONE, DELETED, AHEAD]


@pytest.mark.parametrize("ahead", [0, 1500, 2999])
def test_one_stream_of_thousands_is_enough(bench: ContentBench, ahead: int) -> None:
    bench.order = replace(bench.order, next_stream_id=3000)
    bench.state.ends = dict.fromkeys(range(3000), 2)
    bench.state.ends[ahead] = 1
    several = uploaded(*((number, 0, 2) for number in range(3000)))
    bench.hold(several, uploaded((ahead, 0, 1), (ahead, 1, 3)))
    assert bench.outcomes() == [AHEAD, AHEAD]
    bench.state.ends[ahead] = 3
    assert bench.outcomes() == [DELETED, DELETED]


def test_a_composite_is_judged_by_its_index(bench: ContentBench) -> None:
    bench.hold(composed(1, 5, 10), composed(1, 5, 11))
    assert bench.outcomes() == [DELETED, AHEAD]


def test_what_is_no_object_of_records_is_deleted(bench: ContentBench) -> None:
    whole = uploaded((1, 8, 11), payload=bytes(200))
    foreign = [b"x" * size for size in (0, 1, 47, 48, 20_000)]
    bench.hold(*foreign, whole[: len(whole) // 2], whole[:-1])
    assert bench.outcomes() == [DELETED] * 7


@pytest.mark.parametrize(
    "error", [AccessDeniedError("not this one"), StoreUnavailableError("no answer in time")]
)
def test_unreadable_objects_wait_for_the_next_run(bench: ContentBench, error: StorageError) -> None:
    bench.hold(uploaded((1, 8, 10)), b"x" * 100)
    reading(bench, 0, error)
    judged = {judgement.candidate.object_id: judgement for judgement in bench.judged()}
    assert (judged[0].outcome, judged[1].outcome) == (FAILED, DELETED)
    assert str(error) in judged[0].detail
    reading(bench, 0, None)
    assert bench.outcomes() == [DELETED, Outcome.GONE]


def test_a_torn_read_decides_nothing(bench: ContentBench) -> None:
    bench.hold(uploaded((1, 8, 10)), b"x" * 100)
    reading(bench, 0, None, lambda data: data[:-1])
    reading(bench, 1, None, lambda data: b"")
    judged = bench.judged()
    assert {judgement.outcome for judgement in judged} == {FAILED}
    assert all("length of the bytes" in judgement.detail for judgement in judged)
    assert bench.stored() == {0, 1}


def test_bytes_are_not_foreign_at_first_sight(bench: ContentBench) -> None:
    bench.hold(uploaded((1, 8, 11)))
    seen: list[int] = []

    def mangle_once(data: bytes) -> bytes:
        seen.append(len(data))
        return bytes(len(data)) if len(seen) == 1 else data

    reading(bench, 0, None, mangle_once)
    assert bench.outcomes() == [AHEAD]


def test_an_object_of_records_with_a_damaged_index_is_kept(bench: ContentBench) -> None:
    data = uploaded((1, 8, 10))
    bench.hold(data[:-70] + b"\xff" * 4 + data[-66:])
    (judged,) = bench.judged()
    assert judged.outcome is FAILED
    assert "is corrupt at byte" in judged.detail
    assert bench.stored() == {0}


def test_a_busy_store_is_read_again_after_a_pause(bench: ContentBench) -> None:
    bench.hold(uploaded((1, 8, 10)))
    reading(bench, 0, StoreUnavailableError("SlowDown", throttled=True))

    def relent(pause_s: float) -> None:
        bench.pauses.append(pause_s)
        reading(bench, 0, None)

    bench.on_pause = relent
    assert bench.outcomes() == [DELETED]
    assert bench.pauses == [0.5]


def test_without_the_ends_of_streams_nothing_is_deleted(bench: ContentBench) -> None:
    bench.hold(uploaded((1, 8, 10)), b"x" * 100)
    assert bench.outcomes(fail_at=2) == [FAILED, FAILED]
    assert bench.stored() == {0, 1}


def test_the_leader_is_asked_once_for_a_batch(bench: ContentBench) -> None:
    bench.hold(*(uploaded((number % 2 + 1, number, number + 1)) for number in range(150)))
    outcomes = bench.outcomes()
    assert bench.leader.asked_streams == [[1, 2]]
    ends = [bench.state.ends[number % 2 + 1] for number in range(150)]
    assert outcomes == [AHEAD if number + 1 > ends[number] else DELETED for number in range(150)]


def test_the_leader_is_asked_in_time(bench: ContentBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_metadata, "_ENTRIES_A_CALL", 100)
    bench.hold(*(uploaded((1, number, number + 1)) for number in range(150)))
    assert bench.outcomes() == [AHEAD if number + 1 > 10 else DELETED for number in range(150)]
    assert bench.leader.asked_streams == [[1], [1]]


def reading(
    bench: ContentBench,
    object_id: int,
    error: StorageError | None,
    change: Callable[[bytes], bytes] = lambda data: data,
) -> None:
    """Let reads of one candidate fail, or give other bytes than there are."""
    key, real = key_for(object_id, NAMESPACE), bench.store.get_range

    def get_range(asked: str, start: int = 0, end: int | None = None) -> bytes:
        if asked != key:
            return real(asked, start, end)
        if error is not None:
            raise error
        return change(type(bench.store).get_range(bench.store, asked, start, end))

    bench.store.get_range = get_range  # type: ignore[method-assign, assignment]


# ---- the whole run ----


@pytest.fixture
def rolled_back(bucket: LocalBucket, state: FakeMap) -> FakeMap:
    """A map that has forgotten two commits, of offsets and of a stream; another object is free."""
    state.ends, state.next_stream_id = {1: 10}, 5
    state.objects = {0: MapObject(COMMITTED, size=10)}
    bucket.put(own(0))
    for object_id, held in ((100, (1, 0, 10)), (101, (1, 10, 11)), (102, (5, 0, 1))):
        bucket.put(own(object_id), data=uploaded(held))
    return state


def left(bucket: LocalBucket, ids: Sequence[int]) -> list[int]:
    keys = bucket.keys()
    return [object_id for object_id in ids if own(object_id) in keys]


@spark_when_slow
def test_a_run_keeps_what_a_rolled_back_map_has_forgotten_and_says_so(
    rolled_back: FakeMap,
    bucket: LocalBucket,
    make_plan: Callable[..., Any],
    engine: EngineName,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = make_plan("p")

    done = apply(ApplyConfig(folder, engine=engine, delete=True))

    assert {end: tally.keys for end, tally in done.outcomes.items()} == {DELETED: 1, AHEAD: 2}
    assert left(bucket, range(100, 103)) == [101, 102]
    assert done.complete
    assert done.warning == f"2 {AHEAD_ADVICE}"
    assert {key for key, _ in done.ahead} == {own(101), own(102)}
    assert apply_report(done, 1, 2).problem.startswith("2 candidates are kept")
    if engine is EngineName.SPARK:
        return
    capsys.readouterr()
    command = ["reconcile", "apply", "--plan", str(folder), "--engine", "local"]
    assert run_cli(cli, [*command, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    ahead = next(outcome for outcome in told["outcomes"] if outcome["outcome"] == "ahead_of_map")
    assert ahead["keys"] == 2
    assert told["warning"] == done.warning
    assert {key["key"] for key in told["ahead_of_map"]} == {own(101), own(102)}
    assert run_cli(cli, command) == 0
    assert done.warning in capsys.readouterr().out


@spark_when_slow
def test_a_plan_of_an_earlier_version_knows_no_stream_to_be_deleted(
    rolled_back: FakeMap, bucket: LocalBucket, make_plan: Callable[..., Any]
) -> None:
    rolled_back.ends, rolled_back.next_stream_id = {}, 100
    folder, made = make_plan("p")
    assert made.next_stream_id == 100
    path = folder / plan_folder.PLAN_FILE
    document = json.loads(path.read_text())
    del document["next_stream_id"]
    path.write_text(json.dumps(document))
    done = apply(ApplyConfig(folder, delete=True, engine=EngineName.LOCAL))
    assert done.outcomes[AHEAD].keys == 3
    assert left(bucket, range(100, 103)) == [100, 101, 102]


def test_a_round_of_watch_says_it_too(rolled_back: FakeMap, scene: Scene, tmp_path: Path) -> None:
    planned = PlanConfig(
        store=scene.bucket.address,
        connect=(scene.endpoint,),
        folder=tmp_path / "rounds",
        max_share=1,
    )
    applied = ApplyConfig(tmp_path / "rounds", delete=True)
    told: list[Any] = []
    last = watch(WatchConfig(planned, applied, 1, rounds=1), _Never(), told.append)
    assert (last.outcome, last.outcomes[str(AHEAD)].keys) == (RoundOutcome.SETTLED, 2)
    assert last.problem == f"2 {AHEAD_ADVICE}"


class _Never:
    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        return False


CHECK = Method(objects_pb2.CheckObjectsRequest, objects_pb2.CheckObjectsResponse)
NEVER_ISSUED = 1_000_000


class LateUploads:
    """A cluster of one controller, and uploads that come after their ids were forgotten."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._namespace = ""
        self._plans = 0
        self.store = open_object_store(f"file://{cluster.root}/bucket")

    def upload(self, *contents: bytes) -> list[str]:
        """Store each under an id that has expired; returns the keys."""
        ids = asyncio.run(self._prepare(len(contents)))
        wait_until(lambda: asyncio.run(self._are_forgotten(ids)), "the ids to expire")
        keys = [self.key(object_id) for object_id in ids]
        for key, data in zip(keys, contents, strict=True):
            self.store.put(key, data)
        return keys

    async def commit(self, stream_id: int, end: int, size: int) -> None:
        """Commit an upload with the first offsets of a stream."""
        async with ControllerClient(self._cluster.endpoints) as client:
            session = await BrokerSession.open(client, 9, 1)
            await session.open_streams({stream_id: 1})
            object_id = await prepare_object(session)
            self.store.put(self.key(object_id), bytes(size))
            request = objects_pb2.CommitStreamSetObjectRequest(
                request_id="c",
                node=node_message(session.node),
                object_id=object_id,
                object_size=size,
                on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
                ranges=objects_pb2.RangeColumns(
                    stream_id=[stream_id], stream_epoch=[1], start_offset=[0], end_offset=[end]
                ),
            )
            answer = await client.call(COMMIT_STREAM_SET_OBJECT, request)
            assert answer.error == common_pb2.ERROR_CODE_NONE

    async def stream(self) -> int:
        """Create a stream."""
        async with ControllerClient(self._cluster.endpoints) as client:
            session = await BrokerSession.open(client, 9, 1)
            (stream_id,) = await session.create_streams([{}])
            return int(stream_id)

    def key(self, object_id: int) -> str:
        return key_for(object_id, self._namespace)

    def reconcile(self) -> dict[str, Any]:
        """Plan and apply; returns what apply says."""
        self._plans += 1
        folder = str(self._cluster.root / f"plan-{self._plans}")
        place = ("--store", f"file://{self._cluster.root}/bucket")
        limits = ("--unsafe-grace", "0s", "--max-share", "1", "--allow-empty-map")
        made = streammeta(
            *("reconcile", "plan", "--connect", self._cluster.connect),
            *("--plan", folder, *place, *limits),
        )
        assert made["exit_code"] == 0, made
        return streammeta("reconcile", "apply", "--plan", folder, "--yes")

    def is_there(self, key: str) -> bool:
        return any(object_.key == key for object_ in self.store.list_objects(key))

    async def _prepare(self, count: int) -> list[int]:
        async with ControllerClient(self._cluster.endpoints) as client:
            session = await BrokerSession.open(client, 9, 1)
            self._namespace = session.namespace
            return [await prepare_object(session, ttl_ms=1_000) for _ in range(count)]

    async def _are_forgotten(self, ids: list[int]) -> bool:
        async with ControllerClient(self._cluster.endpoints) as client:
            answer = await client.call(CHECK, objects_pb2.CheckObjectsRequest(object_ids=ids))
        return set(answer.states) == {common_pb2.OBJECT_STATE_REMOVED}


@pytest.mark.process
def test_late_uploads_are_kept_until_their_stream_has_passed_them(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        world = LateUploads(cluster)
        stream_id = asyncio.run(world.stream())
        ahead, unborn, foreign = world.upload(
            uploaded((stream_id, 0, 5)), uploaded((NEVER_ISSUED, 0, 5)), b"foreign" * 100
        )

        done = world.reconcile()

        assert done["exit_code"] == 0
        assert {outcome["outcome"]: outcome["keys"] for outcome in done["outcomes"]} == {
            "ahead_of_map": 2,
            "deleted": 1,
        }
        assert done["warning"].startswith("2 candidates are kept, because their records are ahead")
        assert [world.is_there(key) for key in (ahead, unborn, foreign)] == [True, True, False]

        asyncio.run(world.commit(stream_id, end=5, size=100))
        world.reconcile()

        assert [world.is_there(key) for key in (ahead, unborn)] == [False, True]
