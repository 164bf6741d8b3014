"""Missing and damaged objects: confirmed by a second look, told as ranges of streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pyarrow.parquet as pq
import pytest

from streammeta.reconcile.engines.engine import EngineName
from streammeta.reconcile.findings.deep_read import read_objects, reading_of
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.plans.plan_folder import LossCounts, LostRange, PlanResult, read_plan_file
from streammeta.reconcile.vocabulary.verdicts import ABSENT, Reading, Verdict
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2
from tests.kit.built_objects import BuiltObject, built_object
from tests.kit.memory_store import MemoryObjectStore
from tests.reconcile.fake_controller import (
    COMMITTED,
    LINKED,
    FakeMap,
    LocalBucket,
    MapObject,
    Scene,
    own,
)

SET, COMPOSITE, NAMED = (
    common_pb2.OBJECT_KIND_STREAM_SET,
    common_pb2.OBJECT_KIND_COMPOSITE,
    common_pb2.OBJECT_KIND_NAMED,
)
GONE = common_pb2.OBJECT_STATE_MARK_DESTROYED


def built(stream_id: int = 5, start: int = 0, *, relative: bool = False) -> BuiltObject:
    """A set object with one stream of ten records."""
    records = [RecordBatch(stream_id, 1, start + i, 1, b"x" * 50) for i in range(10)]
    return built_object([records], checksum=True, relative=relative)


def committed(data: bytes, **changes: Any) -> MapObject:
    """The map's row of an object of these bytes."""
    row = MapObject(COMMITTED, size=len(data), crc=ObjectChecksum.of(data).value)
    return replace(row, **changes)


@pytest.fixture
def config(bucket: LocalBucket, endpoint: str, tmp_path: Path) -> PlanConfig:
    return PlanConfig(
        store=bucket.address,
        connect=(endpoint,),
        folder=tmp_path / "p",
        engine=EngineName.LOCAL,
        patience_s=0.5,
    )


