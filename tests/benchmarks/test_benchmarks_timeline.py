"""The timeline of a commit names functions that exist, and puts their times in order."""

import pytest

from scripts.benchmarks import timeline
from scripts.benchmarks.timed_controller import POINTS, Point, find
from scripts.benchmarks.timeline import ANSWERED, ASKED, CAUSES, summary


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.role}: {point.step}")
def test_every_step_is_a_function_of_this_tree(point: Point) -> None:
    """A function that was renamed takes its step along."""
    assert callable(find(point)[2])


def test_every_cause_is_a_step() -> None:
    """A step that was renamed is renamed in both places."""
    steps = {(role, point.step) for point in POINTS for role in ("leader", "follower")}
    assert CAUSES.keys() | set(CAUSES.values()) <= steps


def test_a_step_counts_from_the_question_and_from_its_cause() -> None:
    """Of two followers the first counts; the other is beside it."""
    read, written = ("follower", "batch is read"), ("follower", "journal begins")
    passing: timeline.Passing = {
        ASKED: [1_000],
        read: [6_000, 3_000],
        written: [9_000, 8_000],
        ANSWERED: [21_000],
    }
    rows = summary([passing])
    assert [(row.where, row.p50_us, row.since_cause_us, row.second_p50_us) for row in rows] == [
        ("client", 0.0, 0.0, None),
        ("follower", 2.0, 0.0, 5.0),
        ("follower", 7.0, 5.0, 8.0),
        ("client", 20.0, 13.0, None),
    ]


def test_a_commit_is_put_together_by_its_offset_and_its_time() -> None:
    """Steps that know no offset belong to the commit that was under way."""
    number = {(point.role, point.step): index for index, point in enumerate(POINTS)}
    decided, appended = number["leader", "decided"], number["leader", "appended"]
    flushed = number["each", "flushed"]
    stamps = {
        1: {"stamps": [(decided, 12, 0), (appended, 13, 7), (decided, 32, 0), (appended, 33, 8)]},
        2: {"stamps": [(flushed, 31, 7), (decided, 14, 0), (flushed, 36, 8)]},
    }
    first, second = timeline.passings([(10, 20), (30, 40), (50, 60)], stamps, leader_id=1)
    assert first == {
        ASKED: [10],
        ("leader", "decided"): [12],
        ("leader", "appended"): [13],
        ("follower", "flushed"): [31],
        ANSWERED: [20],
    }
    assert second["follower", "flushed"] == [36]
