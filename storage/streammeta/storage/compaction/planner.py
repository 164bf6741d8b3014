"""Planner of stream set object compaction: commits, iterations and outputs.

Owns the order of the decisions. Faulty objects are excluded, the rest is divided into commits,
grouped within the limits, and cut into iterations that fit the memory budget. A range larger than
the budget is cut into several stream objects. Pure: equal entries and limits give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from streammeta.storage.compaction.entries import (
    Column,
    Entry,
    EntryTable,
    Mask,
    contiguous_runs,
    sort_by_stream,
)
from streammeta.storage.compaction.grouping import (
    Grouping,
    group_all,
    group_entries,
    objects_sharing_streams,
)
from streammeta.storage.compaction.plan import (
    CommitPlan,
    CompactionLimits,
    CompactionPlan,
    Exclusion,
    ExclusionReason,
    Iteration,
    Output,
    OutputKind,
)


def exclude_faults(
    table: EntryTable, memory_budget: int
) -> tuple[EntryTable, tuple[Exclusion, ...]]:
    """Return the entries of sound objects, and the faults of the others.

    Faults are overlaps and entries over the budget. `table` is sorted by stream and offset. An
    object is kept or excluded with all its entries.
    """
    oversized = table.size > memory_budget
    overlapping = _overlapping_rows(table)
    found = {
        entry.object_id: Exclusion(
            entry.object_id,
            ExclusionReason.OVERLAP,
            f"stream {entry.stream_id} [{entry.start_offset}, {entry.end_offset}) of object"
            f" {entry.object_id} overlaps another entry of the stream. Compare the objects with"
            " these offsets before you remove one",
        )
        for entry in _first_of_each_object(table, overlapping)
    }
    # An oversized entry overrides an overlap: the object is unusable in either case, and raising
    # the budget is the simpler remedy.
    found |= {
        entry.object_id: Exclusion(
            entry.object_id,
            ExclusionReason.OVERSIZED_ENTRY,
            f"stream {entry.stream_id} [{entry.start_offset}, {entry.end_offset}) of object"
            f" {entry.object_id} has {entry.size} bytes, over the memory budget of"
            f" {memory_budget}. Raise the budget",
        )
        for entry in _first_of_each_object(table, oversized)
    }
    if not found:
        return table, ()

    # Whole objects: a commit deletes its sources, so it must cover all of their entries.
    kept = table.take(~np.isin(table.object_id, list(found)))
    return kept, tuple(found[object_id] for object_id in sorted(found))


def _first_of_each_object(table: EntryTable, mask: Mask) -> list[Entry]:
    marked = table.take(mask)
    _, firsts = np.unique(marked.object_id, return_index=True)
    return list(marked.take(firsts).rows())


def _overlapping_rows(table: EntryTable) -> Mask:
    """Mark the rows that share an offset with another row.

    A comparison of neighbours finds the streams with an overlap. Only these are searched for all
    affected rows, because a long entry may overlap many later ones.
    """
    marked = np.zeros(len(table), dtype=np.bool_)
    streams, starts, ends = table.stream_id, table.start_offset, table.end_offset
    is_over = (streams[1:] == streams[:-1]) & (starts[1:] < ends[:-1])
    for stream_id in np.unique(streams[1:][is_over]).tolist():
        first = int(streams.searchsorted(stream_id, side="left"))
        stop = int(streams.searchsorted(stream_id, side="right"))
        # The furthest end so far. The previous row alone may end before an older, longer row.
        reached = np.maximum.accumulate(ends[first:stop])
        marked[first + 1 : stop] |= starts[first + 1 : stop] < reached[:-1]
        marked[first : stop - 1] |= starts[first + 1 : stop] < ends[first : stop - 1]
    return marked


def plan_compaction(
    live: EntryTable, limits: CompactionLimits, *, sharing_only: bool = True
) -> CompactionPlan:
    """Plan the compaction of some stream set objects.

    `live` has every live entry of each readable object. Sources are divided in the order of their
    first entries, the node's order, so that streams continue from one source to the next. With
    `sharing_only`, only objects that share a stream with another one take part, and objects are
    excluded until the limits hold. Otherwise all objects take part, even a single one unless it
    would be rewritten unchanged. If they exceed a limit, they are halved into several commits.
    """

    def plan(sources: EntryTable) -> _Planned | None:
        if sharing_only:
            return _plan_some(objects_sharing_streams(sources), limits)
        whole = _plan_all(sources, limits)
        is_single = len(sources.object_ids()) == 1
        return _plan_some(sources, limits) if whole is None and is_single else whole

    return _divide(live, limits, plan)


_Planned: TypeAlias = tuple[CommitPlan | None, tuple[Exclusion, ...]]
"""A commit of some sources, and the excluded sources."""


def _divide(
    live: EntryTable, limits: CompactionLimits, plan: Callable[[EntryTable], _Planned | None]
) -> CompactionPlan:
    """Plan all sound objects. `plan` returns None for several that do not fit one commit."""
    # Before sorting by stream, which loses the node's order.
    order = object_order(live)
    table, faulty = exclude_faults(sort_by_stream(live), limits.memory_budget)
    commits: list[CommitPlan] = []
    excluded = list(faulty)
    waiting = [table] if len(table) else []

    while waiting:
        sources = waiting.pop()
        planned = plan(sources)
        if planned is None:
            waiting.extend(reversed(halve(sources, order)))  # the earlier half is next
            continue
        commit, left_out = planned
        excluded += left_out
        # A rewrite of one object without a split would produce the same object again.
        if commit and (len(commit.source_ids) > 1 or stream_object_count(commit.iterations)):
            commits.append(commit)

    placed = {source_id for commit in commits for source_id in commit.source_ids}
    placed |= {exclusion.object_id for exclusion in excluded}
    left_alone = tuple(object_id for object_id in table.object_ids() if object_id not in placed)

    return CompactionPlan(tuple(commits), tuple(excluded), left_alone)


def object_order(table: EntryTable) -> tuple[int, ...]:
    """Return the ids of all objects, in the order of their first entries."""
    object_ids, firsts = np.unique(table.object_id, return_index=True)
    return tuple(object_ids[np.argsort(firsts)].tolist())


def halve(sources: EntryTable, order: Sequence[int]) -> tuple[EntryTable, EntryTable]:
    """Divide the entries of several objects: the first objects in `order`, and the others."""
    source_ids = set(sources.object_ids())
    present = [object_id for object_id in order if object_id in source_ids]
    is_early = np.isin(sources.object_id, present[: len(present) // 2])
    return sources.take(is_early), sources.take(~is_early)


def _plan_all(sources: EntryTable, limits: CompactionLimits) -> _Planned | None:
    """Plan one commit of all objects. Returns None if it would exceed a limit."""
    grouping = group_all(sources, limits)
    if grouping is None:
        return None
    commit = _commit_plan(grouping, limits.memory_budget)
    return (commit, ()) if _is_within(grouping, commit, limits) else None


def _plan_some(sources: EntryTable, limits: CompactionLimits) -> _Planned:
    """Plan one commit of as many objects as the limits allow.

    Iterations cut some stream objects, and the number of cuts is known only after grouping. If the
    cuts exceed a limit, the objects are grouped again with that many stream objects reserved.
    """
    reserved = 0
    while True:
        grouping = group_entries(sources, limits, reserved=reserved)
        commit = _commit_plan(grouping, limits.memory_budget)
        if _is_within(grouping, commit, limits):
            return commit, grouping.excluded
        cuts = stream_object_count(commit.iterations) - int(grouping.is_split.sum())
        # Grows in each round, so the loop ends at the latest when no group is split.
        reserved = max(reserved + 1, cuts)


def _is_within(grouping: Grouping, commit: CommitPlan, limits: CompactionLimits) -> bool:
    made = stream_object_count(commit.iterations)
    rows = made + grouping.kept_stream_count()
    return made <= limits.max_stream_objects and rows <= limits.max_rows


def _commit_plan(grouping: Grouping, memory_budget: int) -> CommitPlan:
    """Cut the groups into iterations: rows in order, as many as fit the budget.

    A group that does not fit as a whole is cut. A stream object becomes two, while the stream set
    object continues.
    """
    table = grouping.table
    ends = np.cumsum(table.size, dtype=np.int64)
    iterations: list[Iteration] = []
    row = 0
    while row < len(table):
        used = int(ends[row - 1]) if row else 0
        # At least one row fits, because entries over the budget were excluded.
        stop = int(ends.searchsorted(used + memory_budget, side="right"))
        iterations.append(iteration_of(grouping, row, stop))
        row = stop
    return CommitPlan(table.object_ids(), table, tuple(iterations))


def iteration_of(grouping: Grouping, start: int, stop: int) -> Iteration:
    """Return the iteration of the rows `[start, stop)` with the groups' parts in it."""
    entries = grouping.table.span(start, stop)
    # The group of the first row may have begun in an earlier iteration.
    first_group = int(grouping.firsts.searchsorted(start, side="right")) - 1
    stop_group = int(grouping.firsts.searchsorted(stop, side="left"))
    outputs: list[Output] = []
    kept: list[tuple[int, int]] = []

    for group in range(first_group, stop_group):
        group_start, group_stop = grouping.rows(group)
        span = max(start, group_start) - start, min(stop, group_stop) - start
        if grouping.is_split[group]:
            outputs.append(Output(OutputKind.SPLIT, (span,), entries))
        else:
            kept.append(span)

    if kept:
        outputs.append(Output(OutputKind.COMPACT, tuple(kept), entries))
    return Iteration(entries, tuple(outputs))


