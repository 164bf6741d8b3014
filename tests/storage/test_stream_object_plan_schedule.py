"""Turns of streams: every kind comes as often as it should, and not for all streams at once."""

from __future__ import annotations

from collections import Counter

import pytest

from streammeta.storage.compaction.stream_objects import (
    StreamCompaction,
    StreamSchedule,
    after_turn,
    due_kind,
    first_turns,
    may_have_work,
)

DAY = 86_400


def kinds_over_a_day(schedule: StreamSchedule, stream_id: int) -> Counter[str]:
    turns = first_turns(stream_id, 0.0, schedule)
    found: Counter[str] = Counter()
    for minute in range(DAY // 60):
        now = minute * 60.0
        kind = due_kind(turns, now, schedule)
        if kind is None:
            found["rest"] += 1
            continue
        found[kind.name] += 1
        turns = after_turn(turns, kind, now, schedule)
    return found


@pytest.mark.parametrize("stream_id", [0, 1, 77])
def test_every_kind_comes_as_often_as_its_interval_says(stream_id: int) -> None:
    found = kinds_over_a_day(StreamSchedule(), stream_id)
    assert found["rest"] == 1
    assert 23 <= found["LINK"] <= 25
    assert 130 <= found["GATHER_SMALL"] <= 145
    assert found["PRUNE_LINKS"] == DAY // 60 - 1 - found["LINK"] - found["GATHER_SMALL"]


def test_without_composites_everything_is_copied() -> None:
    found = kinds_over_a_day(StreamSchedule(composites=False), 3)
    assert set(found) == {"rest", "REMOVE_EXPIRED", "MERGE_SMALL", "MERGE_LARGE"}


def test_streams_are_spread_over_the_interval() -> None:
    schedule = StreamSchedule()
    due = Counter(
        due_kind(first_turns(stream_id, 0.0, schedule), 60.0, schedule) for stream_id in range(6000)
    )
    assert due[StreamCompaction.LINK] == pytest.approx(100, abs=10), "one in sixty"
    assert due[StreamCompaction.GATHER_SMALL] == pytest.approx(500, abs=50), "the others in ten"


def test_intervals_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted 0 < interval_s"):
        StreamSchedule(interval_s=700.0)


@pytest.mark.parametrize(
    ("kind", "start", "spans", "expected"),
    [
        (StreamCompaction.REMOVE_EXPIRED, 10, [(0, 10), (10, 20)], True),
        (StreamCompaction.REMOVE_EXPIRED, 9, [(0, 10), (10, 20)], False),
        (StreamCompaction.PRUNE_LINKS, 1, [(0, 10)], True),
        (StreamCompaction.PRUNE_LINKS, 0, [(0, 10)], False),
        (StreamCompaction.PRUNE_LINKS, 0, [], False),
        (StreamCompaction.LINK, 0, [(0, 10), (10, 20)], True),
        (StreamCompaction.GATHER_SMALL, 0, [(0, 10), (11, 20)], False),
        (StreamCompaction.MERGE_SMALL, 0, [(0, 10)], False),
    ],
)
def test_a_stream_without_work_is_told_by_its_offsets_alone(
    kind: StreamCompaction, start: int, spans: list[tuple[int, int]], expected: bool
) -> None:
    assert may_have_work(kind, start, spans) is expected
