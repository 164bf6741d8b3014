"""A cluster whose brokers go on while reconciliation runs, in a bucket that misbehaves.

The map is the real one, objects are real objects. Brokers upload, compact, trim, and die between
their upload and its commit; what they had stalled arrives after its id was forgotten. Something
happens at each request to the bucket and each question to the leader. The world knows the digest of
every acknowledged row, and what is an orphan in truth. Every choice comes from one seed.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity, RangeColumns, column
from streammeta.storage.cluster_files.bucket_marker import claim_key
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.object_key import OwnKey, key_for, parse_key
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import DeleteResult, ObjectInfo
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.built_objects import ObjectBuilder
from tests.kit.memory_store import MemoryObjectStore
from tests.reconcile.fake_controller import OWN, FakeMap, checkpoint_of

NODES = (NodeIdentity(7, 1), NodeIdentity(8, 1), NodeIdentity(9, 1))
TTL_MS = 60_000
DELETE_DELAY_MS = 30_000
GRACE_MS = 120_000
CLAIM_STEP = 64
WANTED = (common_pb2.OBJECT_STATE_COMMITTED, common_pb2.OBJECT_STATE_LINKED)


class DriverKilledError(BaseException):
    """The process that reconciles has come to its end."""


@dataclass(slots=True)
class Faults:
    """Misbehaviour of bucket and leader while one attempt runs; numbers are probabilities."""

    ends_early: float = 0
    repeats: float = 0
    lags: bool = False
    slow_down: float = 0
    fails: float = 0
    leader_changes: float = 0
    requests_left: int = -1
    """Requests to the bucket until the driver is killed; -1: it is not."""


class HostileStore(MemoryObjectStore):
    """The bucket as reconciliation sees it; brokers use the world's own methods."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: world.now_ms)
        self.world = world
        self.stale: list[ObjectInfo] = []

    def list_objects(
        self, prefix: str = "", start_after: str | None = None
    ) -> Iterator[ObjectInfo]:
        self.world.on_request()
        listed = list(super().list_objects(prefix, start_after))
        if prefix:  # the marker's claims and the lease
            yield from listed
            return
        yield from self._garbled(listed, start_after or "")

    def _garbled(self, listed: list[ObjectInfo], after: str) -> Iterator[ObjectInfo]:
        faults, rng = self.world.faults, self.world.rng
        if faults.lags:
            recent = self.world.now_ms - 60_000
            shown = {info.key: info for info in self.stale if info.key > after}
            shown |= {info.key: info for info in listed if info.last_modified_ms < recent}
            listed = sorted(shown.values(), key=lambda info: info.key.encode())
        for info in listed:
            if rng.random() < faults.ends_early:
                return
            yield info
            if rng.random() < faults.repeats:
                yield info
            if rng.random() < 0.1:
                self.world.on_request()

    def head(self, key: str) -> ObjectInfo:
        self.world.on_request()
        return super().head(key)

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.world.on_request()
        return super().get_range(key, start, end)

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        self.world.on_request()
        rng, wanted = self.world.rng, list(keys)
        slow = {key for key in wanted if rng.random() < self.world.faults.slow_down}
        done = super().delete_many(key for key in wanted if key not in slow)
        self.world.on_request()  # the answer may be lost, and the driver with it
        return DeleteResult(done.deleted, dict.fromkeys(slow, "SlowDown"), frozenset(slow))


class _Questions(list[list[int]]):
    """Questions to the leader; the world hears of each before it is answered."""

    def __init__(self, world: World) -> None:
        self._world = world

    def append(self, ids: list[int]) -> None:
        self._world.on_question()


