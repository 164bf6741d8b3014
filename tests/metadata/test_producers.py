"""Producers of shared streams: every repeat of a batch is known, and nothing else is taken for one.

A slow model of dictionaries judges verdicts, expiry and sections after any history.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from streammeta.controller.errors import ErrorCode, InvariantError
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries.limits import MetadataLimits, require_room
from streammeta.controller.metadata.registries.producers import Producers
from streammeta.controller.metadata.tables import pair_index
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, INT32_MAX, column
from streammeta.controller.records import record as rec
from tests.metadata.rich_history import batches, plain
from tests.metadata.small_world import World

NONE, FENCED = ErrorCode.NONE, ErrorCode.PRODUCER_FENCED
DUPLICATE, OUT_OF_ORDER = ErrorCode.DUPLICATE_BATCH, ErrorCode.OUT_OF_ORDER_SEQUENCE
Batch = tuple[int, int, int, int, int]
"""Stream, producer, epoch, first sequence, record count."""
PAIR = (0, 7)


def committed(*rows: Batch, now_ms: int = 5_000) -> Producers:
    producers = Producers()
    for number, row in enumerate(rows):
        producers.replay_batches(batches(row, now_ms=now_ms + number), Undo())
    return producers


def verdicts(producers: Producers, *rows: Batch) -> list[tuple[ErrorCode, int]]:
    found, offsets = producers.check(*map(column, zip(*rows, strict=True)))
    return [(ErrorCode(code), at) for code, at in zip(found, offsets.tolist(), strict=True)]


def codes(producers: Producers, *rows: Batch) -> list[ErrorCode]:
    return [code for code, _ in verdicts(producers, *rows)]


# -- rules


def test_an_unknown_producer_begins_anywhere_and_rows_without_one_are_accepted() -> None:
    producers = committed((*PAIR, 0, 0, 5))
    rows = ((1, 7, 0, 33, 5), (0, 8, 4, 2, 1), (0, -1, -1, -1, 5), (0, -1, -1, -1, 5))
    assert verdicts(producers, *rows) == [(NONE, -1)] * 4
    assert verdicts(Producers(), *rows) == [(NONE, -1)] * 4
    assert verdicts(producers, *rows[2:]) == [(NONE, -1)] * 2


def test_a_batch_continues_at_the_next_sequence() -> None:
    producers = committed((*PAIR, 0, 3, 5))
    assert codes(producers, (*PAIR, 0, 8, 1)) == [NONE]
    for first in (0, 7, 9, INT32_MAX):
        assert codes(producers, (*PAIR, 0, first, 1)) == [OUT_OF_ORDER]


@pytest.mark.parametrize("last", [(INT32_MAX, 1), (INT32_MAX - 4, 5), (1, INT32_MAX)])
def test_the_largest_sequence_is_followed_by_0(last: tuple[int, int]) -> None:
    producers = committed((*PAIR, 0, *last))
    assert codes(producers, (*PAIR, 0, 0, 3)) == [NONE]
    assert codes(producers, (*PAIR, 0, 1, 3)) == [OUT_OF_ORDER]
    across = committed((*PAIR, 0, INT32_MAX - 4, 10))
    assert codes(across, (*PAIR, 0, 5, 1), (1, 7, 0, 0, 1)) == [NONE, NONE]
    assert codes(across, (*PAIR, 0, 5, 1), (*PAIR, 0, 6, 1)) == [NONE, NONE]


def test_the_five_newest_batches_are_known_again_with_their_offsets() -> None:
    rows = [(*PAIR, 0, 10 * number, 10) for number in range(8)]
    producers = committed(*rows, now_ms=100)
    expected = [(OUT_OF_ORDER, -1)] * 3 + [(DUPLICATE, 103 + number) for number in range(5)]
    assert [verdicts(producers, row)[0] for row in rows] == expected
    assert codes(producers, (*PAIR, 0, 70, 9)) == [OUT_OF_ORDER]


def test_an_epoch_fences_older_ones_and_begins_at_0() -> None:
    producers = committed((*PAIR, 3, 0, 5), (*PAIR, 3, 5, 5))
    assert codes(producers, (*PAIR, 2, 10, 5)) == [FENCED]
    assert codes(producers, (*PAIR, 2, 5, 5)) == [FENCED]
    assert codes(producers, (*PAIR, 4, 10, 5)) == [OUT_OF_ORDER]
    assert verdicts(producers, (*PAIR, 4, 0, 5)) == [(NONE, -1)]
    newer = committed((*PAIR, 3, 0, 5), (*PAIR, 3, 5, 5), (*PAIR, 4, 0, 2))
    assert codes(newer, (*PAIR, 3, 10, 5)) == [FENCED]
    assert codes(newer, (*PAIR, 4, 5, 5)) == [OUT_OF_ORDER], "batches of an older epoch are gone"
    assert verdicts(newer, (*PAIR, 4, 0, 2)) == [(DUPLICATE, 5_002)]


def test_rows_assume_the_accepted_ones_before_them() -> None:
    producers = committed((*PAIR, 1, 0, 5))
    rows = (
        (*PAIR, 1, 5, 5),  # the next one
        (*PAIR, 1, 5, 5),  # it again
        (*PAIR, 1, 0, 5),  # one from before
        (*PAIR, 1, 11, 5),  # past a gap
        (*PAIR, 1, 10, 5),  # the next one
        (*PAIR, 2, 0, 1),  # an epoch
        (*PAIR, 1, 15, 1),  # the epoch before
        (*PAIR, 2, 1, 1),
        (1, 7, 0, 9, 1),  # another stream
        (1, 7, 0, 10, 1),
        (1, 7, 0, 9, 1),
    )
    assert verdicts(producers, *rows) == [
        *((NONE, -1), (DUPLICATE, -1), (DUPLICATE, 5_000), (OUT_OF_ORDER, -1), (NONE, -1)),
        *((NONE, -1), (FENCED, -1), (NONE, -1), (NONE, -1), (NONE, -1), (DUPLICATE, -1)),
    ]
    assert verdicts(producers, rows[0]) == [(NONE, -1)], "a check changes nothing"


# -- counts, expiry, memory


def test_new_pairs_are_counted_once_and_producers_by_stream() -> None:
    producers = committed((0, 7, 0, 0, 5), (1, 7, 0, 0, 5))
    assert len(producers) == 2
    assert producers.count_new(column([0, 2, 2, 0, 0]), column([7, 7, 7, 8, -1])) == 2
    assert producers.count_new(EMPTY_COLUMN, EMPTY_COLUMN) == 0


def test_producers_expire_by_last_use_then_stream_and_id() -> None:
    producers = Producers()
    for now, pairs in ((30, [(1, 1)]), (20, [(2, 9), (0, 5), (0, 3), (2, 1)]), (10, [(4, 4)])):
        rows = [(*pair, 0, 0, 1) for pair in pairs]
        producers.replay_batches(batches(*rows, now_ms=now), Undo())
    order = [(4, 4), (0, 3), (0, 5), (2, 1), (2, 9), (1, 1)]
    for before, known in ((10, 0), (11, 1), (21, 5), (31, 6)):
        for limit in range(7):
            streams, ids = producers.list_expired(before, limit)
            found = list(zip(streams.tolist(), ids.tolist(), strict=True))
            assert found == order[:known][:limit]


def test_100_000_producers_take_at_most_120_bytes_each() -> None:
    producers = Producers()
    for first in range(0, 100_000, 1_000):
        ids = range(first, first + 1_000)
        producers.replay_batches(batches(*((i % 977, i, 0, 0, 1) for i in ids)), Undo())
    assert len(producers) == 100_000
    assert producers.nbytes <= 120 * len(producers)
    every = np.arange(100_000)
    assert producers.count_new(every % 977, every) == 0


def test_rows_of_expired_producers_are_reused_once_that_is_committed() -> None:
    producers = committed(*((0, producer, 0, 0, 5) for producer in range(9)))
    size, undo = producers.nbytes, Undo()
    gone = rec.ProducersExpired(stream_id=column([0] * 9), producer_id=column(range(9)))
    producers.replay_expired(gone, undo)
    producers.replay_batches(batches((0, 50, 0, 0, 1)), Undo())
    assert producers.nbytes > size, "the rows might be needed again"
    grown = len(producers._rows)
    for action in undo.when_committed:
        action()
    for _ in range(2):
        undo = Undo()
        producers.replay_batches(batches(*((1, i, 0, 0, 1) for i in range(9))), undo)
        assert len(producers._rows) == grown
        for action in reversed(undo):
            action()
    producers.replay_batches(batches(*((1, i, 0, 0, 1) for i in range(9))), Undo())
    assert (len(producers._rows), len(producers)) == (grown, 10)
    assert verdicts(producers, (1, 3, 0, 0, 5)) == [(OUT_OF_ORDER, -1)], "nothing is inherited"


def test_a_limit_of_producers_counts_new_pairs() -> None:
    world = World()
    world.apply(batches((0, 7, 0, 0, 5)))
    require_room(world.map, (batches((0, 7, 0, 5, 5)),), MetadataLimits(producers=1))
    with pytest.raises(InvariantError):
        world.apply(batches((0, 7, 0, 6, 5)))
    with pytest.raises(Exception, match="producers: 1 of 1"):
        require_room(world.map, (batches((1, 7, 0, 0, 5)),), MetadataLimits(producers=1))


def test_states_of_deleted_streams_stay_until_they_expire() -> None:
    world = World()
    world.apply(batches((1, 7, 0, 0, 5)))
    world.apply(rec.StreamsDeleted(stream_id=column([1])))
    assert len(world.map._producers) == 1
    world.apply(rec.ProducersExpired(stream_id=column([1]), producer_id=column([7])))
    assert len(world.map._producers) == 0


# -- any history


@dataclass
class _State:
    epoch: int
    last_used: int = 0
    batches: list[tuple[int, int, int]] = field(default_factory=list)


class _Model:
    """Producers by pair, and the rules in plain words."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], _State] = {}
        self.next_id = 0

    def take(self, row: Batch, start: int, now: int) -> tuple[ErrorCode, int]:
        *key, epoch, first, count = row
        if key[1] == -1:
            return NONE, -1
        state = self.states.get((key[0], key[1]))
        if state is not None:
            if epoch < state.epoch:
                return FENCED, -1
            same = [b for b in state.batches if b[:2] == (first, count) and epoch == state.epoch]
            if same:
                return DUPLICATE, same[-1][2]
            last = state.batches[-1]
            if first != ((last[0] + last[1]) % 2**31 if epoch == state.epoch else 0):
                return OUT_OF_ORDER, -1
        if state is None or epoch > state.epoch:
            state = self.states[key[0], key[1]] = _State(epoch)
        state.batches = [*state.batches, (first, count, start)][-5:]
        state.last_used = now
        return NONE, -1

    def expired(self, before: int, limit: int) -> list[tuple[int, int]]:
        old = sorted((s.last_used, pair) for pair, s in self.states.items() if s.last_used < before)
        return [pair for _, pair in old[:limit]]

    def sections(self) -> dict[str, Any]:
        pairs = sorted(self.states.items())
        return {
            "producers": [(*pair, state.epoch, state.last_used) for pair, state in pairs],
            "producer_batches": [
                (*pair, *batch) for pair, state in pairs for batch in state.batches
            ],
            "producer_ids": [(self.next_id,)],
        }


