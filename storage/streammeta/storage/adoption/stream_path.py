"""Path of a stream through the objects of the metadata and the bucket, as far as possible.

A step is a range of the metadata, an entry of an object in the bucket, or offsets in neither. Each
step begins at the end of the previous one. A compaction that spans the restored end, or replaces
deleted objects, is therefore found like an upload that begins there. The best path has the fewest
lost offsets, and of these paths keeps most of the metadata unchanged.

A record counts if no writer of a larger epoch began at or before its end, because that writer has
fenced the record's writer. Records of equal epochs must be equal, otherwise a person has to decide.
Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from streammeta.storage.adoption import model

_Cost: TypeAlias = tuple[int, int, int]
"""Lost offsets, replaced offsets of the metadata, and changes between objects."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Offsets `[start, end)` of a path: an entry, a range of the metadata, or neither.

    A step that is neither loses its offsets if `is_lost`. Otherwise the metadata had nothing there.
    """

    start: int
    end: int
    run: model.StoredRun | None = None
    entry: model.Entry = ()
    held: model.HeldRange | None = None
    is_lost: bool = False

    @property
    def source(self) -> int:
        """Identity of the run or range that the step reads."""
        return id(self.run or self.held or self)


@dataclass(frozen=True, slots=True, eq=False)
class StreamPath:
    """The chosen steps of a stream, in the order of offsets."""

    steps: tuple[Step, ...]
    held: tuple[model.HeldRange, ...]
    """Ranges of the metadata that the path could use."""

    @property
    def end(self) -> int:
        """The offset after the last step."""
        return self.steps[-1].end if self.steps else 0

    @property
    def entries(self) -> Iterator[tuple[model.StoredRun, model.Entry]]:
        """The entries to adopt."""
        return ((step.run, step.entry) for step in self.steps if step.run is not None)

    def replaced(self) -> set[int]:
        """Return objects of the metadata that entries replace, completely or in part."""
        kept = {step.held for step in self.steps}
        covers = [(step.start, step.end) for step in self.steps if step.run is not None]
        return {
            range_.object_id
            for range_ in self.held
            if range_ not in kept and _meets(covers, range_.start, range_.end)
        }

    def kept(self) -> set[int]:
        """Return readable objects of the metadata on the path."""
        return {step.held.object_id for step in self.steps if step.held is not None}

    def loses(self, object_id: int) -> bool:
        """Return whether the path loses offsets of an object of the metadata."""
        lost = self.lost()
        return any(
            range_.object_id == object_id and _meets(lost, range_.start, range_.end)
            for range_ in self.held
        )

    def lost(self) -> list[tuple[int, int]]:
        """Return the lost offsets, by start."""
        return [(step.start, step.end) for step in self.steps if step.is_lost]


class StreamPaths:
    """All possible paths of a stream."""

    def __init__(
        self, head: model.StreamHead, runs: Sequence[model.StoredRun], *, passes_gaps: bool = False
    ) -> None:
        """With `passes_gaps`, the path of the stream continues after a gap."""
        self._head = head
        self._runs = runs
        self._passes_gaps = passes_gaps
        self._floors = _Floors(head, runs)
        self._conflicts = _find_conflicts(
            record for run in runs for record in run.records if self._counts(record)
        )
        usable = [
            (run, entry) for run in runs for entry in run.entries if self._is_usable(run, entry)
        ]
        self._entries = sorted(usable, key=lambda pair: (pair[1][0].start, pair[0].object_id))
        self._holes = tuple(self._list_holes())
        # Candidates may end after the restored end, which is the purpose of adoption.
        self._reach = max([head.end_offset, *(entry[-1].end for _, entry in usable)])
        edges = {edge for _, entry in usable for edge in (entry[0].start, entry[-1].end)}
        self._edges = sorted(edges)

    # ---- records that count ----

    def _counts(self, record: model.StoredRecord) -> bool:
        if self._floors.is_too_early(record):
            return False
        return record.end <= self._floors.of(record.epoch)

    def _is_usable(self, run: model.StoredRun, entry: model.Entry) -> bool:
        # A writer with a smaller epoch can't append after one with a larger epoch.
        rises = all(before.epoch <= after.epoch for before, after in pairwise(entry))
        if not rises or entry[-1].end <= self._head.start_offset:
            return False
        return all(
            self._counts(record)
            and (record.start, record.epoch) not in self._conflicts
            and all(
                record.epoch == epoch or record.end <= start or end <= record.start
                for start, end, epoch in self._head.owed
            )
            for record in entry
        )

    def _list_holes(self) -> Iterator[tuple[int, int]]:
        """Yield offsets below the end in neither objects nor pending uploads."""
        known = [(range_.start, range_.end) for range_ in self._head.held]
        known += [(start, end) for start, end, _ in self._head.owed]
        at = self._head.start_offset
        for start, end in sorted(known):
            if at < start:
                yield at, start
            at = max(at, end)
        if at < self._head.end_offset:
            yield at, self._head.end_offset

    # ---- paths ----

    def find(self, out: Collection[int], pinned: Collection[int]) -> StreamPath:
        """Return the best path without the objects `out`, and with all objects `pinned`.

        An object in the bucket contributes at most one run of offsets.
        """
        banned: set[tuple[int, int]] = set()
        while True:
            # Each round bans at least one entry, so the search ends.
            path = self._find_any(out, pinned, banned)
            parted = _find_parted(path)
            if parted is None:
                return path
            between, shorter = parted
            joined = self._find_any({*out, *between} - set(pinned), pinned, banned)
            if between and _find_parted(joined) is None and _loss(joined) <= _loss(path):
                return joined
            banned |= shorter

    def _find_any(
        self, out: Collection[int], pinned: Collection[int], banned: Collection[tuple[int, int]]
    ) -> StreamPath:
        held = tuple(self._head.held)
        steps = defaultdict[int, list[Step]](list)
        for step in self._list_steps(held, out, pinned, banned):
            steps[step.start].append(step)
        return StreamPath(_shortest(self._head, steps, self._reach), held)

    def _list_steps(
        self,
        held: Iterable[model.HeldRange],
        out: Collection[int],
        pinned: Collection[int],
        banned: Collection[tuple[int, int]],
    ) -> Iterator[Step]:
        barred = [(range_.start, range_.end) for range_ in held if range_.object_id in pinned]
        barred = sorted([*barred, *self._holes])
        for start, end in self._holes:
            yield Step(start, end)

        for range_ in held:
            if range_.is_readable and range_.object_id not in out:
                yield Step(range_.start, range_.end, held=range_)
            else:
                yield from self._list_lost(range_.start, range_.end)

        for start, end, _ in self._head.owed:
            # A pending upload is committed from its first offset on.
            ends = [edge for edge in self._edges if start < edge < end]
            for edge in (start, *ends):
                yield Step(edge, end, is_lost=True)

        if self._passes_gaps:
            yield from self._list_lost(self._head.end_offset, self._reach)

        low = self._head.start_offset
        for run, entry in self._entries:
            start, end = max(entry[0].start, low), entry[-1].end
            if (id(run), entry[0].start) not in banned and not _meets(barred, start, end):
                yield Step(start, end, run, entry)

    def _list_lost(self, start: int, end: int) -> Iterator[Step]:
        """Yield steps over unreadable offsets, from entry to entry."""
        first = bisect_right(self._edges, start)
        inner = self._edges[first : bisect_left(self._edges, end)]
        for low, high in pairwise((start, *inner, end)):
            if low < high:
                yield Step(low, high, is_lost=True)

    # ---- remaining objects ----

    def list_left(self, path: StreamPath) -> Iterator[model.LeftBehind]:
        """Yield all records outside the path, adjacent ones together."""
        chosen = {record.start: record for _, entry in path.entries for record in entry}
        lost = path.lost()
        taken = {(id(run), record.start) for run, entry in path.entries for record in entry}

        for run in self._runs:
            part: list[model.StoredRecord] = []
            before: model.Why | None = None
            for record in run.records:
                is_taken = (id(run), record.start) in taken
                why = None if is_taken else self._why(record, chosen, lost, path.end)
                if part and why is not before:
                    yield _left(run, part, before)
                    part = []
                if why is not None:
                    part.append(record)
                before = why
            if part:
                yield _left(run, part, before)

    def _why(
        self,
        record: model.StoredRecord,
        chosen: dict[int, model.StoredRecord],
        lost: Sequence[tuple[int, int]],
        end: int,
    ) -> model.Why:
        if record.start in chosen:
            is_same = chosen[record.start].digest == record.digest
            return model.Why.DUPLICATE if is_same else model.Why.FENCED
        if (record.start, record.epoch) in self._conflicts:
            return model.Why.CONFLICT
        if not self._counts(record):
            return model.Why.FENCED
        if _meets(lost, record.start, record.end):
            return model.Why.GAP
        if record.end <= end:
            return model.Why.KNOWN
        return model.Why.CONFLICT if record.start < end else model.Why.GAP


class _Floors:
    """Lowest offset at which a writer of a larger epoch began, by epoch."""

    def __init__(self, head: model.StreamHead, runs: Sequence[model.StoredRun]) -> None:
        self._head = head
        self._ends = [end for _, end, _ in head.owners]
        lowest: dict[int, int] = {}
        begun = [(start, epoch) for start, _, epoch in head.owners]
        # The current writer may have begun anywhere after the last known start.
        begun.append((begun[-1][0] if begun else head.end_offset, head.epoch))
        records = (record for run in runs for record in run.records)
        begun += [
            (record.start, record.epoch) for record in records if not self.is_too_early(record)
        ]
        for start, epoch in begun:
            lowest[epoch] = min(start, lowest.get(epoch, start))
        self._epochs = sorted(lowest)
        floors: list[int] = []
        for epoch in reversed(self._epochs):
            floors.append(min(lowest[epoch], floors[-1] if floors else lowest[epoch]))
        self._floors = floors[::-1]

    def is_too_early(self, record: model.StoredRecord) -> bool:
        """Return whether a record lies below the metadata's end, before the start of its writer.

        The metadata forgets some ranges of former writers. The next writer's epoch is larger.
        """
        # Above the end the metadata knows no owner that could contradict the record.
        if record.start >= self._head.end_offset:
            return False
        place = bisect_right(self._ends, record.start)
        owners = self._head.owners
        return record.epoch > (owners[place][2] if place < len(owners) else self._head.epoch)

    def of(self, epoch: int) -> int:
        """Return the offset at or before which all counting records of an epoch end."""
        place = bisect_right(self._epochs, epoch)
        return self._floors[place] if place < len(self._floors) else 1 << 63


def _find_conflicts(records: Iterable[model.StoredRecord]) -> set[tuple[int, int]]:
    """Return start and epoch of differing records that one writer can't have written."""
    known: dict[tuple[int, int], tuple[int, bytes]] = {}
    conflicts = set()
    for record in records:
        key, content = (record.start, record.epoch), (record.end, record.digest)
        if known.setdefault(key, content) != content:
            conflicts.add(key)
    return conflicts