class HostileMap(FakeMap):
    """A leader that answers from the map of the world, or from an older one."""

    world: World

    def answer(self, object_ids: Iterable[int]) -> objects_pb2.CheckObjectsResponse:
        """See `FakeMap.answer`."""
        with self.world.lock:
            found: Any = self.world.shown.query(r.CheckObjects(object_ids=tuple(object_ids)))
        return objects_pb2.CheckObjectsResponse(
            states=[int(state) for state in found.states],  # type: ignore[misc]
            next_object_id=found.next_object_id,
            cluster_id=self.cluster_id,
            cluster_uuid=found.cluster_uuid,
            issued_below=found.issued_below,
        )

    def ends_of(self, stream_ids: Iterable[int]) -> dict[int, int]:
        """See `FakeMap.ends_of`."""
        self.world.on_question()
        with self.world.lock:
            asked = r.DescribeStreams(stream_ids=tuple(stream_ids))
            found: Any = self.world.shown.query(asked)
        return {stream.stream_id: stream.end_offset for stream in found.streams}

    def checkpoint(self) -> bytes:
        """See `FakeMap.checkpoint`."""
        with self.world.lock:
            return checkpoint_of(dict(self.world.shown.freeze().sections()), self.cluster_id)


@dataclass(slots=True)
class Stalled:
    """An upload whose broker stands still: it arrives when nobody waits for it any more."""

    object_id: int
    data: bytes


