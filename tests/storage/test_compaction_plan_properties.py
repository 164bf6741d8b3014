"""Plans for entries drawn at random: what holds for all of them, and that two planners agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.compaction.entries import (
    Entry,
    EntryTable,
    MergeRule,
    encode_entries,
    merged_index,
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
from streammeta.storage.compaction.verification import check_coverage
from streammeta.storage.object_format.index_block import IndexEntry, encode_index
from streammeta.storage.object_format.record import INT32_MAX
from tests.storage.compaction_model import entry, model_plan, placed, plan_rows, sources

BUDGETS = st.integers(9, 60)
"""From the largest entry there is."""

limits = st.builds(
    CompactionLimits,
    memory_budget=BUDGETS,
    split_size=st.integers(0, 40),
    max_streams=st.integers(1, 6),
    max_stream_objects=st.integers(1, 8),
    max_rows=st.integers(1, 10),
)


@settings(max_examples=40)
@given(sources(), BUDGETS, st.integers(0, 40), st.integers(1, 5), st.integers(1, 6))
def test_the_plan_is_that_of_a_second_planner(
    entries: list[Entry], budget: int, split_size: int, max_streams: int, max_splits: int
) -> None:
    bounds = CompactionLimits(budget, split_size, max_streams, max_splits)
    wanted = model_plan(entries, bounds)
    cuts = sum(kind == "SPLIT" for outputs in wanted.iterations for kind, _ in outputs)
    found = plan_compaction(EntryTable.of_rows(entries), bounds)
    if cuts > max_splits:  # the second planner does not count what the budget cuts
        bounds = CompactionLimits(budget, split_size, max_streams)
        wanted = model_plan(entries, bounds)
        found = plan_compaction(EntryTable.of_rows(entries), bounds)
    assert plan_rows(found) == wanted.iterations
    rounds: dict[int, list[int]] = {}
    for one in found.excluded:
        rounds.setdefault(one.round, []).append(one.object_id)
    assert list(rounds.values()) == wanted.rounds


@pytest.mark.parametrize(
    "plan", [plan_compaction, partial(plan_compaction, sharing_only=False), plan_force_split]
)
@settings(max_examples=30)
@given(sources(), limits)
def test_commits_hold_all_of_their_sources_within_the_limits(
    plan: Callable[[EntryTable, CompactionLimits], CompactionPlan],
    entries: list[Entry],
    bounds: CompactionLimits,
) -> None:
    found = plan(EntryTable.of_rows(entries), bounds)
    ids = [each for commit in found.commits for each in commit.source_ids]
    ids += [one.object_id for one in found.excluded]
    assert sorted([*ids, *found.left_alone]) == sorted({one.object_id for one in entries})
    for commit in found.commits:
        check_commit(entries, commit, bounds)


def check_commit(entries: list[Entry], commit: CommitPlan, bounds: CompactionLimits) -> None:
    wanted = [one for one in entries if one.object_id in commit.source_ids]
    outputs = [(output.kind, output) for one in commit.iterations for output in one.outputs]
    written = [row for _, output in outputs for row in output.entries.rows()]
    assert Counter(written) == Counter(wanted)
    splits = [output for kind, output in outputs if kind is OutputKind.SPLIT]
    kept = [row for kind, output in outputs if kind is OutputKind.COMPACT
            for row in output.entries.rows()]  # fmt: skip
    streams = {row.stream_id for row in kept}
    assert len(splits) <= bounds.max_stream_objects
    assert len(streams) <= bounds.max_streams
    assert len(splits) + len(streams) <= bounds.max_rows
    for one, other in pairwise(kept):
        assert (one.stream_id, one.end_offset) == (other.stream_id, other.start_offset) or (
            one.stream_id < other.stream_id
        )
    for output in splits:
        rows = list(output.entries.rows())
        assert all(
            (one.stream_id, one.end_offset) == (other.stream_id, other.start_offset)
            for one, other in pairwise(rows)
        )
    for iteration in commit.iterations:
        assert 0 < iteration.data_size <= bounds.memory_budget
    check_coverage(EntryTable.of_rows(wanted), EntryTable.concatenate(
        [output.entries for _, output in outputs]))  # fmt: skip


@settings(max_examples=40)
@given(sources(), BUDGETS, st.integers(1, 20))
def test_reads_bring_exactly_the_bytes_of_the_entries(
    entries: list[Entry], budget: int, longest: int
) -> None:
    bounds = CompactionLimits(budget, split_size=10)
    found = plan_compaction(EntryTable.of_rows(entries), bounds, sharing_only=False)
    for iteration in (one for commit in found.commits for one in commit.iterations):
        check_reads(iteration, longest)


def check_reads(iteration: Iteration, longest: int) -> None:
    reads = plan_reads(iteration, longest)
    columns = (reads.object_id, reads.position, reads.size, reads.buffer_start)
    at = 0
    fetched: list[tuple[int, int]] = []
    for object_id, position, size, start in zip(*(c.tolist() for c in columns), strict=True):
        assert start == at
        assert 0 < size <= longest
        fetched += [(object_id, position + byte) for byte in range(size)]
        at += size
    wanted = [
        (one.object_id, one.position + byte)
        for one in iteration.entries.rows()
        for byte in range(one.size)
    ]
    assert sorted(fetched) == sorted(wanted)
    assert len(set(fetched)) == len(fetched)
    for one, start in zip(iteration.entries.rows(), reads.entry_buffer_start.tolist(), strict=True):
        place = [(one.object_id, one.position + byte) for byte in range(one.size)]
        assert fetched[start : start + one.size] == place
    ends = [*zip(reads.object_id.tolist(), (reads.position + reads.size).tolist(), strict=True)]
    for number in range(len(reads) - 1):
        is_adjacent = ends[number] == (reads.object_id[number + 1], reads.position[number + 1])
        together = reads.size[number] + reads.size[number + 1]
        assert (
            not is_adjacent
            or together >= longest
            or any(one.size >= longest for one in iteration.entries.rows())
        )


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(1, INT32_MAX) | st.integers(1, 5),
            st.integers(1, INT32_MAX) | st.integers(1, 5),
            st.integers(1, 40),
        )
    ),
    st.integers(1, 100),
    st.sampled_from(MergeRule),
)
def test_joined_entries_are_as_large_as_the_rule_allows(
    rows: list[tuple[bool, int, int, int]], threshold: int, rule: MergeRule
) -> None:
    at, stream, entries = 0, 0, []
    for continues, span, records, size in rows:
        if not continues:
            stream, at = stream + 1, 7
        entries.append(Entry(0, stream, at, at + span, records, -1, size))
        at += span
    table = EntryTable.of_rows(entries).placed(100)
    assert list(merged_index(table, threshold, rule).rows()) == joined(
        list(table.rows()), threshold, rule
    )


def joined(rows: list[Entry], threshold: int, rule: MergeRule) -> list[Entry]:
    found: list[Entry] = []
    for one in rows:
        last = found[-1] if found else None
        if last and (last.stream_id, last.end_offset) == (one.stream_id, one.start_offset):
            both = Entry(
                *(last.object_id, last.stream_id, last.start_offset, one.end_offset),
                *(last.record_count + one.record_count, last.position, last.size + one.size),
            )
            fits = both.size < threshold or (both.size == threshold and rule is MergeRule.UP_TO)
            if fits and max(both.end_offset - both.start_offset, both.record_count) <= INT32_MAX:
                found[-1] = both
                continue
        found.append(one)
    return found


@settings(max_examples=20)
@given(sources())
def test_encoded_entries_are_those_of_the_format(entries: list[Entry]) -> None:
    rows = placed(entries)
    wanted = encode_index([IndexEntry(*one[1:]) for one in rows])
    assert encode_entries(EntryTable.of_rows(rows)) == wanted


def test_a_second_planner_sees_the_limits_too() -> None:
    """The comparison above is of use only if both leave something out."""
    entries = placed([entry(o, s, 10 * o, 10 * o + 10) for o in range(4) for s in range(5)])
    assert model_plan(entries, CompactionLimits(100, 100, max_streams=2)).rounds
