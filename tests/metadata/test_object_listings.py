"""Objects of a stream and of a node are listed in pages with size, attributes, time and ranges."""

from collections.abc import Iterator
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import answer_budget
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
    StreamObject,
    StreamSetObject,
)
from streammeta.controller.metadata.registries import object_descriptions
from streammeta.controller.metadata.tables.values import ObjectKind, PageRequest
from tests.metadata.small_world import NODE, NOW, World, merge, stream_objects


def world_of_stream_objects() -> World:
    """Return a world whose stream 0 has stream objects of one record, and two ranges in SSOs."""
    world = World()
    for object_id in range(5):
        row = stream_objects((10 + object_id, 0, object_id, object_id + 1))
        world.commit(object_id, (1, object_id, object_id + 1), stream_objects=row)
    world.commit(6, (0, 5, 7))
    world.commit(7, (0, 7, 9), (1, 5, 6), attributes=4)
    last = stream_objects((17, 0, 9, 12))
    world.commit(8, (1, 6, 7), stream_objects=last)
    return world


def listed_ids(world: World, **fields: Any) -> list[int]:
    return [object_.object_id for page in pages(world, **fields) for object_ in page.objects]


def pages(world: World, *, size: int = 2, **fields: Any) -> Iterator[Any]:
    token = ""
    while True:
        page = PageRequest(size, token)
        answer: Any = world.map.query(ListStreamObjects(stream_id=0, page=page, **fields))
        assert answer.error is ErrorCode.NONE
        yield answer
        token = answer.next_page_token
        if not token:
            return


def test_a_listed_stream_object_has_its_size_attributes_time_and_range() -> None:
    world = world_of_stream_objects()
    (first, *_), *_ = (page.objects for page in pages(world))
    assert first == StreamObject(
        stream_id=0,
        object_id=10,
        kind=ObjectKind.STREAM,
        start_offset=0,
        end_offset=1,
        object_size=10,
        attributes=0,
        committed_at_ms=NOW,
    )
    missing: Any = world.map.query(ListStreamObjects(stream_id=99))
    assert (missing.error, missing.objects) == (ErrorCode.STREAM_NOT_EXIST, ())


def test_a_range_selects_the_objects_that_overlap_it() -> None:
    world = world_of_stream_objects()
    assert listed_ids(world) == [10, 11, 12, 13, 14, 17]
    assert listed_ids(world, start_offset=1, end_offset=3) == [11, 12]
    assert listed_ids(world, start_offset=5, end_offset=9) == []
    assert listed_ids(world, start_offset=5, end_offset=10) == [17]
    assert listed_ids(world, start_offset=3, end_offset=3) == []
    assert listed_ids(world, start_offset=12) == []


def test_a_page_examines_a_bounded_number_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_descriptions, "ROWS_EXAMINED_MAX", 2)
    world = world_of_stream_objects()
    found = [[object_.object_id for object_ in page.objects] for page in pages(world, size=9)]
    assert found == [[10, 11], [12, 13], [14], [17]]


def test_a_compaction_between_two_pages_repeats_and_omits_no_record() -> None:
    world = world_of_stream_objects()
    listed = pages(world, size=3)
    assert [object_.object_id for object_ in next(listed).objects] == [10, 11, 12]
    world.write(merge(20, range(10, 15)))
    # The result of the compaction ends after the page, so it is listed with the rest.
    assert [object_.object_id for object_ in next(listed).objects] == [20, 17]


def set_objects(world: World, page: PageRequest, *, include_ranges: bool) -> Any:
    request = ListStreamSetObjects(node_id=NODE.node_id, page=page, include_ranges=include_ranges)
    return world.map.query(request)


def test_a_listed_set_object_has_attributes_time_and_ranges_if_asked() -> None:
    world = world_of_stream_objects()
    plain = set_objects(world, PageRequest(2, "7"), include_ranges=False).objects[0]
    assert plain == StreamSetObject(7, 7, NOW, 100, 2, attributes=4, committed_at_ms=NOW)

    (object_, _) = set_objects(world, PageRequest(2, "7"), include_ranges=True).objects
    held = object_.ranges
    rows = zip(held.stream_id, held.start_offset, held.end_offset, strict=True)
    assert list(rows) == [(0, 7, 9), (1, 5, 6)]


def test_a_page_of_set_objects_ends_where_their_ranges_fill_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of_stream_objects()
    monkeypatch.setattr(answer_budget, "ANSWER_BYTES", 2 * answer_budget.STREAM_SET_OBJECT_BYTES)
    assert len(set_objects(world, PageRequest(), include_ranges=False).objects) == 2
    assert len(set_objects(world, PageRequest(), include_ranges=True).objects) == 1
