"""Producers: the state of idempotent producers of shared streams, after Kafka's brokers.

Any broker may write to a shared stream, so a repeated batch can arrive in another broker's object.
The metadata therefore holds the producer's epoch and its `BATCHES_KEPT` newest batches, per stream
and producer. Batches of an epoch have consecutive sequences. A larger epoch begins at sequence 0
and drops the batches of the one before.

A state stays until it expires, even if its stream is deleted: stream ids are never reused, so it
cannot be taken for the state of another stream. Rows of forgotten states are reused once that is
committed. A row's batches are a ring of `BATCHES_KEPT` rows in a second table, and a `record_count`
of 0 marks an empty place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from streammeta.controller.errors import ErrorCode, InvariantError
from streammeta.controller.metadata.tables.pair_index import PairIndex, hash_pairs
from streammeta.controller.metadata.tables.tables import FreeBlocks, Table, TableView, Undo
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, INT32_MAX, Int64Column
from streammeta.controller.records import record as rec

BATCHES_KEPT = 5
"""Newest batches that are remembered per stream and producer, as many as Kafka has in flight."""
NO_PRODUCER = -1
"""Producer id of a batch without an idempotent producer."""

PRODUCER_COLUMNS = ("stream_id", "producer_id", "producer_epoch", "last_used_ms")
BATCH_COLUMNS = ("first_sequence", "record_count", "start_offset")
_ROWS = {
    "stream_id": np.int32,  # -1: the row is free
    "producer_id": np.int64,
    "producer_epoch": np.int32,
    "last_used_ms": np.int64,
    "newest": np.int8,  # place of the newest batch in the ring
}
_BATCHES = {"first_sequence": np.int32, "record_count": np.int32, "start_offset": np.int64}
_FREE = -1
_RING = np.arange(BATCHES_KEPT)
_NONE = int(ErrorCode.NONE)
_DUPLICATE = int(ErrorCode.DUPLICATE_BATCH)
_OUT_OF_ORDER = int(ErrorCode.OUT_OF_ORDER_SEQUENCE)
_FENCED = int(ErrorCode.PRODUCER_FENCED)


@dataclass(frozen=True, slots=True)
class ProducersView:
    """The producers at one moment. `batches` has `BATCHES_KEPT` rows for each of `rows`."""

    rows: TableView
    batches: TableView
    next_producer_id: int

    def producer_columns(self) -> dict[str, Int64Column]:
        """Return the producers by stream and id."""
        order = self._in_order()
        return {name: self.rows.column(name)[order].astype(np.int64) for name in PRODUCER_COLUMNS}

    def batch_columns(self) -> dict[str, Int64Column]:
        """Return the batches of the producers, in the same order, the oldest of each first."""
        order = self._in_order()
        oldest = self.rows.column("newest")[order].astype(np.int64) + 1
        places = (oldest[:, None] + _RING) % BATCHES_KEPT
        rows = (order[:, None] * BATCHES_KEPT + places).ravel()
        kept = np.flatnonzero(self.batches.column("record_count")[rows])
        owners = order[kept // BATCHES_KEPT]
        keys = {
            name: self.rows.column(name)[owners].astype(np.int64)
            for name in ("stream_id", "producer_id")
        }
        batches = {
            name: self.batches.column(name)[rows[kept]].astype(np.int64) for name in BATCH_COLUMNS
        }
        return {**keys, **batches}

    def _in_order(self) -> Int64Column:
        streams, producers = self.rows.column("stream_id"), self.rows.column("producer_id")
        live = np.flatnonzero(streams != _FREE)
        ordered: Int64Column = live[np.lexsort((producers[live], streams[live]))]
        return ordered


@dataclass(frozen=True, slots=True, eq=False)
class _Batches:
    """Batches of producers, in columns."""

    stream_id: Int64Column
    producer_id: Int64Column
    producer_epoch: Int64Column
    first_sequence: Int64Column
    record_count: Int64Column
    start_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def take(self, chosen: Int64Column) -> _Batches:
        """Return some of them."""
        return _Batches(
            self.stream_id[chosen],
            self.producer_id[chosen],
            self.producer_epoch[chosen],
            self.first_sequence[chosen],
            self.record_count[chosen],
            self.start_offset[chosen] if len(self.start_offset) else EMPTY_COLUMN,
        )

    def has_repeated_pairs(self) -> bool:
        """Return whether a producer may have several batches in a stream. Rarely wrongly True."""
        if len(self.stream_id) < 2:
            return False
        hashes = np.sort(hash_pairs(self.stream_id, self.producer_id))
        return bool(np.count_nonzero(hashes[1:] == hashes[:-1]))

    def in_rounds(self) -> Iterator[_Batches]:
        """Yield the batches in rounds with distinct pairs, in the order of each pair's batches."""
        if not self.has_repeated_pairs():
            yield self
            return
        order = np.lexsort((self.producer_id, self.stream_id))  # which is stable
        streams, producers = self.stream_id[order], self.producer_id[order]
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (streams[1:] != streams[:-1]) | (producers[1:] != producers[:-1])
        places = np.arange(len(order))
        earlier = places - np.maximum.accumulate(np.where(begins, places, 0))
        for number in range(int(earlier.max()) + 1):
            yield self.take(order[earlier == number])


