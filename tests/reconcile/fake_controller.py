"""A controller, a bucket in a directory, and plans, for reconciliation tests without Spark."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.snapshot.checkpoint_file import write_checkpoint
from streammeta.reconcile.cluster.identity import ClusterIdentity
from streammeta.reconcile.plan import PlanConfig
from streammeta.reconcile.plans.plan_folder import PlanResult
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import Verdict
from streammeta.rpc.failures import Reason
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, create_marker
from streammeta.storage.object_format.object_key import cluster_namespace, key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.address import StoreAddress
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
    streams_pb2,
    streams_pb2_grpc,
)
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented

REMOVED = common_pb2.OBJECT_STATE_REMOVED
COMMITTED = common_pb2.OBJECT_STATE_COMMITTED
LINKED = common_pb2.OBJECT_STATE_LINKED


@dataclass(frozen=True, slots=True)
class MapObject:
    """An object of the map; `time_ms` is when it was committed.

    `ranges` are (stream, start, end), `crc` the checksum that its commit gave, -1: none.
    """

    state: int
    size: int = 0
    time_ms: int = 1_000_000
    attributes: int = 0
    node: int = 7
    kind: int = common_pb2.OBJECT_KIND_STREAM_SET
    crc: int = -1
    composite: int = -1
    ranges: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True)
class FakeMap:
    """The state of the fake: edit it at any time. `snapshot` None means a copy of the map.

    `ends` are those of the streams that exist; all others below `next_stream_id` were deleted.

    So many `broken_copies` end after the first chunk, as when the leader is lost.
    """

    cluster_id: str = "c1"
    cluster_uuid: str = "uuid-1"
    namespace: str = "_streammeta_c1"
    bucket_problem: str = ""
    next_object_id: int = 1000
    issued_below: int = 2000
    objects: dict[int, MapObject] = field(default_factory=dict)
    next_stream_id: int = 100
    ends: dict[int, int] = field(default_factory=dict)
    streams_a_page: int = 1000
    refuse: grpc.StatusCode | None = None
    leader_endpoint: str = ""
    checks: list[list[int]] = field(default_factory=list)
    chunk_bytes: int = 100
    snapshot: bytes | None = None
    broken_copies: int = 0
    on_snapshot: Callable[[], None] = lambda: None

    @property
    def identity(self) -> ClusterIdentity:
        """The cluster that the fake says it is."""
        return ClusterIdentity(self.cluster_id, self.cluster_uuid, self.namespace)

    def mark(self, store: ObjectStore) -> None:
        """Take possession of a bucket, as the cluster's first leader does."""
        marker = BucketMarker(
            cluster_id=self.cluster_id,
            cluster_uuid=self.cluster_uuid,
            namespace=self.namespace,
            created_ms=1,
        )
        assert create_marker(store, marker) == marker

    def state_of(self, object_id: int) -> int:
        """What CheckObjects says of an id."""
        if object_id in self.objects:
            return self.objects[object_id].state
        issued = object_id < self.next_object_id
        return REMOVED if issued else common_pb2.OBJECT_STATE_NOT_ISSUED

    def answer(self, object_ids: Iterable[int]) -> objects_pb2.CheckObjectsResponse:
        """What CheckObjects says of some ids."""
        return objects_pb2.CheckObjectsResponse(
            states=[self.state_of(i) for i in object_ids],  # type: ignore[misc]
            next_object_id=self.next_object_id,
            cluster_id=self.cluster_id,
            cluster_uuid=self.cluster_uuid,
            issued_below=self.issued_below,
        )

    def ends_of(self, stream_ids: Iterable[int]) -> dict[int, int]:
        """The ends of those of some streams that exist."""
        return {stream: self.ends[stream] for stream in stream_ids if stream in self.ends}

    def checkpoint(self) -> bytes:
        """A copy of the map, with the columns that controllers write."""
        ids = sorted(self.objects)
        rows = [self.objects[object_id] for object_id in ids]
        objects: dict[str, Any] = {
            "object_id": np.array(ids, dtype=np.int64),
            "state": np.array([row.state for row in rows], dtype=np.int8),
            "kind": np.array([row.kind for row in rows], dtype=np.int8),
            "order_id": np.array([row.composite for row in rows], dtype=np.int64),
            "attributes": np.array([row.attributes for row in rows], dtype=np.int32),
            "node_id": np.array([row.node for row in rows], dtype=np.int32),
            "object_size": np.array([row.size for row in rows], dtype=np.int64),
            "timestamp_ms": np.array([row.time_ms for row in rows], dtype=np.int64),
        }
        counters: dict[str, Any] = {
            "next_object_id": np.array([self.next_object_id], dtype=np.int64),
            "next_stream_id": np.array([self.next_stream_id], dtype=np.int64),
        }
        claim: dict[str, Any] = {
            "cluster_uuid": [self.cluster_uuid],
            "issued_below": np.array([self.issued_below], dtype=np.int64),
        }
        known = [(i, row) for i, row in sorted(self.objects.items()) if row.crc >= 0]
        facts = {
            "object_id": np.array([i for i, _ in known], dtype=np.int64),
            "min_timestamp_ms": np.array([100 + i for i, _ in known], dtype=np.int64),
            "max_timestamp_ms": np.array([-1] * len(known), dtype=np.int64),
            "crc32c": np.array([row.crc for _, row in known], dtype=np.int64),
        }
        held = [(i, *range_) for i, row in sorted(self.objects.items()) for range_ in row.ranges]
        names = ("object_id", "stream_id", "start_offset", "end_offset")
        ranges = {
            name: np.array([row[at] for row in held], dtype=np.int64)
            for at, name in enumerate(names)
        }
        sections = {
            "counters": counters,
            "objects": objects,
            "bucket_claim": claim,
            "object_facts": facts,
            "object_ranges": ranges,
        }
        return checkpoint_of(sections, self.cluster_id)