def stream_object_count(iterations: Iterable[Iteration]) -> int:
    """Return the number of stream objects that some iterations create."""
    return sum(
        output.kind is OutputKind.SPLIT for iteration in iterations for output in iteration.outputs
    )


def plan_force_split(live: EntryTable, limits: CompactionLimits) -> CompactionPlan:
    """Plan the split of stream set objects. `live` has all their live entries.

    Every range of a stream with more than `split_size` bytes becomes a stream object, with 0 every
    range. The others stay together. If a commit would create too many stream objects, the smallest
    ranges stay in a stream set object. If that is not enough, the sources are divided in the order
    of their first entries. Plans are executed like the plans of `plan_compaction`. An object
    without a range to split is left alone.
    """

    def plan(sources: EntryTable) -> _Planned | None:
        found = _commit_or_problem(sources, limits)
        if isinstance(found, CommitPlan):
            return found, ()
        object_id, *others = sources.object_ids()
        return None if others else (None, (Exclusion(object_id, *found),))

    return _divide(live, limits, plan)


def _commit_or_problem(
    table: EntryTable, limits: CompactionLimits
) -> CommitPlan | tuple[ExclusionReason, str]:
    """Return the commit of some sources, or the limit that it would exceed."""
    firsts = contiguous_runs(table)
    cuts = _iteration_firsts(table, firsts, limits.memory_budget)
    pieces = _pieces_of_runs(table, firsts, cuts)
    is_kept = _kept_runs(table, firsts, pieces, limits)
    splits, kept = int(pieces[~is_kept].sum()), int(is_kept.sum())

    if splits > limits.max_stream_objects:
        return ExclusionReason.TOO_MANY_STREAM_OBJECTS, (
            f"split of the object would create {splits} stream objects, expected at most"
            f" {limits.max_stream_objects}. Raise the limit or the memory budget"
        )
    if kept > limits.max_streams:
        return ExclusionReason.TOO_MANY_STREAMS, (
            f"split of the object would leave {kept} streams in a stream set object, expected at"
            f" most {limits.max_streams}. Raise the limit of streams or of stream objects"
        )
    if splits + kept > limits.max_rows:
        return ExclusionReason.TOO_MANY_ROWS, (
            f"split of the object would create {splits} stream objects and leave {kept} streams,"
            f" expected at most {limits.max_rows} in total. Raise the memory budget"
        )

    grouping = Grouping(table, firsts, ~is_kept, ())
    stops = [*cuts[1:].tolist(), len(table)]
    iterations = tuple(
        iteration_of(grouping, start, stop)
        for start, stop in zip(cuts.tolist(), stops, strict=True)
    )

    return CommitPlan(table.object_ids(), table, iterations)


