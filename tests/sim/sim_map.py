"""The real map as part of what the simulated quorum replicates, and what must hold of it.

Each node's store has its map. A `MapWatch` has the committed one: after each committed entry
everything that a reader may need must be in the map and its bytes in the bucket, what can be read
is what could be read before and what was uploaded since, and it is asked before any bytes are
deleted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState, StreamState
from streammeta.controller.records import record as rec
from tests.metadata.slow_model_state import Node, Object, State, Stream
from tests.sim.sim_time import check

MAP_KEY = "map"


@dataclass(frozen=True, slots=True)
class MapWrite:
    """A request to the map."""

    request: Any


@dataclass(frozen=True, slots=True)
class MapAnswer:
    """What the map answered, or None if it refused."""

    answer: Any


class MapWatch:
    """The committed map and the bucket."""

    def __init__(self) -> None:
        self._map = ClusterMetadata()
        self.bucket: set[int] = set()
        """Objects whose bytes are there."""
        self._hashes: dict[int, bytes] = {}
        self._block_ends: dict[int, dict[int, int]] = {}
        """Per composite the objects that were linked to it, and where each ends."""
        self._state = State()
        self._readable: dict[int, set[int]] = {}
        """Per stream the offsets that objects hold and that are not trimmed."""
        self.counts: Counter[str] = Counter()
        """Compactions of each kind that were committed."""

    def commit(
        self, cluster_metadata: ClusterMetadata, offset: int, records: Sequence[rec.Record]
    ) -> None:
        """An entry is committed, and this is the committed map with it."""
        self._map = cluster_metadata
        for record in records:
            if isinstance(record, rec.ObjectsLinked):
                ids = record.object_id.tolist()
                ends = {object_.object_id: _end_of(object_) for object_ in self._describe(ids)}
                self._block_ends.setdefault(record.composite_id, {}).update(ends)
        self._hashes[offset + 1] = cluster_metadata.state_hash()
        before, self._state = self._state, state_of(cluster_metadata)
        self._check_streams(before, offset)
        self._check_readable(compacts=bool(_replaced(records, before)), offset=offset)
        self._check_needed(offset)
        self.counts.update(_compactions_in(records, before))

    def check_replica(self, who: object, end_offset: int, state_hash: bytes) -> None:
        """A replica that has everything below `end_offset` is this map as it was there."""
        known = self._hashes.get(max((end for end in self._hashes if end <= end_offset), default=0))
        check(known in (None, state_hash), "equal maps at equal offsets", f"{who} at {end_offset}")

    def check_deletion(self, object_ids: tuple[int, ...]) -> None:
        """Bytes go when the mark is committed, and only what can't be needed."""
        states: Any = self._map.query(r.CheckObjects(object_ids=object_ids))
        gone = (ObjectState.MARK_DESTROYED, ObjectState.REMOVED)
        for object_id, state in zip(object_ids, states.states, strict=True):
            marked = f"object {object_id} is {state.name}"
            check(state in gone, "bytes go after the mark is committed", marked)
        needed = self._needed() & set(object_ids)
        check(not needed, "nothing needed is deleted", f"{needed} of {object_ids}")

    def _check_streams(self, before: State, offset: int) -> None:
        for stream_id, stream in self._state.streams.items():
            known = before.streams.get(stream_id)
            check(
                known is None or (stream.end >= known.end and stream.start >= known.start),
                "starts and ends grow",
                f"stream {stream_id} at {offset}",
            )

    def _check_readable(self, *, compacts: bool, offset: int) -> None:
        """What was readable stays so until it is trimmed; a compaction adds nothing to it."""
        before = self._readable
        self._readable = find_readable(self._map, self._state, f"at {offset}")
        for stream_id, stream in self._state.streams.items():
            left = {offset for offset in before.get(stream_id, ()) if offset >= stream.start}
            now = self._readable.get(stream_id, set())
            detail = f"stream {stream_id} at {offset}: {sorted(left)} became {sorted(now)}"
            check(left <= now, "what is readable stays readable", detail)
            if compacts:
                check(left == now, "compactions change nothing that is read", detail)

    def _check_needed(self, offset: int) -> None:
        for object_id in self._needed():
            item = self._state.objects.get(object_id)
            kept = item is not None and item.state in (ObjectState.COMMITTED, ObjectState.LINKED)
            check(kept, "nothing needed is destroyed", f"object {object_id} at {offset}")
            there = object_id in self.bucket
            check(there, "bytes of what is needed are there", f"object {object_id} at {offset}")

    def _needed(self) -> set[int]:
        """Objects that hold something live, and what live composites link of it."""
        state, needed = self._state, set()
        for object_id, item in state.objects.items():
            if item.state is not ObjectState.COMMITTED or not state.alive(item.held):
                continue
            needed.add(object_id)
            if item.kind is ObjectKind.COMPOSITE:
                stream_id, low, _ = item.held[0]
                first = max(low, state.streams[stream_id].start)
                blocks = self._block_ends.get(object_id, {})
                needed |= {block for block, end in blocks.items() if end > first}
        return needed

    def _describe(self, object_ids: list[int]) -> tuple[Any, ...]:
        answer: Any = self._map.query(r.DescribeObjects(object_ids=tuple(object_ids)))
        return tuple(answer.objects)


