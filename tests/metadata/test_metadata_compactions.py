"""Compactions: readers see the same offsets before and after, and sources go in the same entry."""

from collections.abc import Sequence
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import ObjectState, RangeColumns, SourceOperation, column
from tests.metadata.test_metadata_uploads import NODE, OTHER, World, merge, stream_objects

DELETE, KEEP, DEEP = SourceOperation
COMPOSITE = 1


def _uploaded() -> World:
    """Set objects 0 and 1 hold streams 0 and 1 up to 20, object 2 holds stream 2 up to 10."""
    world = World()
    world.commit(0, (0, 0, 10), (1, 0, 10))
    world.commit(1, (0, 10, 20), (1, 10, 20))
    world.commit(2, (2, 0, 10))
    return world


def _compact(world: World, object_id: int, sources: Sequence[int], *rows: Any, **more: Any) -> Any:
    if not rows:
        more["ranges"] = RangeColumns()
        rows = ((0, 0, 1),)
    return world.commit(object_id, *rows, compacted_object_ids=column(sources), **more)


def _seen(world: World, stream_id: int, start: int = 0) -> list[tuple[int, int, int]]:
    answer: Any = world.map.query(r.GetObjects(queries=(r.ObjectQuery(stream_id, start, -1),)))
    return [(o.object_id, o.start_offset, o.end_offset) for o in answer.results[0].objects]


def test_one_entry_swaps_sources_for_the_result() -> None:
    world = _uploaded()
    entries = world.map.applied_end_offset
    answer = _compact(world, 3, (0, 1), (0, 0, 20), (1, 0, 20), order_id=-1)
    assert answer.error is ErrorCode.NONE
    assert world.map.applied_end_offset == entries + 1
    assert (_seen(world, 0), _seen(world, 1)) == ([(3, 0, 20)], [(3, 0, 20)])
    assert world.state(0) is world.state(1) is ObjectState.MARK_DESTROYED
    described: Any = world.map.query(r.DescribeObjects(object_ids=(3,)))
    assert described.objects[0].data_time_ms >= 0
    again = _compact(world, 3, (0, 1), (0, 0, 20), (1, 0, 20), order_id=-1)
    assert again.error is ErrorCode.NONE
    assert world.map.applied_end_offset == entries + 1


def test_a_stream_may_be_in_several_results() -> None:
    world = _uploaded()
    rows = ((0, 0, 5), (0, 5, 7), (0, 17, 20), (1, 0, 20))
    others = stream_objects((5, 0, 12, 17), (4, 0, 7, 12))
    answer = _compact(world, 3, (0, 1), *rows, stream_objects=others)
    assert answer.error is ErrorCode.NONE
    assert _seen(world, 0) == [(3, 0, 5), (3, 5, 7), (4, 7, 12), (5, 12, 17), (3, 17, 20)]
    assert _seen(world, 0, 12) == [(5, 12, 17), (3, 17, 20)]
    assert _seen(world, 1) == [(3, 0, 20)]
    assert world.ends() == [20, 20, 10, 0]
    repeated = _compact(world, 3, (0, 1), *rows, stream_objects=others)
    assert repeated.error is ErrorCode.NONE
    assert repeated.range_errors.tolist() == [0] * 4
    # What was cut is put together again, and what is between keeps its place.
    world.commit(6, (0, 20, 30))
    assert _compact(world, 7, (3, 6), (0, 0, 7), (0, 17, 30), (1, 0, 20)).error is ErrorCode.NONE
    assert _seen(world, 0) == [(7, 0, 7), (4, 7, 12), (5, 12, 17), (7, 17, 30)]


