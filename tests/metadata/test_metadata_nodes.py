"""Listings in pages, what they look up, and the ids of nodes; the model holds the rest."""

from dataclasses import replace
from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import (
    Int64Column,
    NodeIdentity,
    PageRequest,
    column,
)
from streammeta.controller.records.record import ObjectsDestroyed
from tests.metadata.small_world import NODE, NOW, OTHER, World


def destroy(world: World, *object_ids: int) -> None:
    world.apply(ObjectsDestroyed(object_id=column(object_ids), marked_at_ms=NOW))


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


def test_an_issued_id_is_never_above_the_largest_even_if_a_node_has_that() -> None:
    world = World()
    world.write(r.RegisterNode(node=NodeIdentity(2**31 - 1, 0)))
    world.write(r.RegisterNode(node=NodeIdentity(1000, 0)))
    assert [next_id(world, name) for name in ("a", "b")] == [1001, 1002]


def test_a_node_that_departs_is_supervised_no_longer() -> None:
    world = World(streams=1)
    world.commit(1, (0, 0, 5))
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),)))
    world.write(r.SuperviseNode(node=NODE))
    world.write(r.UnregisterNode(node=NODE))
    described: Any = world.map.query(r.GetNodes(node_ids=(0,)))
    assert [(one.departed, one.supervised) for one in described.nodes] == [(True, False)]


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
