"""Scenarios about the compaction of stream set objects: what is planned from which blocks.

Each kind of scenario asks one thing; the answer is put in the words of the scenarios and compared.
What only planning tells is here; kinds that write objects and commit are run by the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from streammeta.storage.compaction.entries import (
    EntryTable,
    MergeRule,
    contiguous_runs,
    merge_entries,
    sort_by_stream,
    stream_ranges,
)
from streammeta.storage.compaction.grouping import group_entries, objects_sharing_streams
from streammeta.storage.compaction.layout import plan_reads
from streammeta.storage.compaction.plan import (
    CompactionLimits,
    ExclusionReason,
    Iteration,
    OutputKind,
)
from streammeta.storage.compaction.planner import exclude_faults, plan_compaction
from streammeta.storage.compaction.selection import StreamSetObjects
from tests.conformance.compaction_execution import compact, fail, force_split, unreadable, upload
from tests.conformance.compaction_stage import block_list, limits_of, read_given
from tests.conformance.conformance_report import (
    Answer,
    Mismatch,
    ScenarioResult,
    compare,
    differences,
    entry_facts,
    features_of,
    features_of_plan,
)
from tests.conformance.scenario_args import Args

InputSets = Mapping[str, Any]

_MAX_READ_BYTES = 16 * 1024 * 1024


def is_set_compaction(scenario: Mapping[str, Any]) -> bool:
    """Tell whether a scenario is one of these; those about one stream name a compaction type."""
    return scenario.get("kind") in KINDS and "compaction_type" not in scenario


def check_set_compaction(
    input_sets: InputSets, args: Args, result: ScenarioResult
) -> Iterator[Mismatch]:
    kind = args.take("kind")
    answer = KINDS[kind](args, input_sets)
    expected = {name: args.take(name, {}) for name in ("expect", "derived")}
    yield from differences(kind, expected, answer, result)


def _live(args: Args, input_sets: InputSets) -> EntryTable:
    return read_given(args, input_sets).live()


def _read_indices(args: Args, input_sets: InputSets) -> Answer:
    return Answer({"blocks": _by_object(_live(args, input_sets))})


def _filter(args: Args, input_sets: InputSets) -> Answer:
    kept = objects_sharing_streams(sort_by_stream(_live(args, input_sets)))
    return Answer({"objects": list(kept.object_ids()), "blocks": _by_object(kept)})


def _sort(args: Args, input_sets: InputSets) -> Answer:
    return Answer({"blocks": _blocks(sort_by_stream(_live(args, input_sets)))})


def _group(args: Args, input_sets: InputSets) -> Answer:
    limits = limits_of(args)
    table, faulty = exclude_faults(sort_by_stream(_live(args, input_sets)), limits.memory_budget)
    grouping = group_entries(objects_sharing_streams(table), limits)
    groups = [
        (is_split, grouping.table.span(*grouping.rows(number)))
        for number, is_split in enumerate(grouping.is_split.tolist())
    ]
    rounds: dict[int, list[int]] = {}
    for exclusion in grouping.excluded:
        rounds.setdefault(exclusion.round, []).append(exclusion.object_id)
    facts = {
        "excluded_objects": sorted(exclusion.object_id for exclusion in grouping.excluded),
        "groups": [
            {"type": "SPLIT" if is_split else "COMPACT", "blocks": _blocks(entries)}
            for is_split, entries in groups
        ],
        "group_sizes": [entries.data_size for _, entries in groups],
        "exclusion_rounds": list(rounds.values()),
    }
    return Answer(facts, features_of(faulty))


def _plan(args: Args, input_sets: InputSets) -> Answer:
    limits = limits_of(args)
    given = read_given(args, input_sets)
    table = given.live()
    missing = args.take("extra_unreadable_objects", [])
    plan = plan_compaction(table, limits)
    iterations = [iteration for commit in plan.commits for iteration in commit.iterations]
    faulty = [
        exclusion
        for exclusion in plan.excluded
        if exclusion.reason in (ExclusionReason.OVERSIZED_ENTRY, ExclusionReason.OVERLAP)
    ]
    mismatches = list(_not_as_without(table, limits, [exclusion.object_id for exclusion in faulty]))
    if missing:
        left_out = sorted(unreadable(given, missing))
        wanted = sorted(source["object"] for source in missing)
        mismatches += compare(wanted, left_out, "objects that can't be read")
    facts = {
        "plan_count": len(iterations),
        "plans": [_iteration_facts(number, turn) for number, turn in enumerate(iterations)],
        "plan_sizes": [iteration.data_size for iteration in iterations],
        "compacted_object_sizes": [
            [output.data_size for output in iteration.outputs] for iteration in iterations
        ],
    }
    return Answer(facts, features_of_plan(plan, table, limits), mismatches)


def _iteration_facts(number: int, iteration: Iteration) -> dict[str, Any]:
    reads = plan_reads(iteration, _MAX_READ_BYTES)
    in_order = iteration.entries.take(np.argsort(reads.entry_buffer_start, kind="stable"))
    return {
        "order": number,
        "compacted_objects": [
            {"type": str(output.kind), "blocks": _blocks(output.entries)}
            for output in iteration.outputs
        ],
        "read_blocks": _by_object(in_order),
    }


def _group_blocks(args: Args, _: InputSets) -> Answer:
    blocks = block_list(args.take("input_block_list"))
    if args.take("rule") == "by_offset":
        firsts = contiguous_runs(blocks).tolist()
    else:
        starts = list(zip(blocks.stream_id.tolist(), blocks.start_offset.tolist(), strict=True))
        firsts = [
            starts.index((row.stream_id, row.start_offset)) for row in _index(args, blocks).rows()
        ]
    stops = [*firsts[1:], len(blocks)]
    groups = [list(range(first, stop)) for first, stop in zip(firsts, stops, strict=True)]
    return Answer({"groups_by_position_in_input": groups})


def _stream_ranges(args: Args, _: InputSets) -> Answer:
    blocks = block_list(args.take("input_block_list"))
    merged = blocks if args.take("rule") == "by_offset" else _index(args, blocks)
    ranges = [
        {"stream": one.stream_id, "start": one.start_offset, "end": one.end_offset}
        for one in stream_ranges(merged)
    ]
    return Answer({"ranges": ranges})


def _index_entries(args: Args, _: InputSets) -> Answer:
    blocks = block_list(args.take("input_block_list"))
    if args.take("rule") != "by_limit":
        raise ValueError("rule of index_entries is not by_limit")
    index = [entry_facts(row) for row in _index(args, blocks).rows()]
    return Answer({"index": index})


def _index(args: Args, blocks: EntryTable) -> EntryTable:
    threshold = args.within("config").take("block_size_threshold")
    return merge_entries(blocks, threshold, MergeRule.BELOW)


def _check_block_size(args: Args, input_sets: InputSets) -> Answer:
    """A block over the budget keeps its object out, and nothing else."""
    limits = limits_of(args)
    table = _live(args, input_sets)
    too_large = set(table.take(table.size > limits.memory_budget).object_ids())
    plan = plan_compaction(table, limits)
    left_out = {
        left.object_id for left in plan.excluded if left.reason is ExclusionReason.OVERSIZED_ENTRY
    }
    mismatches = list(_not_as_without(table, limits, too_large))
    if left_out != too_large:
        mismatches.append(Mismatch("objects left out", too_large, left_out))
    facts = {"error": False, "largest_live_block": int(table.size.max(initial=0))}
    return Answer(facts, features_of(plan.excluded), mismatches)


def _deduplicate(args: Args, _: InputSets) -> Answer:
    """An object that is listed twice has one place, and what was listed last."""
    listed = args.take("input_list")
    ids = [source["object"] for source in listed]
    rows = [(object_id, ids.index(object_id), 0, number, 1) for number, object_id in enumerate(ids)]
    kept = StreamSetObjects.of_rows(rows).sort().object_size.tolist()
    return Answer({"tags": [listed[number]["tag"] for number in kept]})


def _not_as_without(
    table: EntryTable, limits: CompactionLimits, faulty: Sequence[int] | set[int]
) -> Iterator[Mismatch]:
    """Yield a mismatch unless faulty objects change nothing for the others."""
    others = table.take(~np.isin(table.object_id, list(faulty)))
    alone, together = plan_compaction(others, limits), plan_compaction(table, limits)
    wanted, found = ([commit.source_ids for commit in plan.commits] for plan in (alone, together))
    if wanted != found:
        yield Mismatch("sources beside objects that are left out", wanted, found)


def _blocks(entries: EntryTable) -> list[list[int]]:
    return [
        [row.object_id, row.stream_id, row.start_offset, row.end_offset] for row in entries.rows()
    ]


def _by_object(entries: EntryTable) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}
    for object_id, *block in _blocks(entries):
        found.setdefault(object_id, []).append(block)
    return found


KINDS: Mapping[str, Callable[[Args, InputSets], Answer]] = {
    "read_indices": _read_indices,
    "filter": _filter,
    "sort": _sort,
    "group": _group,
    "plan": _plan,
    "group_blocks": _group_blocks,
    "stream_ranges": _stream_ranges,
    "index_entries": _index_entries,
    "upload_stream_set_object": upload(OutputKind.COMPACT),
    "upload_stream_object": upload(OutputKind.SPLIT),
    "force_split": force_split,
    "compact": compact,
    "check_block_size": _check_block_size,
    "deduplicate": _deduplicate,
    "failure": fail,
}