def _iteration_firsts(table: EntryTable, run_firsts: Column, memory_budget: int) -> Column:
    """Return the first row of each iteration: as many whole runs as fit the budget.

    In a single object they have to lie within a range of `memory_budget` bytes, including dead
    bytes between them. A run that does not fit alone is cut between entries.
    """
    if len(np.unique(table.object_id)) == 1:
        starts, ends = table.position, table.position + table.size
    else:
        ends = np.cumsum(table.size, dtype=np.int64)
        starts = ends - table.size
    bounds = np.append(run_firsts, len(table))
    firsts: list[int] = []
    row = 0
    while row < len(table):
        firsts.append(row)
        fits = int(ends.searchsorted(starts[row] + memory_budget, side="right"))
        whole = int(bounds[bounds.searchsorted(fits, side="right") - 1])
        row = whole if whole > row else max(fits, row + 1)
    return np.array(firsts, dtype=np.int64)


def _pieces_of_runs(table: EntryTable, firsts: Column, cuts: Column) -> Column:
    """Return the number of iterations that write a part of each run."""
    stops = np.append(firsts[1:], len(table))
    return cuts.searchsorted(stops, side="left") - cuts.searchsorted(firsts, side="right") + 1


def _kept_runs(table: EntryTable, firsts: Column, pieces: Column, limits: CompactionLimits) -> Mask:
    """Mark the runs that stay in a stream set object: small ones, and as many more as needed.

    A stream set object may contain one range of a stream, so only the smallest run of each stream
    may stay.
    """
    sizes = np.add.reduceat(table.size, firsts)
    by_size = np.argsort(sizes, kind="stable")
    _, smallest = np.unique(table.stream_id[firsts][by_size], return_index=True)
    candidates = by_size[np.sort(smallest)]
    made = int(pieces.sum()) - np.cumsum(pieces[candidates])
    too_many = int((made > limits.max_stream_objects).sum())
    has_to = too_many + 1 if int(pieces.sum()) > limits.max_stream_objects else 0
    small = int(sizes[candidates].searchsorted(limits.split_size, side="right"))
    is_kept = np.zeros(len(firsts), dtype=np.bool_)
    is_kept[candidates[: max(has_to, small)]] = True
    return is_kept
