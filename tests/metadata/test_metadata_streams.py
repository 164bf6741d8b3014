"""Ranges of ownership, pages, and repeats of requests that issue ids."""

from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.values import PageRequest, RangeColumns
from tests.metadata.test_metadata_uploads import NODE, OTHER, World, stream_objects


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
    ("covered_ranges", "left"),
    [(0, [0, 1, 2, 3, 4]), (2, [2, 3, 4]), (3, [3, 4]), (4, [3, 4])],
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
        world,
        lambda page: query(r.ListKVs(namespace="n1", prefix="a", page=page)),
        "entries",
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
