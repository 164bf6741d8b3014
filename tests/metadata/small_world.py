"""A small map whose requests are decided and applied at once, and short forms of requests."""

from collections.abc import Sequence
from typing import Any

from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record

NODE = v.NodeIdentity(0, 1)
OTHER = v.NodeIdentity(1, 1)
NOW = 5_000


class World:
    """A map with two nodes, `streams` open streams of NODE under epoch 1, and 50 prepared ids."""

    def __init__(self, streams: int = 4) -> None:
        self.map = ClusterMetadata()
        self.log: list[tuple[int, bytes]] = []
        self.write(r.RegisterNode(node=NODE))
        self.write(r.RegisterNode(node=OTHER))
        new = (r.NewStream(),) * streams
        self.write(r.CreateStreams(request_id="c", node=NODE, streams=new))
        items = tuple(r.StreamToOpen(stream, 1) for stream in range(streams))
        self.write(r.OpenStreams(node=NODE, streams=items))
        self.write(r.PrepareObjects(request_id="p", node=NODE, count=50, ttl_ms=60_000))

    def write(self, request: Any) -> Any:
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, NOW, offset)
        if decision.records:
            self.log.append((offset, encode_records(decision.records)))
            self.replay(*self.log[-1])
        return decision.answer

    def replay(self, offset: int, payload: bytes) -> None:
        """Apply an entry of a log, perhaps of another world's."""
        self.map.apply(offset, decode_records(payload))

    def apply(self, *records: Record) -> None:
        """Replay records that were not decided."""
        self.replay(self.map.applied_end_offset, encode_records(records))

    def restored(self) -> "World":
        frozen = self.map.freeze()
        world = World()
        world.map = ClusterMetadata.from_sections(frozen.sections(), frozen.end_offset)
        return world

    def assert_undone_and_restored(self, steps: Sequence[Any]) -> None:
        """Make `steps`; each changes the map, is restored from a snapshot, and is undone."""
        hashes = [self.map.state_hash()]
        offsets = [self.map.applied_end_offset]
        for step in steps:
            self.write(step)
            assert self.map.state_hash() != hashes[-1], step
            assert self.restored().map.state_hash() == self.map.state_hash(), step
            hashes.append(self.map.state_hash())
            offsets.append(self.map.applied_end_offset)
        for offset, expected in zip(reversed(offsets), reversed(hashes), strict=True):
            self.map.undo_to(offset)
            assert self.map.state_hash() == expected, offset

    def commit(self, object_id: int, *rows: tuple[int, int, int], **changes: Any) -> Any:
        """Commit rows of (stream, start, end)."""
        return self.write(upload(object_id, *rows, **changes))

    def ends(self) -> list[int]:
        answer: Any = self.map.query(r.DescribeStreams())
        return [stream.end_offset for stream in answer.streams]

    def state(self, object_id: int) -> v.ObjectState:
        answer: Any = self.map.query(r.CheckObjects(object_ids=(object_id,)))
        state: v.ObjectState = answer.states[0]
        return state


def upload(object_id: int, *rows: tuple[int, int, int], **changes: Any) -> r.CommitStreamSetObject:
    streams, starts, ends = zip(*rows, strict=True)
    fields: dict[str, Any] = {
        "node": NODE,
        "object_id": object_id,
        "order_id": object_id,
        "object_size": 100,
        "ranges": v.RangeColumns(
            stream_id=v.column(streams),
            stream_epoch=v.column(changes.pop("epochs", ())),
            start_offset=v.column(starts),
            end_offset=v.column(ends),
        ),
    }
    return r.CommitStreamSetObject(**(fields | changes))


def batch(*uploads: tuple[Any, ...], **changes: Any) -> r.CommitUploads:
    """Uploads of (object, (stream, start, end), (stream, start, end), ...)."""
    rows = [row for _, *held in uploads for row in held]
    streams, starts, ends = zip(*rows, strict=True)
    fields: dict[str, Any] = {
        "node": NODE,
        "object_id": v.column([object_id for object_id, *_ in uploads]),
        "object_size": v.column([100] * len(uploads)),
        "range_count": v.column([len(held) for _, *held in uploads]),
        "ranges": v.RangeColumns(
            stream_id=v.column(streams),
            stream_epoch=v.column(changes.pop("epochs", ())),
            start_offset=v.column(starts),
            end_offset=v.column(ends),
        ),
    }
    return r.CommitUploads(**(fields | changes))


def stream_objects(*rows: tuple[int, int, int, int]) -> v.StreamObjectColumns:
    """Rows of (object, stream, start, end)."""
    ids, streams, starts, ends = zip(*rows, strict=True)
    return v.StreamObjectColumns(
        object_id=v.column(ids),
        object_size=v.column([10] * len(ids)),
        stream_id=v.column(streams),
        start_offset=v.column(starts),
        end_offset=v.column(ends),
    )


def merge(object_id: int, sources: Sequence[int], **changes: Any) -> r.CommitStreamObject:
    """Object that stream objects of stream 0, which end at offset 5, are merged to."""
    fields: dict[str, Any] = {"node": NODE, "object_id": object_id, "object_size": 5}
    fields |= {"stream_id": 0, "stream_epoch": 1, "start_offset": 0, "end_offset": 5}
    fields |= {"source_object_ids": v.column(sources)}
    return r.CommitStreamObject(**(fields | changes))