def _shortest(head: model.StreamHead, steps: dict[int, list[Step]], reach: int) -> tuple[Step, ...]:
    """Return the cheapest steps from the stream's start to its end or further."""
    # Dijkstra's algorithm in offset order. States are offset and source, so that a change between
    # objects has a cost.
    best: dict[int, dict[int, tuple[_Cost, int, Step | None, int]]] = defaultdict(dict)
    best[head.start_offset][0] = ((0, 0, 0), -1, None, 0)
    ends: list[tuple[_Cost, int, int]] = []

    for at in sorted({*steps, head.start_offset, head.end_offset, reach, *_step_ends(steps)}):
        arrived = best.get(at)
        if arrived is None:
            continue
        source, (cost, *_) = min(arrived.items(), key=lambda item: item[1][0])
        # A path that ends before the restored end would lose data that the metadata has.
        if at >= head.end_offset:
            # Offsets up to the furthest candidate count as lost if the path ends before them.
            ends.append(((cost[0] + reach - at, *cost[1:]), at, source))
        for step in steps.get(at, ()):
            same = arrived.get(step.source)
            came_by, total = source, _added(cost, step, head, is_change=True)
            if same is not None and (stay := _added(same[0], step, head, is_change=False)) < total:
                came_by, total = step.source, stay
            there = best[step.end].get(step.source)
            if there is None or total < there[0]:
                best[step.end][step.source] = (total, at, step, came_by)

    _, at, source = min(ends, key=lambda end: (end[0], end[1]))
    path: list[Step] = []
    while (found := best[at][source])[2] is not None:
        path.append(found[2])
        at, source = found[1], found[3]

    return tuple(reversed(path))


