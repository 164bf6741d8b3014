"""Commits and times of the last hour, in rows of five minutes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from streammeta.controller.monitoring.history.history import History
from streammeta.controller.monitoring.history.last_hour import last_hour
from streammeta.controller.monitoring.history.sampling import SERIES

START = 30_000.0
"""The beginning of a row."""


def leading(rate: float) -> Mapping[str, float]:
    times = {"commit_p50": 2.0, "commit_p99": rate}
    return {"commits_accepted": rate, "commits_refused": 1, "is_leader": 1, **times}


FOLLOWING = {"commits_accepted": 0.0, "commits_refused": 0.0, "is_leader": 0.0}


def test_rows_count_commits_and_keep_the_highest_time() -> None:
    history = History(SERIES)
    for second in range(611):
        history.add(START + second, leading(8 if second < 300 else 16))
    newest, *rows = last_hour(history, START + 611)
    assert newest["begin_s"] == START + 600
    assert newest["accepted"] == 160
    assert rows == [
        {
            "begin_s": begin_s,
            "accepted": 300 * rate,
            "refused": 300,
            "p50_ms": 2,
            "p99_ms": rate,
            "led": 1,
        }
        for begin_s, rate in ((START + 300, 16), (START, 8))
    ]


def test_a_change_of_the_leader_leaves_each_controller_its_part() -> None:
    former, later = History(SERIES), History(SERIES)
    for second in range(301):
        former.add(START + second, leading(5) if second < 90 else FOLLOWING)
        later.add(START + second, leading(5) if second >= 90 else FOLLOWING)
    seen = [last_hour(each, START + 301)[0] for each in (former, later)]
    assert [each["accepted"] for each in seen] == [450, 1_050]
    assert [each["led"] for each in seen] == pytest.approx([0.3, 0.7])
    assert all(each["p50_ms"] == 2 for each in seen)


def test_a_controller_that_did_not_lead_has_rows_without_times() -> None:
    history = History(SERIES)
    for second in range(301):
        history.add(START + second, FOLLOWING)
    (row,) = last_hour(history, START + 301)
    assert (row["accepted"], row["p50_ms"], row["p99_ms"], row["led"]) == (0, None, None, 0)


def test_a_sample_without_values_spoils_no_row_and_an_hour_is_all() -> None:
    history = History(SERIES)
    for second in range(3 * 3_600 + 1):
        history.add(START + second, {} if second % 10 else leading(4))
    rows = last_hour(history, START + 3 * 3_600 + 1)
    assert len(rows) == 12
    assert [each["accepted"] for each in rows] == [*11 * [1_200], 1_160], "an hour before now"
    assert not any(isinstance(x, float) and math.isnan(x) for each in rows for x in each.values())
    assert last_hour(History(SERIES), START) == []
