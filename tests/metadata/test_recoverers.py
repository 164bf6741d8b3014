"""Recoveries that say who makes them: nobody recovers a node but the one that it is assigned to."""

from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.upload_batches import is_plain
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, NodeIdentity, column
from tests.metadata.small_world import NODE, OTHER, World, upload

THIRD = NodeIdentity(2, 1)


def assigned(target: NodeIdentity = OTHER) -> World:
    """Return a world in which the recovery of NODE is assigned."""
    world = World()
    world.write(r.RegisterNode(node=THIRD))
    world.write(r.AssignRecoveries(targets=(r.RecoveryTarget(NODE.node_id, 1, target.node_id),)))
    return world


def calls(recoverer: NodeIdentity) -> list[Any]:
    """Return the calls of a recovery, none of which changes what the others are judged by."""
    closed = (r.StreamToClose(3, 1),)
    return [
        r.GetOpeningStreams(node=NODE, failover=True, recoverer=recoverer),
        upload(0, (0, 0, 10), failover=True, recoverer=recoverer),
        r.CloseStreams(node=NODE, streams=closed, recoverer=recoverer),
    ]


def error_of(answer: Any) -> ErrorCode:
    error: ErrorCode = answer.errors[0] if hasattr(answer, "errors") else answer.error
    return error


def test_the_node_that_is_assigned_recovers() -> None:
    world = assigned()
    for call in calls(OTHER):
        assert error_of(world.write(call)) is ErrorCode.NONE, call


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    ("recoverer", "error"),
    [
        (THIRD, ErrorCode.NODE_FENCED),
        (NodeIdentity(99, 1), ErrorCode.NODE_FENCED),
        (NodeIdentity(OTHER.node_id, 0), ErrorCode.NODE_EPOCH_EXPIRED),
    ],
)
def test_another_node_or_an_older_process_changes_nothing(
    index: int, recoverer: NodeIdentity, error: ErrorCode
) -> None:
    world = assigned()
    before = world.map.state_hash()
    assert error_of(world.write(calls(recoverer)[index])) is error
    assert world.map.state_hash() == before


def test_a_recovery_that_was_assigned_anew_is_refused_to_the_first() -> None:
    world = assigned()
    opening, commit, close = calls(OTHER)
    assert world.write(opening).error is ErrorCode.NONE
    targets = (r.RecoveryTarget(NODE.node_id, 1, THIRD.node_id),)
    world.write(r.AssignRecoveries(targets=targets))
    before = world.map.state_hash()
    for late in (opening, commit, close):
        assert error_of(world.write(late)) is ErrorCode.NODE_FENCED
    assert world.map.state_hash() == before
    for call in calls(THIRD):
        assert error_of(world.write(call)) is ErrorCode.NONE


def test_a_recoverer_that_is_itself_recovered_is_fenced() -> None:
    world = assigned()
    world.write(r.GetOpeningStreams(node=OTHER, failover=True))
    for call in calls(OTHER):
        assert error_of(world.write(call)) is ErrorCode.NODE_FENCED


def test_the_return_of_the_owner_ends_the_recovery() -> None:
    world = assigned()
    world.write(r.RegisterNode(node=NodeIdentity(NODE.node_id, 2)))
    for call in calls(OTHER):
        assert error_of(world.write(call)) is ErrorCode.NODE_EPOCH_EXPIRED


def test_calls_that_name_no_recoverer_are_judged_as_ever() -> None:
    world = assigned()
    assert world.write(r.GetOpeningStreams(node=NODE, failover=True)).error is ErrorCode.NONE
    assert world.commit(0, (0, 0, 10), failover=True).error is ErrorCode.NONE


