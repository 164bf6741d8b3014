"""Turns of many systems become ratios within a round, and medians of them."""

from typing import Any

import pytest

from scripts.benchmarks import latency
from scripts.benchmarks.latency import ALONE, LOADS, MANY, OURS, UNARY_ALONE, Settings


def _turn(member: str, load: str, number: int, p50_ms: float) -> dict[str, Any]:
    return {
        "member": member,
        "load": load,
        "round": number,
        "p50_ms": p50_ms,
        "per_s": 1000 / p50_ms,
        "leader_cpu_us": 5.0,
    }


def _outcome() -> Any:
    turns = [
        _turn(member, load, number, p50_ms)
        for number, slow in enumerate((1, 10, 2))  # the machine's speed in each round
        for member, load, p50_ms in (
            (OURS, ALONE, 3.0 * slow),
            (OURS, UNARY_ALONE, 4.0 * slow),
            ("etcd", ALONE, 2.0 * slow),
        )
    ]
    settings = Settings(systems=(OURS, "etcd"), rounds=3)
    measured = {"turns": turns, "overall": []}
    return latency.outcome(settings, [OURS, "etcd"], measured, {"zookeeper": "zookeeper"})


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that was slow in one round changes none of them."""
    figures = _outcome().figures
    assert figures[f"{ALONE}: p50 ms / etcd"] == pytest.approx(1.5)
    assert figures[f"{OURS} {ALONE}: p50 ms"] == 6.0


def test_tls_is_compared_with_plain_text_of_the_same_round() -> None:
    turns = [
        _turn(member, load, number, p50_ms * slow)
        for number, slow in enumerate((1, 10, 2))
        for member, load, p50_ms in (
            (OURS, ALONE, 3.0),
            (latency.OVER_TLS, ALONE, 3.25),
            (OURS, MANY, 1.0),
            (latency.OVER_TLS, MANY, 2.0),
        )
    ]
    names = [OURS, latency.OVER_TLS]
    settings = Settings(systems=(OURS,), rounds=3, tls=True)
    found = latency.outcome(settings, names, {"turns": turns, "overall": []}, {})
    alone, _, many = found.all_tables()[-1].rows
    assert alone[2:] == ("0.5", "met")
    assert many[2:] == ("0.5", "missed")


def test_a_unary_commit_is_compared_with_a_commit_of_the_peer() -> None:
    """A peer has no other way, so its turn under the first load counts for both."""
    figures = _outcome().figures
    assert figures[f"{UNARY_ALONE}: p50 ms / etcd"] == pytest.approx(2.0)
    assert not any(MANY in name for name in figures)


def test_the_table_says_what_was_wanted_and_what_is_not_installed() -> None:
    """A ratio over its bound is missed."""
    figures, _, left_out = _outcome().tables
    verdicts = {row[0]: row[-1] for row in figures.rows}
    assert verdicts[f"{ALONE}: p50 ms"] == "etcd at most 1.3: missed"
    assert left_out.rows == (("zookeeper", "zookeeper"),)


def test_every_round_goes_through_all_loads_and_begins_with_another() -> None:
    """None is always the first after another's load."""
    members = [
        latency.Member(name=name, kind=name, endpoint="", leader_pid=1, pids=[1])
        for name in ("streammeta", "zookeeper", "etcd")
    ]
    seats: Any = [
        latency.Seat(load, member, committer=None)  # type: ignore[arg-type]
        for load in LOADS
        for member in members
        if member.kind in load.ways
    ]
    rounds = [list(latency.in_order(seats, number)) for number in range(4)]
    assert all(len(order) == len(seats) for order in rounds)
    assert {order[0].member.name for order in rounds} == {"streammeta", "zookeeper", "etcd"}
