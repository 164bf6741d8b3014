"""Planner of adoptions: objects from before a restore that continue the restored streams.

`stream_path` finds the path of each stream separately. Objects connect the paths, because an object
of the metadata is replaced for all of its streams or for none. An object in the bucket stays if any
stream needs it. A lost object is replaced as soon as others have a part of it. The planner does not
know which commits were acknowledged, so it lists all offsets that are not adopted, with reasons.

An object contributes at most one range of a stream. The range may be a part of the object, cut at
the boundaries of index entries, because readers read whole entries. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from streammeta.storage.adoption import model
from streammeta.storage.adoption.stream_path import StreamPath, StreamPaths

OBJECTS_A_BATCH = 1_000
"""Maximum objects of a request, unless they depend on each other."""

RANGES_A_BATCH = 10_000
"""Maximum ranges of a request, unless their objects depend on each other."""


@dataclass(frozen=True, slots=True)
class AdoptionBatch:
    """Objects to adopt in one request, and the objects of the metadata that they replace."""

    objects: tuple[model.Adopted, ...]
    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """Objects to adopt, in the order of requests, and the offsets that are not adopted."""

    batches: tuple[AdoptionBatch, ...]
    left: tuple[model.LeftBehind, ...]
    gaps: tuple[tuple[int, int, int], ...] = ()
    """Stream, start and end of skipped offsets after the restored end."""
    torn: tuple[int, ...] = ()
    """Objects of the metadata that some streams need and that block the paths of others.

    A copy under an undecided id resolves this. Plan again with the copies as candidates.
    """

    @property
    def objects(self) -> tuple[model.Adopted, ...]:
        """All objects to adopt."""
        return tuple(adopted for batch in self.batches for adopted in batch.objects)

    @property
    def replaced(self) -> tuple[int, ...]:
        """All replaced objects of the metadata."""
        return tuple(object_id for batch in self.batches for object_id in batch.replaced)

    @property
    def lost(self) -> tuple[model.LeftBehind, ...]:
        """Offsets that are not adopted and may have been acknowledged."""
        return tuple(left for left in self.left if left.why not in model.HARMLESS)


def plan_adoption(
    streams: Mapping[int, model.StreamHead],
    next_stream_id: int,
    candidates: Sequence[model.Candidate],
    *,
    passes_gaps: bool = False,
) -> AdoptionPlan:
    """Plan the adoption of candidates with unique ids.

    Streams from `next_stream_id` on did not exist at the restored point. With `passes_gaps`,
    objects after a gap are adopted too, and the offsets in the gap are lost.
    """
    by_stream: dict[int, list[model.StoredRun]] = defaultdict(list)
    for candidate in candidates:
        for run in candidate.runs:
            by_stream[run.stream_id].append(run)

    left: list[model.LeftBehind] = []
    known: dict[int, StreamPaths] = {}
    for stream_id, runs in sorted(by_stream.items()):
        # Candidates are planned with the streams that exist. The others can only be listed.
        if (head := streams.get(stream_id)) is not None:
            known[stream_id] = StreamPaths(head, runs, passes_gaps=passes_gaps)
            continue
        why = model.Why.NEW_STREAM if stream_id >= next_stream_id else model.Why.DELETED_STREAM
        left += [
            model.LeftBehind(run.object_id, stream_id, run.entries[0][0].start, run.end, why)
            for run in runs
        ]

    others = _streams_by_object(streams, known)
    paths = _agreed_paths(known, others)
    pieces: list[_Piece] = []
    gaps: list[tuple[int, int, int]] = []

    for stream_id, path in paths.items():
        end = streams[stream_id].end_offset
        pieces += _list_pieces(path, end)
        left += known[stream_id].list_left(path)
        # Gaps below the end belong to lost objects of the metadata, not to passed gaps.
        passed = (gap for gap in path.lost() if gap[0] >= end)
        gaps += [(stream_id, *gap) for gap in passed]

    batches = tuple(_list_batches(pieces, candidates, paths))
    torn = _list_torn(known, paths, streams)
    return AdoptionPlan(batches, tuple(sorted(left)), tuple(sorted(gaps)), torn)


def _list_torn(
    known: Mapping[int, StreamPaths],
    paths: Mapping[int, StreamPath],
    streams: Mapping[int, model.StreamHead],
) -> tuple[int, ...]:
    """Return the readable objects that a stream would replace but that stay for other streams."""
    readable = {
        range_.object_id
        for stream_id in known
        for range_ in streams[stream_id].held
        if range_.is_readable
    }
    wanted = {
        object_id
        for stream_paths in known.values()
        for object_id in stream_paths.find((), ()).replaced()
    }
    replaced = {object_id for path in paths.values() for object_id in path.replaced()}
    return tuple(sorted((wanted & readable) - replaced))


def _streams_by_object(
    streams: Mapping[int, model.StreamHead], known: Mapping[int, StreamPaths]
) -> set[int]:
    """Return readable objects of the metadata that streams without candidates need."""
    return {
        range_.object_id
        for stream_id, head in streams.items()
        if stream_id not in known
        for range_ in head.held
        if range_.is_readable
    }


def _agreed_paths(known: Mapping[int, StreamPaths], needed: set[int]) -> dict[int, StreamPath]:
    """Find a path for each stream, so that each object stays for all streams or for none.

    An object that some streams can replace is excluded for all of them. If that loses offsets, all
    of them use it. Each object changes at most twice, so the search ends.
    """
    out: set[int] = set()
    pinned = set(needed)
    paths = {stream_id: paths.find(out, pinned) for stream_id, paths in known.items()}

    while True:
        kept = {object_id for path in paths.values() for object_id in path.kept()}
        replaced = {object_id for path in paths.values() for object_id in path.replaced()}
        # Objects that were decided before are not considered again, so the loop ends.
        torn = (kept & replaced) - out - pinned
        missed = {
            object_id for object_id in out if any(path.loses(object_id) for path in paths.values())
        }
        if not torn and not missed:
            return paths
        out = (out | torn) - missed
        # Pinned permanently, so an object leaves and returns at most once.
        pinned |= missed
        paths = {stream_id: paths_.find(out, pinned) for stream_id, paths_ in known.items()}


@dataclass(slots=True)
class _Piece:
    """Records of an object in a path, after the piece `before` of the same path."""

    run: model.StoredRun
    records: list[model.StoredRecord]
    before: _Piece | None
    is_after_gap: bool = False

    @property
    def range(self) -> model.AdoptedRange:
        epoch = max(record.epoch for record in self.records)
        return model.AdoptedRange(
            self.run.stream_id,
            self.records[0].start,
            self.records[-1].end,
            epoch,
            self.is_after_gap,
        )


def _list_pieces(path: StreamPath, end_offset: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    ends_of_gaps = {end for start, end in path.lost() if start >= end_offset}
    for run, entry in path.entries:
        at = pieces[-1].records[-1].end if pieces else -1
        start = entry[0].start
        # Adjacent entries of one object form one range.
        if at == start and pieces[-1].run is run:
            pieces[-1].records += entry
            continue
        is_after_gap = start in ends_of_gaps
        before = pieces[-1] if pieces and (at == start or is_after_gap) else None
        pieces.append(_Piece(run, list(entry), before, is_after_gap))
    return pieces


# ---- requests ----


def _list_batches(
    pieces: Sequence[_Piece], candidates: Sequence[model.Candidate], paths: Mapping[int, StreamPath]
) -> Iterator[AdoptionBatch]:
    """Yield objects in an order in which the streams' ends match the start of each range.

    Objects that replace the same object share a batch. Objects that wait for each other share the
    last batch.
    """
    groups = _Groups()
    sizes = {candidate.object_id: candidate.size for candidate in candidates}
    ranges: dict[int, list[model.AdoptedRange]] = defaultdict(list)

    for piece in pieces:
        ranges[piece.run.object_id].append(piece.range)

    for path in paths.values():
        for replaced, adopted in _list_replacements(path):
            # An object of the metadata is replaced in one request, with all the objects that take
            # its place.
            groups.join(~replaced, adopted)

    waits_for: dict[int, set[int]] = defaultdict(set)
    wanted_by: dict[int, set[int]] = defaultdict(set)
    for piece in pieces:
        if piece.before is None:
            continue
        group, before = groups.of(piece.run.object_id), groups.of(piece.before.run.object_id)
        # Within a group the controller applies all ranges at once, in the order of offsets.
        if group != before:
            waits_for[group].add(before)
            wanted_by[before].add(group)

    members: dict[int, list[int]] = defaultdict(list)
    for object_id in sorted(ranges):
        members[groups.of(object_id)].append(object_id)

    replaced_by: dict[int, list[int]] = defaultdict(list)
    for name in sorted(groups.names()):
        if name < 0:
            replaced_by[groups.of(name)].append(~name)

    order = _in_order(members, waits_for, wanted_by)
    batches = {
        group: AdoptionBatch(
            tuple(
                model.Adopted(
                    object_id,
                    sizes[object_id],
                    tuple(sorted(ranges[object_id], key=lambda range_: range_.stream_id)),
                )
                for object_id in object_ids
            ),
            tuple(sorted(replaced_by[group])),
        )
        for group, object_ids in members.items()
    }
    yield from _join([batches.pop(group) for group in order])
    # A cycle: objects that each continue another one in some stream. One request has to adopt them
    # all.
    if batches:
        yield _merge([batches[group] for group in sorted(batches)])


def _list_replacements(path: StreamPath) -> Iterator[tuple[int, int]]:
    """Yield each replaced object with each object that has a part of it."""
    gone = path.replaced()
    entries = list(path.entries)
    for range_ in path.held:
        if range_.object_id not in gone:
            continue
        first = bisect_right(entries, range_.start, key=lambda pair: pair[1][-1].end)
        for run, entry in entries[first:]:
            if entry[0].start >= range_.end:
                break
            yield range_.object_id, run.object_id


class _Groups:
    """Disjoint sets of names. Objects of the metadata have negative names."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def of(self, name: int) -> int:
        """Return the name of the group of `name`."""
        while (parent := self._parents.get(name, name)) != name:
            name = parent
        return name

    def join(self, first: int, second: int) -> None:
        """Join the groups of two names. The larger group name represents both."""
        # The larger name: candidates are positive, so a group with one is named by a candidate.
        low, high = sorted((self.of(first), self.of(second)))
        self._parents.setdefault(high, high)
        self._parents[low] = high

    def names(self) -> Iterable[int]:
        """Return all joined names."""
        return self._parents.keys()


