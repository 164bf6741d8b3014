"""A small cluster with all it ever wrote remembered, and its leading controller.

Nodes open streams, upload set objects and stream objects, trim, delete and hand streams on; each
record is made from its stream and offset. `check_reads` reads every live offset straight from the
map and the bucket. Knows nothing of compactors.

A log in memory commits by itself; every call goes through the conversion, the admission and the map
that a controller has. Clients are connected without a network, or over a port on loopback.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import numpy as np

from streammeta.client.parts import ControllerClient
from streammeta.controller.errors import ErrorCode
from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.requests import ReadRequest, WriteRequest
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables import values
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.object_format import object_key
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import admin_pb2
from tests.compaction.compaction_steps import DirectChannel, Steps
from tests.fake_bucket import FAKE_UUID
from tests.kit.built_objects import BuiltObject, built_object
from tests.kit.grpc_servers import served
from tests.kit.local_calls import LocalServices
from tests.kit.map_services import map_services
from tests.kit.memory_log import CommittingLog
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import ManualClock

TTL_MS = 3_600_000
BASE_TIME_MS = 5_000_000


def payload_of(stream_id: int, offset: int, size: int) -> bytes:
    return random.Random(stream_id << 40 | offset).randbytes(size)


def time_of(record: RecordBatch) -> int:
    return BASE_TIME_MS + 10 * record.base_offset + record.stream_id


@dataclass
class TrueStream:
    """A stream as it is, and every record it ever had."""

    stream_id: int
    owner: int
    epoch: int = 1
    is_open: bool = True
    is_deleted: bool = False
    start: int = 0
    end: int = 0
    records: list[RecordBatch] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)

    def next_records(self, sizes: Sequence[tuple[int, int]]) -> list[RecordBatch]:
        """Make records, each of so many offsets and bytes, behind those there are."""
        made: list[RecordBatch] = []
        at = self.end
        for count, size in sizes:
            payload = payload_of(self.stream_id, at, size)
            made.append(RecordBatch(self.stream_id, self.epoch, at, count, payload))
            at += count
        return made


class World:
    """The map, the bucket, and the truth."""

    def __init__(self, block_bytes: int = 100) -> None:
        self.map = LeadingMap()
        self.clock = self.map.clock
        self.store = MemoryObjectStore(self.clock.wall_ms)
        self.streams: dict[int, TrueStream] = {}
        self.nodes: dict[int, values.NodeIdentity] = {}
        self.block_bytes = block_bytes
        self.tells_facts = True
        self.is_relative: Callable[[int], bool] = lambda _object_id: False  # of set objects

    # ---- nodes and streams ----

    async def register(self, *node_ids: int) -> None:
        """Start a process of each node, which fences those it had."""
        for node_id in node_ids:
            epoch = self.nodes[node_id].node_epoch + 1 if node_id in self.nodes else 1
            self.nodes[node_id] = values.NodeIdentity(node_id, epoch)
            await self._done(requests.RegisterNode(node=self.nodes[node_id]))

    async def unregister(self, node_id: int) -> None:
        """Let a node depart; it owns no open stream."""
        await self._done(requests.UnregisterNode(node=self.nodes[node_id]))

    async def create(self, node_id: int, count: int) -> list[int]:
        node = self.nodes[node_id]
        new = (requests.NewStream(),) * count
        answer = await self.map.write(
            requests.CreateStreams(request_id=self.map.request_id(), node=node, streams=new)
        )
        ids: list[int] = list(answer.stream_ids)
        self.streams |= {stream_id: TrueStream(stream_id, node_id) for stream_id in ids}
        await self._open(node, ids)
        return ids

    async def close(self, stream_id: int) -> None:
        """Close a stream; all of it is committed."""
        stream = self.streams[stream_id]
        await self._close(stream, None)

    async def move(self, stream_id: int, node_id: int) -> None:
        """Close a stream, if it is open, and open it for a node."""
        stream = self.streams[stream_id]
        if stream.is_open:
            await self.close(stream_id)
        stream.epoch += 1
        stream.owner = node_id
        stream.is_open = True
        await self._open(self.nodes[node_id], [stream_id])

    async def lose(self, stream_id: int, offsets: int) -> None:
        """Close a stream with so many acknowledged offsets more, and give those up."""
        stream = self.streams[stream_id]
        await self._close(stream, stream.end + offsets)
        await self._done(requests.AbandonUploads(node_id=stream.owner, stream_ids=(stream_id,)))
        stream.lost.append((stream.end, stream.end + offsets))
        stream.end += offsets

    async def trim(self, stream_id: int, start: int) -> None:
        """Move the start of a stream that is open."""
        stream = self.streams[stream_id]
        item = requests.StreamToTrim(stream_id, stream.epoch, start)
        await self._done(requests.TrimStreams(node=self.nodes[stream.owner], streams=(item,)))
        stream.start = max(stream.start, start)

    async def delete(self, stream_id: int) -> None:
        """Close a stream, if it is open, and delete it."""
        stream = self.streams[stream_id]
        if stream.is_open:
            await self.close(stream_id)
        item = requests.StreamToDelete(stream_id, stream.epoch)
        await self._done(requests.DeleteStreams(node=self.nodes[stream.owner], streams=(item,)))
        stream.is_deleted = True

    # ---- uploads ----

    async def upload(
        self,
        node_id: int,
        sizes: Mapping[int, Sequence[tuple[int, int]]],
        apart: Collection[int] = (),
    ) -> int:
        """Append records (offsets, bytes) to streams of a node, in one commit.

        Streams of `apart` get a stream object each. Returns the set object's id, -1 without one.
        """
        written = {size: self.streams[size].next_records(sizes[size]) for size in sorted(sizes)}
        together = [stream_id for stream_id in written if stream_id not in apart]
        ids = await self.prepare(node_id, 1 + len(apart))
        set_object, *others = ids
        held, relative = [written[id_] for id_ in together], self.is_relative(set_object)
        built = self._put(set_object, held, relative=relative) if together else None
        if built is None:
            set_object = -1
        singles = {
            stream_id: (object_id, self._put(object_id, [written[stream_id]]))
            for object_id, stream_id in zip(others, sorted(set(apart) & set(written)), strict=False)
        }
        await self._commit(node_id, set_object, built, written, singles)
        for stream_id, records in written.items():
            self.streams[stream_id].records.extend(records)
            self.streams[stream_id].end = records[-1].end_offset
        return set_object

    async def upload_with_refused(
        self,
        node_id: int,
        sizes: Mapping[int, Sequence[tuple[int, int]]],
        refused: Mapping[int, Sequence[tuple[int, int]]],
    ) -> int:
        """Append as `upload`, in an object that also holds what the map refuses: other bytes."""
        written = {size: self.streams[size].next_records(sizes[size]) for size in sizes}
        ghosts = {stream: self.streams[stream].next_records(refused[stream]) for stream in refused}
        held = dict(
            sorted((written | {i: [_ghost(r) for r in g] for i, g in ghosts.items()}).items())
        )
        (object_id,) = await self.prepare(node_id, 1)
        relative = self.is_relative(object_id)
        built = self._put(object_id, list(held.values()), relative=relative)
        ranges = self._spans(held)
        lies = 7 * np.isin(ranges["stream_id"], list(ghosts))
        ranges["stream_epoch"] = values.column(ranges["stream_epoch"] + lies)
        answer = await self.map.write(
            requests.CommitStreamSetObject(
                node=self.nodes[node_id],
                object_id=object_id,
                order_id=object_id,
                object_size=built.size,
                on_conflict=values.OnConflict.ACCEPT_VALID,
                ranges=values.RangeColumns(**ranges),
            )
        )
        verdicts = dict(zip(held, answer.range_errors.tolist(), strict=True))
        assert {stream for stream in held if verdicts[stream] != ErrorCode.NONE} == set(ghosts)
        for stream_id, records in written.items():
            self.streams[stream_id].records.extend(records)
            self.streams[stream_id].end = records[-1].end_offset
        return object_id

    async def prepare(self, node_id: int, count: int) -> list[int]:
        answer = await self.map.write(
            requests.PrepareObjects(
                request_id=self.map.request_id(),
                node=self.nodes[node_id],
                count=count,
                ttl_ms=TTL_MS,
            )
        )
        assert answer.error is ErrorCode.NONE
        return list(range(answer.first_object_id, answer.first_object_id + count))

    def _put(
        self, object_id: int, streams: Sequence[Sequence[RecordBatch]], *, relative: bool = False
    ) -> BuiltObject:
        built = built_object(streams, self.block_bytes, checksum=True, relative=relative)
        self.store.put(object_key.key_for(object_id, NAMESPACE), built.data)
        return built

    async def _commit(
        self,
        node_id: int,
        object_id: int,
        built: BuiltObject | None,
        written: Mapping[int, Sequence[RecordBatch]],
        singles: Mapping[int, tuple[int, BuiltObject]],
    ) -> None:
        together = [stream_id for stream_id in written if stream_id not in singles]
        apart = {stream_id: written[stream_id] for stream_id in sorted(singles)}
        fields: dict[str, Any] = {}
        if built is not None and self.tells_facts:
            low, high = _bounds([record for stream_id in together for record in written[stream_id]])
            fields = {"min_timestamp_ms": low, "max_timestamp_ms": high, "crc32c": built.crc32c}
        bounds = [_bounds(written[stream_id]) for stream_id in apart]
        await self._done(
            requests.CommitStreamSetObject(
                node=self.nodes[node_id],
                object_id=object_id,
                order_id=object_id,
                object_size=built.size if built is not None else 0,
                ranges=values.RangeColumns(
                    **self._spans({stream_id: written[stream_id] for stream_id in together})
                ),
                stream_objects=values.StreamObjectColumns(
                    object_id=values.column([singles[stream_id][0] for stream_id in apart]),
                    object_size=values.column([singles[stream_id][1].size for stream_id in apart]),
                    **self._spans(apart),
                    min_timestamp_ms=values.column([low for low, _ in bounds]),
                    max_timestamp_ms=values.column([high for _, high in bounds]),
                    crc32c=values.column([singles[stream_id][1].crc32c for stream_id in apart]),
                ),
                **fields,
            )
        )

    def _spans(self, written: Mapping[int, Sequence[RecordBatch]]) -> dict[str, values.Int64Column]:
        """Streams, their epochs, and what was written of each, as columns."""
        return {
            "stream_id": values.column(list(written)),
            "stream_epoch": values.column([self.streams[stream_id].epoch for stream_id in written]),
            "start_offset": values.column([records[0].base_offset for records in written.values()]),
            "end_offset": values.column([records[-1].end_offset for records in written.values()]),
        }

    # ---- what the controllers do by themselves ----

    async def sweep(self, delay_ms: int = 0) -> list[int]:
        """Delete the bytes of what was destroyed `delay_ms` ago; return whose."""
        cluster_metadata = self.map.controller.cluster_metadata
        while cluster_metadata.has_sweepings():
            await self.map.write(requests.SweepDeletedStreams(limit=100))
        now_ms = self.clock.now_ms
        due = list(cluster_metadata.destroyed(now_ms - delay_ms + 1, 10_000, now_ms))
        if due:
            self.store.delete_many([object_key.key_for(object_id, NAMESPACE) for object_id in due])
            await self.map.write(requests.RemoveObjects(object_ids=tuple(due)))
        return due

    async def expire(self) -> None:
        """Let a day and more pass, so that everything prepared until now expires, and sweep."""
        self.clock.now_ms += 8 * 86_400_000
        await self.map.write(requests.ExpireObjects(limit=10_000))
        await self.sweep()

    # ---- what there is ----

    def live(self) -> list[TrueStream]:
        return [stream for stream in self.streams.values() if not stream.is_deleted]

    def set_objects(self, node_id: int) -> list[int]:
        answer = self.map.query(
            requests.GetNodes(node_ids=(node_id,), include_stream_set_objects=True)
        )
        return [one.object_id for node in answer.nodes for one in node.stream_set_objects]

    def stored_ranges(self, stream_id: int) -> list[tuple[int, int, int]]:
        """Ids and offsets of a stream's stream objects and composites, by start offset."""
        found = []
        for one in self.committed():
            if one.node_id < 0 and stream_id in one.ranges.stream_id.tolist():
                (start,), (end,) = one.ranges.start_offset.tolist(), one.ranges.end_offset.tolist()
                found.append((one.object_id, start, end))
        return sorted(found, key=lambda item: item[1])

    def committed(self) -> list[Any]:
        answer = self.map.query(requests.DescribeObjects())
        return [item for item in answer.objects if item.state is values.ObjectState.COMMITTED]

    def state(self, object_id: int) -> values.ObjectState:
        answer = self.map.query(requests.CheckObjects(object_ids=(object_id,)))
        return values.ObjectState(answer.states[0])

    def strays(self) -> dict[int, values.ObjectState]:
        """Objects in the bucket that nothing in the map needs, by id."""
        found: dict[int, values.ObjectState] = {}
        for key in self.store.objects():
            parsed = object_key.parse_key(key, NAMESPACE)
            assert isinstance(parsed, object_key.OwnKey), f"{key} is no key of this cluster"
            state = self.state(parsed.object_id)
            if state not in (values.ObjectState.COMMITTED, values.ObjectState.LINKED):
                found[parsed.object_id] = state
        return found

    # ---- requests ----

    async def _open(self, node: values.NodeIdentity, ids: Sequence[int]) -> None:
        items = tuple(requests.StreamToOpen(stream, self.streams[stream].epoch) for stream in ids)
        answer = await self.map.write(requests.OpenStreams(node=node, streams=items))
        assert {stream.error for stream in answer.streams} <= {ErrorCode.NONE}

    async def _close(self, stream: TrueStream, end: int | None) -> None:
        item = requests.StreamToClose(stream.stream_id, stream.epoch, end)
        await self._done(requests.CloseStreams(node=self.nodes[stream.owner], streams=(item,)))
        stream.is_open = False

    async def _done(self, request: Any) -> None:
        answer = await self.map.write(request)
        errors = getattr(answer, "errors", None) or (answer.error,)
        assert set(errors) == {ErrorCode.NONE}, f"{request} is answered {answer}"


