"""Clients spread over all controllers but the leader, and one stays where it is served."""

from __future__ import annotations

import random
from collections import Counter

from streammeta.client.controller_spread import ControllerSpread

ALL = ("a:1", "b:1", "c:1")


def spread(seed: int, *given: str) -> ControllerSpread:
    return ControllerSpread(given or ALL, random.Random(seed))


def test_many_clients_spread_evenly_over_all_but_the_leader() -> None:
    firsts = Counter(spread(seed).order("b:1")[0] for seed in range(1_000))
    assert firsts.keys() == {"a:1", "c:1"}
    assert max(firsts.values()) < 600
    assert all(spread(seed).order("b:1")[-1] == "b:1" for seed in range(20))


def test_one_client_has_one_order_and_the_next_leader_changes_no_more_than_its_own_place() -> None:
    one = spread(7)
    order = one.order(None)
    assert order == one.order(None)
    assert sorted(order) == sorted(ALL)
    assert [each for each in one.order("a:1") if each != "a:1"] == [
        each for each in order if each != "a:1"
    ]


def test_who_failed_comes_behind_the_others_and_before_the_leader() -> None:
    one = spread(3)
    first, second = one.order("b:1")[:2]
    one.failed(first)
    assert one.order("b:1") == [second, first, "b:1"]
    one.answered(first)
    assert one.order("b:1") == [first, second, "b:1"]
    one.failed(first)
    one.learn(ALL, "b:1")
    assert one.order(None) == [first, second, "b:1"], "a new list forgets failures"


def test_controllers_that_are_learned_are_asked_too() -> None:
    one = spread(1, "b:1")
    assert one.order("b:1") == ["b:1"]
    one.learn(["a:1", "b:1", "", "d:1"], "b:1")
    assert sorted(one.order("b:1")) == ["a:1", "b:1", "d:1"]
    assert one.order(None)[-1] == "b:1", "as learned"
    assert one.order("d:1")[-1] == "d:1", "a call has found the next leader meanwhile"


def test_a_leader_with_two_names_comes_last_with_both() -> None:
    one = spread(1, "localhost:1")
    one.learn(ALL, "b:1")
    assert one.order("localhost:1")[:2] == [
        each for each in one.order("localhost:1") if each in ("a:1", "c:1")
    ]


def test_a_leader_is_left_only_for_one_that_works() -> None:
    one = spread(1)
    assert one.has_better("b:1", "b:1")
    assert not one.has_better("a:1", "b:1")
    one.failed("a:1")
    assert one.has_better("b:1", "b:1")
    one.failed("c:1")
    assert not one.has_better("b:1", "b:1")
    assert not spread(1, "b:1").has_better("b:1", "b:1"), "alone"
