"""Plans the compaction of stream set objects: which commits, iterations and outputs.

Owns the order of the decisions: faulty objects are left out, the rest is cut into commits, grouped
within the limits, and laid into iterations that fit the memory budget. Pure: the same entries and
limits make the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from streammeta.storage.compaction.entries import EntryTable, sorted_by_stream
from streammeta.storage.compaction.faults import without_faults
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
    Iteration,
    Output,
    OutputKind,
)


def plan_compaction(
    live: EntryTable, limits: CompactionLimits, *, sharing_only: bool = True
) -> CompactionPlan:
    """Plan what becomes of the live entries of some stream set objects.

    `live` has every live entry of each object that could be read. Where sources are parted, it is
    in the order in which their first entries come: the node's, so that streams go on from one to
    the next. With `sharing_only` an object takes part if it holds a stream that another one holds
    too, and objects are left out until the limits hold. Otherwise all objects take part, even a
    single one unless it would only be written again as it is; and where they break a limit, they
    are halved into several commits.
    """
    order = object_order(live)
    table, faulty = without_faults(sorted_by_stream(live), limits.memory_budget)
    commits: list[CommitPlan] = []
    excluded = list(faulty)
    waiting = _batches(table, order, limits.max_commit_bytes)[::-1]
    while waiting:
        sources = waiting.pop()
        planned = None if sharing_only else _plan_all(sources, limits)
        if sharing_only:
            sources = objects_sharing_streams(sources)
        elif planned is None and len(sources.object_ids()) > 1:
            waiting.extend(reversed(halves(sources, order)))
            continue
        grouping, commit = planned or _plan_some(sources, limits)
        excluded += grouping.excluded
        if len(commit.source_ids) > 1 or grouping.is_split.any():
            commits.append(commit)
    placed = {source_id for commit in commits for source_id in commit.source_ids}
    placed |= {exclusion.object_id for exclusion in excluded}
    left_alone = tuple(one for one in table.object_ids() if one not in placed)
    return CompactionPlan(tuple(commits), tuple(excluded), left_alone)


def object_order(table: EntryTable) -> tuple[int, ...]:
    """Return the ids of all objects, in the order in which their first entries come."""
    object_ids, firsts = np.unique(table.object_id, return_index=True)
    return tuple(object_ids[np.argsort(firsts)].tolist())


def halves(sources: EntryTable, order: Sequence[int]) -> tuple[EntryTable, EntryTable]:
    """Part the entries of several objects: those that come first in `order`, and the others."""
    held = set(sources.object_ids())
    present = [object_id for object_id in order if object_id in held]
    is_early = np.isin(sources.object_id, present[: len(present) // 2])
    return sources.take(is_early), sources.take(~is_early)


def _plan_all(sources: EntryTable, limits: CompactionLimits) -> tuple[Grouping, CommitPlan] | None:
    """Plan one commit of all objects; None when it would break a limit."""
    grouping = group_all(sources, limits)
    if grouping is None:
        return None
    commit = _commit_plan(grouping, limits.memory_budget)
    return (grouping, commit) if _is_within(grouping, commit, limits) else None


def _plan_some(sources: EntryTable, limits: CompactionLimits) -> tuple[Grouping, CommitPlan]:
    """Plan one commit of as many objects as the limits allow.

    How many stream objects are cut by iterations is known only when the groups are; if the limits
    are broken by them, the groups are made again with so much less room.
    """
    reserved = 0
    while True:
        grouping = group_entries(sources, limits, reserved=reserved)
        commit = _commit_plan(grouping, limits.memory_budget)
        if _is_within(grouping, commit, limits):
            return grouping, commit
        cuts = stream_object_count(commit.iterations) - int(grouping.is_split.sum())
        reserved = max(reserved + 1, cuts)


def _is_within(grouping: Grouping, commit: CommitPlan, limits: CompactionLimits) -> bool:
    made = stream_object_count(commit.iterations)
    rows = made + grouping.kept_stream_count()
    return made <= limits.max_stream_objects and rows <= limits.max_rows


def _batches(
    table: EntryTable, order: Sequence[int], max_commit_bytes: int | None
) -> list[EntryTable]:
    """Cut the objects into those of one commit each.

    A single object that is left over joins the batch before: alone it could not be compacted.
    """
    if max_commit_bytes is None:
        return [table]
    object_ids, numbers = np.unique(table.object_id, return_inverse=True)
    sums = np.bincount(numbers, weights=table.size, minlength=len(object_ids))
    sizes = dict(zip(object_ids.tolist(), sums.tolist(), strict=True))
    batches: list[list[int]] = [[]]
    total = 0
    present = [object_id for object_id in order if object_id in sizes]
    for object_id in present:
        is_full = len(batches[-1]) >= 2 and total + sizes[object_id] > max_commit_bytes
        if is_full and object_id != present[-1]:
            batches.append([])
            total = 0
        batches[-1].append(object_id)
        total += sizes[object_id]
    if len(batches) == 1:
        return [table]
    return [table.take(np.isin(table.object_id, batch)) for batch in batches]


def _commit_plan(grouping: Grouping, memory_budget: int) -> CommitPlan:
    """Lay the groups into iterations: rows in their order, as many as fit the budget.

    A group that does not fit as a whole is cut: a stream object becomes two, the stream set object
    is gone on with.
    """
    table = grouping.table
    ends = np.cumsum(table.size, dtype=np.int64)
    iterations: list[Iteration] = []
    row = 0
    while row < len(table):
        used = int(ends[row - 1]) if row else 0
        stop = int(ends.searchsorted(used + memory_budget, side="right"))
        iterations.append(iteration_of(grouping, row, stop))
        row = stop
    return CommitPlan(table.object_ids(), table, tuple(iterations))


def iteration_of(grouping: Grouping, start: int, stop: int) -> Iteration:
    """Return the iteration of the rows `[start, stop)`: the parts of the groups that are in it."""
    entries = grouping.table.span(start, stop)
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
    """Return how many stream objects some iterations make."""
    return sum(
        output.kind is OutputKind.SPLIT for iteration in iterations for output in iteration.outputs
    )