def _ghost(record: RecordBatch) -> RecordBatch:
    """Return a record at the same offsets with other bytes."""
    return replace(record, payload=bytes(len(record.payload)))


def _bounds(records: Sequence[RecordBatch]) -> tuple[int, int]:
    times = [time_of(record) for record in records]
    return min(times), max(times)


CLUSTER_ID = "compaction"
NAMESPACE = object_key.cluster_namespace(CLUSTER_ID)
SESSION_TIMEOUT_MS = 9_000
_ENDPOINT = "leader:1"


class LeadingMap:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.controller = MetadataController(ClusterMetadata(), self.clock)
        self._log = CommittingLog(self.controller)
        self.controller.bind(self._log)
        self._log.lead()
        self.sessions = Sessions(SESSION_TIMEOUT_MS)
        self.sessions.lead(self.clock.monotonic_ms())
        self._generic = self._handlers()
        self._direct = LocalServices(self._generic)
        self._request_ids = itertools.count()

    async def write(self, request: WriteRequest) -> Any:
        return (await self.controller.write(request)).answer

    def query(self, request: ReadRequest) -> Any:
        return self.controller.cluster_metadata.query(request)

    def request_id(self) -> str:
        return f"request {next(self._request_ids)}"

    def load(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self._log.load(ClusterMetadata.from_sections(sections, self._log.committed), self.clock)

    def client(self, steps: Steps, *, deadline: float = 10.0) -> ControllerClient:
        """Return a client without a network, whose attempts are steps."""
        return _SteppedClient(DirectChannel(self._direct, steps), deadline)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[ControllerClient]:
        """Serve on a port of loopback; yield a client that calls there."""
        async with (
            served(*self._generic) as endpoint,
            ControllerClient([endpoint], rng=random.Random(1)) as client,
        ):
            yield client

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        services = map_services(CLUSTER_ID, self.controller, self.sessions, self.clock)
        described: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self._describe,
            request_deserializer=None,
            response_serializer=admin_pb2.DescribeClusterResponse.SerializeToString,
        )
        admin = {"DescribeCluster": described}
        return *services, grpc.method_handlers_generic_handler("streammeta.v1.AdminService", admin)

    async def _describe(self, _data: bytes, _context: Any) -> admin_pb2.DescribeClusterResponse:
        return admin_pb2.DescribeClusterResponse(
            cluster_id=CLUSTER_ID,
            object_namespace=NAMESPACE,
            cluster_uuid=FAKE_UUID,
            high_watermark=self.controller.committed_end,
        )


class _SteppedClient(ControllerClient):
    """Calls over one channel that is there already."""

    def __init__(self, channel: DirectChannel, deadline: float) -> None:
        super().__init__([_ENDPOINT], deadline_s=deadline, rng=random.Random(1))
        self._direct = channel

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, self._direct)