def find_readable(
    cluster_metadata: ClusterMetadata, state: State, where: str
) -> dict[int, set[int]]:
    """Return per stream the offsets that objects hold above its start: each in one object alone.

    Readers must find each run of them from its first to its last offset.
    """
    items = state.objects.values()
    held = [row for item in items if item.state is ObjectState.COMMITTED for row in item.held]
    readable = state.alive(held)
    starts = {stream_id: stream.start for stream_id, stream in state.streams.items()}
    length = sum(
        max(0, end - max(start, starts[stream_id]))
        for stream_id, start, end in held
        if stream_id in starts
    )
    alone = length == sum(map(len, readable.values()))
    check(alone, "no offset is in two objects", f"{held} {where}")
    runs = [
        (stream_id, first, last + 1)
        for stream_id, offsets in readable.items()
        for first, last in zip(
            sorted(offset for offset in offsets if offset - 1 not in offsets),
            sorted(offset for offset in offsets if offset + 1 not in offsets),
            strict=True,
        )
    ]
    if runs:
        queries = tuple(ObjectQuery(stream_id, first, -1) for stream_id, first, _ in runs)
        answer: Any = cluster_metadata.query(r.GetObjects(queries=queries))
        for (stream_id, first, end), found in zip(runs, answer.results, strict=True):
            reached = [object_.end_offset for object_ in found.objects][-1:]
            detail = f"stream {stream_id} from {first} to {end} {where}: {list(found.objects)}"
            check(reached == [end], "what is readable is found", detail)
    return readable


def _replaced(records: Sequence[rec.Record], before: State) -> list[ObjectKind]:
    """Return of what kinds the objects are that were committed before and are not any more.

    An upload of a stream that is gone destroys a new object at once; it replaces nothing.
    """
    items = [
        before.objects.get(object_id)
        for record in records
        if isinstance(record, rec.ObjectsDestroyed | rec.ObjectsLinked)
        for object_id in record.object_id.tolist()
    ]
    return [item.kind for item in items if item and item.state is ObjectState.COMMITTED]


def _compactions_in(records: Sequence[rec.Record], before: State) -> list[str]:
    """Say what kind of compaction an entry is, if it is one."""
    names = {type(record) for record in records}
    if rec.StreamsDeleted in names:
        return []
    has_results = bool(names & {rec.StreamSetObjectsCommitted, rec.StreamObjectsCommitted})
    destroyed = [record for record in records if isinstance(record, rec.ObjectsDestroyed)]
    kinds = _replaced(destroyed, before)
    found = {
        "set objects compacted": has_results and ObjectKind.STREAM_SET in kinds,
        "stream objects compacted": has_results and bool({*kinds} - {ObjectKind.STREAM_SET}),
        "composites linked": rec.ObjectsLinked in names,
        "deep deletes": bool(kinds) and any(record.deep for record in destroyed),
    }
    return [name for name, happened in found.items() if happened]


def _end_of(described: Any) -> int:
    return int(described.ranges.end_offset[0])


def state_of(cluster_metadata: ClusterMetadata) -> State:
    """Return what the map tells of itself as the state that random requests are made from."""
    streams: Any = cluster_metadata.query(r.DescribeStreams())
    objects: Any = cluster_metadata.query(r.DescribeObjects())
    nodes: Any = cluster_metadata.query(r.GetNodes())
    checked: Any = cluster_metadata.query(r.CheckObjects(object_ids=(0,)))
    state = State(next_object=checked.next_object_id, feature_level=cluster_metadata.feature_level)
    for stream in streams.streams:
        state.streams[stream.stream_id] = Stream(
            epoch=stream.epoch,
            index=stream.range_index,
            start=stream.start_offset,
            end=stream.end_offset,
            opened=stream.state is StreamState.OPENED,
            shared=stream.state is StreamState.SHARED,
            node=stream.node_id,
        )
        for owed in stream.pending_uploads:
            key = (owed.node_id, owed.stream_id)
            state.pending[key] = (owed.start_offset, owed.end_offset)
    state.next_stream = max(state.streams, default=-1) + 1
    for object_ in objects.objects:
        columns = (object_.ranges.stream_id, object_.ranges.start_offset, object_.ranges.end_offset)
        state.objects[object_.object_id] = Object(
            timestamp=object_.timestamp_ms,
            state=object_.state,
            kind=object_.kind,
            attributes=object_.attributes,
            node=object_.node_id,
            composite=object_.composite_id,
            held=list(zip(*(values.tolist() for values in columns), strict=True)),
        )
    for node in nodes.nodes:
        state.nodes[node.node_id] = Node(
            epoch=node.node_epoch, failover=node.failover, departed=node.departed
        )
    return state