@pytest.mark.parametrize(
    ("rows", "others", "verdicts"),
    [
        (((0, 0, 20),), (), [0]),  # stream 1 is missing
        (((0, 0, 20), (1, 0, 19)), (), [0, 0]),  # so is a part of it
        (((0, 0, 20), (1, 0, 21)), (), [0, 509]),
        (((0, 0, 20), (1, 0, 20), (2, 0, 10)), (), [0, 0, 509]),  # not held by these sources
        (((0, 0, 20), (1, 0, 20), (9, 0, 10)), (), [0, 0, 509]),  # never created
        # something is missing between two, before or behind them
        (((0, 0, 9), (0, 10, 20), (1, 0, 20)), (), [0, 0, 0]),
        (((0, 1, 10), (0, 10, 20), (1, 0, 20)), (), [0, 0, 0]),
        (((0, 0, 10), (0, 10, 19), (1, 0, 20)), (), [0, 0, 0]),
        (((0, 0, 10), (1, 0, 20)), ((4, 0, 11, 20),), [0, 0, 0]),
        # something is held by none of the sources
        (((0, 0, 10), (0, 10, 21), (1, 0, 20)), (), [0, 509, 0]),
        (((0, 0, 20), (1, 0, 20)), ((4, 0, 20, 21),), [0, 0, 509]),
        (((0, 0, 20), (1, 0, 20)), ((4, 0, 20, 21), (5, 3, 0, 1)), [0, 0, 509, 509]),
        # as much is held as is missing
        (((0, 0, 10), (0, 15, 25), (1, 0, 20)), (), [0, 509, 0]),
        (((0, 0, 20), (1, 0, 10), (2, 0, 10)), (), [0, 0, 509]),
    ],
)
def test_results_hold_what_the_sources_hold_or_nothing_happens(
    rows: Any, others: Any, verdicts: list[int]
) -> None:
    world = _uploaded()
    before = world.map.state_hash()
    more = {"stream_objects": stream_objects(*others)} if others else {}
    answer = _compact(world, 3, (0, 1), *rows, **more)
    assert answer.error is ErrorCode.OFFSET_NOT_MATCHED
    assert [*answer.range_errors.tolist(), *answer.stream_object_errors.tolist()] == verdicts
    assert world.map.state_hash() == before


def test_a_result_never_reaches_over_what_others_hold() -> None:
    world = _uploaded()
    world.commit(3, (0, 20, 30))
    across = _compact(world, 4, (0, 3), (0, 0, 30), (1, 0, 10))
    assert across.error is ErrorCode.OFFSET_NOT_MATCHED
    assert across.range_errors.tolist() == [509, 0]
    shifted = _compact(world, 4, (0, 3), (0, 0, 15), (0, 25, 30), (1, 0, 10))
    assert shifted.error is ErrorCode.OFFSET_NOT_MATCHED
    assert shifted.range_errors.tolist() == [509, 0, 0]
    below = _compact(world, 4, (1,), (0, 5, 10), (0, 15, 20), (1, 10, 20))
    assert below.range_errors.tolist() == [509, 0, 0]
    apart = _compact(world, 4, (0, 3), (0, 0, 10), (0, 20, 30), (1, 0, 10))
    assert apart.error is ErrorCode.NONE
    assert _seen(world, 0) == [(4, 0, 10), (1, 10, 20), (4, 20, 30)]


@pytest.mark.parametrize(("sources", "node"), [((0, 0), NODE), ((0, 9), NODE), ((0,), OTHER)])
def test_sources_are_set_objects_of_the_node_named_once(sources: Any, node: Any) -> None:
    answer = _compact(_uploaded(), 3, sources, (0, 0, 10), (1, 0, 10), node=node)
    assert answer.error is ErrorCode.COMPACTED_OBJECTS_NOT_FOUND
    assert set(answer.range_errors.tolist()) == {int(answer.error)}


