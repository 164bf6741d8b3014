"""Scenarios about compaction that write objects and commit: run by the real executor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from streammeta.client.compaction.report import SourceError
from streammeta.client.compaction.sso_sources import Source
from streammeta.controller.metadata.tables.values import ObjectKind
from streammeta.storage.compaction.entries import (
    EntryTable,
    contiguous_runs,
    live_entries,
    objects_without_entries,
    sort_by_stream,
)
from streammeta.storage.compaction.layout import StreamSetObjectSoFar, lay_out
from streammeta.storage.compaction.plan import CompactionLimits, CompactionPlan, Output, OutputKind
from streammeta.storage.compaction.planner import plan_compaction, plan_force_split
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format import index_block
from tests.conformance.compaction_stage import (
    LARGEST_BLOCK,
    Compactor,
    Given,
    Stage,
    block_list,
    break_uploads,
    key_of,
    limits_of,
    read_given,
)
from tests.conformance.conformance_report import (
    Answer,
    Mismatch,
    compare,
    entry_facts,
    features_of_plan,
)
from tests.conformance.scenario_args import Args

InputSets = Mapping[str, Any]

NEW_ID = "newly prepared id (greater than every input id)"
_PART_SIZE = 5 * 1024 * 1024
_MAX_READ_BYTES = 16 * 1024 * 1024


def upload(kind: OutputKind) -> Callable[[Args, InputSets], Answer]:
    """Return what runs a scenario that writes one object, piece by piece."""

    def run(args: Args, _: InputSets) -> Answer:
        pieces = [block_list(blocks) for blocks in args.take("input_objects")]
        so_far = StreamSetObjectSoFar()
        for number, entries in enumerate(pieces, start=1):
            layout = lay_out(
                [Output(kind, ((0, len(entries)),), entries)],
                so_far,
                ends_set_object=number == len(pieces),
                part_size=_PART_SIZE,
                max_read_bytes=_MAX_READ_BYTES,
            )
        (placed,) = layout.outputs
        size = sum(entries.data_size for entries in pieces) + len(placed.trailer)
        footer = index_block.decode_footer(memoryview(placed.trailer), size, composite=False)
        index = index_block.salvage_entries(memoryview(placed.trailer)[: -index_block.FOOTER_SIZE])
        facts = {
            "object_size": size,
            "index_entry_count": footer.index_size // index_block.INDEX_ENTRY_SIZE,
            "index_positions": [entry.position for entry in index],
            "index": [entry_facts(entry) for entry in index],
        }
        return Answer(facts)

    return run


def unreadable(given: Given, listed: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return why objects that are listed and not in the bucket can't be read."""
    missing = [Source(source["object"], source["size"], len(source["ranges"])) for source in listed]
    reasons: dict[int, str] = {}

    async def read(_stage: Stage, compactor: Compactor) -> Answer:
        _, found = await compactor.entries(list(given.objects), missing)
        reasons.update(found)
        return Answer({})

    _on_stage(given, read)
    return reasons


def compact(args: Args, input_sets: InputSets) -> Answer:
    limits = limits_of(args)
    given = read_given(args, input_sets)
    candidates: list[int] = args.take("candidates", list(given.objects))
    return _on_stage(given, partial(_compact, candidates, limits))


async def _compact(
    candidates: Sequence[int], limits: CompactionLimits, stage: Stage, compactor: Compactor
) -> Answer:
    entries, _ = await compactor.entries(candidates)
    live = _live(stage, entries)
    plan = plan_compaction(live, limits)
    mismatches = await _carry_out(stage, compactor, plan, candidates, live)
    facts = _facts(stage)
    facts["error"] = False
    facts["iterations"] = sum(len(commit.iterations) for commit in plan.commits)
    facts["excluded_objects"] = sorted(exclusion.object_id for exclusion in plan.excluded)
    features = features_of_plan(plan, live, limits)
    if facts["order_id"] != candidates[0]:
        features.append("order-of-the-oldest-source")
    return Answer(facts, features, mismatches)


def force_split(args: Args, input_sets: InputSets) -> Answer:
    """Force split one object after the other, each from the same start."""
    limits = limits_of(args)
    limits = replace(limits, split_size=0)
    given = read_given(args, input_sets)
    answer = Answer({})
    for request in args.each("requests"):
        part = _on_stage(given, partial(_force_split, request.take("object"), limits))
        sections = ("expect", "derived")
        wanted = {f"{request.path}.{name}": request.take(name, {}) for name in sections}
        answer.parts.append((wanted, part))
    return answer


async def _force_split(
    object_id: int, limits: CompactionLimits, stage: Stage, compactor: Compactor
) -> Answer:
    entries, _ = await compactor.entries([object_id])
    live = _live(stage, entries)
    plan = plan_force_split(live, limits)
    mismatches = await _carry_out(stage, compactor, plan, [object_id], live)
    if not stage.destroyed():
        return Answer({"request": None}, mismatches=mismatches)
    iterations = [iteration for commit in plan.commits for iteration in commit.iterations]
    kinds = [[output.kind for output in iteration.outputs] for iteration in iterations]
    splits = [kind.count(OutputKind.SPLIT) for kind in kinds]
    facts = {"request": "made", **_facts(stage), "objects_prepared_per_batch": splits}
    features = []
    if sum(splits) > len(contiguous_runs(live)):
        features.append("oversized-range-cut")
    if any(OutputKind.COMPACT in kind for kind in kinds):
        features.append("limit-of-a-force-split")
    return Answer(facts, features, mismatches)


