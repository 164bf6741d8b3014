"""Plans and joined entries drawn at random are those of a second, slow implementation.

What holds for all plans is in `tests/compaction/test_compaction_planner_laws.py`.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.compaction.entries import (
    Entry,
    EntryTable,
    MergeRule,
    encode_entries,
    merged_index,
)
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.compaction.planner import plan_compaction
from streammeta.storage.object_format.index_block import IndexEntry, encode_index
from streammeta.storage.object_format.record import INT32_MAX
from tests.storage.compaction_model import entry, model_plan, placed, plan_rows, sources


@settings(max_examples=40)
@given(sources(), st.integers(9, 60), st.integers(0, 40), st.integers(1, 5), st.integers(1, 6))
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