class _Run:
    """A map and a model, and what drives them."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.map = World().map
        self.model = _Model()
        self.now = self.start = 1_000
        self.before: list[tuple[int, bytes, _Model]] = []
        """Entries that can be undone: end, hash and model before each."""
        self.apply(rec.FeatureLevelSet(level=SUPPORTED.highest))

    def apply(self, *records: rec.Record, model: _Model | None = None) -> None:
        offset = self.map.applied_end_offset
        self.before.append((offset, self.map.state_hash(), self.model))
        self.map.apply(offset, records)
        self.model = model or self.model

    def row(self) -> Batch:
        rng = self.rng
        pair = rng.randrange(4), rng.choice((-1, 0, 1, 2, 3, 2**40))
        state = self.model.states.get(pair)
        if state is None or rng.random() < 0.1:
            return (*pair, rng.randrange(4), rng.choice((0, 5, INT32_MAX)), rng.randint(1, 3))
        first, count, _ = rng.choice(state.batches)
        if rng.random() < 0.6:
            last = state.batches[-1]
            first = last[0] + last[1] & INT32_MAX
            count = rng.choice((1, 2, 3, INT32_MAX))
        epoch = state.epoch + rng.choice((0, 0, 0, 0, 0, 1, -1))
        return (*pair, max(epoch, 0), 0 if epoch > state.epoch else first, count)

    def commit(self) -> None:
        rows = [self.row() for _ in range(self.rng.choice((1, 1, 3, 20)))]
        model = copy.deepcopy(self.model)
        pending = copy.deepcopy(self.model)
        expected, accepted, starts = [], [], []
        for row in rows:
            # Within a commit offsets are not assigned yet.
            expected.append(pending.take(row, -1, self.now))
            if model.take(row, self.start, self.now)[0] is NONE and row[1] != -1:
                accepted.append(row)
                starts.append(self.start)
            self.start += row[4]
        producers = self.map._producers
        assert verdicts(producers, *rows) == expected, rows
        new = len({row[:2] for row in rows if row[1] >= 0} - set(self.model.states))
        assert producers.count_new(*map(column, list(zip(*rows, strict=True))[:2])) == new
        if accepted:
            record = batches(*accepted, now_ms=self.now)
            fields = {name: getattr(record, name) for name in record.__slots__}
            given = rec.ProducerBatchesCommitted(**{**fields, "start_offset": column(starts)})
            self.apply(given, model=model)

    def expire(self) -> None:
        before, limit = self.now - self.rng.randrange(40), self.rng.randint(1, 9)
        streams, ids = self.map._producers.list_expired(before, limit)
        found = list(zip(streams.tolist(), ids.tolist(), strict=True))
        assert found == self.model.expired(before, limit)
        if found:
            model = copy.deepcopy(self.model)
            for pair in found:
                del model.states[pair]
            self.apply(rec.ProducersExpired(stream_id=streams, producer_id=ids), model=model)

    def issue(self) -> None:
        model, count = copy.deepcopy(self.model), self.rng.randint(1, 1000)
        first = self.map._producers.next_producer_id
        model.next_id = first + count
        self.apply(rec.ProducerIdsIssued(first_producer_id=first, count=count), model=model)

    def undo(self) -> None:
        if len(self.before) > 1:
            place = self.rng.randrange(max(1, len(self.before) - 4), len(self.before))
            end, digest, self.model = self.before[place]
            del self.before[place:]
            self.map.undo_to(end)
            assert self.map.state_hash() == digest

    def settle(self) -> None:
        self.map.forget_undo(self.map.applied_end_offset)
        self.before.clear()

    def restart(self) -> None:
        view = self.map.freeze()
        self.map = ClusterMetadata.from_sections(view.sections(), view.end_offset)
        self.before.clear()
        assert self.map.state_hash() == view.digest()

    def step(self) -> None:
        self.now += self.rng.randrange(4)
        actions = (self.commit, self.expire, self.issue, self.undo, self.settle, self.restart)
        self.rng.choices(actions, (20, 3, 1, 4, 2, 1))[0]()
        self.compare()

    def compare(self) -> None:
        sections = plain(self.map.freeze().sections())
        for name, rows in self.model.sections().items():
            assert list(zip(*sections[name].values(), strict=True)) == rows, name
        assert len(self.map._producers) == self.map.used()["producers"] == len(self.model.states)


@pytest.mark.parametrize("seed", range(6))
def test_any_history_gives_the_verdicts_and_sections_of_the_model(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rebuilding a small index is frequent.
    monkeypatch.setattr(pair_index, "_BITS_MIN", 3)
    run = _Run(seed)
    for number in range(250):
        try:
            run.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {number}: {error!r}") from error


def test_sections_are_absent_below_their_level() -> None:
    world = World()
    world.apply(batches((0, 7, 0, 0, 5)))
    assert "producers" not in world.map.freeze().sections()
    world.write(r.SetFeatureLevel(level=5))
    found = plain(world.map.freeze().sections())
    assert found["producers"]["producer_id"] == [7]
    assert found["producer_batches"]["record_count"] == [5]


def test_a_view_stays_as_it_was() -> None:
    producers = committed((*PAIR, 0, 0, 5))
    view = producers.view()
    before = plain({"": view.producer_columns(), "batches": view.batch_columns()})
    producers.replay_batches(batches((*PAIR, 0, 5, 5), (3, 3, 0, 0, 1), now_ms=6_000), Undo())
    producers.replay_expired(
        rec.ProducersExpired(stream_id=column([0]), producer_id=column([7])), Undo()
    )
    assert plain({"": view.producer_columns(), "batches": view.batch_columns()}) == before