def checkpoint_of(sections: dict[str, Any], cluster_id: str = "c1", end_offset: int = 9) -> bytes:
    """A checkpoint file of these sections."""
    file = io.BytesIO()
    write_checkpoint(file, SnapshotId(EndOffset(end_offset), Epoch(4)), cluster_id, sections)
    return file.getvalue()


_SERVICES = (admin_pb2_grpc, metadata_pb2_grpc, objects_pb2_grpc, streams_pb2_grpc)


class _Controller(unimplemented(*_SERVICES)):  # type: ignore[misc]
    """Serves the calls that reconciliation makes."""

    def __init__(self, state: FakeMap) -> None:
        self._map = state

    def CheckObjects(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._map.checks.append(list(request.object_ids))
        self._refuse_if_told(context)
        return self._map.answer(request.object_ids)

    def DescribeStreams(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._refuse_if_told(context)
        first, size = int(request.page.page_token or 0), self._map.streams_a_page
        asked = sorted(stream_id for stream_id in request.stream_ids if stream_id >= first)
        ends = self._map.ends_of(asked[:size])
        return streams_pb2.DescribeStreamsResponse(
            streams=[
                streams_pb2.StreamDescription(stream_id=stream_id, end_offset=end)
                for stream_id, end in ends.items()
            ],
            next_page_token=str(asked[size]) if len(asked) > size else "",
        )

    def DescribeCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        return admin_pb2.DescribeClusterResponse(
            cluster_id=self._map.cluster_id,
            cluster_uuid=self._map.cluster_uuid,
            object_namespace=self._map.namespace,
            bucket_problem=self._map.bucket_problem,
        )

    def GetSnapshot(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._map.on_snapshot()
        self._refuse_if_told(context)
        data = self._map.checkpoint() if self._map.snapshot is None else self._map.snapshot
        for at in range(0, len(data), self._map.chunk_bytes):
            yield metadata_pb2.GetSnapshotResponse(
                end_offset=9,
                epoch=4,
                total_bytes=len(data),
                position=at,
                data=data[at : at + self._map.chunk_bytes],
            )
            if self._map.broken_copies > 0:
                self._map.broken_copies -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "told to break")

    def _refuse_if_told(self, context: Any) -> None:
        if self._map.leader_endpoint:
            where = {"leader_endpoint": self._map.leader_endpoint, "epoch": "1"}
            abort(context, grpc.StatusCode.UNAVAILABLE, Reason.NOT_LEADER, "not leader", where)
        if self._map.refuse is not None:
            context.abort(self._map.refuse, "told to refuse")


@contextmanager
def serving(state: FakeMap) -> Iterator[str]:
    """Serve a map on a free port; gives HOST:PORT."""
    with served_by_threads(_Controller(state), *_SERVICES) as endpoint:
        yield endpoint


OWN = cluster_namespace("c1")
OTHER = cluster_namespace("c2")
LONG_AGO_S = 1_700_000_000


def is_marker(key: str) -> bool:
    """Whether it is the marker of any cluster, or a term of the lease."""
    return key.endswith("/cluster.json") or "/leases/" in key


class LocalBucket:
    """A folder as a bucket; what is put is old unless told otherwise."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.uri = root.as_uri()
        self.address = StoreAddress.parse(self.uri)
        self.store = open_object_store(self.uri)

    def put(
        self, key: str, size: int = 10, *, young: bool = False, data: bytes | None = None
    ) -> str:
        """Store `size` bytes, or these; gives the key."""
        self.store.put(key, b"x" * size if data is None else data)
        if not young:
            os.utime(self.root / "objects" / key, (LONG_AGO_S, LONG_AGO_S))
        return key

    def keys(self) -> set[str]:
        """All keys but the markers'."""
        return {key for info in self.store.list_objects() if not is_marker(key := info.key)}


@dataclass(frozen=True, slots=True)
class Scene:
    """A fake controller at `endpoint`, its bucket, and a folder for plans."""

    state: FakeMap
    bucket: LocalBucket
    endpoint: str
    root: Path

    def fill(self, live: Iterable[int], orphans: Iterable[int] = ()) -> None:
        """Store objects of ten bytes; the map has committed the live ones alone."""
        self.state.objects = {i: MapObject(COMMITTED, size=10) for i in live}
        for object_id in (*self.state.objects, *orphans):
            self.bucket.put(own(object_id))

    def config(self, folder: str, **settings: Any) -> PlanConfig:
        """Return the settings of a plan in a folder below the scene's own."""
        return PlanConfig(self.bucket.address, (self.endpoint,), self.root / folder, **settings)


def own(object_id: int) -> str:
    """The key of an object of this cluster."""
    return key_for(object_id, OWN)


HOUR_MS = 3_600_000


def example_plan(made_at_ms: int = 1_000 * HOUR_MS, **changes: Any) -> PlanResult:
    """A plan of cluster c1 that may be applied, with every field set, and then `changes`."""
    plan = PlanResult(
        cluster_id="c1",
        cluster_uuid="uuid-1",
        store="s3://b",
        place="s3://b at Amazon S3",
        namespace=cluster_namespace("c1"),
        connect=("h:1", "h:2"),
        created_at_ms=made_at_ms,
        listing_started_ms=made_at_ms - 60_000,
        young_from_ms=made_at_ms - 60_000 - HOUR_MS,
        unsafe_grace=False,
        map_end_offset=9,
        map_epoch=4,
        next_object_id=100,
        map_objects=80,
        classes={Verdict.LIVE: Tally(80, 8000), Verdict.ORPHAN: Tally(20, 2000)},
        unfinished_uploads=2,
    )
    return replace(plan, **changes)
