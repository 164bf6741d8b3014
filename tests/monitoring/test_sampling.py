"""Samples of a controller, their history in memory, and the last hour in rows of five minutes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from streammeta.controller.monitoring.history.history import Fold, History, Series, last_hour
from streammeta.controller.monitoring.history.sampling import SERIES, Sampler, voter_lag
from streammeta.controller.monitoring.http.http_listener import ResponseCache
from streammeta.controller.monitoring.status import largest as largest_things
from streammeta.controller.monitoring.status.largest import (
    Pieces,
    Sizes,
    Sums,
    TopSizes,
    TopStreams,
    largest,
)
from streammeta.controller.runtime.writer.submission import CommitTally
from streammeta.controller.timings import quantile_s
from tests.monitoring.sampled import LEADING, SOURCES
from tests.monitoring.test_http_plane import QUORUM


def test_rates_are_of_what_happened_since_the_sample_before() -> None:
    tally, calls = CommitTally(accepted=1_000, refused=50), Counter(BUSY=7)
    clock = iter((100.0, 101.0, 102.0))
    sampler = Sampler(
        replace(SOURCES, commits=tally, refused_calls=calls),
        loop_lag=lambda: 0.25,
        memory=lambda: 1 << 20,
        wall_s=lambda: next(clock),
    )
    sampler.sample()
    tally.add(30, 10, took_s=0.004)
    calls["BUSY"] += 1
    sampler.sample()
    sampler.sample()
    seen = sampler.history.since(0, [series.name for series in SERIES]).columns

    assert [value > 0 for value in seen["commits_accepted"].tolist()] == [False, True, False]
    accepted, refused = (seen[f"commits_{verdict}"][1] for verdict in ("accepted", "refused"))
    assert accepted == pytest.approx(2 * refused)
    assert seen["calls_refused"][1] > 0 == seen["calls_refused"][2]
    assert seen["commit_p99"][1] == pytest.approx(4, rel=0.2)
    assert math.isnan(seen["commit_p99"][2]), "without commits there is no time"
    assert seen["objects_destroyed"].tolist() == [4, 4, 4]
    assert seen["voter_lag"].tolist() == [10, 10, 10]
    assert seen["loop_lag"].tolist() == [250, 250, 250]
    assert {name for name, values in seen.items() if np.isnan(values[1]).any()} == set()


def test_only_a_leader_knows_lags() -> None:
    assert voter_lag(LEADING) == 10
    assert math.isnan(voter_lag(QUORUM))


@pytest.mark.parametrize("took_s", [0.0, 2e-7, 1e-6, 3.3e-5, 0.004, 1.0, 29.0])
def test_a_quantile_is_never_less_than_the_time_and_a_fifth_more_at_most(took_s: float) -> None:
    tally = CommitTally()
    tally.add(1, 0, took_s)
    told = quantile_s(tally.times, 0.5)
    assert took_s <= told <= max(1e-6, 1.2 * took_s)


def test_quantiles_are_of_the_share_of_answers() -> None:
    tally = CommitTally()
    for _ in range(98):
        tally.add(1, 0, 0.001)
    for _ in range(2):
        tally.add(1, 0, 3_600)
    assert quantile_s(tally.times, 0.5) < 0.0012
    assert quantile_s(tally.times, 0.99) > 20
    assert math.isnan(quantile_s(CommitTally().times, 0.5))


def test_the_streams_with_the_most_ranges_come_first() -> None:
    counts = np.array([0, 3, 9, 0, 3, 1], dtype=np.int32)
    assert largest(counts, 3) == [(2, 9), (1, 3), (4, 3)]
    assert largest(counts) == [(2, 9), (1, 3), (4, 3), (5, 1)]
    assert largest(counts[:0]) == []


async def test_the_map_is_not_looked_at_for_every_question() -> None:
    looks = 0

    def counts() -> np.typing.NDArray[np.int32]:
        nonlocal looks
        looks += 1
        return np.array([1], dtype=np.int32)

    top = TopStreams(counts)
    assert [await top.known() for _ in range(3)] == [[(0, 1)]] * 3
    assert looks == 1


async def test_answers_are_shared_for_a_moment_and_failures_are_not_kept() -> None:
    kept: ResponseCache[int] = ResponseCache(kept_s=3_600)
    made = 0

    async def make() -> int:
        nonlocal made
        made += 1
        if made == 1:
            raise RuntimeError("a defect")
        return made

    failed = await asyncio.gather(*(kept.get("a", make) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [RuntimeError] * 3
    assert await asyncio.gather(*(kept.get("a", make) for _ in range(3))) == [2, 2, 2]
    assert await kept.get("b", make) == 3


async def test_few_answers_are_made_at_a_time() -> None:
    kept: ResponseCache[None] = ResponseCache()
    running, most, go_on = 0, 0, asyncio.Event()

    async def make() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    asked = [asyncio.create_task(kept.get(number, make)) for number in range(10)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert running == 4
    go_on.set()
    await asyncio.gather(*asked)
    assert most == 4


def column(*values: int) -> np.typing.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def test_bytes_are_summed_by_stream_and_by_broker_exactly() -> None:
    sums = Sums()
    sums.add(column(5, -1, 9_000), column(7, 7, 8), column(10, 20, 1 << 60))
    sums.add(column(5, -1), column(8, -1), column(1, 2))
    sums.add(column(), column(), column())
    assert sums.largest() == Sizes(
        streams=[(9_000, 1 << 60), (5, 11)],
        nodes=((8, (1 << 60) + 1, 2), (7, 30, 2)),
    )


async def test_a_long_look_holds_up_neither_questions_nor_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(largest_things, "WAIT_S", 0.001)
    looks, given, is_ending = 0, 0, False

    def pieces(_: int) -> Pieces:
        nonlocal looks, given
        looks += 1
        while not is_ending:
            given += 1
            yield column(1), column(7), column(10)

    top = TopSizes(pieces)
    assert await top.known() == Sizes()
    before = given
    assert await top.known() == Sizes(), "nothing is known yet"
    assert given > before, "the look goes on meanwhile"
    is_ending = True
    monkeypatch.setattr(largest_things, "WAIT_S", 20)
    known = await top.known()
    assert (looks, known.nodes) == (1, ((7, 10 * given, given),))
    assert await top.known() == known
    assert looks == 1, "it rests"


async def test_a_look_that_failed_is_not_repeated_at_once() -> None:
    looks = 0

    def pieces(_: int) -> Pieces:
        nonlocal looks
        looks += 1
        raise RuntimeError("a defect")

    top = TopSizes(pieces)
    assert [await top.known() for _ in range(3)] == [Sizes()] * 3
    assert looks == 1


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


BEGINNING = 30_000.0
"""The beginning of a row."""


def leading(rate: float) -> Mapping[str, float]:
    times = {"commit_p50": 2.0, "commit_p99": rate}
    return {"commits_accepted": rate, "commits_refused": 1, "is_leader": 1, **times}


FOLLOWING = {"commits_accepted": 0.0, "commits_refused": 0.0, "is_leader": 0.0}


def test_rows_count_commits_and_keep_the_highest_time() -> None:
    history = History(SERIES)
    for second in range(611):
        history.add(BEGINNING + second, leading(8 if second < 300 else 16))
    newest, *rows = last_hour(history, BEGINNING + 611)
    assert newest["begin_s"] == BEGINNING + 600
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
        for begin_s, rate in ((BEGINNING + 300, 16), (BEGINNING, 8))
    ]


def test_a_change_of_the_leader_leaves_each_controller_its_part() -> None:
    former, later = History(SERIES), History(SERIES)
    for second in range(301):
        former.add(BEGINNING + second, leading(5) if second < 90 else FOLLOWING)
        later.add(BEGINNING + second, leading(5) if second >= 90 else FOLLOWING)
    seen = [last_hour(sampler, BEGINNING + 301)[0] for sampler in (former, later)]
    assert [hour["accepted"] for hour in seen] == [450, 1_050]
    assert [hour["led"] for hour in seen] == pytest.approx([0.3, 0.7])
    assert all(hour["p50_ms"] == 2 for hour in seen)


def test_a_controller_that_did_not_lead_has_rows_without_times() -> None:
    history = History(SERIES)
    for second in range(301):
        history.add(BEGINNING + second, FOLLOWING)
    (row,) = last_hour(history, BEGINNING + 301)
    assert (row["accepted"], row["p50_ms"], row["p99_ms"], row["led"]) == (0, None, None, 0)


def test_a_sample_without_values_spoils_no_row_and_an_hour_is_all() -> None:
    history = History(SERIES)
    for second in range(3 * 3_600 + 1):
        history.add(BEGINNING + second, {} if second % 10 else leading(4))
    rows = last_hour(history, BEGINNING + 3 * 3_600 + 1)
    assert len(rows) == 12
    assert [row["accepted"] for row in rows] == [*11 * [1_200], 1_160], "an hour before now"
    assert not any(isinstance(x, float) and math.isnan(x) for row in rows for x in row.values())
    assert last_hour(History(SERIES), BEGINNING) == []
