"""Producers of a partition: repeats, sequences, epochs, expiry, snapshots."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from streammeta.brokers.partition import meta_map
from streammeta.brokers.partition.errors import InvalidProducerEpochError, OutOfOrderSequenceError
from streammeta.brokers.partition.log import TailCache
from streammeta.brokers.partition.log_clock import log_clock
from streammeta.brokers.partition.producer_state import (
    EXPIRATION_MS,
    ProducerStates,
    sequence_after,
)
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.brokers.partition.segments import Retention, Segment, retained_from
from streammeta.brokers.stamped_time import AHEAD_MS
from streammeta.storage.inspection.kafka_batch import KafkaBatch
from streammeta.storage.inspection.meta_stream import ProducerState, decode_meta_entry
from tests.kit.kafka_batches import Rec, make_batch, plain, sequenced

_LAST_SEQUENCE = 2**31 - 1


def _batch(payload: bytes) -> KafkaBatch:
    (batch,) = read_batches(payload)
    return batch


def _states(*batches: bytes) -> ProducerStates:
    """Return states that recorded batches, which follow each other from offset 0 on."""
    states = ProducerStates()
    for payload in batches:
        states.record(_batch(payload), states.map_end)
    return states


def _saved_rows(states: ProducerStates) -> tuple[ProducerState, ...]:
    """Return the rows of a snapshot of the states, read as a tool would."""
    value = meta_map.encode_snapshots({states.map_end: states.snapshot()})
    snapshots = decode_meta_entry(meta_map.encode_entry(meta_map.PRODUCER_SNAPSHOTS, value)).value
    assert isinstance(snapshots, tuple)
    (snapshot,) = snapshots
    assert snapshot.offset == states.map_end
    return tuple(snapshot.producers)


def test_a_repeat_has_the_same_epoch_and_both_sequences() -> None:
    states = _states(sequenced(7, 3, 0, 2))
    repeat = states.duplicate_of(_batch(sequenced(7, 3, 0, 2)))
    assert repeat is not None
    assert (repeat.first_offset, repeat.last_offset) == (0, 1)
    for other in (
        sequenced(7, 3, 0, 3),
        sequenced(7, 3, 1, 1),
        sequenced(7, 4, 0, 2),
        sequenced(7, 2, 0, 2),
        sequenced(8, 3, 0, 2),
    ):
        assert states.duplicate_of(_batch(other)) is None


def test_a_new_epoch_begins_with_sequence_0() -> None:
    states = _states(sequenced(7, 0, 0))
    states.check(7, 1, 0)
    for sequence in (1, 5):
        with pytest.raises(OutOfOrderSequenceError, match=f"sequence {sequence}"):
            states.check(7, 1, sequence)


def test_an_old_epoch_is_refused_and_a_new_one_forgets_its_batches() -> None:
    states = _states(sequenced(7, 0, 0), sequenced(7, 1, 0))
    with pytest.raises(InvalidProducerEpochError, match="epoch 0"):
        states.check(7, 0, 1)
    assert len(states.producers[7].batches) == 1
    assert states.producers[7].epoch == 1


def test_sequences_wrap() -> None:
    states = _states(sequenced(7, 0, _LAST_SEQUENCE))
    assert sequence_after(_LAST_SEQUENCE) == 0
    states.check(7, 0, 0)
    with pytest.raises(OutOfOrderSequenceError):
        states.check(7, 0, 1)


def test_an_unknown_producer_may_begin_anywhere() -> None:
    ProducerStates().check(7, 3, 12)


def test_batches_of_nobody_and_control_batches_move_the_end_alone() -> None:
    control = make_batch([Rec(1)], attributes=0x20, producer_id=0, producer_epoch=0)
    states = _states(plain("a", "b"), control)
    assert states.map_end == 3
    assert states.producers == {}


def test_producer_0_is_a_producer() -> None:
    states = _states(sequenced(0, 0, 0))
    assert list(states.producers) == [0]


def test_a_producer_expires_when_its_newest_batch_has_the_age() -> None:
    states = _states(sequenced(7, 0, 0, time=1_000), sequenced(8, 0, 0, time=1_001))
    states.record(_batch(sequenced(7, 0, 1, time=1_002)), 2)
    states.record(_batch(sequenced(9, 0, 0, time=1_000)), 3)
    states.expire(1_000 + EXPIRATION_MS - 1)
    assert sorted(states.producers) == [7, 8, 9]
    states.expire(1_000 + EXPIRATION_MS)
    assert sorted(states.producers) == [7, 8]


def test_a_snapshot_gives_the_same_states() -> None:
    batches = [sequenced(7, 0, 2 * at, 2, time=at) for at in range(7)]
    states = _states(*batches, sequenced(9, 4, _LAST_SEQUENCE, 2))
    rows = _saved_rows(states)
    assert ProducerStates.of_snapshot(states.map_end, rows).producers == states.producers
    assert ProducerStates.of_snapshot(states.map_end, rows).map_end == 16


def test_a_row_of_a_producer_without_a_batch_is_passed_over() -> None:
    (row,) = _saved_rows(_states(sequenced(7, 0, 0)))
    empty: ProducerState = replace(row, last_sequence=-1, last_offset=-1, producer_id=8)
    assert not empty.has_batch
    assert list(ProducerStates.of_snapshot(1, (row, empty)).producers) == [7]


# ---- the clock of a log ----


HOUR_MS, DAY_MS = 3_600_000, 86_400_000
NOW_MS = 1_700_000_000_000
WEEK = Retention(age_ms=7 * DAY_MS, bytes=-1)


def daily_segments(days: int) -> list[Segment]:
    """A segment of each day until now, as brokers with right clocks wrote them."""
    return [
        Segment(
            base_offset=day,
            created_ms=NOW_MS - (days - day) * DAY_MS,
            modified_ms=NOW_MS - (days - day - 1) * DAY_MS,
            size=1,
            last_time=(NOW_MS - (days - day - 1) * DAY_MS, day),
        )
        for day in range(days)
    ]


class Machine:
    """A machine's wall clock and timer, moved by hand."""

    def __init__(self, wall_ahead_ms: int = 0) -> None:
        self.timer = 5_000
        self.wall_ahead_ms = wall_ahead_ms

    def timer_ms(self) -> int:
        return self.timer

    def wall_ms(self) -> int:
        return NOW_MS + self.timer - 5_000 + self.wall_ahead_ms