@dataclass
class World:
    """The cluster; `now_ms` is its only clock."""

    rng: Random
    now_ms: int
    map: ClusterMetadata = field(default_factory=ClusterMetadata)
    shown: ClusterMetadata = field(default_factory=ClusterMetadata)
    faults: Faults = field(default_factory=Faults)
    rows: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Digest of each acknowledged row, by stream and offset."""
    owners: dict[int, int] = field(default_factory=dict)
    contents: dict[int, dict[int, list[RecordBatch]]] = field(default_factory=dict)
    stalled: list[Stalled] = field(default_factory=list)
    history: list[tuple[int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count()
        self.shown = self.map
        self.bucket = HostileStore(self)
        self.state = HostileMap()
        self.state.world = self
        self.state.checks = _Questions(self)
        self.state.chunk_bytes = 100_000
        self.state.mark(self.bucket)
        self.is_quiet = True
        self._claim(2 * CLAIM_STEP)
        for index, node in enumerate(NODES):
            self.write(r.RegisterNode(node=node))
            new = (r.NewStream(), r.NewStream())
            made = self.write(r.CreateStreams(request_id="s", node=node, streams=new))
            for stream_id in made.stream_ids:
                opened = (r.StreamToOpen(stream_id, 1),)
                self.write(r.OpenStreams(node=node, streams=opened))
                self.owners[stream_id] = index

    # ---- the map ----

    def write(self, request: Any) -> Any:
        """Decide a request and apply what it changes."""
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, self.now_ms, offset)
        if decision.records:
            self.map.apply(offset, decision.records)
            self.map.forget_undo(offset + 1)
            self.history.append((offset, decision.records))
        return decision.answer

    def map_of_before(self, records: int) -> ClusterMetadata:
        """The map as it was after the first `records` changes."""
        old = ClusterMetadata()
        for offset, changed in self.history[:records]:
            old.apply(offset, changed)
            old.forget_undo(offset + 1)
        return old

    def states(self, ids: Iterable[int]) -> list[int]:
        """The states of ids in the map of truth."""
        found: Any = self.map.query(r.CheckObjects(object_ids=tuple(ids)))
        return [int(state) for state in found.states]

    # ---- what goes on ----

    def on_request(self) -> None:
        """A request to the bucket: brokers go on meanwhile, and it may fail."""
        with self.lock:
            if self.is_quiet:
                return
            if self.rng.random() < 0.3:
                self.step()
            if self.faults.requests_left == 0:
                raise DriverKilledError
            self.faults.requests_left -= 1
            if self.rng.random() < self.faults.fails:
                raise StoreUnavailableError("500 InternalError")
            if self.rng.random() < self.faults.slow_down / 4:
                raise StoreUnavailableError("503 SlowDown", throttled=True)

    def on_question(self) -> None:
        """A question to the leader, which may not lead any more."""
        with self.lock:
            if self.is_quiet:
                return
            self.step()
            changes = self.rng.random() < self.faults.leader_changes
            self.state.refuse = grpc.StatusCode.UNAVAILABLE if changes else None
            self.state.broken_copies = int(self.rng.random() < self.faults.leader_changes)

    def step(self) -> None:
        """Let something happen."""
        was_quiet, self.is_quiet = self.is_quiet, True
        self.now_ms += self.rng.randrange(500)
        kinds = ("_upload", "_compact", "_trim", "_stall", "_arrive", "_clean")
        (kind,) = self.rng.choices(kinds, (50, 12, 8, 10, 8, 12))
        getattr(self, kind)()
        self.is_quiet = was_quiet

    def pass_time(self, ms: int) -> None:
        """Let time go by, with a step each ten seconds or so."""
        end = self.now_ms + ms
        while self.now_ms < end:
            self.now_ms += self.rng.randrange(5_000, 15_000)
            self.step()

    def _prepare(self, index: int) -> int:
        answer = self.write(
            r.PrepareObjects(
                request_id=f"p{next(self.numbers)}", node=NODES[index], count=1, ttl_ms=TTL_MS
            )
        )
        object_id: int = answer.first_object_id
        if object_id % CLAIM_STEP == 0:
            self._claim((object_id // CLAIM_STEP + 2) * CLAIM_STEP)
        return object_id

    def _claim(self, issued_below: int) -> None:
        """Have ids issued below a bound, the bucket first, as the leader does."""
        self.bucket.put(claim_key(OWN, issued_below), b"")
        uuid = self.state.cluster_uuid
        self.write(r.ClaimBucket(cluster_uuid=uuid, issued_below=issued_below))

    def _upload(self) -> None:
        """Upload some rows; the broker dies before the commit of a tenth of them."""
        index = self.rng.randrange(len(NODES))
        mine = sorted(stream_id for stream_id, owner in self.owners.items() if owner == index)
        runs = {stream: self._new_rows(stream) for stream in mine if self.rng.random() < 0.8}
        if runs:
            object_id = self._prepare(index)
            self._put(object_id, runs)
            if self.rng.random() < 0.9:
                self._commit(index, object_id, runs)

    def _stall(self) -> None:
        index = self.rng.randrange(len(NODES))
        stream_id = self.rng.choice([id_ for id_, owner in self.owners.items() if owner == index])
        runs = {stream_id: self._new_rows(stream_id)}
        self.stalled.append(Stalled(self._prepare(index), _encoded(runs)))

    def _arrive(self) -> None:
        """Bytes of a stalled upload arrive, most of them long after their id was forgotten."""
        if self.stalled:
            late = self.stalled.pop(self.rng.randrange(len(self.stalled)))
            self.bucket.put(key_for(late.object_id, OWN), late.data)

    def _new_rows(self, stream_id: int) -> list[RecordBatch]:
        described: Any = self.map.query(r.DescribeStreams(stream_ids=(stream_id,)))
        at = int(described.streams[0].end_offset)
        count = self.rng.randint(1, 4)
        texts = [f"row {next(self.numbers)}".encode() for _ in range(count)]
        return [RecordBatch(stream_id, 1, at + i, 1, text) for i, text in enumerate(texts)]

    def _put(self, object_id: int, runs: dict[int, list[RecordBatch]]) -> None:
        self.contents[object_id] = runs
        self.bucket.put(key_for(object_id, OWN), _encoded(runs))

    def _commit(
        self,
        index: int,
        object_id: int,
        runs: dict[int, list[RecordBatch]],
        sources: Iterable[int] = (),
    ) -> None:
        ids = sorted(runs)
        answer = self.write(
            r.CommitStreamSetObject(
                node=NODES[index],
                object_id=object_id,
                order_id=-1,
                object_size=len(_encoded(runs)),
                ranges=RangeColumns(
                    stream_id=column(ids),
                    start_offset=column([runs[stream_id][0].base_offset for stream_id in ids]),
                    end_offset=column([runs[stream_id][-1].end_offset for stream_id in ids]),
                ),
                compacted_object_ids=column(list(sources)),
            )
        )
        if answer.error is ErrorCode.NONE:
            for stream_id, records in runs.items():
                for record in records:
                    self.rows[stream_id, record.base_offset] = _digest(record.payload)

    def _compact(self) -> None:
        """Replace neighbours of a node by one object that holds their rows."""
        index = self.rng.randrange(len(NODES))
        listed: Any = self.map.query(ListStreamSetObjects(node_id=NODES[index].node_id))
        ids = [object_.object_id for object_ in listed.objects]
        if len(ids) < 2:
            return
        first = self.rng.randrange(len(ids) - 1)
        sources = ids[first : first + self.rng.randint(2, 4)]
        runs: dict[int, list[RecordBatch]] = {}
        for source in sources:
            for stream_id, records in self.contents[source].items():
                runs.setdefault(stream_id, []).extend(records)
        for records in runs.values():
            records.sort(key=lambda record: record.base_offset)
            if any(a.end_offset != two.base_offset for a, two in itertools.pairwise(records)):
                return
        object_id = self._prepare(index)
        self._put(object_id, runs)
        if self.rng.random() < 0.9:
            self._commit(index, object_id, runs, sources)

    def _trim(self) -> None:
        stream_id = self.rng.choice(sorted(self.owners))
        node = NODES[self.owners[stream_id]]
        described: Any = self.map.query(r.DescribeStreams(stream_ids=(stream_id,)))
        start, end = described.streams[0].start_offset, described.streams[0].end_offset
        trim = r.StreamToTrim(stream_id, 1, self.rng.randint(start, start + (end - start) // 3))
        self.write(r.TrimStreams(node=node, streams=(trim,)))
        self.write(
            r.DestroyDeadStreamSetObjects(node_id=node.node_id, after_object_id=-1, limit=100)
        )

    def _clean(self) -> None:
        """Do the leader's own work: expire, delete after a delay, forget."""
        self.write(r.ExpireObjects(limit=1000))
        gone = self.map.destroyed(self.now_ms - DELETE_DELAY_MS, 1000, self.now_ms)
        if gone:
            MemoryObjectStore.delete_many(self.bucket, [key_for(id_, OWN) for id_ in gone])
            self.write(r.RemoveObjects(object_ids=tuple(gone)))

    # ---- the truth ----

    def stored(self) -> dict[int, ObjectInfo]:
        """The cluster's objects in the bucket, by id."""
        listed = MemoryObjectStore.list_objects(self.bucket)
        parsed = ((parse_key(info.key, OWN), info) for info in listed)
        return {key.object_id: info for key, info in parsed if isinstance(key, OwnKey)}

    def orphans(self, before_ms: int) -> set[ObjectInfo]:
        """Objects that the map has forgotten, and that have not changed since `before_ms`."""
        found = self.stored()
        states = dict(zip(found, self.states(found), strict=True))
        removed = common_pb2.OBJECT_STATE_REMOVED
        return {
            info
            for object_id, info in found.items()
            if states[object_id] == removed and info.last_modified_ms < before_ms
        }

    def check_rows(self) -> int:
        """Assert that each acknowledged row that is not trimmed can be read; returns how many."""
        sections: Any = self.map.freeze().sections()
        streams, objects = sections["streams"], sections["objects"]
        starts = dict(
            zip(streams["stream_id"].tolist(), streams["start_offset"].tolist(), strict=True)
        )
        found: dict[tuple[int, int], bytes] = {}
        stored = self.bucket.objects()
        for object_id, state in zip(
            objects["object_id"].tolist(), objects["state"].tolist(), strict=True
        ):
            if state in WANTED:
                key = key_for(object_id, OWN)
                assert key in stored, f"live object {object_id} is gone"
                for record in _decoded(key, stored[key]):
                    found[record.stream_id, record.base_offset] = _digest(record.payload)
        due = {at: row for at, row in self.rows.items() if at[1] >= starts[at[0]]}
        assert {at: found.get(at) for at in due} == due
        return len(due)


def _encoded(runs: dict[int, list[RecordBatch]]) -> bytes:
    builder = ObjectBuilder()
    for stream_id in sorted(runs):
        builder.write(runs[stream_id])
    return builder.finish().data


def _decoded(key: str, data: bytes) -> Iterator[RecordBatch]:
    reader = ObjectReader(key, len(data))
    while (wanted := reader.needed) is not None:
        reader.receive(data[wanted.start : wanted.end])
    for entry in reader.index:
        place = reader.block_range(entry)
        yield from reader.records(entry, data[place.start : place.end])


def _digest(payload: bytes | memoryview) -> bytes:
    return hashlib.sha256(payload).digest()
