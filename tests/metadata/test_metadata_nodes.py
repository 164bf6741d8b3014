"""Nodes: ids, listings in pages, processes of one epoch, recoveries by the assigned node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller import features
from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_listings import ListStreamSetObjects
from streammeta.controller.metadata.api.upload_batches import is_plain
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.records.record import ObjectsDestroyed
from tests.metadata.small_world import NODE, NOW, OTHER, World, upload


def destroy(world: World, *object_ids: int) -> None:
    world.apply(ObjectsDestroyed(object_id=v.column(object_ids), marked_at_ms=NOW))


def next_id(world: World, request_id: str) -> int:
    issued: int = world.write(r.GetNextNodeId(request_id=request_id)).node_id
    return issued


def test_a_nodes_set_objects_are_listed_without_looking_at_those_of_others() -> None:
    world = World(streams=1)
    world.write(r.PrepareObjects(request_id="many", node=NODE, count=9_950, ttl_ms=60_000))
    mine = [3, 700, 701, 703, 5_000, 9_999]
    for number, object_id in enumerate(mine):
        world.commit(object_id, (0, number, number + 1))
    destroy(world, 701)
    mine.remove(701)
    asked = _count_looked_up(world)
    pages: list[list[int]] = []
    token = ""
    while not pages or token:
        request = ListStreamSetObjects(node_id=NODE.node_id, page=v.PageRequest(2, token))
        page: Any = world.map.query(request)
        assert (page.error, page.total) == (ErrorCode.NONE, 5)
        pages.append([object_.object_id for object_ in page.objects])
        token = page.next_page_token
    assert pages == [[3, 700], [703, 5_000], [9_999]]
    assert sum(asked) < 4_000, "as many ids as are in the spans of the node, for each page"
    other: Any = world.map.query(ListStreamSetObjects(node_id=OTHER.node_id))
    assert (other.objects, other.total) == ((), 0)


def _count_looked_up(world: World) -> list[int]:
    """Return a list that gets the number of ids of every look into the directory."""
    directory: Any = world.map._objects._directory
    look_up, asked = directory.rows, list[int]()

    def count(ids: v.Int64Column) -> Any:
        asked.append(len(ids))
        return look_up(ids)

    directory.rows = count
    return asked


def test_an_issued_id_is_never_above_the_largest_even_if_a_node_has_that() -> None:
    world = World()
    world.write(r.RegisterNode(node=v.NodeIdentity(2**31 - 1, 0)))
    world.write(r.RegisterNode(node=v.NodeIdentity(1000, 0)))
    assert [next_id(world, name) for name in ("a", "b")] == [1001, 1002]


def test_a_node_that_departs_is_supervised_no_longer() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    world.write(r.SuperviseNode(node=NODE))
    world.write(r.UnregisterNode(node=NODE))
    described: Any = world.map.query(r.GetNodes(node_ids=(0,)))
    assert [(node.departed, node.supervised) for node in described.nodes] == [(True, False)]


def _pages(ask: Any, request: Any, items: str, size: int = 3) -> list[list[Any]]:
    pages, token = list[list[Any]](), ""
    while token or not pages:
        answer: Any = ask(replace(request, page=v.PageRequest(size, token)))
        pages.append(list(getattr(answer, items)))
        token = answer.next_page_token
    return pages


def test_listings_come_in_pages_without_repeats_or_gaps() -> None:
    world = World(streams=7)
    query = world.map.query
    all_in_pages = [[0, 1, 2], [3, 4, 5], [6]]
    for ask, request, wanted in (
        (query, r.DescribeStreams(), all_in_pages),
        (query, r.DescribeStreams(stream_ids=(6, 99, 1, 3, 3, 0)), [[0, 1, 3], [6]]),
        (world.write, r.GetOpeningStreams(node=NODE), all_in_pages),
    ):
        pages = _pages(ask, request, "streams")
        assert [[stream.stream_id for stream in page] for page in pages] == wanted
    objects = _pages(query, r.DescribeObjects(), "objects")
    assert [o.object_id for page in objects for o in page] == list(range(50))


def test_keys_and_namespaces_come_in_pages() -> None:
    world = World()
    names = ["a", "a1", "a2", "a3", "a4", "b"]
    items = tuple(r.KVToPut(namespace=n, key=k, value=b"") for n in ("", "m", "n") for k in names)
    world.write(r.PutKVs(items=items))
    keys = _pages(world.map.query, r.ListKVs(namespace="m", prefix="a"), "entries")
    assert [[entry.key for entry in page] for page in keys] == [["a", "a1", "a2"], ["a3", "a4"]]
    # The default namespace has the empty name, which as a token would end the list.
    for size, wanted in ((1, [[""], ["m"], ["n"]]), (2, [["", "m"], ["n"]])):
        request = r.ListKVs(namespaces=True)
        assert _pages(world.map.query, request, "namespace_names", size) == wanted


def test_a_page_token_below_the_prefix_leaves_out_no_key() -> None:
    world = World()
    world.write(r.PutKVs(items=tuple(r.KVToPut(namespace="n", key=key, value=b"") for key in "ab")))
    page = v.PageRequest(page_token="Z")
    answer: Any = world.map.query(r.ListKVs(namespace="n", prefix="a", page=page))
    assert [entry.key for entry in answer.entries] == ["a"]


LEVEL = features.SECTIONS["node_processes"]
NODE_ID = 5


@pytest.fixture
def world() -> World:
    made = World()
    made.write(r.SetFeatureLevel(level=LEVEL))
    return made


def register(world: World, process_id: str, epoch: int = 1, **changes: Any) -> ErrorCode:
    request = r.RegisterNode(node=v.NodeIdentity(NODE_ID, epoch), process_id=process_id, **changes)
    error: ErrorCode = world.write(request).error
    return error


def test_another_process_of_the_same_epoch_is_refused_and_changes_nothing(world: World) -> None:
    assert register(world, "a", wal_config="mine") is ErrorCode.NONE
    for asked in (world, world.restored()):
        before = asked.map.state_hash()
        refused = register(asked, "b", wal_config="other")
        assert refused is ErrorCode.NODE_EPOCH_EXPIRED
        assert asked.map.state_hash() == before


def test_the_same_process_repeats_and_changes_its_registration(world: World) -> None:
    assert register(world, "a") is ErrorCode.NONE
    before = world.map.state_hash()
    assert register(world, "a") is ErrorCode.NONE
    assert world.map.state_hash() == before
    assert register(world, "a", wal_config="moved") is ErrorCode.NONE
    assert register(world, "b") is ErrorCode.NODE_EPOCH_EXPIRED


def test_a_larger_epoch_is_any_process_s(world: World) -> None:
    register(world, "a")
    assert register(world, "b", epoch=2) is ErrorCode.NONE
    assert register(world, "a", epoch=2) is ErrorCode.NODE_EPOCH_EXPIRED
    assert register(world, "a", epoch=1) is ErrorCode.NODE_EPOCH_EXPIRED
    world.write(r.GetOpeningStreams(node=v.NodeIdentity(NODE_ID, 3)))
    assert register(world, "c", epoch=3) is ErrorCode.NONE


def test_a_process_that_does_not_say_which_it_is_changes_no_owner(world: World) -> None:
    register(world, "a")
    assert register(world, "", wal_config="moved") is ErrorCode.NONE
    assert register(world, "b") is ErrorCode.NODE_EPOCH_EXPIRED
    assert register(world, "a") is ErrorCode.NONE


def test_below_the_level_processes_are_not_told_apart() -> None:
    world = World()
    world.write(r.SetFeatureLevel(level=LEVEL - 1))
    assert register(world, "a") is ErrorCode.NONE
    before = world.map.state_hash()
    assert register(world, "b") is ErrorCode.NONE
    assert world.map.state_hash() == before
    world.write(r.SetFeatureLevel(level=LEVEL))
    assert register(world, "b") is ErrorCode.NONE
    assert register(world, "a") is ErrorCode.NODE_EPOCH_EXPIRED


def test_a_process_id_is_bounded(world: World) -> None:
    assert register(world, "p" * 64) is ErrorCode.NONE
    with pytest.raises(InvalidRequestError, match="process_id"):
        register(world, "p" * 65, epoch=2)


THIRD = v.NodeIdentity(2, 1)


def assigned(target: v.NodeIdentity = OTHER) -> World:
    """Return a world in which the recovery of NODE is assigned."""
    world = World()
    world.write(r.RegisterNode(node=THIRD))
    world.write(r.AssignRecoveries(targets=(r.RecoveryTarget(NODE.node_id, 1, target.node_id),)))
    return world


def calls(recoverer: v.NodeIdentity) -> list[Any]:
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
        (v.NodeIdentity(99, 1), ErrorCode.NODE_FENCED),
        (v.NodeIdentity(OTHER.node_id, 0), ErrorCode.NODE_EPOCH_EXPIRED),
    ],
)
def test_another_node_or_an_older_process_changes_nothing(
    index: int, recoverer: v.NodeIdentity, error: ErrorCode
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
    world.write(r.RegisterNode(node=v.NodeIdentity(NODE.node_id, 2)))
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
            upload(
                0, (0, 0, 10), failover=True, recoverer=OTHER, compacted_object_ids=v.column([1])
            ),
            "recoverer",
        ),
        (r.GetOpeningStreams(node=NODE, recoverer=OTHER), "recoverer"),
        (calls(v.NodeIdentity(-1, 1))[0], "recoverer.node_id"),
        (calls(v.NodeIdentity(1, -1))[1], "recoverer.node_epoch"),
        (calls(NODE)[2], "recoverer.node_id"),
    ],
)
def test_a_recoverer_where_none_belongs_is_refused(request_: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        assigned().write(request_)
    assert caught.value.field == field


def test_uploads_of_recoverers_are_not_joined_with_others() -> None:
    one = upload(0, (0, 0, 10), epochs=(1,), compacted_object_ids=v.EMPTY_COLUMN)
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
    newer = v.NodeIdentity(NODE.node_id, 2)
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
    assert {stream.error for stream in answer.streams} == {ErrorCode.NONE}
    again = world.write(r.ReleaseStreams(node=NODE))
    assert (again.error, again.closed_streams) == (ErrorCode.NONE, 0)


def test_a_newer_process_is_not_released_nor_one_that_owes_uploads() -> None:
    world = World(streams=2)
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, end_offset=7),)))
    before = world.map.state_hash()
    assert world.write(r.ReleaseStreams(node=NODE)).error is ErrorCode.STREAM_NOT_CLOSED
    assert world.map.state_hash() == before
    world.write(r.RegisterNode(node=v.NodeIdentity(NODE.node_id, 2)))
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
    assert [stream.stream_id for stream in done.abandoned] == [0]
    assert (done.error, done.closed_streams, done.open_streams) == (ErrorCode.NONE, 1, 0)
