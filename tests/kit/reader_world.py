"""A cluster for readers, in the test's own process: a small map, its changes, objects in memory.

Streams grow, are compacted and trimmed as the test says; every change reaches watchers through the
controller's own watch. Records are made from their stream and offset, so a test knows each byte.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from streammeta.client import ReaderConfig
from streammeta.client.parts import ControllerClient, StreamReader
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.rpc.watch.service import WatchHandler
from streammeta.controller.runtime.writer.change_feed import ChangeFeed
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2, metadata_pb2, objects_pb2, records_pb2
from tests.kit.built_objects import built_object
from tests.kit.fake_cluster import NAMESPACE, FakeCluster, FakeStream, Piece, located
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import PATIENCE_S

BASE_TIME = 1_000_000


def payload_of(stream_id: int, offset: int, size: int = 20) -> bytes:
    """What the record of a stream at an offset holds."""
    return random.Random(stream_id << 32 | offset).randbytes(size)


@dataclass
class WorldStream(FakeStream):
    """A stream as the map has it, and all records it ever had."""

    records: list[RecordBatch] = field(default_factory=list)

    def covering(self, start: int, end: int | None = None) -> list[RecordBatch]:
        """The records that overlap `[start, end)`."""
        return [
            record
            for record in self.records
            if record.end_offset > start and (end is None or record.base_offset < end)
        ]


class WatchedCluster(FakeCluster):
    """The fake controllers, with the map and the changes of a world."""

    def __init__(self, world: World, members: int) -> None:
        super().__init__(members)
        self._world = world
        self._watching = WatchHandler(world.feed)

    def _handlers(self, member: int) -> list[grpc.GenericRpcHandler]:
        watch: Any = grpc.unary_stream_rpc_method_handler(
            self._watch, request_deserializer=metadata_pb2.WatchRequest.FromString
        )

        self.map.objects = self._world.objects  # type: ignore[method-assign]
        return [
            grpc.method_handlers_generic_handler("streammeta.v1.MetadataService", {"Watch": watch}),
            *super()._handlers(member),
        ]

    def high_watermark(self) -> int:
        return self._world.feed.end_offset + self._world.committed_elsewhere

    async def _watch(self, request: metadata_pb2.WatchRequest, context: Any) -> None:
        self.calls["Watch"] += 1
        self.requests["Watch"].append(request)
        if self._world.watch_is_broken:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "fake: no watch")
        if self._world.watch_hangs:
            far = self._world.feed.end_offset + 1_000
            lagging = metadata_pb2.WatchResponse(offset=request.from_offset - 1, high_watermark=far)
            await context.write(lagging.SerializeToString())
            await asyncio.Event().wait()
        await self._watching.watch(request, context)


class World:
    """The map, its changes and the bucket. Whatever is changed is told to watchers at once."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.streams: dict[int, WorldStream] = {}
        self.store = CountingStore()
        self.feed = ChangeFeed(1 << 20)
        self.watch_is_broken = False
        self.watch_hangs = False  # it says that it is behind, and then nothing
        self.committed_elsewhere = 0  # entries that those who serve watches have not heard of
        self.tells = True  # whether changes reach watchers
        self.once_answered: Callable[[], None] | None = None  # before the answer arrives
        self.next_object_id = 0
        self.block_bytes = 60
        self.time_of: Callable[[int, int], int] = lambda _stream, offset: BASE_TIME + offset
        self.tells_times = True
        self.is_relative: Callable[[int], bool] = lambda _object_id: False  # of set objects
        self._users: Counter[int] = Counter()

    # ---- what happens ----

    def create(self, count: int) -> list[int]:
        ids = list(range(len(self.streams), len(self.streams) + count))
        self.streams.update((stream_id, WorldStream()) for stream_id in ids)
        return ids

    def commit(self, counts: dict[int, int], *, payload: int = 20, span: int = 1) -> int:
        """Append so many records to each stream, in one object; return its id."""
        written = {
            count: self._next_records(count, counts[count], payload, span)
            for count in sorted(counts)
        }
        relative = self.is_relative(self.next_object_id)
        object_id, size, _ = self._put(written.values(), relative=relative)
        times = self._times(record for records in written.values() for record in records)
        kind, crc32c = common_pb2.OBJECT_KIND_STREAM_SET, self._crc(object_id)
        pieces: dict[int, Piece] = {}
        for stream_id, records in written.items():
            start, end = records[0].base_offset, records[-1].end_offset
            pieces[stream_id] = Piece(object_id, kind, start, end, size, times, crc32c)
        for stream_id, piece in pieces.items():
            stream = self.streams[stream_id]
            stream.pieces.append(piece)
            stream.records.extend(written[stream_id])
            stream.end = piece.end
            self._users[object_id] += 1
        self._tell(set_objects_record(pieces))
        return object_id

    def _next_records(
        self, stream_id: int, count: int, payload: int, span: int
    ) -> list[RecordBatch]:
        """Make records of `span` offsets each behind those there are."""
        end = self.streams[stream_id].end
        starts = range(end, end + count * span, span)
        payloads = (payload_of(stream_id, at, payload) for at in starts)
        made = zip(starts, payloads, strict=True)
        return [RecordBatch(stream_id, 0, at, span, held) for at, held in made]

    def compact(self, stream_id: int, first: int, count: int, *, composite: bool = False) -> int:
        """Put one object in the place of `count` pieces from `first` on; return its id."""
        stream = self.streams[stream_id]
        old = stream.pieces[first : first + count]
        start, end = old[0].start, old[-1].end
        held = [record for record in stream.records if start <= record.base_offset < end]
        if composite:
            object_id, size = self._link(held)
        else:
            object_id, size, _ = self._put([held])
        kind = common_pb2.OBJECT_KIND_COMPOSITE if composite else common_pb2.OBJECT_KIND_STREAM
        new = Piece(object_id, kind, start, end, size, self._times(held), self._crc(object_id))
        stream.pieces[first : first + count] = [new]
        self._users[object_id] += 1
        self._tell(stream_object_record(stream_id, new))
        self._release(old)
        return object_id

    def trim(self, stream_id: int, start: int) -> None:
        stream = self.streams[stream_id]
        stream.start = max(stream.start, start)
        gone = [piece for piece in stream.pieces if piece.end <= stream.start]
        stream.pieces = [piece for piece in stream.pieces if piece.end > stream.start]
        trimmed = records_pb2.StreamsTrimmedRecord(
            stream_id=column(stream_id), start_offset=column(start)
        )
        self._tell(records_pb2.Record(streams_trimmed=trimmed))
        self._release(gone)

    def close_beyond(self, stream_id: int, end: int) -> None:
        """Close a stream at an end that is not uploaded yet."""
        self.streams[stream_id].end = end
        closed = records_pb2.StreamsClosedRecord(
            stream_id=column(stream_id), end_offset=column(end)
        )
        self._tell(records_pb2.Record(streams_closed=closed))

    def give_up(self, stream_id: int, start: int, end: int) -> None:
        """Give up offsets that were never uploaded."""
        self.streams[stream_id].lost.append((start, end))
        abandoned = records_pb2.UploadsAbandonedRecord(node_id=1, stream_id=column(stream_id))
        self._tell(records_pb2.Record(uploads_abandoned=abandoned))

    def delete(self, stream_id: int) -> None:
        self._release(self.streams.pop(stream_id).pieces)
        deleted = records_pb2.StreamsDeletedRecord(stream_id=column(stream_id))
        self._tell(records_pb2.Record(streams_deleted=deleted))

    def lose_changes(self) -> None:
        """Let all watchers learn that changes are gone."""
        self.feed.restart(self.feed.end_offset + 1)

    # ---- what controllers answer ----

    def objects(self, request: objects_pb2.GetObjectsRequest) -> objects_pb2.GetObjectsResponse:
        found = [(self.streams.get(query.stream_id), query) for query in request.queries]
        results = [located(stream, query, ends_at_gap=True) for stream, query in found]
        if self.once_answered is not None:
            self.once_answered()
        return objects_pb2.GetObjectsResponse(results=results)

    # ---- objects ----

    def _put(
        self, streams: Iterable[Sequence[RecordBatch]], *, relative: bool = False
    ) -> tuple[int, int, tuple[Any, ...]]:
        built = built_object(streams, self.block_bytes, relative=relative)
        object_id = self.next_object_id
        self.next_object_id += 1
        self.store.put(key_for(object_id, NAMESPACE), built.data)
        return object_id, built.size, built.entries

    def _link(self, records: Sequence[RecordBatch]) -> tuple[int, int]:
        """Put records into two objects, and a composite over them."""
        cut = max(1, len(records) // 2)
        links = []
        for part in (records[:cut], records[cut:]):
            if part:
                object_id, _, entries = self._put([part])
                links.append(LinkedObject(object_id, 0, entries))
        composite_id = self.next_object_id
        self.next_object_id += 1
        self.store.put(key_for(composite_id, NAMESPACE), encode_composite(links))
        linked: list[IndexEntry] = [entry for link in links for entry in link.entries]
        return composite_id, sum(entry.size for entry in linked)

    def _release(self, pieces: Iterable[Piece]) -> None:
        """Delete the bytes of objects that hold nothing any more."""
        for piece in pieces:
            self._users[piece.object_id] -= 1
            if not self._users[piece.object_id]:
                self.store.delete_many([key_for(piece.object_id, NAMESPACE)])

    def _times(self, records: Iterable[RecordBatch]) -> tuple[int, int]:
        times = [self.time_of(record.stream_id, record.base_offset) for record in records]
        return (min(times), max(times)) if self.tells_times else (-1, -1)

    def _crc(self, object_id: int) -> int:
        checksum = ObjectChecksum()
        checksum.update(self.store.objects()[key_for(object_id, NAMESPACE)])
        return checksum.value

    def _tell(self, record: records_pb2.Record) -> None:
        at = self.feed.end_offset
        payload = records_pb2.RecordSet(records=[record]).SerializeToString()
        if self.tells:
            batch = Batch(EndOffset(at), Epoch(1), BatchKind.DATA, (payload,))
            self.feed.extend([batch], at + 1)


class CountingStore(MemoryObjectStore):
    """Keeps a list of all reads; `block_on` tells when one is reached and lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[tuple[str, int, int | None]] = []
        self.block_on: tuple[threading.Event, threading.Event] | None = None

    def until(self, deadline: float) -> CountingStore:
        return self

    def get_range(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gets.append((key, start, end))
        if self.block_on is not None:
            reached, released = self.block_on
            reached.set()
            released.wait(60)
        return super().get_range(key, start, end)


def column(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def set_objects_record(pieces: dict[int, Piece]) -> records_pb2.Record:
    """The record of the commit of one stream set object."""
    (one, *_) = pieces.values()
    ranges = records_pb2.SetObjectRanges(
        stream_id=column(*pieces),
        start_offset=column(*(piece.start for piece in pieces.values())),
        end_offset=column(*(piece.end for piece in pieces.values())),
    )
    committed = records_pb2.StreamSetObjectsCommittedRecord(
        node_id=1,
        object_id=column(one.object_id),
        order_id=column(one.object_id),
        object_size=column(one.size),
        attributes=column(0),
        range_count=column(len(pieces)),
        ranges=ranges,
        min_timestamp_ms=column(one.times[0]),
        max_timestamp_ms=column(one.times[1]),
        crc32c=column(one.crc32c),
    )
    return records_pb2.Record(stream_set_objects_committed=committed)


def stream_object_record(stream_id: int, piece: Piece) -> records_pb2.Record:
    """The record of the commit of one stream object or composite."""
    committed = records_pb2.StreamObjectsCommittedRecord(
        object_id=column(piece.object_id),
        object_size=column(piece.size),
        attributes=column(1 if piece.kind == common_pb2.OBJECT_KIND_COMPOSITE else 0),
        stream_id=column(stream_id),
        start_offset=column(piece.start),
        end_offset=column(piece.end),
        min_timestamp_ms=column(piece.times[0]),
        max_timestamp_ms=column(piece.times[1]),
        crc32c=column(piece.crc32c),
    )
    return records_pb2.Record(stream_objects_committed=committed)


@dataclass
class Place:
    """A world, and the cluster and client to reach it through."""

    world: World
    cluster: WatchedCluster
    client: ControllerClient

    def reader(self, config: ReaderConfig | None = None) -> StreamReader:
        return StreamReader(self.client, self.world.store, NAMESPACE, config)


@asynccontextmanager
async def placed(seed: int = 0, members: int = 1) -> AsyncIterator[Place]:
    """Yield an empty world that is served."""
    world = World(seed)
    cluster = WatchedCluster(world, members)
    async with (
        cluster,
        ControllerClient(
            cluster.endpoints, deadline_s=PATIENCE_S, attempt_timeout_s=2.0, rng=random.Random(seed)
        ) as client,
    ):
        yield Place(world, cluster, client)
