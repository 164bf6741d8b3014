"""Queries in columns are answered as one by one, and cost a few steps for all of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from streammeta.controller.errors import InvalidRequestError, LimitExceededError
from streammeta.controller.metadata.api import answer_budget
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.validation import validate
from streammeta.controller.metadata.tables.values import column
from tests.metadata.map_pair import in_columns, plain
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


def queries(rng: Random, count: int) -> tuple[r.ObjectQuery, ...]:
    found = []
    for _ in range(count):
        start = rng.choice((0, rng.randrange(400), rng.randrange(900)))
        end = rng.choice((-1, start, start + rng.randrange(200)))
        limit = rng.choice((0, 1, 3, 7, 50, 10_000))
        found.append(r.ObjectQuery(rng.randrange(STREAMS + 2), start, end, limit))
    return tuple(found)


@pytest.mark.parametrize("seed", range(4))
def test_many_queries_are_answered_as_each_is(seed: int) -> None:
    rng = Random(seed)
    world = grown(rng)
    request = r.GetObjects(queries=queries(rng, 300))
    one_by_one, together = world.map.query(request), world.map.query(in_columns(request))
    assert plain(together) == plain(one_by_one)
    errors = {each.error for each in together.results}  # type: ignore[attr-defined]
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
        r.ObjectQuery(-1, 0, -1),
        r.ObjectQuery(0, -1, -1),
        r.ObjectQuery(0, 5, 4),
        r.ObjectQuery(0, 0, -2),
        r.ObjectQuery(0, 0, -1, -1),
        r.ObjectQuery(0, 0, -1, 10_001),
    ],
    ids=lambda query: f"{query.stream_id} {query.start_offset} {query.end_offset} {query.limit}",
)
def test_a_malformed_query_is_named_among_many(bad: r.ObjectQuery) -> None:
    request = r.GetObjects(queries=(*[r.ObjectQuery(0, 0, -1)] * 20, bad))
    with pytest.raises(InvalidRequestError) as one:
        validate(request)
    with pytest.raises(InvalidRequestError) as other:
        validate(in_columns(request))
    assert str(one.value) == str(other.value)
    assert other.value.field.startswith("queries[20].")


def calls_of(world: World, count: int) -> int:
    """Return how many functions are called to answer `count` queries in columns."""
    request = r.GetObjects(
        queries=r.ObjectQueryColumns(
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