def fill(bucket: LocalBucket, state: FakeMap, count: int = 3) -> bytes:
    """Objects 0..count-1, whole; gives the bytes of each."""
    data = built().data
    for object_id in range(count):
        bucket.store.put(own(object_id), data)
        state.objects[object_id] = committed(data, ranges=((5, 10 * object_id, 10),))
    return data


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Confirmed losses of a plan."""
    rows: list[dict[str, Any]] = pq.read_table(folder / plan_folder.LOSSES).to_pylist()
    return rows


def verdicts_of(made: PlanResult) -> dict[Verdict, int]:
    return {verdict: tally.keys for verdict, tally in made.classes.items()}


def test_losses_are_told_as_ranges_of_streams_with_times(scene: Scene, config: PlanConfig) -> None:
    data = fill(scene.bucket, scene.state)
    scene.state.objects[10] = committed(data, ranges=((8, 0, 5), (7, 30, 40)), node=3)
    scene.state.objects[11] = replace(committed(data, kind=NAMED), crc=-1)
    scene.state.objects[12] = committed(data, attributes=1, ranges=((9, 100, 120),))
    scene.bucket.store.put(own(12), b"composite")
    scene.state.objects[13] = replace(committed(data), state=LINKED, composite=12)
    scene.state.objects[1] = replace(scene.state.objects[1], size=len(data) + 1)

    made = plan(config)

    assert made == read_plan_file(config.folder)
    assert [
        (row["object_id"], row["verdict"], row["stream_id"], row["start_offset"], row["end_offset"])
        for row in rows_of(config.folder)
    ] == [
        (1, "size_mismatch", 5, 10, 10),
        (10, "missing", 7, 30, 40),
        (10, "missing", 8, 0, 5),
        (13, "missing", 9, 100, 120),
        (11, "missing", None, None, None),
    ]
    first = rows_of(config.folder)[1]
    assert (first["key"], first["map_node"], first["committed_ms"]) == (own(10), 3, 1_000_000)
    assert (first["min_timestamp_ms"], first["max_timestamp_ms"]) == (110, None)
    assert made.losses == LossCounts(
        objects=4,
        size=4 * len(data) + 1,
        streams=4,
        ranges=4,
        refuted=0,
        first=made.losses.first if made.losses else (),
    )
    assert made.losses.first[1] == LostRange("missing", own(10), 7, 30, 40, 1_000_000, 110, None)


def test_what_only_the_listing_lacked_is_not_lost(scene: Scene, config: PlanConfig) -> None:
    data = fill(scene.bucket, scene.state)
    scene.state.objects[10] = scene.state.objects[11] = committed(data)

    def appear() -> None:
        scene.bucket.store.put(own(10), data)
        scene.state.on_snapshot = destroy

    def destroy() -> None:
        scene.state.objects[11] = replace(scene.state.objects[11], state=GONE)

    scene.state.on_snapshot = appear  # after the listing, before the second look
    made = plan(config)
    assert verdicts_of(made)[Verdict.MISSING] == 2
    assert made.losses == LossCounts(objects=0, size=0, streams=0, ranges=0, refuted=2)
    assert rows_of(config.folder) == []


def test_losses_that_can_t_be_confirmed_are_said_to_be_unknown(
    bucket: LocalBucket, state: FakeMap, config: PlanConfig
) -> None:
    data = fill(bucket, state)
    state.objects[10] = committed(data)

    def refuse_the_second() -> None:
        state.on_snapshot = lambda: setattr(state, "refuse", grpc.StatusCode.FAILED_PRECONDITION)

    state.on_snapshot = refuse_the_second
    made = plan(config)
    assert made.losses is None
    (sentence,) = made.unknown
    assert sentence.startswith("1 missing or damaged objects could not be confirmed")
    assert not (config.folder / plan_folder.LOSSES).exists()


def test_reading_all_finds_other_bytes_and_broken_forms_and_engines_agree(
    scene: Scene, config: PlanConfig, engine: EngineName, tmp_path: Path
) -> None:
    data = fill(scene.bucket, scene.state, 4)
    damaged = data[:20] + bytes([data[20] ^ 1]) + data[21:]
    scene.bucket.store.put(own(1), damaged)
    unknown_sum = data[:-3] + b"xxx"
    scene.bucket.store.put(own(2), unknown_sum)
    scene.state.objects[2] = replace(scene.state.objects[2], crc=-1)
    scene.state.objects[20] = committed(b"a list", kind=NAMED)
    scene.bucket.store.put(own(20), b"a list")

    shallow = plan(replace(config, engine=engine))
    assert (shallow.losses, shallow.read) == (LossCounts(0, 0, 0, 0, 0), {})
    made = plan(replace(config, engine=engine, folder=tmp_path / "q", deep_share=1.0))

    assert made.read == {"sound": 3, "checksum_differs": 1, "malformed": 1}
    found = verdicts_of(made)
    assert (found[Verdict.CHECKSUM_MISMATCH], found[Verdict.MALFORMED]) == (1, 1)
    assert found[Verdict.LIVE] == 3
    assert made.losses is not None
    assert [(loss.verdict, loss.key) for loss in made.losses.first] == [
        ("checksum_mismatch", own(1)),
        ("malformed", own(2)),
    ]


def test_a_sample_is_of_the_share_and_of_its_seed(scene: Scene, config: PlanConfig) -> None:
    fill(scene.bucket, scene.state, 200)
    plan(config)
    of_map = config.folder / plan_folder.MAP

    def read() -> list[int]:
        return [row["reading"] for row in pq.read_table(of_map).to_pylist()]

    found = read_objects(scene.bucket.store, of_map, scene.state.namespace, 0.2, seed=5)
    assert 15 <= found[Reading.SOUND] <= 65
    assert read().count(Reading.SOUND) == found[Reading.SOUND]
    assert read_objects(scene.bucket.store, of_map, scene.state.namespace, 0.2, seed=5) == found


def test_an_object_that_can_t_be_read_leaves_the_plan_without_a_sample(
    bucket: LocalBucket, state: FakeMap, config: PlanConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket, state)

    def refuse(*_: object) -> bytes:
        raise StoreUnavailableError("told to refuse")

    monkeypatch.setattr("streammeta.reconcile.findings.deep_read.reading_of", refuse)
    made = plan(replace(config, deep_share=1.0))
    assert made.unknown == ("objects could not be read: told to refuse",)
    assert verdicts_of(made)[Verdict.LIVE] == 3


class FickleStore(MemoryObjectStore):
    """Sends other bytes the first time."""

    has_erred = False

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get_range(key, start, end)
        if self.has_erred:
            return data
        self.has_erred = True
        return bytes(len(data))


def test_an_object_that_is_read_well_the_second_time_is_sound() -> None:
    store, data = FickleStore(), built().data
    store.put("k", data)
    assert reading_of(store, "k", SET, ObjectChecksum.of(data).value) is Reading.SOUND
    assert store.has_erred


def test_forms_of_every_kind_are_read() -> None:
    store, whole = MemoryObjectStore(), built()
    composite = encode_composite([LinkedObject(7, 0, whole.entries)])
    relative = built(relative=True).data
    bodies = {"set": whole.data, "relative": relative, "composite": composite, "empty": b""}
    for key, data in bodies.items():
        store.put(key, data)
    found = {
        (key, kind): reading_of(store, key, kind, ABSENT)
        for key in (*bodies, "absent")
        for kind in (SET, common_pb2.OBJECT_KIND_STREAM, COMPOSITE, NAMED)
    }
    sound = {("set", SET), ("set", common_pb2.OBJECT_KIND_STREAM), ("composite", COMPOSITE)}
    sound |= {("relative", SET)}
    sound |= {(key, NAMED) for key in bodies}
    assert {at for at, reading in found.items() if reading is Reading.SOUND} == sound
    assert {key for (key, _), reading in found.items() if reading is Reading.UNREAD} == {"absent"}
