"""Planner of adoptions: which objects of before a restore continue the streams of a restored map.

Chains records from each stream's restored end, and through what nodes still owe. Where several
objects have an offset, the larger stream epoch wins: its writer had fenced the other. Records of
equal epochs must be equal, as a compaction's are to its sources'; if they are not, the chain ends
and a person has to look. It ends at the first gap as well. Nothing that acknowledged a commit is
known here: what is not adopted is listed with the reason.

An object gives one range of a stream at most. It may be a part of what the object holds, cut where
an entry of its index begins or ends: readers take whole entries. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

OBJECTS_A_BATCH = 1_000
"""Objects adopted by one request, unless they depend on each other."""

RANGES_A_BATCH = 10_000
"""Ranges adopted by one request, likewise."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Offsets `[start, end)` of a stream as an object has them; equal digests are equal bytes."""

    start: int
    end: int
    epoch: int
    digest: bytes


Entry: TypeAlias = tuple[StoredRecord, ...]
"""Records of one entry of an object's index, which are taken together; at least one."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Entries of one stream in an object, each beginning where the one before ends."""

    object_id: int
    stream_id: int
    entries: tuple[Entry, ...]

    @property
    def records(self) -> Iterator[StoredRecord]:
        """The records of all entries."""
        return (record for entry in self.entries for record in entry)

    @property
    def end(self) -> int:
        """The offset behind the last one."""
        return self.entries[-1][-1].end


@dataclass(frozen=True, slots=True)
class Candidate:
    """An undecided object that the map does not know."""

    object_id: int
    size: int
    runs: tuple[StoredRun, ...]


@dataclass(frozen=True, slots=True)
class StreamHead:
    """End and epoch of a stream in the map, and what nodes owe below that end.

    `owed` has start, end and epoch of each range, the epoch being that of its records.
    """

    end_offset: int
    epoch: int
    owed: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AdoptedRange:
    """Offsets of a stream to adopt; `epoch` is the largest among their records."""

    stream_id: int
    start: int
    end: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """An object to adopt with some of its ranges, by stream id."""

    object_id: int
    size: int
    ranges: tuple[AdoptedRange, ...]


class Why(StrEnum):
    """Reasons to leave offsets of an object behind."""

    KNOWN = "known"
    """The map has these offsets from other objects."""
    DUPLICATE = "duplicate"
    """Another object with the same records is adopted."""
    FENCED = "fenced"
    """A writer that was fenced left them: other records have a larger epoch."""
    DELETED_STREAM = "deleted-stream"
    """The stream was deleted before the restored point."""
    COMPOSITE = "composite"
    """The object has no records of its own: it names others, which are judged themselves."""
    CONFLICT = "conflict"
    """Other records of the same epoch are at the same offset; a person has to decide."""
    GAP = "gap"
    """Offsets before them are in no object."""
    NEW_STREAM = "new-stream"
    """The stream was created after the restored point."""
    UNREADABLE = "unreadable"
    """The object is damaged."""


HARMLESS = frozenset(
    {Why.KNOWN, Why.DUPLICATE, Why.FENCED, Why.DELETED_STREAM, Why.COMPOSITE},
)
"""Reasons by which nothing is lost."""


@dataclass(frozen=True, slots=True, order=True)
class LeftBehind:
    """Offsets of an object that are not adopted; stream and offsets are -1 if all of it is."""

    object_id: int
    stream_id: int
    start: int
    end: int
    why: Why


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """Objects to adopt, request by request in this order, and what is left behind."""

    batches: tuple[tuple[Adopted, ...], ...]
    left: tuple[LeftBehind, ...]

    @property
    def objects(self) -> tuple[Adopted, ...]:
        """All objects to adopt."""
        return tuple(one for batch in self.batches for one in batch)

    @property
    def lost(self) -> tuple[LeftBehind, ...]:
        """What is left behind and may have been acknowledged."""
        return tuple(one for one in self.left if one.why not in HARMLESS)


