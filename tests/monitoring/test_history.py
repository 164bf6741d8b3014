"""History in memory: its windows, its minutes and its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from streammeta.controller.monitoring.history.history import Fold, History, Series
from streammeta.controller.monitoring.history.sampling import SERIES

SOME = (Series("mean", ""), Series("highest", "", Fold.MAX))
START = 6_000.0


def filled(samples: int, seconds: int = 900, minutes: int = 1_440) -> History:
    history = History(SOME, {1: seconds, 10: 360, 60: minutes})
    for number in range(samples):
        history.add(START + number, {"mean": number, "highest": number})
    return history


def test_the_last_samples_are_kept_in_order() -> None:
    window = filled(samples=25, seconds=10).since(0, ["highest", "mean"])
    assert window.times.tolist() == [START + number for number in range(15, 25)]
    assert list(window.columns) == ["highest", "mean"]
    assert window.columns["mean"].tolist() == list(range(15, 25))


def test_a_window_begins_after_its_time() -> None:
    history = filled(samples=10)
    assert history.since(START + 7, ["mean"]).columns["mean"].tolist() == [8, 9]
    assert len(history.since(START + 9, ["mean"]).times) == 0


def test_minutes_are_folded_by_the_rule_of_their_series() -> None:
    window = filled(samples=150).since(0, ["mean", "highest"], step_s=60)
    assert window.times.tolist() == [START, START + 60], "the third minute is under way"
    assert window.columns["mean"].tolist() == [29.5, 89.5]
    assert window.columns["highest"].tolist() == [59, 119]


def test_an_hour_has_a_sample_for_each_ten_seconds() -> None:
    history = filled(samples=3_600 + 2_001)
    window = history.since(0, ["mean", "highest"], step_s=10)
    assert window.times.tolist() == [START + 2_000 + 10 * number for number in range(360)]
    assert window.columns["mean"].tolist() == [2_004.5 + 10 * number for number in range(360)]
    assert window.columns["highest"][-1] == 5_599


def test_minutes_give_way_too() -> None:
    window = filled(samples=60 * 6 + 1, minutes=4).since(0, ["highest"], step_s=60)
    assert window.times.tolist() == [START + 60 * minute for minute in range(2, 6)]


def test_a_missing_value_is_none_and_spoils_no_minute() -> None:
    history = History(SOME)
    for number in range(61):
        history.add(START + number, {"mean": 4} if number == 3 else {})
    seconds = history.since(0, ["mean", "highest"]).columns
    assert np.isnan(seconds["highest"]).all()
    assert np.count_nonzero(~np.isnan(seconds["mean"])) == 1
    minutes = history.since(0, ["mean", "highest"], step_s=60).columns
    assert minutes["mean"].tolist() == [4]
    assert np.isnan(minutes["highest"]).all()


@pytest.mark.parametrize("back_s", [0, 30, 3_600])
def test_a_clock_that_was_set_back_begins_a_new_history(back_s: int) -> None:
    history = filled(samples=100)
    history.add(START + 99 - back_s, {"mean": 7})
    assert history.since(0, ["mean"]).times.tolist() == [START + 99 - back_s]
    for step_s in (10, 60):
        assert len(history.since(0, ["mean"], step_s).times) == 0


def test_all_series_of_a_day_take_less_than_a_megabyte() -> None:
    assert History(SERIES).nbytes < 1_000_000
    with pytest.raises(KeyError):
        filled(samples=1).since(0, ["unknown"])