class Producers:
    """States of idempotent producers by stream and producer, and the next producer id."""

    def __init__(self) -> None:
        self._rows = Table(_ROWS)
        self._batches = Table(_BATCHES)
        self._index = PairIndex(self._rows, "stream_id", "producer_id")
        self._free = FreeBlocks()
        self._count = 0
        self._next_producer_id = 0

    def __len__(self) -> int:
        """Return the number of states."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes in use, including the index and free rows."""
        free = self._free.rows() * EMPTY_COLUMN.itemsize
        return self._rows.nbytes + self._batches.nbytes + self._index.nbytes + free

    @property
    def next_producer_id(self) -> int:
        """The producer id that is issued next."""
        return self._next_producer_id

    def are_known(self, stream_id: Int64Column, producer_id: Int64Column) -> rec.Mask:
        """Return which pairs have a state."""
        known: rec.Mask = self._index.find(stream_id, producer_id) >= 0
        return known

    def count_new(self, stream_id: Int64Column, producer_id: Int64Column) -> int:
        """Return the number of distinct pairs without a state. Rows without producer are none."""
        idempotent = np.flatnonzero(producer_id != NO_PRODUCER)
        streams, producers = stream_id[idempotent], producer_id[idempotent]
        new = ~self.are_known(streams, producers)
        return len(set(zip(streams[new].tolist(), producers[new].tolist(), strict=True)))

    def list_expired(
        self, before_ms: int, limit: int, from_ms: int = 0
    ) -> tuple[Int64Column, Int64Column]:
        """Return streams and ids of at most `limit` producers last used before `before_ms`.

        They come by last use, then stream and id. A last use before `from_ms` is skipped.
        """
        streams, producers = self._rows["stream_id"], self._rows["producer_id"]
        last_used = self._rows["last_used_ms"]
        is_old = (last_used < before_ms) & (last_used >= from_ms)
        found = np.flatnonzero(is_old & (streams != _FREE))
        if len(found) > limit > 0:
            # Selecting is faster than sorting all.
            latest = np.partition(last_used[found], limit - 1)[limit - 1]
            found = found[last_used[found] <= latest]
        order = np.lexsort((producers[found], streams[found], last_used[found]))
        found = found[order[:limit]]
        return streams[found].astype(np.int64), producers[found]

    # ---- verdicts ----

    def check(
        self,
        stream_id: Int64Column,
        producer_id: Int64Column,
        producer_epoch: Int64Column,
        first_sequence: Int64Column,
        record_count: Int64Column,
    ) -> tuple[Int64Column, Int64Column]:
        """Return the `ErrorCode` number of each batch of one commit, and where it was committed.

        Batches are in commit order, and each assumes that the accepted ones before it are
        committed. Those without a producer are accepted. A duplicate has the offset of the batch
        it repeats, or -1 if that is in the same commit. Other offsets are -1.
        """
        errors = np.zeros(len(stream_id), dtype=np.int64)
        offsets = np.full(len(stream_id), -1, dtype=np.int64)
        idempotent = np.flatnonzero(producer_id != NO_PRODUCER)
        if not len(idempotent):
            return errors, offsets
        given = _Batches(stream_id, producer_id, producer_epoch, first_sequence, record_count)
        if len(idempotent) < len(stream_id):
            given = given.take(idempotent)
        check = self._check_in_turn if given.has_repeated_pairs() else self._check_apart
        errors[idempotent], offsets[idempotent] = check(given)
        return errors, offsets

    def _check_apart(self, given: _Batches) -> tuple[Int64Column, Int64Column]:
        """Check batches of distinct pairs."""
        errors = np.zeros(len(given.stream_id), dtype=np.int64)
        offsets = np.full(len(given.stream_id), -1, dtype=np.int64)
        rows = self._index.find(given.stream_id, given.producer_id)
        known = np.flatnonzero(rows >= 0)
        if not len(known):
            return errors, offsets
        if len(known) < len(rows):
            rows, given = rows[known], given.take(known)

        first, count = given.first_sequence, given.record_count
        newest = self._rows["newest"][rows].astype(np.int64)
        # One row per batch given, with the places of its producer's batches, the newest first.
        places = rows[:, None] * BATCHES_KEPT + (newest[:, None] - _RING) % BATCHES_KEPT
        firsts, counts = (
            self._batches[name][places] for name in ("first_sequence", "record_count")
        )
        alike = (firsts == first[:, None]) & (counts == count[:, None])
        which = alike.argmax(axis=1)
        at = np.arange(len(rows))
        is_repeat = alike[at, which]

        epochs = self._rows["producer_epoch"][rows]
        older, newer = given.producer_epoch < epochs, given.producer_epoch > epochs
        is_repeat &= ~(older | newer)
        # A new epoch begins at 0.
        follows = first == np.where(newer, 0, _after(firsts[:, 0], counts[:, 0]))
        verdicts = np.where(follows, _NONE, _OUT_OF_ORDER)
        verdicts[is_repeat] = _DUPLICATE
        verdicts[older] = _FENCED
        errors[known] = verdicts
        repeated = np.flatnonzero(is_repeat)
        starts = self._batches["start_offset"][places[repeated, which[repeated]]]
        offsets[known[repeated]] = starts
        return errors, offsets

    def _check_in_turn(self, given: _Batches) -> tuple[Int64Column, Int64Column]:
        """Check batches one after the other, each with the effects of those before it."""
        rows = self._index.find(given.stream_id, given.producer_id).tolist()
        pairs = zip(given.stream_id.tolist(), given.producer_id.tolist(), strict=True)
        columns = (given.producer_epoch, given.first_sequence, given.record_count)
        batches = zip(*(cells.tolist() for cells in columns), strict=True)
        states: dict[tuple[int, int], _State] = {}
        errors, offsets = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for index, (row, pair, batch) in enumerate(zip(rows, pairs, batches, strict=True)):
            if pair not in states:
                states[pair] = self._state(row)
            errors[index], offsets[index] = states[pair].take(*batch)
        return errors, offsets

    def _state(self, row: int) -> _State:
        if row < 0:
            return _State()
        epoch, newest = self._rows.cells(("producer_epoch", "newest"), row)
        places = [
            row * BATCHES_KEPT + (newest + 1 + place) % BATCHES_KEPT
            for place in range(BATCHES_KEPT)
        ]
        batches = [self._batches.cells(BATCH_COLUMNS, place) for place in places]
        return _State(epoch, [(first, count, start) for first, count, start in batches if count])

    # ---- replay ----

    def replay_batches(self, record: rec.ProducerBatchesCommitted, undo: Undo) -> None:
        """Replay `ProducerBatchesCommitted`.

        Raises:
            InvariantError: a batch does not follow the one before it.
        """
        given = _Batches(
            record.stream_id,
            record.producer_id,
            record.producer_epoch,
            record.first_sequence,
            record.record_count,
            record.start_offset,
        )
        for batches in given.in_rounds():
            self._commit(batches, record.committed_at_ms, undo)

    def _commit(self, given: _Batches, committed_at_ms: int, undo: Undo) -> None:
        """Remember one batch of each pair."""
        rows = self._index.find(given.stream_id, given.producer_id)
        known = np.flatnonzero(rows >= 0)
        # States without batches of the same epoch begin a new ring.
        fresh = np.ones(len(rows), dtype=np.bool_)
        fresh[known] = given.producer_epoch[known] != self._rows["producer_epoch"][rows[known]]
        if len(known):
            self._require_follows(given.take(known), rows[known], fresh[known])
        new = np.flatnonzero(rows < 0)
        if len(new):
            rows[new] = self._add(given.stream_id[new], given.producer_id[new], undo)

        newest = np.where(fresh, 0, (self._rows["newest"][rows] + 1) % BATCHES_KEPT)
        self._rows.put("newest", rows, newest, undo)
        self._rows.put("producer_epoch", rows, given.producer_epoch, undo)
        self._rows.put("last_used_ms", rows, committed_at_ms, undo)
        if np.count_nonzero(fresh):
            others = (rows[fresh][:, None] * BATCHES_KEPT + _RING[1:]).ravel()
            self._batches.put("record_count", others, 0, undo)
        places = rows * BATCHES_KEPT + newest
        for name in BATCH_COLUMNS:
            self._batches.put(name, places, getattr(given, name), undo)

    def _require_follows(self, given: _Batches, rows: Int64Column, fresh: rec.Mask) -> None:
        last = rows * BATCHES_KEPT + self._rows["newest"][rows]
        first, count, start = (self._batches[name][last] for name in BATCH_COLUMNS)
        later = given.producer_epoch >= self._rows["producer_epoch"][rows]
        wanted = np.where(fresh, 0, _after(first, count))
        good = later & (given.first_sequence == wanted) & (fresh | (given.start_offset > start))
        if np.count_nonzero(good) < len(good):
            row = int(np.argmin(good))
            raise InvariantError(
                f"ProducerBatchesCommitted: the batch of producer {given.producer_id[row]} in "
                f"stream {given.stream_id[row]} with epoch {given.producer_epoch[row]}, sequence "
                f"{given.first_sequence[row]} and offset {given.start_offset[row]} does not "
                "follow its newest one"
            )

    def _add(self, stream_id: Int64Column, producer_id: Int64Column, undo: Undo) -> Int64Column:
        rows = self._free.take_alike(1, len(stream_id))
        if len(rows):
            reused = rows
            undo.append(lambda: self._free.give(1, reused))
        missing = len(stream_id) - len(rows)
        if missing:
            added = self._rows.append(missing, undo)
            self._batches.append(missing * BATCHES_KEPT, undo)
            rows = np.concatenate((rows, np.arange(added.start, added.stop)))

        self._rows.put("stream_id", rows, stream_id, undo)
        self._rows.put("producer_id", rows, producer_id, undo)
        self._index.insert(rows)
        undo.append(lambda: self._index.remove(rows))
        undo.assign(self, "_count", self._count + len(rows))
        return rows

    def replay_issued(self, record: rec.ProducerIdsIssued, undo: Undo) -> None:
        """Replay `ProducerIdsIssued`."""
        undo.assign(self, "_next_producer_id", record.first_producer_id + record.count)

    def replay_expired(self, record: rec.ProducersExpired, undo: Undo) -> None:
        """Replay `ProducersExpired`."""
        rows = self._index.find(record.stream_id, record.producer_id)
        # The index needs the keys, which are still there.
        self._index.remove(rows)
        undo.append(lambda: self._index.insert(rows))
        self._rows.put("stream_id", rows, _FREE, undo)
        undo.assign(self, "_count", self._count - len(rows))
        # Undo needs the rows, so they are free only once they cannot come back.
        undo.when_committed.append(lambda: self._free.give(1, rows))

    # ---- views ----

    def view(self) -> ProducersView:
        """Return an immutable view."""
        return ProducersView(self._rows.view(), self._batches.view(), self._next_producer_id)

    def load(
        self,
        next_producer_id: int,
        producers: Mapping[str, Int64Column],
        batches: Mapping[str, Int64Column],
    ) -> None:
        """Fill empty producers with the columns of a `ProducersView`."""
        self._next_producer_id = next_producer_id
        self._count = len(producers["stream_id"])
        streams, ids = batches["stream_id"], batches["producer_id"]
        begins = np.ones(len(streams), dtype=np.bool_)
        begins[1:] = (streams[1:] != streams[:-1]) | (ids[1:] != ids[:-1])
        first = np.flatnonzero(begins)
        counts = np.diff(np.append(first, len(streams)))
        rows = np.repeat(np.arange(self._count), counts)
        places = rows * BATCHES_KEPT + np.arange(len(streams)) - first[rows]

        columns = {name: producers[name] for name in PRODUCER_COLUMNS}
        self._rows.load({**columns, "newest": counts - 1})
        ring = {name: np.zeros(self._count * BATCHES_KEPT, kind) for name, kind in _BATCHES.items()}
        for name, cells in ring.items():
            cells[places] = batches[name]
        self._batches.load(ring)
        self._index.insert(np.arange(self._count))


