"""What every plan obeys: all that is live of its sources and nothing else, within all limits.

Each law is checked on sources and limits drawn from a seed, which the test's name shows; without
overlaps the plan is that of a second, slow planner.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from streammeta.storage.compaction.entries import (
    Entry,
    EntryTable,
    MergeRule,
    encode_entries,
    live_entries,
    merge_entries,
)
from streammeta.storage.compaction.layout import plan_reads
from streammeta.storage.compaction.plan import (
    CommitPlan,
    CompactionLimits,
    CompactionPlan,
    Iteration,
    OutputKind,
)
from streammeta.storage.compaction.planner import plan_compaction, plan_force_split
from streammeta.storage.compaction.verification import CoverageError, check_coverage
from streammeta.storage.object_format.index_block import IndexEntry, encode_index
from tests.compaction.compaction_random import Sources, bytes_at, random_sources
from tests.kit.seeds import seeds
from tests.storage.compaction_model import entry, model_plan, placed, plan_rows

SEEDS = seeds(8, slow=8)


def cases(seed: int) -> Iterator[random.Random]:
    """Yield what each case of a seed is drawn from: more of those that only long runs have."""
    return itertools.repeat(random.Random(seed), 25 if seed < 8 else 200)


def draw_limits(rng: random.Random) -> CompactionLimits:
    return CompactionLimits(
        memory_budget=rng.choice([45, 100, 400, 100_000]),
        split_size=rng.choice([0, 20, 60, 200, 10_000]),
        max_streams=rng.choice([1, 3, 20_000]),
        max_stream_objects=rng.choice([1, 4, 10_000]),
        max_rows=rng.choice([5, 20_000]),
    )


def draw_sources(rng: random.Random) -> Sources:
    return random_sources(
        rng,
        objects=rng.choice([1, 2, 6, 14]),
        streams=rng.choice([1, 3, 10]),
        largest=rng.choice([5, 40, 40, 90]),
        gaps=rng.choice([0.0, 0.15, 0.5]),
        overlaps=rng.choice([0.0, 0.0, 0.2]),
    )


def planned(rng: random.Random) -> tuple[list[Entry], CompactionLimits, CompactionPlan]:
    """Plan a merge of some, or the force split of a few; return its live entries."""
    sources, limits = draw_sources(rng), draw_limits(rng)
    live = live_entries(sources.table, sources.starts)
    assert Counter(live.rows()) == Counter(sources.live)
    if rng.random() < 0.7:
        alone = rng.random() < 0.5
        return sources.live, limits, plan_compaction(live, limits, sharing_only=not alone)
    few = rng.sample(live.object_ids(), min(len(live.object_ids()), rng.randint(1, 4)))
    live = live.take(np.isin(live.object_id, few))
    return list(live.rows()), limits, plan_force_split(live, limits)


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_hold_what_is_live_of_their_sources_once_within_all_limits(seed: int) -> None:
    for rng in cases(seed):
        live, limits, plan = planned(rng)
        check_sources(live, plan)
        for commit in plan.commits:
            check_commit(live, limits, commit)


def check_sources(live: list[Entry], plan: CompactionPlan) -> None:
    """Each source is in one commit, or excluded, or left alone."""
    named = [source_id for commit in plan.commits for source_id in commit.source_ids]
    named += [object_.object_id for object_ in plan.excluded]
    named += plan.left_alone
    assert sorted(named) == sorted({item.object_id for item in live}), "each source has one place"


def check_commit(live: list[Entry], limits: CompactionLimits, commit: CommitPlan) -> None:
    of_sources = [object_ for object_ in live if object_.object_id in commit.source_ids]
    outputs = [
        (output.kind, list(output.entries.rows()))
        for iteration in commit.iterations
        for output in iteration.outputs
    ]
    held = [entry for _, entries in outputs for entry in entries]
    assert Counter(held) == Counter(of_sources), "outputs hold what is live of the sources, once"
    assert Counter(commit.entries.rows()) == Counter(of_sources)
    splits = [entries for kind, entries in outputs if kind is OutputKind.SPLIT]
    merged = [entry for kind, entries in outputs if kind is OutputKind.COMPACT for entry in entries]
    assert len(splits) <= limits.max_stream_objects
    streams = {entry.stream_id for entry in merged}
    assert len(streams) <= limits.max_streams
    assert len(splits) + len(streams) <= limits.max_rows
    for entries in splits:
        assert_contiguous(entries)
    for before, after in pairwise(merged):
        is_next = (before.stream_id, before.end_offset) == (after.stream_id, after.start_offset)
        assert is_next or before.stream_id < after.stream_id
    for iteration in commit.iterations:
        check_iteration(limits, iteration)


def assert_contiguous(entries: list[Entry]) -> None:
    assert entries, "an output holds something"
    for before, after in pairwise(entries):
        assert (before.stream_id, before.end_offset) == (after.stream_id, after.start_offset)


def check_iteration(limits: CompactionLimits, iteration: Iteration) -> None:
    sizes = [output.data_size for output in iteration.outputs]
    assert 0 < iteration.data_size <= limits.memory_budget
    assert sum(sizes) == iteration.data_size == sum(row.size for row in iteration.entries.rows())
    kinds = [output.kind for output in iteration.outputs]
    assert kinds.count(OutputKind.COMPACT) <= 1
    assert OutputKind.COMPACT not in kinds[:-1], "what goes into the set object is last"
    for output in iteration.outputs:
        assert output.data_size == sum(row.size for row in output.entries.rows())


@pytest.mark.parametrize("seed", SEEDS)
def test_reads_bring_each_byte_once_to_where_it_is_said_to_be(seed: int) -> None:
    for rng in cases(seed):
        _, _, plan = planned(rng)
        longest = rng.choice([7, 30, 1_000])
        for iteration in (iteration for commit in plan.commits for iteration in commit.iterations):
            check_reads(iteration, longest)


def check_reads(iteration: Iteration, longest: int) -> None:
    reads = plan_reads(iteration, longest)
    has_large = any(row.size >= longest for row in iteration.entries.rows())
    buffer = bytearray(iteration.data_size)
    filled: Counter[int] = Counter()
    rows = zip(
        *(column.tolist() for column in (reads.object_id, reads.position, reads.size)),
        reads.buffer_start.tolist(),
        strict=True,
    )
    end, last = 0, (-1, -1, longest)
    for object_id, position, size, at in rows:
        assert 0 < size <= longest
        assert at == end, "reads fill the buffer one after the other"
        goes_on = last[:2] == (object_id, position)
        assert not goes_on or has_large or last[2] + size >= longest, "neighbours are read together"
        end, last = at + size, (object_id, position + size, size)
        buffer[at : at + size] = bytes_at(object_id, position, size)
        filled.update(range(at, at + size))
    assert filled == Counter(range(iteration.data_size)), "each byte of the buffer is read once"
    assert len(reads) == len(reads.size)
    for place, row in zip(reads.entry_buffer_start.tolist(), iteration.entries.rows(), strict=True):
        wanted = bytes_at(row.object_id, row.position, row.size)
        assert buffer[place : place + row.size] == wanted, f"{row} is where it is said to be"


def index_of(commit: CommitPlan, threshold: int) -> EntryTable:
    """The index entries of all outputs of a commit, as they are written."""
    tables: list[EntryTable] = []
    in_set: list[EntryTable] = []
    for output in (output for iteration in commit.iterations for output in iteration.outputs):
        if output.kind is OutputKind.SPLIT:
            tables.append(merge_entries(output.entries.place(), threshold, MergeRule.BELOW))
        else:
            in_set.append(output.entries)
    if in_set:
        placed = EntryTable.concatenate(in_set).place()
        tables.append(merge_entries(placed, threshold, MergeRule.BELOW))
    return EntryTable.concatenate(tables)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_wrong_with_an_index_is_refused_before_the_commit(seed: int) -> None:
    """Entries may be joined as they like; one lost, doubled, shifted or shortened is found."""
    for rng in cases(seed):
        _, _, plan = planned(rng)
        for commit in plan.commits:
            index = list(index_of(commit, rng.choice([1, 30, 10_000])).rows())
            check_coverage(commit.entries, EntryTable.of_rows(index))
            for wrong in spoiled(rng, index):
                with pytest.raises(CoverageError):
                    check_coverage(commit.entries, EntryTable.of_rows(wrong))


def spoiled(rng: random.Random, index: list[Entry]) -> list[list[Entry]]:
    at = rng.randrange(len(index))
    before, one, after = index[:at], index[at], index[at + 1 :]
    wrong = (
        one._replace(record_count=one.record_count + 1),
        one._replace(size=one.size + 1),
        one._replace(end_offset=one.end_offset + 1),
        one._replace(stream_id=10**6),
    )
    changed = [[*before, wrong_entry, *after] for wrong_entry in wrong]
    return [[*before, *after], [*before, one, one, *after], *changed]


@pytest.mark.parametrize("seed", SEEDS)
def test_overlapping_sources_are_never_written_together(seed: int) -> None:
    for rng in cases(seed):
        sources = random_sources(rng, overlaps=0.3, gaps=0.0)
        live = live_entries(sources.table, sources.starts)
        plan = plan_compaction(live, draw_limits(rng))
        for commit in plan.commits:
            by_stream = defaultdict[int, list[Entry]](list)
            for row in commit.entries.rows():
                by_stream[row.stream_id].append(row)
            for entries in by_stream.values():
                for before, after in pairwise(entries):
                    assert before.end_offset <= after.start_offset


@pytest.mark.parametrize("seed", SEEDS)
def test_one_bad_source_does_not_keep_the_others_from_being_compacted(seed: int) -> None:
    """Those that share nothing with a source that is left out are planned as if it were not."""
    for rng in cases(seed):
        sources = random_sources(rng, gaps=0.0, largest=40)
        limits = CompactionLimits(memory_budget=400, split_size=100)
        bad = Entry(1_000, 10**6, 0, 5, 5, 0, 401)
        alone = plan_compaction(live_entries(sources.table, sources.starts), limits)
        table = EntryTable.concatenate([sources.table, EntryTable.of_rows([bad])])
        beside = plan_compaction(live_entries(table, sources.starts | {10**6: 0}), limits)
        assert [commit.source_ids for commit in beside.commits] == [
            commit.source_ids for commit in alone.commits
        ]
        assert 1_000 in {*beside.left_alone, *(left.object_id for left in beside.excluded)}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_that_of_a_second_planner(seed: int) -> None:
    for rng in cases(seed):
        entries = random_sources(rng, objects=6, streams=5, largest=9, gaps=0.2).entries
        bounds = CompactionLimits(*(rng.randint(*span) for span in ((9, 60), (0, 40), (1, 5))))
        limited = replace(bounds, max_stream_objects=rng.randint(1, 6))
        wanted = model_plan(entries, limited)
        cuts = sum(kind == "SPLIT" for outputs in wanted.iterations for kind, _ in outputs)
        if cuts > limited.max_stream_objects:  # the second planner counts none that the budget cuts
            limited = bounds
            wanted = model_plan(entries, limited)
        table = EntryTable.of_rows(entries)
        found = plan_compaction(table, limited)
        assert plan_rows(found) == wanted.iterations
        rounds: dict[int, list[int]] = {}
        for exclusion in found.excluded:
            rounds.setdefault(exclusion.round, []).append(exclusion.object_id)
        assert list(rounds.values()) == wanted.rounds
        assert encode_entries(table) == encode_index([IndexEntry(*row[1:]) for row in entries])


def test_a_second_planner_sees_the_limits_too() -> None:
    """The comparison above is of use only if both leave something out."""
    entries = placed([entry(o, s, 10 * o, 10 * o + 10) for o in range(4) for s in range(5)])
    assert model_plan(entries, CompactionLimits(100, 100, max_streams=2)).rounds
