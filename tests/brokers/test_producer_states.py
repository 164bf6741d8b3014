"""Producers of a partition: repeats, sequences, epochs, expiry, snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.brokers.partition.errors import (
    InvalidProducerEpochError,
    OutOfOrderSequenceError,
)
from streammeta.brokers.partition.meta_map import (
    PRODUCER_SNAPSHOTS,
    encode_entry,
    encode_snapshots,
)
from streammeta.brokers.partition.producer_state import (
    EXPIRATION_MS,
    ProducerStates,
    sequence_after,
)
from streammeta.brokers.partition.record_batch import read_batches
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
    value = encode_snapshots({states.map_end: states.snapshot()})
    snapshots = decode_meta_entry(encode_entry(PRODUCER_SNAPSHOTS, value)).value
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
