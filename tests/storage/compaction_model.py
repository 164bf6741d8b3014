"""A second planner, of lists and loops: slow, and close to how the rules are told.

Knows of no columns. It stands for the planner of stream set objects where both are given the same
entries; entries that overlap or are over the budget are not its business.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streammeta.storage.compaction.entries import Entry
from streammeta.storage.compaction.plan import CompactionLimits, CompactionPlan

Group = tuple[str, list[Entry]]


def entry(object_id: int, stream_id: int, start: int, end: int, size: int | None = None) -> Entry:
    """An entry whose bytes are as many as its offsets, unless told otherwise; not placed yet."""
    return Entry(object_id, stream_id, start, end, 1, -1, end - start if size is None else size)


def placed(entries: Iterable[Entry]) -> list[Entry]:
    """Lay the entries of each object one after the other, by stream and offset."""
    ends: Counter[int] = Counter()
    found = []
    for piece in sorted(entries, key=lambda e: (e.object_id, e.stream_id, e.start_offset)):
        found.append(piece._replace(position=ends[piece.object_id]))
        ends[piece.object_id] += piece.size
    return found


def three_objects(unit: int = 1) -> list[Entry]:
    """Three set objects whose compaction takes two iterations of 150 units."""
    ranges = [
        *((0, 0, 0, 20), (0, 1, 30, 60), (0, 3, 210, 230)),
        *((1, 0, 20, 25), (1, 1, 60, 120)),
        *((2, 2, 400, 435), (2, 2, 435, 500), (2, 3, 230, 270)),
    ]
    return placed(entry(o, s, start, end, (end - start) * unit) for o, s, start, end in ranges)


def plan_rows(plan: CompactionPlan) -> list[list[tuple[str, list[Entry]]]]:
    """Outputs of each iteration of all commits: kind and entries."""
    return [
        [(str(output.kind), list(output.entries.rows())) for output in iteration.outputs]
        for commit in plan.commits
        for iteration in commit.iterations
    ]


# ---- the model ----


@dataclass
class ModelPlan:
    """What the model finds; `rounds` are the objects left out, round by round."""

    iterations: list[list[Group]]
    rounds: list[list[int]]


def model_plan(entries: Sequence[Entry], limits: CompactionLimits) -> ModelPlan:
    """Plan one commit of the objects that share a stream with another one."""
    kept = [piece for piece in entries if piece.object_id in _sharing(entries)]
    rounds: list[list[int]] = []
    groups = model_groups(kept, limits.split_size)
    while (victims := _victims(groups, limits)) is not None:
        rounds.append(sorted(victims))
        kept = [piece for piece in kept if piece.object_id not in victims]
        if not _sharing(kept):
            kept = []
        groups = model_groups(kept, limits.split_size)
    return ModelPlan(_iterations(groups, limits.memory_budget), rounds)


def _sharing(entries: Iterable[Entry]) -> set[int]:
    holders: defaultdict[int, set[int]] = defaultdict(set)
    for piece in entries:
        holders[piece.stream_id].add(piece.object_id)
    return {object_id for held in holders.values() if len(held) > 1 for object_id in held}


def model_groups(entries: Iterable[Entry], split_size: int) -> list[Group]:
    """Walk the sorted entries, splitting off streams that are large or have a gap behind."""
    runs: list[list[Entry]] = []
    for piece in sorted(entries, key=lambda e: (e.stream_id, e.start_offset)):
        last = runs[-1][-1] if runs else None
        if last and (last.stream_id, last.end_offset) == (piece.stream_id, piece.start_offset):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    groups: list[Group] = []
    for run, following in pairwise([*runs, None]):
        assert run is not None
        has_gap_behind = following is not None and following[0].stream_id == run[0].stream_id
        if has_gap_behind or sum(piece.size for piece in run) > split_size:
            groups.append(("SPLIT", run))
        elif groups and groups[-1][0] == "COMPACT":
            groups[-1] = ("COMPACT", groups[-1][1] + run)
        else:
            groups.append(("COMPACT", run))
    return groups


def _victims(groups: list[Group], limits: CompactionLimits) -> set[int] | None:
    splits = [run for kind, run in groups if kind == "SPLIT"]
    streams: defaultdict[int, set[int]] = defaultdict(set)
    for kind, run in groups:
        for piece in run if kind == "COMPACT" else ():
            streams[piece.stream_id].add(piece.object_id)
    if len(splits) > limits.max_stream_objects:
        feeds = Counter(id_ for _, run in groups for id_ in {one.object_id for one in run})
        cheapest = min(
            splits, key=lambda run: (len(run), sum(feeds[object_] for object_ in _objects(run)))
        )
        return _objects(cheapest)
    if len(streams) > limits.max_streams:
        held = Counter(object_ for objects in streams.values() for object_ in objects)
        return min(streams.values(), key=lambda objects: sum(held[object_] for object_ in objects))
    return None


def _objects(entries: Iterable[Entry]) -> set[int]:
    return {piece.object_id for piece in entries}


def _iterations(groups: list[Group], memory_budget: int) -> list[list[Group]]:
    iterations: list[list[tuple[int, Group]]] = []
    used = memory_budget
    for number, (kind, entries) in enumerate(groups):
        for piece in entries:
            if used + piece.size > memory_budget:
                iterations.append([])
                used = 0
            used += piece.size
            outputs = iterations[-1]
            if outputs and outputs[-1][0] == number:
                outputs[-1][1][1].append(piece)
            else:
                outputs.append((number, (kind, [piece])))
    found = []
    for numbered in iterations:
        outputs_ = [group for _, group in numbered]
        compact = [piece for kind, run in outputs_ if kind == "COMPACT" for piece in run]
        splits = [group for group in outputs_ if group[0] == "SPLIT"]
        found.append([*splits, *([("COMPACT", compact)] if compact else [])])
    return found