def _step_ends(steps: dict[int, list[Step]]) -> Iterator[int]:
    return (step.end for listed in steps.values() for step in listed)


def _added(cost: _Cost, step: Step, head: model.StreamHead, *, is_change: bool) -> _Cost:
    lost, replaced, changes = cost
    if step.run is not None:
        # Only offsets below the end have data of the metadata to replace.
        replaced += max(0, min(step.end, head.end_offset) - step.start)
    lost += (step.end - step.start) * step.is_lost
    return lost, replaced, changes + is_change


def _find_parted(path: StreamPath) -> tuple[set[int], set[tuple[int, int]]] | None:
    """Find an object that the path uses twice, or return None.

    Returns the metadata's objects in between, and the shorter part as runs and starts of entries.
    """
    parts: list[list[Step]] = []
    for step in path.steps:
        if parts and parts[-1][-1].source == step.source:
            parts[-1].append(step)
        else:
            parts.append([step])

    first_of: dict[int, int] = {}
    for place, part in enumerate(parts):
        if (run := part[0].run) is None:
            continue
        if run.object_id not in first_of:
            first_of[run.object_id] = place
            continue
        first = first_of[run.object_id]
        inner = [step.held for between in parts[first + 1 : place] for step in between]
        shorter = min(parts[first], part, key=lambda steps: steps[-1].end - steps[0].start)
        named = {(id(step.run), step.entry[0].start) for step in shorter}
        return {range_.object_id for range_ in inner if range_ is not None}, named

    return None


def _loss(path: StreamPath) -> int:
    return sum(end - start for start, end in path.lost()) - path.end


def _meets(spans: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Return whether offsets lie in one of the ordered, disjoint spans."""
    place = bisect_left(spans, (end, 0))
    return place > 0 and spans[place - 1][1] > start


def _left(
    run: model.StoredRun, records: Sequence[model.StoredRecord], why: model.Why | None
) -> model.LeftBehind:
    assert why is not None
    return model.LeftBehind(run.object_id, run.stream_id, records[0].start, records[-1].end, why)