def test_nobody_recovers_what_is_assigned_to_nobody() -> None:
    world = World()
    for call in calls(OTHER):
        assert error_of(world.write(call)) is ErrorCode.NODE_FENCED


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (upload(0, (0, 0, 10), recoverer=OTHER), "recoverer"),
        (
            upload(0, (0, 0, 10), failover=True, recoverer=OTHER, compacted_object_ids=column([1])),
            "recoverer",
        ),
        (r.GetOpeningStreams(node=NODE, recoverer=OTHER), "recoverer"),
        (calls(NodeIdentity(-1, 1))[0], "recoverer.node_id"),
        (calls(NodeIdentity(1, -1))[1], "recoverer.node_epoch"),
        (calls(NODE)[2], "recoverer.node_id"),
    ],
)
def test_a_recoverer_where_none_belongs_is_refused(request_: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        assigned().write(request_)
    assert caught.value.field == field


def test_uploads_of_recoverers_are_not_joined_with_others() -> None:
    one = upload(0, (0, 0, 10), epochs=(1,), compacted_object_ids=EMPTY_COLUMN)
    assert is_plain(one)
    assert not is_plain(upload(0, (0, 0, 10), epochs=(1,), recoverer=OTHER))


def test_a_fenced_process_does_not_lift_its_own_fence() -> None:
    world = World()
    world.write(r.GetOpeningStreams(node=NODE, failover=True))
    before = world.map.state_hash()
    for call in (r.GetOpeningStreams(node=NODE), r.RegisterNode(node=NODE, wal_config="other")):
        assert world.write(call).error is ErrorCode.NODE_FENCED, call
    assert world.map.state_hash() == before
    assert world.write(r.GetOpeningStreams(node=NODE, failover=True)).error is ErrorCode.NONE


@pytest.mark.parametrize("call", [r.GetOpeningStreams, r.RegisterNode])
def test_a_newer_process_ends_the_failover_of_an_older_one(call: Any) -> None:
    world = World()
    world.write(r.GetOpeningStreams(node=NODE, failover=True))
    newer = NodeIdentity(NODE.node_id, 2)
    assert world.write(call(node=newer)).error is ErrorCode.NONE
    assert world.write(r.GetOpeningStreams(node=newer)).error is ErrorCode.NONE


def test_a_process_that_has_unregistered_does_not_come_back() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    world.write(r.UnregisterNode(node=NODE))
    for call in (r.GetOpeningStreams(node=NODE), r.RegisterNode(node=NODE)):
        assert world.write(call).error is ErrorCode.NODE_FENCED, call


def test_a_node_that_is_gone_is_fenced_and_its_streams_are_closed() -> None:
    world = World(streams=2)
    released = world.write(r.ReleaseStreams(node=NODE))
    assert (released.error, released.closed_streams) == (ErrorCode.NONE, 2)
    assert world.write(r.CreateStreams(request_id="x", node=NODE, streams=(r.NewStream(),))).error
    taken = tuple(r.StreamToOpen(stream_id, 2) for stream_id in range(2))
    answer = world.write(r.OpenStreams(node=OTHER, streams=taken))
    assert {one.error for one in answer.streams} == {ErrorCode.NONE}
    again = world.write(r.ReleaseStreams(node=NODE))
    assert (again.error, again.closed_streams) == (ErrorCode.NONE, 0)


def test_a_newer_process_is_not_released_nor_one_that_owes_uploads() -> None:
    world = World(streams=2)
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, end_offset=7),)))
    before = world.map.state_hash()
    assert world.write(r.ReleaseStreams(node=NODE)).error is ErrorCode.STREAM_NOT_CLOSED
    assert world.map.state_hash() == before
    world.write(r.RegisterNode(node=NodeIdentity(NODE.node_id, 2)))
    before = world.map.state_hash()
    late = r.AbandonUploads(node_id=NODE.node_id, close_streams_of_epoch=1)
    for call in (r.ReleaseStreams(node=NODE), late):
        assert world.write(call).error is ErrorCode.NODE_EPOCH_EXPIRED, call
    assert world.map.state_hash() == before


def test_abandoning_uploads_closes_streams_only_if_asked() -> None:
    world = World(streams=2)
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, end_offset=7),)))
    kept = world.write(r.AbandonUploads(node_id=NODE.node_id, stream_ids=(1,)))
    assert (kept.abandoned, kept.closed_streams) == ((), 0)
    done = world.write(r.AbandonUploads(node_id=NODE.node_id, close_streams_of_epoch=1))
    assert [one.stream_id for one in done.abandoned] == [0]
    assert (done.error, done.closed_streams, done.open_streams) == (ErrorCode.NONE, 1, 0)
