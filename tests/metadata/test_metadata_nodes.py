"""Nodes and streams: fencing, locks, departure, ranges of ownership, pages, repeats."""

from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.answers import NodeDescription
from streammeta.controller.metadata.values import (
    Int64Column,
    NodeIdentity,
    PageRequest,
    RangeColumns,
    column,
)
from streammeta.controller.records.record import ObjectsDestroyed
from tests.metadata.test_metadata_uploads import NODE, NOW, OTHER, World, stream_objects


def node(world: World, node_id: int = 0) -> NodeDescription | None:
    answer: Any = world.map.query(r.GetNodes(node_ids=(node_id,)))
    described: NodeDescription | None = answer.nodes[0] if answer.nodes else None
    return described


def known(world: World, node_id: int = 0) -> NodeDescription:
    described = node(world, node_id)
    assert described is not None
    return described


def close(world: World, *streams: int, end: int | None = None) -> None:
    items = tuple(r.StreamToClose(stream, 1, end) for stream in streams)
    assert not any(world.write(r.CloseStreams(node=NODE, streams=items)).errors)


def unregister(world: World, identity: NodeIdentity = NODE) -> ErrorCode:
    error: ErrorCode = world.write(r.UnregisterNode(node=identity)).error
    return error


def destroy(world: World, *object_ids: int) -> None:
    world.apply(ObjectsDestroyed(object_id=column(object_ids), marked_at_ms=NOW))


def prepare(world: World, identity: NodeIdentity) -> ErrorCode:
    request = r.PrepareObjects(request_id="n", node=identity, count=1, ttl_ms=1_000)
    error: ErrorCode = world.write(request).error
    return error


def next_id(world: World, request_id: str) -> int:
    issued: int = world.write(r.GetNextNodeId(request_id=request_id)).node_id
    return issued


# ---- counters ----


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
        request = r.ListStreamSetObjects(node_id=NODE.node_id, page=PageRequest(2, token))
        page: Any = world.map.query(request)
        assert (page.error, page.total) == (ErrorCode.NONE, 5)
        pages.append([one.object_id for one in page.objects])
        token = page.next_page_token
    assert pages == [[3, 700], [703, 5_000], [9_999]]
    assert sum(asked) < 4_000, "as many ids as are in the spans of the node, for each page"
    other: Any = world.map.query(r.ListStreamSetObjects(node_id=OTHER.node_id))
    assert (other.objects, other.total) == ((), 0)


def _count_looked_up(world: World) -> list[int]:
    """Return a list that gets the number of ids of every look into the directory."""
    directory: Any = world.map._objects._directory
    look_up, asked = directory.rows, list[int]()

    def count(ids: Int64Column) -> Any:
        asked.append(len(ids))
        return look_up(ids)

    directory.rows = count
    return asked


# ---- unregistering ----


def test_a_node_that_owns_nothing_is_forgotten() -> None:
    world = World(streams=1)
    assert unregister(world) is ErrorCode.STREAM_NOT_CLOSED
    close(world, 0)
    assert unregister(world, NodeIdentity(0, 0)) is ErrorCode.NODE_EPOCH_EXPIRED
    world.write(r.SetNodeLock(node_id=0, locked=True))
    assert unregister(world) is ErrorCode.NODE_LOCKED
    world.write(r.SetNodeLock(node_id=0, locked=False))
    assert unregister(world) is ErrorCode.NONE
    assert node(world) is None
    assert prepare(world, NODE) is ErrorCode.NODE_EPOCH_NOT_EXIST
    before = world.map.state_hash()
    assert unregister(world) is ErrorCode.NONE
    assert world.map.state_hash() == before


def test_a_node_that_owes_an_upload_is_kept_until_it_is_made_or_given_up() -> None:
    world = World(streams=1)
    close(world, 0, end=10)
    assert unregister(world) is ErrorCode.STREAM_NOT_CLOSED
    world.commit(1, (0, 0, 10))
    destroy(world, 1)
    assert unregister(world) is ErrorCode.NONE


def test_uploads_that_are_over_are_forgotten_with_their_node() -> None:
    world = World(streams=1)
    close(world, 0, end=10)
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(0, 1),)))
    assert unregister(world) is ErrorCode.NONE
    assert len(world.map.freeze().sections()["pending_uploads"]["node_id"]) == 0