def fail(args: Args, input_sets: InputSets) -> Answer:
    """Carry out a compaction that a read or an upload fails of.

    What is expected does not depend on the sizes of blocks, which are not always those given.
    """
    limits = limits_of(args)
    limits = replace(limits, memory_budget=max(limits.memory_budget, LARGEST_BLOCK * 2))
    given = read_given(args, input_sets)
    fault, action = dict(args.take("fault")), str(args.take("action"))
    split = action.removeprefix("force split object ") if "force split" in action else None
    candidates = list(given.objects) if split is None else [int(split)]
    answer = _on_stage(given, partial(_fail, candidates, limits, fault, split))
    return Answer(answer.facts, ["blocks-with-records"], answer.mismatches)


async def _fail(
    candidates: Sequence[int],
    limits: CompactionLimits,
    fault: Mapping[str, Any],
    split: str | None,
    stage: Stage,
    compactor: Compactor,
) -> Answer:
    entries, _ = await compactor.entries(candidates)
    live = _live(stage, entries)
    plan = (
        plan_compaction(live, limits)
        if split is None
        else plan_force_split(live, replace(limits, split_size=0))
    )
    if not plan.commits:
        raise ValueError(f"nothing is planned to fail: {plan.excluded}")
    stored = stage.store.objects()
    for name, value in fault.items():
        if name == "read_fails_for_object":
            stage.store.delete_many([key_of(value)])
        elif name == "uploads_fail_with":
            break_uploads(stage.store, str(value))
        else:
            raise ValueError(f"fault {name} is unknown")
    problem = ""
    try:
        for commit in plan.commits:
            await compactor.carry_out(commit, ())
    except (SourceError, StorageError) as error:
        problem = str(error)
    mismatches = list(compare([], stage.destroyed(), "objects gone after the failure"))
    mismatches += compare([], stage.unfinished(), "uploads left unfinished")
    for key, data in stage.store.objects().items():
        if key in stored and stored[key] != data:
            mismatches.append(Mismatch(key, "as it was", "changed"))
    return Answer({"error": bool(problem)}, mismatches=mismatches)


def _on_stage(given: Given, run: Callable[[Stage, Compactor], Awaitable[Answer]]) -> Answer:
    async def whole() -> Answer:
        stage = Stage(given)
        await stage.prepare()
        compactor = Compactor(stage)
        try:
            return await run(stage, compactor)
        finally:
            compactor.close()

    return asyncio.run(whole())


def _live(stage: Stage, entries: EntryTable) -> EntryTable:
    return sort_by_stream(live_entries(entries, stage.stream_starts()))


async def _carry_out(
    stage: Stage,
    compactor: Compactor,
    plan: CompactionPlan,
    candidates: Sequence[int],
    live: EntryTable,
) -> list[Mismatch]:
    """Execute a plan; return what is wrong with the bytes of the outputs."""
    expired = objects_without_entries(candidates, live)
    planned = [source_id for commit in plan.commits for source_id in commit.source_ids]
    wanted = stage.bytes_by_run(sort_by_stream(live.take(_is_of(live, planned))))
    for number, commit in enumerate(plan.commits):
        await compactor.carry_out(commit, () if number else expired)
    if expired and not plan.commits:
        await compactor.remove(expired)
    return list(_wrong_bytes(stage, wanted))


def _is_of(table: EntryTable, object_ids: Sequence[int]) -> Any:
    ids = set(object_ids)
    return [object_id in ids for object_id in table.object_id.tolist()]


def _wrong_bytes(stage: Stage, wanted: Mapping[tuple[int, int], bytes]) -> Iterator[Mismatch]:
    made = [*stage.made(ObjectKind.STREAM_SET), *stage.made(ObjectKind.STREAM)]
    tables = EntryTable.concatenate([stage.index_of(object_) for object_ in made])
    found = stage.bytes_by_run(sort_by_stream(tables))
    if found.keys() != wanted.keys():
        yield Mismatch("streams and starts of outputs", sorted(wanted), sorted(found))
    for run in found.keys() & wanted.keys():
        if found[run] != wanted[run]:
            yield Mismatch(f"bytes of stream {run[0]} from {run[1]}", "as in the sources", "others")


def _facts(stage: Stage) -> dict[str, Any]:
    """Say what a commit did, by the map."""
    shared, alone = stage.made(ObjectKind.STREAM_SET), stage.made(ObjectKind.STREAM)
    ranges = [held for object_ in shared for held in object_.ranges]
    set_object = shared[0] if shared else None
    is_new = set_object is not None and set_object.object_id > max(stage.objects)
    return {
        "compacted_objects": stage.destroyed(),
        "stream_object_count": len(alone),
        "stream_range_count": len(ranges),
        "stream_set_object": -1 if set_object is None else NEW_ID if is_new else "an input id",
        "order_id": -1 if set_object is None else set_object.order_id,
        "streams_in_result": sorted(
            {held.stream_id for object_ in (*shared, *alone) for held in object_.ranges}
        ),
        "stream_objects": [
            {**_range_facts(held), "size": item.size} for item in alone for held in item.ranges
        ],
        "stream_ranges": [_range_facts(held) for held in ranges],
        "stream_set_object_size": -1 if set_object is None else set_object.size,
    }


def _range_facts(held: Any) -> dict[str, int]:
    return {"stream": held.stream_id, "start": held.start_offset, "end": held.end_offset}