def plan_adoption(
    streams: Mapping[int, StreamHead], next_stream_id: int, candidates: Sequence[Candidate]
) -> AdoptionPlan:
    """Return what of the candidates, each id once, is to be adopted.

    Streams from `next_stream_id` on were not created yet at the restored point.
    """
    by_stream: dict[int, list[StoredRun]] = defaultdict(list)
    for candidate in candidates:
        for run in candidate.runs:
            by_stream[run.stream_id].append(run)
    pieces: list[_Piece] = []
    left: list[LeftBehind] = []
    for stream_id, runs in sorted(by_stream.items()):
        head = streams.get(stream_id)
        if head is None:
            why = Why.NEW_STREAM if stream_id >= next_stream_id else Why.DELETED_STREAM
            left += [_left(run, tuple(run.records), why) for run in runs]
            continue
        chains = _Chains(head, runs)
        pieces += chains.pieces
        left += chains.left()
    return AdoptionPlan(tuple(_batches(pieces, candidates)), tuple(sorted(left)))


@dataclass(slots=True)
class _Piece:
    """Records of one object that stand in a chain, behind `before` in the same chain."""

    run: StoredRun
    records: list[StoredRecord]
    before: _Piece | None

    @property
    def range(self) -> AdoptedRange:
        epoch = max(record.epoch for record in self.records)
        return AdoptedRange(self.run.stream_id, self.records[0].start, self.records[-1].end, epoch)


class _Chains:
    """The chains of one stream: through what is owed, and from its end on."""

    def __init__(self, head: StreamHead, runs: Sequence[StoredRun]) -> None:
        self._head = head
        self._runs = runs
        self._entries: dict[int, list[tuple[StoredRun, Entry]]] = defaultdict(list)
        self._epochs: dict[int, int] = {}
        for run in runs:
            for entry in run.entries:
                self._entries[entry[0].start].append((run, entry))
            for record in run.records:
                before = self._epochs.get(record.start, -1)
                self._epochs[record.start] = max(before, record.epoch)
        self._starts = sorted(self._epochs)
        self._closed: set[int] = set()
        self._chosen: dict[int, StoredRecord] = {}
        self._conflicts: set[int] = set()
        self.pieces: list[_Piece] = []
        for start, end, epoch in head.owed:
            self._follow(start, end, epoch)
        self._end, self._epoch = self._follow(head.end_offset, None, head.epoch)

    def _follow(self, at: int, limit: int | None, epoch: int) -> tuple[int, int]:
        """Chain entries from an offset on, under epochs that don't fall; return end and epoch."""
        piece: _Piece | None = None
        while limit is None or at < limit:
            found = self._best(at, limit, epoch, piece)
            if found is None:
                break
            run, entry = found
            if piece is None or piece.run is not run:
                piece = _Piece(run, [], piece)
                self.pieces.append(piece)
                self._closed.add(run.object_id)
            piece.records += entry
            self._chosen |= {record.start: record for record in entry}
            at, epoch = entry[-1].end, entry[-1].epoch
        return at, epoch

    def _best(
        self, at: int, limit: int | None, epoch: int, piece: _Piece | None
    ) -> tuple[StoredRun, Entry] | None:
        """Return the entry that goes on at an offset; None if there is none, or no one can tell."""
        open_ones = [
            (run, entry)
            for run, entry in self._entries.get(at, ())
            if (limit is None or entry[-1].end <= limit)
            and (run.object_id not in self._closed or (piece is not None and run is piece.run))
            and _rises([epoch, *(record.epoch for record in entry)])
            and (limit is None or entry[-1].epoch == epoch)
        ]
        offers = [offer for offer in open_ones if not self._is_fenced_within(offer[1])]
        best: list[tuple[StoredRun, Entry]] = []
        for offer in offers:
            order = _compared(offer[1], best[0][1]) if best else 0
            if order is None:
                self._conflicts.add(at)
                return None
            if order >= 0:
                best = [*best, offer] if order == 0 else [offer]
        if not best:
            if open_ones:
                self._conflicts.add(at)
            return None
        if piece is not None and (same := [one for one in best if one[0] is piece.run]):
            return same[0]
        return min(best, key=lambda offer: (-offer[0].end, offer[0].object_id))

    def _is_fenced_within(self, entry: Entry) -> bool:
        """Whether a writer of a larger epoch began behind the entry's start, and before its end."""
        for place, record in enumerate(entry):
            low = (bisect_left if place else bisect_right)(self._starts, record.start)
            high = bisect_left(self._starts, record.end)
            if any(self._epochs[start] > record.epoch for start in self._starts[low:high]):
                return True
        return False

    def left(self) -> Iterator[LeftBehind]:
        """Yield all records that stand in no chain, those next to each other together."""
        adopted = {
            (id(piece.run), record.start) for piece in self.pieces for record in piece.records
        }
        for run in self._runs:
            part: list[StoredRecord] = []
            before: Why | None = None
            for record in run.records:
                why = None if (id(run), record.start) in adopted else self._why(record)
                if why is not before and part:
                    yield _left(run, part, before)
                    part = []
                if why is not None:
                    part.append(record)
                before = why
            if part:
                yield _left(run, part, before)

    def _why(self, record: StoredRecord) -> Why:
        if record.start in self._chosen:
            is_same = self._chosen[record.start].digest == record.digest
            return Why.DUPLICATE if is_same else Why.FENCED
        if record.start in self._conflicts:
            return Why.CONFLICT
        if record.end <= self._head.end_offset:
            return self._why_owed(record)
        if record.start < self._head.end_offset:
            return Why.FENCED if record.epoch < self._head.epoch else Why.CONFLICT
        is_fenced = record.start <= self._end or record.epoch < self._epoch
        return Why.FENCED if is_fenced else Why.GAP

    def _why_owed(self, record: StoredRecord) -> Why:
        for start, end, epoch in self._head.owed:
            if start < record.end and record.start < end:
                return Why.GAP if record.epoch == epoch else Why.FENCED
        return Why.KNOWN


