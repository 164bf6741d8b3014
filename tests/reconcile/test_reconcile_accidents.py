"""Accidents that others had: those on the page have tests, and here are the ones of size and pace.

Memory, requests and steps are counted, so that a slow machine changes nothing.
"""

from __future__ import annotations

import re
import threading
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammeta.reconcile.cluster.lease import Lease
from streammeta.reconcile.deletion.order import Candidate, DeletionOrder, Outcome
from streammeta.reconcile.deletion.tasks import Deleter
from streammeta.reconcile.engines import local_engine, local_verdicts, metadata_join
from streammeta.reconcile.engines.local_engine import LocalEngine
from streammeta.reconcile.engines.metadata_join import MetadataJoin
from streammeta.reconcile.listing import shards
from streammeta.reconcile.listing.shards import Shard, shards_of
from streammeta.reconcile.plans import plan_folder
from streammeta.reconcile.vocabulary.attempts import ONLY_ATTEMPT
from streammeta.reconcile.vocabulary.tables import (
    CANDIDATE_COLUMNS,
    LISTING_COLUMNS,
    MAP_COLUMNS,
    arrow_schema,
    record_batch,
)
from streammeta.reconcile.vocabulary.verdicts import Rules
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import DeleteResult, ObjectInfo, ObjectStore
from streammeta.v1 import objects_pb2
from tests.kit.memory_store import MemoryObjectStore
from tests.reconcile.fake_controller import COMMITTED, OWN, FakeMap, Scene, own

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reconciliation.md"
LATE_MS = 2_000


def test_each_accident_of_the_page_has_its_tests() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\|.*tests/reconcile/.*\|$", page, re.M)
    assert len(rows) >= 22
    for file, name in re.findall(r"\(\.\./(tests/[\w/]+\.py)#(test_\w+)\)", page):
        source = (ROOT / file).read_text()
        assert re.search(rf"^def {name}\(", source, re.M), f"{file} has no {name}"


def write_world(draft: Path, objects: int) -> None:
    """A listing in the order of keys, and a map that lacks one object in a hundred."""
    (draft / plan_folder.LISTING).mkdir(parents=True)
    (draft / plan_folder.MAP).mkdir()
    ids = sorted(range(objects), key=own)
    schema = arrow_schema(LISTING_COLUMNS)
    with pq.ParquetWriter(draft / plan_folder.LISTING / "shard.parquet", schema) as writer:
        for first in range(0, objects, 5000):
            part = ids[first : first + 5000]
            values: dict[str, Any] = {
                "key": [own(object_id) for object_id in part],
                "size": [10] * len(part),
                "modified_ms": [1_000] * len(part),
                "etag": ["e"] * len(part),
                "owner": [0] * len(part),
                "object_id": part,
                "note": [""] * len(part),
            }
            writer.write_batch(record_batch(LISTING_COLUMNS, values))
    known = np.array([object_id for object_id in range(objects) if object_id % 100], dtype=np.int64)
    columns = {name: np.zeros(len(known), np.int64) for name in arrow_schema(MAP_COLUMNS).names}
    columns |= {
        "object_id": known,
        "map_state": np.full(len(known), COMMITTED, np.int64),
        "map_size": np.full(len(known), 10, np.int64),
    }
    table = pa.table(columns, schema=arrow_schema(MAP_COLUMNS))
    pq.write_table(table, draft / plan_folder.MAP / "objects.parquet", row_group_size=50_000)


def peak_of(draft: Path) -> int:
    """The most bytes that judging a draft has in memory at once, beside Arrow's own."""
    rules = Rules(next_object_id=1 << 40, young_from_ms=LATE_MS, unlisted_from_ms=LATE_MS)
    tracemalloc.start()
    try:
        LocalEngine().judge(draft, rules, OWN)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(MetadataJoin, objects_a_partition=1_000, kept_bytes=100_000)
    monkeypatch.setattr(local_verdicts, "MetadataJoin", small)
    monkeypatch.setattr(metadata_join, "_ROWS_A_RUN", 10_000)
    peaks = {}
    for objects in (100_000, 500_000):
        write_world(tmp_path / str(objects), objects)
        peaks[objects] = peak_of(tmp_path / str(objects))
        of_map = pq.read_metadata(
            tmp_path / str(objects) / plan_folder.CANDIDATES / "part-00000.parquet"
        )
        assert of_map.num_rows == objects // 100
    print(peaks)
    assert peaks[500_000] < 1.5 * peaks[100_000], "five times the bucket"


def test_candidates_come_in_order_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "_ROWS_SORTED", 2_000)
    keys = [own(object_id) for object_id in range(5_000)]
    schema = arrow_schema(CANDIDATE_COLUMNS)
    with pq.ParquetWriter(tmp_path / "part.parquet", schema) as writer:
        for first in range(0, len(keys), 500):
            part = keys[first : first + 500]
            nothing = {name: [0] * len(part) for name in ("object_id", "size", "modified_ms")}
            values = {"key": part, "etag": [""] * len(part)} | nothing
            writer.write_batch(record_batch(CANDIDATE_COLUMNS, values), row_group_size=500)
    pieces = [rows["key"].to_pylist() for rows in local_engine._sorted_candidates(tmp_path)]
    assert max(map(len, pieces)) <= 1_000
    assert all(piece == sorted(piece) for piece in pieces)
    assert sorted(key for piece in pieces for key in piece) == sorted(keys)