def test_attributes_alone_are_replaced() -> None:
    world = _uploaded()
    assert _compact(world, 0, (0,), attributes=8).error is ErrorCode.NONE
    entries = world.map.applied_end_offset
    assert _compact(world, 0, (0,), attributes=8).error is ErrorCode.NONE
    assert world.map.applied_end_offset == entries
    assert _compact(world, 9, (9,)).error is ErrorCode.OBJECT_NOT_COMMITTED
    assert _compact(world, 99, (99,)).error is ErrorCode.OBJECT_NOT_EXIST
    described: Any = world.map.query(r.DescribeObjects(object_ids=(0,)))
    assert (described.objects[0].attributes, described.objects[0].object_size) == (8, 100)


def _split(world: World, *objects: tuple[int, int, int, int]) -> None:
    rows = stream_objects(*objects)
    answer = world.commit(-1, (0, 0, 1), ranges=RangeColumns(), stream_objects=rows)
    assert answer.error is ErrorCode.NONE


def _merge(
    world: World, object_id: int, start: int, end: int, sources: Sequence[int], **more: Any
) -> ErrorCode:
    request = merge(object_id, sources, start_offset=start, end_offset=end, **more)
    error: ErrorCode = world.write(request).error
    return error


def _with_stream_objects() -> World:
    """Stream objects 0, 1 and 2 hold 10 offsets each of stream 0."""
    world = World()
    for object_id in range(3):
        _split(world, (object_id, 0, 10 * object_id, 10 * object_id + 10))
    return world


def test_stream_objects_are_merged() -> None:
    world = _with_stream_objects()
    mismatch = ErrorCode.OFFSET_NOT_MATCHED
    assert _merge(world, 3, 0, 20, (0, 2)) is mismatch
    assert _merge(world, 3, 0, 20, (0, 1, 2)) is mismatch
    assert _merge(world, 3, 0, 20, (0, 1), stream_epoch=0) is ErrorCode.STREAM_FENCED
    assert _merge(world, 3, 0, 20, (0, 1)) is ErrorCode.NONE
    assert _merge(world, 3, 0, 20, (0, 1)) is ErrorCode.NONE
    assert _seen(world, 0) == [(3, 0, 20), (2, 20, 30)]
    assert _merge(world, -1, -1, -1, (3,)) is mismatch
    world.write(r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 1, 20),)))
    # An id prepared for a result that is not needed goes too; all of it can be repeated.
    for _ in range(2):
        assert _merge(world, -1, -1, -1, (3, 9)) is ErrorCode.NONE
    assert world.state(3) is world.state(9) is ObjectState.MARK_DESTROYED


def test_a_composite_keeps_the_data_of_its_sources_and_hands_it_on() -> None:
    world = _with_stream_objects()
    assert _merge(world, 3, 0, 20, (0, 1), attributes=COMPOSITE, operations=(KEEP, KEEP)) is (
        ErrorCode.NONE
    )
    assert _seen(world, 0) == [(3, 0, 20), (2, 20, 30)]
    assert world.state(0) is world.state(1) is ObjectState.LINKED
    described: Any = world.map.query(r.DescribeObjects(object_ids=(1,)))
    assert described.objects[0].composite_id == 3
    again = {"attributes": COMPOSITE, "operations": (DELETE, KEEP)}
    kept = {"attributes": COMPOSITE, "operations": (KEEP,)}
    assert _merge(world, 4, 0, 20, (3,), **kept) is ErrorCode.INVALID_REQUEST
    world.write(r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 1, 10),)))
    assert _merge(world, 4, 10, 30, (3, 2), **again) is ErrorCode.NONE
    states = [world.state(object_id) for object_id in (0, 1, 2, 3)]
    gone, linked = ObjectState.MARK_DESTROYED, ObjectState.LINKED
    assert states == [gone, linked, linked, gone]
    # What is no composite holds copies: nothing stays linked.
    assert _merge(world, 5, 10, 30, (4,), operations=(DEEP,)) is ErrorCode.NONE
    assert [world.state(object_id) for object_id in (1, 2, 4)] == [gone] * 3
    with pytest.raises(InvalidRequestError, match="KEEP_DATA"):
        _merge(world, 6, 10, 30, (5,), operations=(KEEP,))
