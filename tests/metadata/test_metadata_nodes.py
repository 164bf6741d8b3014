"""Nodes and streams: fencing, locks, departure, ranges of ownership, pages, repeats."""

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.answers import NodeDescription
from streammeta.controller.metadata.values import (
    Int64Column,
    NodeIdentity,
    PageRequest,
    column,
)
from streammeta.controller.records.record import ObjectsDestroyed
from tests.metadata.test_metadata_uploads import NODE, NOW, OTHER, World


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


# ---- ids ----


def test_an_issued_id_is_never_above_the_largest_even_if_a_node_has_that() -> None:
    world = World()
    world.write(r.RegisterNode(node=NodeIdentity(2**31 - 1, 0)))
    world.write(r.RegisterNode(node=NodeIdentity(1000, 0)))
    assert [next_id(world, name) for name in ("a", "b")] == [1001, 1002]


# ---- recoveries and supervision ----


def test_a_node_that_departs_is_supervised_no_longer() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    close(world, 0)
    world.write(r.SuperviseNode(node=NODE))
    world.write(r.UnregisterNode(node=NODE))
    assert known(world).departed
    assert not known(world).supervised


# ---- pages ----


def _pages(ask: Any, request: Any, items: str, size: int = 3) -> list[list[Any]]:
    pages, token = list[list[Any]](), ""
    while token or not pages:
        answer: Any = ask(replace(request, page=PageRequest(size, token)))
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
    page = PageRequest(page_token="Z")
    answer: Any = world.map.query(r.ListKVs(namespace="n", prefix="a", page=page))
    assert [entry.key for entry in answer.entries] == ["a"]