@pytest.mark.parametrize("by", ["register", "opening"])
def test_a_newer_process_ends_departure_failover_and_recovery(by: str) -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    close(world, 0)
    world.write(r.GetOpeningStreams(node=NODE, failover=True))
    world.write(r.AssignRecoveries(targets=(r.RecoveryTarget(0, 1, 1),)))
    unregister(world)
    described = known(world)
    assert (described.failover, described.departed, described.recovered_by) == (True, True, 1)
    newer = NodeIdentity(0, 2)
    world.write(r.RegisterNode(node=newer) if by == "register" else r.GetOpeningStreams(node=newer))
    described = known(world)
    assert (described.failover, described.departed, described.recovered_by) == (False, False, -1)
    destroy(world, 1)
    assert known(world).node_epoch == 2


def test_failover_still_fences_after_a_restart_from_a_snapshot() -> None:
    world = World()
    world.write(r.GetOpeningStreams(node=NODE, failover=True))
    assert world.restored().commit(0, (0, 0, 1)).error is ErrorCode.NODE_FENCED


# ---- ids ----


def test_ids_are_issued_once_until_a_node_has_come_and_gone() -> None:
    world = World()
    assert [next_id(world, name) for name in ("a", "b", "a", "c")] == [1000, 1001, 1000, 1002]
    world.write(r.RegisterNode(node=NodeIdentity(1500, 1)))
    assert next_id(world, "d") == 1501
    for node_id in (1001, 1500):
        identity = NodeIdentity(node_id, 1)
        world.write(r.RegisterNode(node=identity))
        assert unregister(world, identity) is ErrorCode.NONE
    assert [next_id(world, name) for name in ("e", "f", "g")] == [1001, 1500, 1502]


def test_an_issued_id_is_never_above_the_largest_even_if_a_node_has_that() -> None:
    world = World()
    world.write(r.RegisterNode(node=NodeIdentity(2**31 - 1, 0)))
    world.write(r.RegisterNode(node=NodeIdentity(1000, 0)))
    assert [next_id(world, name) for name in ("a", "b")] == [1001, 1002]


def test_a_free_id_that_is_registered_unasked_is_not_issued() -> None:
    world = World()
    for _ in range(2):
        world.write(r.RegisterNode(node=NodeIdentity(1000, 1)))
        world.map.forget_undo(world.map.applied_end_offset)
        unregister(world, NodeIdentity(1000, 1))
    world.write(r.RegisterNode(node=NodeIdentity(1000, 2)))
    assert next_id(world, "a") == 1001


def test_ids_that_were_chosen_by_hand_are_not_issued() -> None:
    world = World(streams=1)
    assert unregister(world, OTHER) is ErrorCode.NONE
    assert next_id(world, "a") == 1000


# ---- recoveries and supervision ----


def test_recoveries_are_assigned_to_the_process_that_was_meant() -> None:
    world = World()
    targets = (r.RecoveryTarget(0, 1, 1), r.RecoveryTarget(1, 2, 0), r.RecoveryTarget(7, 1, 0))
    assert world.write(r.AssignRecoveries(targets=targets)).assigned == 1
    assert (known(world).recovered_by, known(world, 1).recovered_by) == (1, -1)
    before = world.map.state_hash()
    assert world.write(r.AssignRecoveries(targets=targets)).assigned == 0
    assert world.map.state_hash() == before
    world.write(r.AssignRecoveries(targets=(r.RecoveryTarget(0, 1, -1),)))
    assert known(world).recovered_by == -1


def test_supervision_is_remembered_once_and_stays_through_epochs() -> None:
    world = World()
    assert (
        world.write(r.SuperviseNode(node=NodeIdentity(0, 0))).error is ErrorCode.NODE_EPOCH_EXPIRED
    )
    assert not known(world).supervised
    assert world.write(r.SuperviseNode(node=NODE)).error is ErrorCode.NONE
    before = world.map.state_hash()
    world.write(r.SuperviseNode(node=NODE))
    assert world.map.state_hash() == before
    world.write(r.RegisterNode(node=NodeIdentity(0, 2)))
    assert known(world).supervised


def test_a_node_that_departs_is_supervised_no_longer() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    close(world, 0)
    world.write(r.SuperviseNode(node=NODE))
    world.write(r.UnregisterNode(node=NODE))
    assert known(world).departed
    assert not known(world).supervised


def _range_indexes(world: World) -> list[int]:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(0,), include_ranges=True))
    return [item.range_index for item in answer.streams[0].ranges]


def _hand_over(world: World, epoch: int) -> None:
    node = OTHER if epoch % 2 == 0 else NODE
    before = NODE if epoch % 2 == 0 else OTHER
    world.write(r.CloseStreams(node=before, streams=(r.StreamToClose(0, epoch - 1),)))
    opened = world.write(r.OpenStreams(node=node, streams=(r.StreamToOpen(0, epoch),)))
    assert opened.streams[0].error is ErrorCode.NONE