def test_shards_are_listed_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for object_id in range(20):
        scene.bucket.put(own(object_id))
    together = threading.Barrier(8, timeout=60)
    arrived: list[Shard] = []
    real = shards.listed_rows

    def wait_for_others(
        store: ObjectStore, shard: Shard, namespace: str
    ) -> Iterator[pa.RecordBatch]:
        arrived.append(shard)
        if len(arrived) <= 16:  # of 17 shards, two rounds of eight
            together.wait()
        yield from real(store, shard, namespace)

    monkeypatch.setattr(local_engine, "listed_rows", wait_for_others)
    assert (
        LocalEngine().list_bucket(scene.bucket.address, OWN, shards_of(1), scene.root / "l") == 21
    )


class CountingStore(MemoryObjectStore):
    """Counts requests as S3 would have them, a page of a listing being one; and can end them."""

    def __init__(self) -> None:
        super().__init__(lambda: 1_000)
        self.requests: list[str] = []
        self.left = -1

    def _count(self, what: str) -> None:
        if self.left == 0:
            raise KilledError
        self.left -= 1
        self.requests.append(what)

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list_objects(prefix, start_after)):
            if number % 1_000 == 0:
                self._count("list")
            yield info

    def head(self, key: str) -> ObjectInfo:
        self._count("head")
        return super().head(key)

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._count("get")
        return super().get_range(key, start, end)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        wanted = list(keys)
        self._count("delete")
        half = super().delete_many(wanted[: len(wanted) // 2])
        self._count("rest of a delete")  # the answer is lost if the process ends here
        rest = super().delete_many(wanted[len(wanted) // 2 :])
        return DeleteResult(half.deleted + rest.deleted, {}, frozenset())


class KilledError(BaseException):
    """The process has come to its end."""


class CountingLeader:
    """Answers from a map, and counts the questions."""

    endpoints = ("fake:1",)

    def __init__(self, state: FakeMap, store: CountingStore) -> None:
        self._state = state
        self._store = store
        self.asked = 0

    def check_objects(
        self, object_ids: list[int], *, deleting: bool = False
    ) -> objects_pb2.CheckObjectsResponse:
        self._store._count("question")
        self.asked += 1
        return self._state.answer(object_ids)

    def stream_ends(self, stream_ids: list[int]) -> dict[int, int]:
        self._store._count("question")
        self.asked += 1
        return self._state.ends_of(stream_ids)


def candidates_in(store: CountingStore, count: int) -> list[Candidate]:
    """Objects that no map knows, by key."""
    for object_id in range(count):
        store.put(key_for(object_id, OWN), b"x")
    return [
        Candidate(info.key, int(info.key.split("/")[2]), 1, info.last_modified_ms, info.etag)
        for info in MemoryObjectStore.list_objects(store)
    ]


def order_of(state: FakeMap, folder: Path, run: str) -> DeletionOrder:
    return DeletionOrder(
        store=StoreAddress.parse("file:///unused"),
        connect=("unused:1",),
        patience_s=1,
        identity=state.identity,
        next_object_id=1_000,
        next_stream_id=100,
        undo_folder=str(folder / "undo"),
        audit_folder=str(folder / "audit"),
        signals_folder=str(folder / "signals"),
        keys_per_s=1_000_000,
        delete=True,
        run=run,
    )


def delete_all(
    state: FakeMap, store: CountingStore, candidates: list[Candidate], folder: Path, run: str
) -> tuple[list[Outcome], int]:
    """Do the work of a run; returns outcomes and the number of questions to the leader."""
    leader: Any = CountingLeader(state, store)
    work = Deleter(order_of(state, folder, run), ONLY_ATTEMPT, store, leader)
    try:
        judged = [judgement for batch in work.run(candidates) for judgement in batch]
    finally:
        work.close()
    return [judgement.outcome for judgement in judged], leader.asked


def test_a_thousand_keys_take_few_requests(tmp_path: Path) -> None:
    state, store = FakeMap(), CountingStore()
    candidates = candidates_in(store, 1_000)
    state.mark(store)
    Lease(store, OWN, "r1").take()
    store.requests.clear()
    outcomes, asked = delete_all(state, store, candidates, tmp_path, "r1")
    assert set(outcomes) == {Outcome.DELETED}
    in_bucket = [call for call in store.requests if call not in ("question", "rest of a delete")]
    print(in_bucket, asked)
    assert in_bucket.count("delete") == 1
    assert "head" not in in_bucket
    assert len(in_bucket) <= 8, "marker, claims, lease, one page of a listing, one deletion"
    assert asked == 11, "one for all, and one for each hundred that go on record"


def test_a_run_that_is_killed_at_any_step_is_finished_by_the_next_one(tmp_path: Path) -> None:
    state = FakeMap()
    finished = False
    for steps in range(60):
        store = CountingStore()
        candidates = candidates_in(store, 6)
        state.mark(store)
        live = {key_for(900, OWN): b"live"}
        store.put(key_for(900, OWN), b"live")
        Lease(store, OWN, "r1").take()
        store.left = steps
        folder = tmp_path / str(steps)
        try:
            delete_all(state, store, candidates, folder / "1", "r1")
            finished = True
        except KilledError:
            pass
        gone = {candidate.key for candidate in candidates} - store.objects().keys()
        undo = "".join(path.read_text() for path in (folder / "1").glob("undo/*.jsonl"))
        assert all(key in undo for key in gone), "on record before it was gone"
        store.left = -1
        # Once the lease of r1 is over, and was watched without a renewal.
        Lease(store, OWN, "r2", lambda: time.time() + 120, lambda seconds: None).take()
        outcomes, _ = delete_all(state, store, candidates, folder / "2", "r2")
        assert set(outcomes) <= {Outcome.DELETED, Outcome.GONE}
        left = {key: data for key, data in store.objects().items() if "/leases/" not in key}
        assert not {candidate.key for candidate in candidates} & left.keys()
        assert live.items() <= left.items()
        if finished:
            break
    assert finished
    assert steps > 5, "there were steps to be killed at"