def _rises(epochs: Sequence[int]) -> bool:
    return all(before <= after for before, after in pairwise(epochs))


def _compared(one: Entry, other: Entry) -> int | None:
    """Return above 0 if one is of a later writer, below 0 if the other is, 0 if they agree.

    None if they differ, and nothing tells which of them counts.
    """
    for left, right in zip(one, other, strict=False):
        if left.epoch != right.epoch:
            return left.epoch - right.epoch
        if (left.end, left.digest) != (right.end, right.digest):
            return None
    return 0


def _left(run: StoredRun, records: Sequence[StoredRecord], why: Why | None) -> LeftBehind:
    assert why is not None
    return LeftBehind(run.object_id, run.stream_id, records[0].start, records[-1].end, why)


def _batches(
    pieces: Sequence[_Piece], candidates: Sequence[Candidate]
) -> Iterator[tuple[Adopted, ...]]:
    """Yield objects in an order in which each finds its ranges' streams at the right ends.

    Those that wait for each other come together, at last.
    """
    sizes = {candidate.object_id: candidate.size for candidate in candidates}
    of_object: dict[int, list[_Piece]] = defaultdict(list)
    waits_for: dict[int, set[int]] = defaultdict(set)
    wanted_by: dict[int, set[int]] = defaultdict(set)
    for piece in pieces:
        object_id = piece.run.object_id
        of_object[object_id].append(piece)
        if piece.before is not None:
            waits_for[object_id].add(piece.before.run.object_id)
            wanted_by[piece.before.run.object_id].add(object_id)
    ordered: list[int] = []
    ready = deque(sorted(one for one in of_object if not waits_for[one]))
    while ready:
        ordered.append(ready.popleft())
        for waiting in sorted(wanted_by[ordered[-1]]):
            waits_for[waiting].discard(ordered[-1])
            if not waits_for[waiting]:
                ready.append(waiting)
    cyclic = sorted(set(of_object) - set(ordered))
    adopted = {
        object_id: Adopted(
            object_id,
            sizes[object_id],
            tuple(sorted((piece.range for piece in parts), key=lambda one: one.stream_id)),
        )
        for object_id, parts in of_object.items()
    }
    yield from _cut([adopted[object_id] for object_id in ordered])
    if cyclic:
        yield tuple(adopted[object_id] for object_id in cyclic)


def _cut(objects: Sequence[Adopted]) -> Iterator[tuple[Adopted, ...]]:
    batch: list[Adopted] = []
    ranges = 0
    for one in objects:
        if batch and (len(batch) == OBJECTS_A_BATCH or ranges + len(one.ranges) > RANGES_A_BATCH):
            yield tuple(batch)
            batch, ranges = [], 0
        batch.append(one)
        ranges += len(one.ranges)
    if batch:
        yield tuple(batch)
