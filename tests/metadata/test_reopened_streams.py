"""An open stream under a larger epoch: its owner ends one range and begins the next in one step."""

from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import NodeIdentity
from tests.metadata.small_world import NODE, OTHER, World, upload


def reopened(world: World, node: NodeIdentity, epoch: int, *, reopen: bool = True) -> Any:
    item = r.StreamToOpen(0, epoch, reopen=reopen)
    return world.write(r.OpenStreams(node=node, streams=(item,))).streams[0]


def ranges_of(world: World) -> list[tuple[int, int, int]]:
    asked = r.DescribeStreams(stream_ids=(0,), include_ranges=True)
    described: Any = world.map.query(asked)
    return [(one.epoch, one.start_offset, one.end_offset) for one in described.streams[0].ranges]


def test_an_owner_begins_another_range_of_an_open_stream() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    opened = reopened(world, NODE, 2)
    assert (opened.error, opened.next_offset) == (ErrorCode.NONE, 5)
    assert ranges_of(world) == [(1, 0, 5), (2, 5, 5)]
    listed = world.write(r.GetOpeningStreams(node=NODE))
    assert [(one.stream_id, one.epoch) for one in listed.streams] == [(0, 2)]
    world.commit(2, (0, 5, 8))
    assert ranges_of(world) == [(1, 0, 5), (2, 5, 8)]


def test_a_repeat_after_a_lost_answer_changes_nothing() -> None:
    world = World(streams=1)
    first = reopened(world, NODE, 2)
    before = world.map.state_hash()
    assert reopened(world, NODE, 2) == first
    assert world.map.state_hash() == before


def test_an_open_stream_is_refused_without_the_owners_wish_and_to_any_other_node() -> None:
    world = World(streams=1)
    before = world.map.state_hash()
    assert reopened(world, NODE, 2, reopen=False).error is ErrorCode.STREAM_NOT_CLOSED
    assert reopened(world, OTHER, 2).error is ErrorCode.STREAM_NOT_CLOSED
    assert reopened(world, NODE, 0).error is ErrorCode.STREAM_FENCED
    assert world.map.state_hash() == before


def test_the_former_epoch_is_fenced_at_once() -> None:
    world = World(streams=1)
    reopened(world, NODE, 2)
    late = r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),))
    assert world.write(late).errors == (ErrorCode.STREAM_FENCED,)
    trim = r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 1, 0),))
    assert world.write(trim).errors == (ErrorCode.STREAM_FENCED,)


def test_a_stream_of_which_the_node_has_an_upload_pending_is_not_reopened() -> None:
    world = World(streams=1)
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, end_offset=7),)))
    assert reopened(world, NODE, 2).error is ErrorCode.STREAM_NOT_CLOSED
    world.write(upload(1, (0, 0, 7)))
    assert reopened(world, NODE, 2).error is ErrorCode.NONE
