"""Which ranges of an upload are accepted, what rejected ones do, and how repeats are answered."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata import values as v
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record, StreamSetObjectsCommitted

NODE = v.NodeIdentity(0, 1)
OTHER = v.NodeIdentity(1, 1)
NOW = 5_000


class World:
    """A map with two nodes, `streams` open streams of NODE under epoch 1, and 50 prepared ids."""

    def __init__(self, streams: int = 4) -> None:
        self.map = ClusterMap()
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
        """Replay records that nobody decided."""
        self.replay(self.map.applied_end_offset, encode_records(records))

    def restored(self) -> "World":
        frozen = self.map.freeze()
        world = World()
        world.map = ClusterMap.from_sections(frozen.sections(), frozen.end_offset)
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
    """What stream objects of stream 0, which end at offset 5, are merged to."""
    fields: dict[str, Any] = {"node": NODE, "object_id": object_id, "object_size": 5}
    fields |= {"stream_id": 0, "stream_epoch": 1, "start_offset": 0, "end_offset": 5}
    fields |= {"source_object_ids": v.column(sources)}
    return r.CommitStreamObject(**(fields | changes))


CONTINUITY = [
    # (start, end) of the stream; state of affairs; range; epoch given; verdict; end afterwards
    (0, 0, "open", (0, 10), None, "NONE", 10),
    (0, 0, "open", (5, 10), None, "OFFSET_NOT_MATCHED", 0),
    (0, 50, "open", (50, 60), None, "NONE", 60),
    (0, 50, "open", (51, 60), None, "OFFSET_NOT_MATCHED", 50),
    (0, 50, "open", (49, 60), None, "OFFSET_NOT_MATCHED", 50),
    (20, 50, "open", (50, 60), None, "NONE", 60),
    (20, 50, "open", (20, 60), None, "OFFSET_NOT_MATCHED", 50),
    (100, 100, "open", (0, 90), None, "NONE", 100),
    (100, 100, "open", (0, 100), None, "NONE", 100),
    (100, 100, "open", (90, 110), None, "NONE", 110),
    (100, 100, "open", (100, 110), None, "NONE", 110),
    (100, 100, "open", (101, 110), None, "OFFSET_NOT_MATCHED", 100),
    (0, 50, "closed", (50, 60), None, "STREAM_NOT_OPENED", 50),
    (0, 50, "taken over", (50, 60), None, "STREAM_FENCED", 50),
    (0, 50, "deleted", (50, 60), None, "NONE", None),
    (0, 50, "never created", (50, 60), None, "STREAM_NOT_EXIST", None),
    (0, 50, "open", (50, 60), 1, "NONE", 60),
    (0, 50, "open", (50, 60), 0, "STREAM_FENCED", 50),
    (0, 50, "open", (50, 60), 2, "STREAM_INNER_ERROR", 50),
    # what is below the visible start is accepted whoever sends it
    (100, 100, "taken over", (0, 90), 1, "NONE", 100),
    (100, 100, "closed", (0, 90), 0, "NONE", 100),
    # the first check that fails is the one that counts
    (0, 50, "closed", (99, 100), 0, "STREAM_FENCED", 50),
    (0, 50, "closed", (99, 100), None, "STREAM_NOT_OPENED", 50),
    (0, 50, "taken over", (99, 100), None, "STREAM_FENCED", 50),
]


def _arrange(world: World, start: int, end: int, affairs: str) -> int:
    if end > start:
        world.commit(40, (0, 0, end))
    if start:
        world.write(r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 1, start),)))
    if affairs in ("closed", "taken over", "deleted"):
        world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    if affairs == "taken over":
        world.write(r.OpenStreams(node=OTHER, streams=(r.StreamToOpen(0, 2),)))
    if affairs == "deleted":
        world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(0, 1),)))
    return 77 if affairs == "never created" else 0


@pytest.mark.parametrize("as_stream_object", [False, True])
@pytest.mark.parametrize(
    ("start", "end", "affairs", "offered", "epoch", "verdict", "end_after"), CONTINUITY
)
def test_continuity(
    start: int,
    end: int,
    affairs: str,
    offered: tuple[int, int],
    epoch: int | None,
    verdict: str,
    end_after: int | None,
    as_stream_object: bool,
) -> None:
    world = World()
    stream = _arrange(world, start, end, affairs)
    epochs = () if epoch is None else (epoch,)
    request = upload(7, (stream, *offered), epochs=epochs)
    if as_stream_object:
        rows = stream_objects((7, stream, *offered))
        rows = replace(rows, stream_epoch=v.column(epochs))
        request = r.CommitStreamSetObject(
            node=NODE, object_id=-1, order_id=-1, object_size=0, stream_objects=rows
        )
    answer = world.write(request)
    verdicts = answer.stream_object_errors if as_stream_object else answer.range_errors
    assert [ErrorCode(code).name for code in verdicts.tolist()] == [verdict]
    assert answer.error.name == verdict
    if end_after is not None:
        assert world.ends()[0] == end_after


def test_many_commits_over_many_streams_are_found_again() -> None:
    seed = 20
    rng = np.random.default_rng(seed)
    world = World(streams=300)
    ends = np.zeros(300, dtype=np.int64)
    expected: list[list[int]] = [[] for _ in range(300)]
    for object_id in range(40):
        streams = np.sort(rng.choice(300, 150, replace=False))
        lengths = rng.integers(1, 9, 150)
        rows = zip(streams, ends[streams], ends[streams] + lengths, strict=True)
        answer = world.commit(object_id, *((int(s), int(a), int(b)) for s, a, b in rows))
        assert answer.error is ErrorCode.NONE, f"seed {seed}"
        ends[streams] += lengths
        for stream in streams.tolist():
            expected[stream].append(object_id)
    assert world.ends() == ends.tolist()
    queries = tuple(r.ObjectQuery(stream, 0, -1, 100) for stream in range(300))
    results: Any = world.map.query(r.GetObjects(queries=queries))
    found = [[item.object_id for item in result.objects] for result in results.results]
    assert found == expected, f"seed {seed}"


# ---- batches ----


def test_a_batch_is_one_record_and_every_object_holds_its_own_ranges() -> None:
    world = World()
    request = batch((3, (0, 0, 5), (2, 0, 7)), (1, (1, 0, 9)), (2, (3, 0, 1)))
    decision = world.map.decide(request, NOW, world.map.applied_end_offset)
    assert [type(record) for record in decision.records] == [StreamSetObjectsCommitted]
    answer = world.write(request)
    assert (answer.errors.tolist(), answer.range_errors.tolist()) == ([0] * 3, [0] * 4)
    described: Any = world.map.query(r.DescribeObjects(object_ids=(1, 2, 3)))
    held = [(item.object_id, item.ranges.stream_id.tolist()) for item in described.objects]
    assert held == [(1, [1]), (2, [3]), (3, [0, 2])]
    assert world.ends() == [5, 9, 7, 1]
