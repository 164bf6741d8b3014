"""Every live offset, read straight from the map and the bucket, held against the truth.

No cache of blocks, no retry and no wait: what the map lists must be there now, whole, and be what
was written. What an object's record says of it (size, checksum, times) must hold too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.api.requests import DescribeObjects, GetObjects
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.composite import decode_composite
from streammeta.storage.object_format.index_block import IndexBlock, IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.object_reader import ObjectReader, read_entry
from streammeta.storage.object_format.record import RecordBatch
from tests.compaction.compaction_world import NAMESPACE, TrueStream, World, time_of

_UNKNOWN = -1
_HeldIndex: TypeAlias = tuple[bytes, IndexBlock, list[int], bool]
"""Bytes of an object, its index, the object of each entry's blocks, and whether it is relative."""
_ALL_BYTES = 1 << 62


class ReadCheck:
    """Reads of one world. Objects never change once written, so each is decoded once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._indexes: dict[int, _HeldIndex] = {}
        self._records: dict[tuple[int, int], list[RecordBatch]] = {}
        self._bucket: dict[str, bytes] = {}
        self._end = -1

    def run(self) -> None:
        """Read everything, unless map and bucket are what they were the last time."""
        bucket = self._world.store.objects()
        end = self._world.map.controller.cluster_metadata.applied_end_offset
        if (end, bucket) == (self._end, self._bucket):
            return
        self._bucket = bucket
        for stream in self._world.live():
            self._stream(stream)
        self._end = end

    def run_links(self) -> None:
        """Compare what composites link with what the map says is linked by them."""
        self.run()
        linked: dict[int, set[int]] = {}
        held: dict[int, set[int]] = {}
        for object_ in self._world.map.query(DescribeObjects()).objects:
            if object_.state is ObjectState.LINKED:
                linked.setdefault(object_.composite_id, set()).add(object_.object_id)
            elif object_.state is ObjectState.COMMITTED and object_.kind is ObjectKind.COMPOSITE:
                composite = decode_composite(self._bytes(object_.object_id))
                held[object_.object_id] = {link.object_id for link in composite.links}
        assert linked == held, "the map keeps the bytes that composites need, and no others"

    async def look(self, _step: object) -> None:
        """Read everything before and after a step of a process."""
        self.run()

    async def swept(self) -> None:
        """Read everything before and after the controllers delete what was replaced."""
        self.run()
        await self._world.sweep()
        self.run()

    async def all_gone(self) -> None:
        """Check that controllers delete replaced objects and expired outputs, and reads stay."""
        await self.swept()
        await self._world.expire()
        self.run_links()
        assert not self._world.strays()

    def _stream(self, stream: TrueStream) -> None:
        wanted = {record.base_offset: record for record in stream.records}
        at = stream.start
        while at < stream.end:
            lost_end = _end_of_lost(stream, at)
            found = self._ask(stream, at)
            if lost_end is not None:
                assert found.lost_end_offset == lost_end, f"stream {stream.stream_id} at {at}"
                at = lost_end
                continue
            assert found.objects, f"no object holds stream {stream.stream_id} at offset {at}"
            for piece in found.objects:
                assert piece.start_offset <= at < piece.end_offset, f"{piece} does not hold {at}"
                for record in self._piece(stream.stream_id, piece, at):
                    assert record == wanted.get(record.base_offset), (
                        f"object {piece.object_id} holds {record}, written was"
                        f" {wanted.get(record.base_offset)}"
                    )
                    assert record.base_offset <= at < record.end_offset, f"{record} is not next"
                    at = record.end_offset

    def _ask(self, stream: TrueStream, at: int) -> Any:
        query = ObjectQuery(stream.stream_id, at, -1)
        (found,) = self._world.map.query(GetObjects(queries=(query,))).results
        assert found.error is ErrorCode.NONE, f"stream {stream.stream_id} at {at}: {found}"
        span = (found.stream_start_offset, found.stream_end_offset)
        assert span == (stream.start, stream.end), f"stream {stream.stream_id} is {span}"
        return found

    def _piece(self, stream_id: int, piece: Any, at: int) -> Iterator[RecordBatch]:
        """Read the records of a slice from the one that holds `at` on."""
        _, index, holders, relative = self._index(piece)
        base = piece.start_offset if relative else 0
        assert not relative or index.end_of(stream_id) == piece.end_offset - base
        found = index.find(stream_id, at - base, piece.end_offset - base, _ALL_BYTES)
        for ordinal, entry in enumerate(found.entries, start=found.first_ordinal):
            for record in self._entry(holders[ordinal], entry, base):
                if record.end_offset > at and record.base_offset < piece.end_offset:
                    self._check_time(piece, record)
                    yield record

    def _index(self, piece: Any) -> _HeldIndex:
        object_id = piece.object_id
        data = self._bytes(object_id)
        held = self._indexes.get(object_id)
        if held is not None and held[0] == data:
            return held
        relative = False
        if piece.kind is ObjectKind.COMPOSITE:
            composite = decode_composite(data, source=str(object_id))
            index = composite.index
            holders = [link.object_id for link in composite.links for _ in link.entries]
            assert piece.object_size == index.data_size
        else:
            assert piece.object_size == len(data), f"size of object {object_id}"
            is_set = piece.kind is ObjectKind.STREAM_SET
            reader = ObjectReader(str(object_id), len(data), accept_relative=is_set)
            while (needed := reader.needed) is not None:
                reader.receive(data[needed.start : needed.end])
            index, holders = reader.index, [object_id] * len(reader.index)
            relative = reader.relative
        if piece.crc32c != _UNKNOWN:
            ObjectChecksum.of(data).verify(piece.crc32c, source=str(object_id))
        self._indexes[object_id] = data, index, holders, relative
        return self._indexes[object_id]

    def _entry(self, object_id: int, entry: IndexEntry, base: int) -> list[RecordBatch]:
        data = self._bytes(object_id)
        key = object_id, entry.position
        records = self._records.get(key)
        if records is None:
            view = memoryview(data)[entry.position : entry.position + entry.size]
            records = self._records[key] = read_entry(
                entry.shifted(base), view, str(object_id), base=base
            )
        return records

    def _bytes(self, object_id: int) -> bytes:
        data = self._bucket.get(key_for(object_id, NAMESPACE))
        assert data is not None, f"object {object_id} is in the map, and not in the bucket"
        return data

    def _check_time(self, piece: Any, record: RecordBatch) -> None:
        if piece.max_timestamp_ms != _UNKNOWN:
            low, high = piece.min_timestamp_ms, piece.max_timestamp_ms
            assert low <= time_of(record) <= high, f"{record} is not within {low}..{high} ms"


def _end_of_lost(stream: TrueStream, at: int) -> int | None:
    """Where the offsets that were given up end, those right behind them included."""
    found = None
    for start, end in stream.lost:
        if start <= at < end:
            at = found = end
    return found
