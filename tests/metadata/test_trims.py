"""Trims end at the committed end, or where the owner has appended to."""

from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.registries.stream_decisions import TRIM_AHEAD_MAX
from streammeta.controller.metadata.tables.values import INT64_MAX
from tests.metadata.small_world import NODE, OTHER, World, upload

NONE, NOT_NEXT = ErrorCode.NONE, ErrorCode.OFFSET_NOT_MATCHED


def committed_to_5(*, level: int = 1) -> World:
    """A world whose stream 0 ends at 5."""
    world = World()
    world.write(r.SetFeatureLevel(level=level))
    world.commit(0, (0, 0, 5))
    return world


def trimmed(world: World, start: int, appended: int | None, **changes: Any) -> tuple[Any, int]:
    given: dict[str, Any] = {
        "node": NODE,
        "streams": (r.StreamToTrim(0, 1, start, appended),),
    } | changes
    answer = world.write(r.TrimStreams(**given))
    return answer.errors[0], answer.start_offsets[0]


def bounds(world: World) -> tuple[int, int]:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(0,)))
    (stream,) = answer.streams
    return stream.start_offset, stream.end_offset


@pytest.mark.parametrize(
    ("wanted", "appended", "start", "end"),
    [
        (3, 0, 3, 5),
        (5, 0, 5, 5),
        (8, 0, 5, 5),  # nobody appended beyond
        (8, 4, 5, 5),
        (INT64_MAX, 0, 5, 5),
        (8, 10, 8, 8),  # the owner's appends cover it
        (15, 10, 10, 10),
        (8, None, 8, 8),  # as AutoMQ trims
    ],
)
def test_a_trim_ends_where_nothing_was_appended(
    wanted: int, appended: int | None, start: int, end: int
) -> None:
    world = committed_to_5()
    for _ in range(2):  # a repeat gets the same answer
        assert trimmed(world, wanted, appended) == (NONE, start)
        assert bounds(world) == bounds(world.restored()) == (start, end)


@pytest.mark.parametrize("appended", [None, INT64_MAX])
def test_no_trim_uses_up_the_offsets_of_a_stream(appended: int | None) -> None:
    world = committed_to_5()
    before = world.map.state_hash()
    for wanted in (INT64_MAX, 5 + TRIM_AHEAD_MAX + 1):
        assert trimmed(world, wanted, appended) == (NOT_NEXT, -1)
    assert world.map.state_hash() == before
    assert trimmed(world, 5 + TRIM_AHEAD_MAX, appended) == (NONE, 5 + TRIM_AHEAD_MAX)


def test_a_late_commit_of_trimmed_appends_has_no_effect_below_the_start() -> None:
    world = committed_to_5()
    trimmed(world, 8, 10)
    assert world.commit(1, (0, 5, 7)).error is NONE
    assert bounds(world) == (8, 8)
    assert world.commit(2, (0, 7, 10)).error is NONE
    assert bounds(world) == (8, 10)


def test_another_node_trims_nothing_whatever_it_says_it_has_appended() -> None:
    world = committed_to_5()
    assert trimmed(world, 3, 10, node=OTHER) == (ErrorCode.STREAM_FENCED, -1)
    assert trimmed(world, 3, 10, streams=(r.StreamToTrim(0, 2, 3, 10),))[1] == -1
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    assert trimmed(world, 3, 10) == (ErrorCode.STREAM_NOT_OPENED, -1)
    assert bounds(world) == (0, 5)


def test_an_appended_end_that_is_none_is_named() -> None:
    world = committed_to_5()
    with pytest.raises(InvalidRequestError, match=r"streams\[0\].appended_end_offset"):
        trimmed(world, 3, -1)


@pytest.mark.parametrize(
    ("wanted", "appended", "start"), [(8, 0, 8), (12, 0, 10), (12, 11, 11), (12, None, 12)]
)
def test_a_trim_that_comes_with_a_commit_may_reach_to_the_end_that_it_makes(
    wanted: int, appended: int | None, start: int
) -> None:
    world = committed_to_5(level=3)
    commit = upload(1, (0, 5, 10), trims=(r.StreamToTrim(0, 1, wanted, appended),))
    for _ in range(2):
        answer = world.write(commit)
        assert (answer.error, answer.trim_errors) == (NONE, (NONE,))
        assert answer.trim_start_offsets == (start,)
    assert bounds(world) == (start, max(10, start))
