"""Answers that end at their budget: parts together are the whole, and no item is ever left out."""

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import LimitExceededError
from streammeta.controller.metadata.api import answer_budget
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.answer_budget import take_fitting
from streammeta.controller.metadata.tables.values import PageRequest
from tests.metadata.map_pair import plain
from tests.metadata.rich_history import SEEDS, histories


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
    (r.ListStreamSetObjects(node_id=1), "objects"),
    (r.ListKVs(namespace="n"), "entries"),
    (r.ListKVs(namespaces=True), "namespace_names"),
]


@pytest.mark.parametrize("history", histories(), ids=map(str, SEEDS))
@pytest.mark.parametrize(("request_", "items"), PAGED, ids=map(str, range(len(PAGED))))
def test_pages_of_single_items_are_the_whole(
    history: Any, request_: Any, items: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_metadata = history.pair.map
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


@pytest.mark.parametrize("history", histories(), ids=map(str, SEEDS))
def test_what_may_stop_goes_on_behind_its_end(
    history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_metadata = history.pair.map
    keys = tuple(r.KVKey(namespace="n", key=key) for key in "abcab")
    queries = tuple(r.ObjectQuery(stream_id, 0, -1) for stream_id in range(8))
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
