"""Results of a compaction hold what its sources hold, or nothing happens."""

from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.tables.values import column
from tests.metadata.small_world import World, stream_objects


@pytest.mark.parametrize(
    ("rows", "others", "verdicts"),
    [
        (((0, 0, 20),), (), [0]),  # stream 1 is missing
        (((1, 0, 20),), (), [0]),
        (((0, 0, 20), (1, 0, 19)), (), [0, 0]),  # so is a part of it
        (((0, 0, 20), (1, 0, 21)), (), [0, 509]),
        (((0, 0, 20), (1, 0, 20), (2, 0, 10)), (), [0, 0, 509]),  # not held by these sources
        (((0, 0, 20), (1, 0, 20), (9, 0, 10)), (), [0, 0, 509]),  # never created
        (((0, 0, 10), (1, 0, 20)), ((4, 0, 11, 20),), [0, 0, 0]),  # offset 10 is missing
        (((0, 0, 20), (1, 0, 20)), ((4, 0, 20, 21), (5, 3, 0, 1)), [0, 0, 509, 509]),
        (((0, 0, 10), (0, 15, 25), (1, 0, 20)), (), [0, 509, 0]),  # as much as is missing
    ],
)
def test_results_hold_what_the_sources_hold_or_nothing_happens(
    rows: Any, others: Any, verdicts: list[int]
) -> None:
    world = World()
    world.commit(0, (0, 0, 10), (1, 0, 10))
    world.commit(1, (0, 10, 20), (1, 10, 20))
    world.commit(2, (2, 0, 10))
    before = world.map.state_hash()
    more = {"stream_objects": stream_objects(*others)} if others else {}
    answer = world.commit(3, *rows, compacted_object_ids=column((0, 1)), **more)
    assert answer.error is ErrorCode.OFFSET_NOT_MATCHED
    assert [*answer.range_errors.tolist(), *answer.stream_object_errors.tolist()] == verdicts
    assert world.map.state_hash() == before
