"""Queries in columns and answers in parts: the same as one by one, and no item is left out."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from streammeta.controller.errors import InvalidRequestError, LimitExceededError
from streammeta.controller.metadata.api import answer_budget
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.answer_budget import take_fitting
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
)
from streammeta.controller.metadata.api.object_slices import ObjectQuery, ObjectQueryColumns
from streammeta.controller.metadata.api.validation import validate
from streammeta.controller.metadata.tables.values import PageRequest, column
from tests.kit.seeds import seeds
from tests.metadata.map_pair import in_columns, plain
from tests.metadata.rich_history import SEEDS, histories, shared_history
from tests.metadata.small_world import NODE, World, batch

STREAMS = 12


def grown(rng: Random, uploads: int = 400) -> World:
    """Return a world of streams with lists of all lengths, some of them trimmed."""
    world = World(STREAMS)
    ends = [0] * STREAMS
    world.write(r.PrepareObjects(request_id="q", node=NODE, count=uploads, ttl_ms=60_000))
    for object_id in range(50, 50 + uploads):
        chosen = [stream for stream in range(STREAMS) if rng.random() < 1 / (1 + stream)]
        rows = [(stream, ends[stream], ends[stream] + rng.randint(1, 3)) for stream in chosen]
        if not rows:
            continue
        world.write(batch((object_id, *rows)))
        for stream, _, end in rows:
            ends[stream] = end
    trims = tuple(
        r.StreamToTrim(stream, 1, rng.randint(0, ends[stream])) for stream in range(0, STREAMS, 3)
    )
    world.write(r.TrimStreams(node=NODE, streams=trims))
    return world


def queries(rng: Random, count: int) -> tuple[ObjectQuery, ...]:
    found = []
    for _ in range(count):
        start = rng.choice((0, rng.randrange(400), rng.randrange(900)))
        end = rng.choice((-1, start, start + rng.randrange(200)))
        limit = rng.choice((0, 1, 3, 7, 50, 10_000))
        found.append(ObjectQuery(rng.randrange(STREAMS + 2), start, end, limit))
    return tuple(found)


@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_many_queries_are_answered_as_each_is(seed: int) -> None:
    rng = Random(seed)
    world = grown(rng)
    request = r.GetObjects(queries=queries(rng, 300))
    one_by_one, together = world.map.query(request), world.map.query(in_columns(request))
    assert plain(together) == plain(one_by_one)
    errors = {result.error for result in together.results}  # type: ignore[attr-defined]
    assert len(errors) == 3, "all outcomes are met"


@pytest.mark.parametrize("slices", [1, 40, 3_000])
def test_as_many_results_fit_as_one_by_one(slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(slices)
    world = grown(rng)
    request = r.GetObjects(queries=queries(rng, 200), may_stop=True)
    whole: Any = world.map.query(request)
    monkeypatch.setattr(answer_budget, "ANSWER_BYTES", answer_budget._SLICE_BYTES * slices)
    monkeypatch.setattr(answer_budget, "SLICES_MAX", slices)
    one_by_one, together = world.map.query(request), world.map.query(in_columns(request))
    assert plain(together) == plain(one_by_one)
    refused = replace(request, may_stop=False)
    if len(whole.results) > len(together.results):  # type: ignore[attr-defined]
        with pytest.raises(LimitExceededError) as one:
            world.map.query(refused)
        with pytest.raises(LimitExceededError) as other:
            world.map.query(in_columns(refused))
        assert str(one.value) == str(other.value)


@pytest.mark.parametrize(
    "bad",
    [
        ObjectQuery(-1, 0, -1),
        ObjectQuery(0, -1, -1),
        ObjectQuery(0, 5, 4),
        ObjectQuery(0, 0, -2),
        ObjectQuery(0, 0, -1, -1),
        ObjectQuery(0, 0, -1, 10_001),
    ],
    ids=lambda query: f"{query.stream_id} {query.start_offset} {query.end_offset} {query.limit}",
)
def test_a_malformed_query_is_named_among_many(bad: ObjectQuery) -> None:
    request = r.GetObjects(queries=(*[ObjectQuery(0, 0, -1)] * 20, bad))
    with pytest.raises(InvalidRequestError) as one:
        validate(request)
    with pytest.raises(InvalidRequestError) as other:
        validate(in_columns(request))
    assert str(one.value) == str(other.value)
    assert other.value.field.startswith("queries[20].")


def calls_of(world: World, count: int) -> int:
    """Return how many functions are called to answer `count` queries in columns."""
    request = r.GetObjects(
        queries=ObjectQueryColumns(
            column([number % STREAMS for number in range(count)]),
            column([number % 500 for number in range(count)]),
            column([-1] * count),
            column([3] * count),
        )
    )
    made = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        world.map.query(request)
    finally:
        sys.setprofile(None)
    return made


def test_the_steps_of_an_answer_do_not_grow_with_its_queries() -> None:
    """Else a call of ten thousand holds the event loop for a quarter of a second."""
    world = grown(Random(1))
    calls_of(world, 100)
    assert calls_of(world, 10_000) < 2 * calls_of(world, 100)


def test_as_many_fit_as_the_budget_holds_and_one_always_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_budget, "ANSWER_BYTES", 10)
    assert take_fitting([4, 6, 1], int) == ((4, 6), 1)
    assert take_fitting([11, 1], int) == ((11,), 1)
    assert take_fitting([11], int) == ((11,), None)
    assert take_fitting([], int) == ((), None)


def test_no_more_items_are_made_than_one_behind_the_last() -> None:
    made = iter([answer_budget.ANSWER_BYTES, 1, 1])
    take_fitting(made, int)
    assert list(made) == [1]


def test_an_item_that_no_message_holds_is_refused() -> None:
    with pytest.raises(LimitExceededError):
        take_fitting([1, answer_budget.ITEM_BYTES_MAX + 1], int)


PAGED = [
    (r.DescribeStreams(include_ranges=True, include_stream_objects=True), "streams"),
    (r.DescribeStreams(stream_ids=tuple(range(20))), "streams"),
    (r.DescribeObjects(), "objects"),
    (r.DescribeObjects(object_ids=tuple(range(0, 60, 2))), "objects"),
    (r.GetNodes(page=PageRequest()), "nodes"),
    (r.GetNodes(node_ids=(1_000, 1, 2, 3), page=PageRequest()), "nodes"),
    (r.GetNodes(include_stream_set_objects=True, page=PageRequest(2)), "nodes"),
    (ListStreamSetObjects(node_id=1), "objects"),
    (ListStreamSetObjects(node_id=1, include_ranges=True), "objects"),
    *((ListStreamObjects(stream_id=stream_id), "objects") for stream_id in range(6)),
    (r.ListKVs(namespace="n"), "entries"),
    (r.ListKVs(namespaces=True), "namespace_names"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("request_", "items"), PAGED, ids=map(str, range(len(PAGED))))
def test_pages_of_single_items_are_the_whole(
    seed: int, request_: Any, items: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_metadata = shared_history(seed).pair.map
    whole: Any = cluster_metadata.query(replace(request_, page=PageRequest(10_000)))
    monkeypatch.setattr(answer_budget, "ANSWER_BYTES", answer_budget.STREAM_SET_OBJECT_BYTES)
    found: list[Any] = []
    page = request_.page
    while True:
        answer: Any = cluster_metadata.query(replace(request_, page=page))
        part = getattr(answer, items)
        assert len(part) <= 1 or items in ("entries", "namespace_names")  # these are small
        found += part
        if not answer.next_page_token:
            break
        page = PageRequest(page.page_size, answer.next_page_token)
    assert plain(tuple(found)) == plain(getattr(whole, items))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_may_stop_goes_on_behind_its_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_metadata = shared_history(seed).pair.map
    keys = tuple(r.KVKey(namespace="n", key=key) for key in "abcab")
    queries = tuple(ObjectQuery(stream_id, 0, -1) for stream_id in range(8))
    asked: tuple[tuple[Any, str], ...] = (
        (r.GetKVs(keys=keys), "keys"),
        (r.GetObjects(queries=queries), "queries"),
    )
    for request, field in asked:
        whole: Any = cluster_metadata.query(request)
        monkeypatch.setattr(answer_budget, "ANSWER_BYTES", 1)
        with pytest.raises(LimitExceededError, match="may_stop"):
            cluster_metadata.query(request)
        found: list[Any] = []
        while rest := getattr(request, field)[len(found) :]:
            part: Any = cluster_metadata.query(replace(request, **{field: rest, "may_stop": True}))
            assert len(part.results) == 1
            found += part.results
        assert plain(tuple(found)) == plain(whole.results)
        monkeypatch.undo()


def test_nodes_that_do_not_fit_are_refused_without_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [made.pair.map for made in histories()]
    cluster_metadata = max(maps, key=lambda found: len(found.nodes()))
    described: Any = cluster_metadata.query(r.GetNodes())
    monkeypatch.setattr(answer_budget, "ANSWER_BYTES", 1)
    with pytest.raises(LimitExceededError, match=r"node_ids.*page"):
        cluster_metadata.query(r.GetNodes())
    assert cluster_metadata.nodes() == described.nodes
