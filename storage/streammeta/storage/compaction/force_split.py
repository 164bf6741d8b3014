"""Plans how old stream set objects become stream objects, one for each range of a stream.

Owns what is read together and what happens at the limits: a range that is larger than the memory
budget is cut into several stream objects. When there would be more of them than a commit may make,
the smallest ranges stay together in a new stream set object, for a later time; and when that is not
enough, the sources are split in several commits.
"""

from __future__ import annotations

import numpy as np

from streammeta.storage.compaction.entries import (
    Column,
    EntryTable,
    Mask,
    contiguous_runs,
    sorted_by_stream,
)
from streammeta.storage.compaction.faults import without_faults
from streammeta.storage.compaction.grouping import Grouping
from streammeta.storage.compaction.plan import (
    CommitPlan,
    CompactionLimits,
    CompactionPlan,
    Exclusion,
    ExclusionReason,
)
from streammeta.storage.compaction.planner import (
    halves,
    iteration_of,
    object_order,
    stream_object_count,
)


def plan_force_split(live: EntryTable, limits: CompactionLimits) -> CompactionPlan:
    """Plan the split of stream set objects of which `live` has every live entry.

    Every range of a stream with more than `split_size` bytes leaves, with 0 every range there is.
    The others stay together. Where sources are parted, it is in the order in which their first
    entries come. Plans are executed like those of `plan_compaction`. An object of which nothing
    would leave is left alone. `max_commit_bytes` plays no part.
    """
    order = object_order(live)
    table, faulty = without_faults(sorted_by_stream(live), limits.memory_budget)
    commits: list[CommitPlan] = []
    excluded = list(faulty)
    left_alone: list[int] = []
    waiting = [table] if len(table) else []
    while waiting:
        sources = waiting.pop()
        found = _commit_or_problem(sources, limits)
        source_ids = sources.object_ids()
        if isinstance(found, CommitPlan):
            is_worth_it = len(source_ids) > 1 or stream_object_count(found.iterations)
            commits += [found] if is_worth_it else []
            left_alone += () if is_worth_it else source_ids
        elif len(source_ids) > 1:
            waiting.extend(reversed(halves(sources, order)))
        else:
            excluded.append(Exclusion(source_ids[0], *found))
    return CompactionPlan(tuple(commits), tuple(excluded), tuple(left_alone))


def _commit_or_problem(
    table: EntryTable, limits: CompactionLimits
) -> CommitPlan | tuple[ExclusionReason, str]:
    """Return the one commit of some sources, or which limit it would break."""
    firsts = contiguous_runs(table)
    cuts = _iteration_firsts(table, firsts, limits.memory_budget)
    pieces = _pieces_of_runs(table, firsts, cuts)
    is_kept = _kept_runs(table, firsts, pieces, limits)
    splits, kept = int(pieces[~is_kept].sum()), int(is_kept.sum())
    if splits > limits.max_stream_objects:
        return ExclusionReason.TOO_MANY_STREAM_OBJECTS, (
            f"its split would make {splits} stream objects, wanted at most"
            f" {limits.max_stream_objects}; raise the limit or the memory budget"
        )
    if kept > limits.max_streams:
        return ExclusionReason.TOO_MANY_STREAMS, (
            f"its split would leave {kept} streams in a stream set object, wanted at most"
            f" {limits.max_streams}; raise the limit of streams or of stream objects"
        )
    if splits + kept > limits.max_rows:
        return ExclusionReason.TOO_MANY_ROWS, (
            f"its split would make {splits} stream objects and leave {kept} streams, wanted at most"
            f" {limits.max_rows} together; raise the memory budget"
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

    In a single object they have to lie, dead bytes between them included, within a stretch of
    `memory_budget` bytes. A run that does not fit alone is cut between entries.
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
    """Return how many iterations write a part of each run."""
    stops = np.append(firsts[1:], len(table))
    return cuts.searchsorted(stops, side="left") - cuts.searchsorted(firsts, side="right") + 1


def _kept_runs(table: EntryTable, firsts: Column, pieces: Column, limits: CompactionLimits) -> Mask:
    """Mark the runs that stay in a stream set object: small ones, and as many more as have to.

    It may hold one range of a stream, so of each stream only the smallest run may stay.
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
