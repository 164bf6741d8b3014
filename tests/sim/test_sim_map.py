"""The watch over the committed map notices what no compaction and no deletion may do."""

from typing import Any

import numpy as np
import pytest

from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.records import record
from streammeta.controller.records.codec import decode_records
from tests.metadata.small_world import NODE, NOW, World, merge, stream_objects, upload
from tests.sim.sim_map import MapWatch
from tests.sim.sim_time import Violation


class Watched(World):
    """A map whose every entry is watched; the bytes of all ids up to 20 are there."""

    def __init__(self) -> None:
        self.watch = MapWatch()
        self.watch.bucket.update(range(20))
        super().__init__()
        self.write(requests.PrepareObjects(request_id="x", node=NODE, count=2, ttl_ms=60_000))
        self.write(upload(0, (0, 0, 10), (1, 0, 10)))
        self.write(upload(1, (0, 10, 20)))
        self.write(upload(2, (2, 0, 5), stream_objects=stream_objects((3, 1, 10, 20))))
        rows = stream_objects((4, 1, 20, 30))
        self.write(upload(-1, (0, 0, 1), ranges=v.RangeColumns(), stream_objects=rows))

    def replay(self, offset: int, payload: bytes) -> None:
        super().replay(offset, payload)
        self.watch.commit(self.map, offset, decode_records(payload))

    def link(self) -> None:
        """Make object 5 a composite of 3 and 4, which hold stream 1 from 10 to 30."""
        kept = {"attributes": 1, "operations": (v.SourceOperation.KEEP_DATA,) * 2}
        request = merge(5, (3, 4), stream_id=1, start_offset=10, end_offset=30, **kept)
        assert self.write(request).error == 0


def destroyed(*object_ids: int) -> record.ObjectsDestroyed:
    return record.ObjectsDestroyed(object_id=v.column(object_ids), marked_at_ms=NOW)


def result(object_id: int, stream_id: int, start: int, end: int) -> record.StreamObjectsCommitted:
    return record.StreamObjectsCommitted(
        committed_at_ms=NOW,
        object_id=v.column([object_id]),
        object_size=v.column([1]),
        attributes=v.column([0]),
        stream_id=v.column([stream_id]),
        start_offset=v.column([start]),
        end_offset=v.column([end]),
    )


def test_compactions_of_all_kinds_are_let_through_and_counted() -> None:
    world = Watched()
    world.link()
    compacted = upload(
        6,
        *((0, 0, 7), (0, 12, 20), (1, 0, 10)),
        compacted_object_ids=v.column([0, 1]),
        stream_objects=stream_objects((7, 0, 7, 12)),
    )
    assert world.write(compacted).error == 0
    world.write(requests.TrimStreams(node=NODE, streams=(requests.StreamToTrim(1, 1, 25),)))
    deep = {"stream_id": 1, "operations": (v.SourceOperation.DEEP_DELETE,)}
    assert world.write(merge(8, (5,), start_offset=25, end_offset=30, **deep)).error == 0
    assert world.watch.counts == {
        "set objects compacted": 1,
        "stream objects compacted": 1,
        "composites linked": 1,
        "deep deletes": 1,
    }
    world.watch.check_deletion((0, 1, 3, 4, 5))


def test_an_upload_for_a_stream_that_is_gone_is_no_compaction() -> None:
    world = Watched()
    world.write(requests.CloseStreams(node=NODE, streams=(requests.StreamToClose(3, 1),)))
    world.write(requests.DeleteStreams(node=NODE, streams=(requests.StreamToDelete(3, 1),)))
    late = stream_objects((7, 3, 0, 5))
    assert world.write(upload(6, (2, 5, 9), stream_objects=late)).error == 0
    assert world.state(7) is v.ObjectState.MARK_DESTROYED
    assert not world.watch.counts


@pytest.mark.parametrize(
    ("records", "invariant"),
    [
        ([destroyed(1)], "what is readable stays readable"),
        ([result(6, 0, 10, 19), destroyed(1)], "what is readable stays readable"),
        ([result(6, 0, 10, 21), destroyed(1)], "compactions change nothing that is read"),
        ([result(6, 0, 19, 21)], "no offset is in two objects"),
    ],
)
def test_what_is_read_can_not_change(records: list[Any], invariant: str) -> None:
    with pytest.raises(Violation, match=invariant):
        Watched().apply(*records)


def test_what_is_held_is_found_by_readers() -> None:
    world = Watched()
    objects: Any = world.map._objects
    first = int(objects._table["first_range"][objects.row(1)])
    objects._ranges.unlink(np.array([first]), Undo())
    with pytest.raises(Violation, match="what is readable is found"):
        world.write(upload(6, (3, 0, 1)))


def test_bytes_of_what_is_committed_must_be_there_and_stay() -> None:
    world = Watched()
    with pytest.raises(Violation, match="bytes of what is needed are there"):
        world.write(upload(30, (3, 0, 1)))
    world = Watched()
    with pytest.raises(Violation, match="bytes go after the mark is committed"):
        world.watch.check_deletion((1,))


def test_what_a_composite_links_can_not_go_before_it() -> None:
    world = Watched()
    world.link()
    with pytest.raises(Violation, match="nothing needed is destroyed"):
        world.apply(destroyed(4))
    with pytest.raises(Violation, match="nothing needed is deleted"):
        world.watch.check_deletion((4,))


def test_starts_and_ends_only_grow() -> None:
    world = Watched()
    streams: Any = world.map._streams
    streams._table.write("end_offset", 0, 19)
    with pytest.raises(Violation, match="starts and ends grow"):
        world.apply(
            record.StreamSetObjectsCommitted(
                node_id=0,
                committed_at_ms=NOW,
                data_time_ms=NOW,
                object_id=v.column([6]),
                order_id=v.column([6]),
                object_size=v.column([1]),
                attributes=v.column([0]),
                range_count=v.column([1]),
                ranges=record.StreamSetObjectRanges(
                    stream_id=v.column([3]), start_offset=v.column([0]), end_offset=v.column([1])
                ),
            )
        )