@pytest.mark.parametrize("ahead_ms", [30 * DAY_MS, 3_650 * DAY_MS])
def test_a_broker_that_starts_with_a_fast_clock_keeps_the_records(
    ahead_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine, segments = Machine(ahead_ms), daily_segments(20)
    with caplog.at_level(logging.WARNING):
        now_ms = log_clock(segments, machine.wall_ms, machine.timer_ms)
    assert now_ms() == NOW_MS + AHEAD_MS
    assert str(ahead_ms) in caplog.text
    kept = retained_from(segments, now_ms(), WEEK)
    assert kept == retained_from(segments, NOW_MS + DAY_MS, WEEK) == 13


def test_a_jump_while_a_broker_runs_moves_the_log_twice_as_fast_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, segments = Machine(), daily_segments(20)
    now_ms = log_clock(segments, machine.wall_ms, machine.timer_ms)
    machine.timer += 90 * DAY_MS
    assert now_ms() == NOW_MS + 90 * DAY_MS

    machine.wall_ahead_ms = 30 * DAY_MS
    machine.timer += 20_000
    with caplog.at_level(logging.WARNING):
        assert now_ms() == NOW_MS + 90 * DAY_MS + 40_000
    assert f"jumped by {30 * DAY_MS} ms" in caplog.text
    machine.wall_ahead_ms = 0
    machine.timer += 20_000
    assert now_ms() == NOW_MS + 90 * DAY_MS + 40_000, "never backwards"
    machine.timer += 20_000
    assert now_ms() == NOW_MS + 90 * DAY_MS + 60_000


def test_an_idle_log_reaches_the_time_and_a_future_stamp_does_not_lead_it() -> None:
    machine, segments = Machine(9 * DAY_MS), daily_segments(3)
    now_ms = log_clock(segments, machine.wall_ms, machine.timer_ms)
    machine.timer += 8 * DAY_MS
    assert now_ms() == machine.wall_ms()

    fast = [*segments, Segment(base_offset=9, created_ms=NOW_MS + 400 * DAY_MS)]
    assert log_clock(fast, Machine().wall_ms, Machine().timer_ms)() == NOW_MS


# ---- the newest batches in memory ----


def _filled(max_bytes: int = 1_000) -> TailCache:
    """Return a cache of batches [0, 3), [3, 4) and [4, 6)."""
    cache = TailCache(max_bytes)
    cache.add(0, 3, b"aaa")
    cache.add(3, 4, b"b")
    cache.add(4, 6, b"cc")
    return cache


def test_a_read_begins_with_the_batch_that_holds_the_offset() -> None:
    cache = _filled()
    assert cache.read(0, 6, 100) == [b"aaa", b"b", b"cc"]
    assert cache.read(2, 6, 100) == [b"aaa", b"b", b"cc"]
    assert cache.read(3, 6, 100) == [b"b", b"cc"]
    assert cache.read(5, 6, 100) == [b"cc"]


def test_a_read_ends_before_batches_that_are_not_durable() -> None:
    cache = _filled()
    assert cache.read(0, 4, 100) == [b"aaa", b"b"]
    assert cache.read(0, 3, 100) == [b"aaa"]
    assert cache.read(0, 0, 100) == []


def test_a_read_takes_one_batch_or_as_many_as_fit() -> None:
    cache = _filled()
    assert cache.read(0, 6, 1) == [b"aaa"]
    assert cache.read(0, 6, 3) == [b"aaa"]
    assert cache.read(0, 6, 4) == [b"aaa", b"b"]


def test_the_oldest_batches_leave_first_and_the_newest_stays() -> None:
    assert _filled(6).read(0, 6, 100) == [b"aaa", b"b", b"cc"]
    assert _filled(5).read(2, 6, 100) is None
    assert _filled(5).read(3, 6, 100) == [b"b", b"cc"]
    assert _filled(1).read(4, 6, 100) == [b"cc"]
    assert _filled(1).read(3, 6, 100) is None


def test_an_empty_cache_knows_nothing() -> None:
    assert TailCache().read(0, 6, 100) is None