@pytest.mark.parametrize(
    ("covered_ranges", "left"), [(0, [0, 1, 2, 3, 4]), (2, [2, 3, 4]), (3, [3, 4]), (4, [3, 4])]
)
def test_ranges_covered_by_stream_objects_go_when_the_stream_is_opened(
    covered_ranges: int, left: list[int]
) -> None:
    world = World(streams=1)
    for index in range(4):
        if index:
            _hand_over(world, epoch=1 + index)
        node = NODE if index % 2 == 0 else OTHER
        start = 100 * index
        if index < covered_ranges:
            rows = stream_objects((index, 0, start, start + 100))
            answer = world.commit(
                -1, (0, 0, 1), node=node, ranges=RangeColumns(), stream_objects=rows
            )
        else:
            answer = world.commit(10 + index, (0, start, start + 100), node=node)
        assert answer.error is ErrorCode.NONE
    _hand_over(world, epoch=5)
    assert _range_indexes(world) == left


def _pages(world: World, ask: Any, items: str) -> list[list[Any]]:
    pages, token = [], ""
    while True:
        answer: Any = ask(PageRequest(page_size=3, page_token=token))
        pages.append(list(getattr(answer, items)))
        token = answer.next_page_token
        if not token:
            return pages


def test_listings_come_in_pages_without_repeats_or_gaps() -> None:
    world = World(streams=7)
    query = world.map.query
    streams = _pages(world, lambda page: query(r.DescribeStreams(page=page)), "streams")
    assert [[s.stream_id for s in page] for page in streams] == [[0, 1, 2], [3, 4, 5], [6]]
    named = _pages(
        world,
        lambda page: query(r.DescribeStreams(stream_ids=(6, 99, 1, 3, 3, 0), page=page)),
        "streams",
    )
    assert [[s.stream_id for s in page] for page in named] == [[0, 1, 3], [6]]
    objects = _pages(world, lambda page: query(r.DescribeObjects(page=page)), "objects")
    assert [o.object_id for page in objects for o in page] == list(range(50))
    opening = _pages(
        world, lambda page: world.write(r.GetOpeningStreams(node=NODE, page=page)), "streams"
    )
    assert [[s.stream_id for s in page] for page in opening] == [[0, 1, 2], [3, 4, 5], [6]]


def test_keys_and_namespaces_come_in_pages() -> None:
    world = World()
    names = ["a", "a1", "a2", "a3", "a4", "b"]
    items = tuple(r.KVToPut(namespace=f"n{n}", key=k, value=b"") for n in range(4) for k in names)
    world.write(r.PutKVs(items=items))
    query = world.map.query
    keys = _pages(
        world, lambda page: query(r.ListKVs(namespace="n1", prefix="a", page=page)), "entries"
    )
    assert [[entry.key for entry in page] for page in keys] == [["a", "a1", "a2"], ["a3", "a4"]]
    found = _pages(
        world, lambda page: query(r.ListKVs(namespaces=True, page=page)), "namespace_names"
    )
    assert found == [["n0", "n1", "n2"], ["n3"]]


def test_pages_of_one_namespace_go_on_after_the_default_one() -> None:
    world = World()
    items = tuple(r.KVToPut(namespace=name, key="k", value=b"") for name in ("", "a", "b"))
    world.write(r.PutKVs(items=items))
    page = PageRequest(page_size=1)
    found: list[tuple[str, ...]] = []
    while not found or page.page_token:
        answer: Any = world.map.query(r.ListKVs(namespaces=True, page=page))
        found.append(answer.namespace_names)
        page = PageRequest(page_size=1, page_token=answer.next_page_token)
    assert found == [("",), ("a",), ("b",)]


def test_a_page_token_below_the_prefix_leaves_out_no_key() -> None:
    world = World()
    world.write(r.PutKVs(items=tuple(r.KVToPut(namespace="n", key=key, value=b"") for key in "ab")))
    page = PageRequest(page_token="Z")
    answer: Any = world.map.query(r.ListKVs(namespace="n", prefix="a", page=page))
    assert [entry.key for entry in answer.entries] == ["a"]


def test_a_repeated_request_id_returns_the_first_ids() -> None:
    world = World()
    create = r.CreateStreams(request_id="again", node=NODE, streams=(r.NewStream(),) * 2)
    prepare = r.PrepareObjects(request_id="again", node=NODE, count=5, ttl_ms=1_000)
    first = [world.write(create), world.write(prepare)]
    after = world.map.state_hash()
    assert [world.write(create), world.write(prepare)] == first
    assert world.map.state_hash() == after