def _after(first_sequence: rec.Int64Column, record_count: rec.Int64Column) -> Int64Column:
    """Return the sequences after batches: 0 follows the largest one."""
    following: Int64Column = (first_sequence.astype(np.int64) + record_count) & INT32_MAX
    return following


@dataclass(slots=True)
class _State:
    """State of one pair as of a batch within a commit. Its batches are the oldest first.

    Each is first sequence, record count and start offset. An unknown pair has epoch -1.
    """

    epoch: int = -1
    batches: list[tuple[int, int, int]] = field(default_factory=list)

    def take(self, epoch: int, first: int, count: int) -> tuple[int, int]:
        """Return the verdict on a batch and where it was committed, and add it if accepted."""
        if epoch < self.epoch:
            return _FENCED, -1
        if epoch == self.epoch:
            for known_first, known_count, start in reversed(self.batches):
                if (known_first, known_count) == (first, count):
                    return _DUPLICATE, start
        if self.batches:
            last_first, last_count, _ = self.batches[-1]
            wanted = last_first + last_count & INT32_MAX if epoch == self.epoch else 0
            if first != wanted:
                return _OUT_OF_ORDER, -1

        kept = self.batches[1 - BATCHES_KEPT :] if epoch == self.epoch else []
        self.epoch, self.batches = epoch, [*kept, (first, count, -1)]
        return _NONE, -1