def _in_order(
    members: Mapping[int, Sequence[int]],
    waits_for: dict[int, set[int]],
    wanted_by: Mapping[int, set[int]],
) -> list[int]:
    """Return groups in topological order, without groups in a cycle."""
    ordered: list[int] = []
    ready = deque(sorted(group for group in members if not waits_for[group]))
    while ready:
        ordered.append(ready.popleft())
        for waiting in sorted(wanted_by.get(ordered[-1], ())):
            waits_for[waiting].discard(ordered[-1])
            if not waits_for[waiting]:
                ready.append(waiting)
    return ordered


def _join(batches: Sequence[AdoptionBatch]) -> Iterator[AdoptionBatch]:
    """Merge batches into few batches within the limits."""
    joined: list[AdoptionBatch] = []
    objects = ranges = 0
    for batch in batches:
        more = sum(len(adopted.ranges) for adopted in batch.objects)
        # A single batch may exceed the limits, because its objects depend on each other.
        is_full = objects + len(batch.objects) > OBJECTS_A_BATCH or ranges + more > RANGES_A_BATCH
        if joined and is_full:
            yield _merge(joined)
            joined, objects, ranges = [], 0, 0
        joined.append(batch)
        objects += len(batch.objects)
        ranges += more
    if joined:
        yield _merge(joined)


def _merge(batches: Iterable[AdoptionBatch]) -> AdoptionBatch:
    merged = list(batches)
    return AdoptionBatch(
        tuple(adopted for batch in merged for adopted in batch.objects),
        tuple(object_id for batch in merged for object_id in batch.replaced),
    )
