"""Plans for entries made by hand, force split included, each with what has to come of it."""

from __future__ import annotations

import pytest

from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.layout import plan_reads
from streammeta.storage.compaction.plan import (
    CompactionLimits,
    CompactionPlan,
    ExclusionReason,
    Iteration,
)
from streammeta.storage.compaction.planner import plan_compaction, plan_force_split
from tests.storage.compaction_model import entry, placed, plan_rows, three_objects

KIB = 1024
MIB = 1024 * KIB
UNLIMITED = 2**40


def plan(
    entries: list[Entry], memory_budget: int = UNLIMITED, split_size: int = 100, **limits: int
) -> CompactionPlan:
    table = EntryTable.of_rows(placed(entries))
    return plan_compaction(table, CompactionLimits(memory_budget, split_size, **limits))


def outputs(found: CompactionPlan) -> list[list[tuple[str, list[tuple[int, int, int]], int]]]:
    """Outputs by iteration: kind, ranges of streams, bytes."""
    return [
        [(kind, ranges(entries), sum(part.size for part in entries)) for kind, entries in iteration]
        for iteration in plan_rows(found)
    ]


def ranges(entries: list[Entry]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for piece in entries:
        if found and (found[-1][0], found[-1][2]) == (piece.stream_id, piece.start_offset):
            found[-1] = (piece.stream_id, found[-1][1], piece.end_offset)
        else:
            found.append((piece.stream_id, piece.start_offset, piece.end_offset))
    return found


def left_out(found: CompactionPlan) -> list[tuple[int, ExclusionReason]]:
    return [(exclusion.object_id, exclusion.reason) for exclusion in found.excluded]


def reads_in_units(found: CompactionPlan, unit: int) -> list[list[tuple[int, int, int]]]:
    """GETs of each iteration: object, first and last byte + 1, in units."""
    made = []
    for iteration in found.commits[0].iterations:
        reads = plan_reads(iteration, 16 * MIB)
        rows = zip(
            reads.object_id.tolist(), reads.position.tolist(), reads.size.tolist(), strict=True
        )
        made.append([(o, at // unit, (at + size) // unit) for o, at, size in rows])
    return made


def test_reads_of_the_three_objects_are_one_per_stretch_and_at_most_16_mib() -> None:
    small = plan(three_objects(64 * KIB), 150 * 64 * KIB, 80 * 64 * KIB)
    assert reads_in_units(small, 64 * KIB) == [
        [(0, 0, 50), (1, 0, 65), (2, 0, 35)],
        [(0, 50, 70), (2, 35, 140)],
    ]
    medium = plan(three_objects(512 * KIB), 150 * 512 * KIB, 80 * 512 * KIB)
    assert reads_in_units(medium, 512 * KIB) == [
        [(0, 0, 20), (0, 20, 50), (1, 0, 5), (1, 5, 37), (1, 37, 65), (2, 0, 32), (2, 32, 35)],
        [(0, 50, 70), (2, 35, 67), (2, 67, 99), (2, 99, 100), (2, 100, 132), (2, 132, 140)],
    ]
    large = plan(three_objects(MIB), 150 * MIB, 80 * MIB)
    assert [len(reads) for reads in reads_in_units(large, MIB)] == [12, 10]


def reads_of(entries: list[Entry], max_read_bytes: int) -> list[tuple[int, int, int]]:
    """GETs of an iteration: object, position, size."""
    reads = plan_reads(Iteration(EntryTable.of_rows(entries), ()), max_read_bytes)
    columns = (reads.object_id, reads.position, reads.size)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_entries_are_read_together_while_they_are_fewer_bytes_than_the_limit() -> None:
    entries = placed([entry(0, 0, 0, 10), entry(0, 0, 10, 20)])
    assert reads_of(entries, 21) == [(0, 0, 20)]
    assert reads_of(entries, 20) == [(0, 0, 10), (0, 10, 10)]
    assert reads_of(entries, 10) == [(0, 0, 10), (0, 10, 10)]
    assert reads_of(entries, 8) == [(0, 0, 8), (0, 8, 2), (0, 10, 8), (0, 18, 2)]


def test_an_object_that_shares_no_stream_is_left_alone() -> None:
    assert (plan([]).commits, plan([]).excluded, plan([]).left_alone) == ((), (), ())
    entries = [entry(0, 0, 0, 10), entry(1, 1, 0, 10), entry(2, 1, 10, 20)]
    found = plan(entries)
    assert outputs(found) == [[("COMPACT", [(1, 0, 20)], 20)]]
    assert found.left_alone == (0,)
    table = EntryTable.of_rows(placed(entries))
    together = plan_compaction(table, CompactionLimits(), sharing_only=False)
    assert outputs(together) == [[("COMPACT", [(0, 0, 10), (1, 0, 20)], 30)]]


def test_a_single_object_is_written_again_only_if_a_stream_leaves_it() -> None:
    table = EntryTable.of_rows(placed([entry(0, 0, 0, 10), entry(0, 1, 0, 30)]))
    kept = plan_compaction(table, CompactionLimits(split_size=30), sharing_only=False)
    assert (kept.commits, kept.left_alone) == ((), (0,))
    left = plan_compaction(table, CompactionLimits(split_size=29), sharing_only=False)
    assert outputs(left) == [[("SPLIT", [(1, 0, 30)], 30), ("COMPACT", [(0, 0, 10)], 10)]]


def test_objects_that_overlap_are_left_out_and_the_others_compacted() -> None:
    overlapping = [entry(0, 0, 0, 10), entry(1, 0, 5, 15)]
    assert plan(overlapping).commits == ()
    assert left_out(plan(overlapping)) == [
        (0, ExclusionReason.OVERLAP),
        (1, ExclusionReason.OVERLAP),
    ]
    others = [entry(2, 0, 15, 20), entry(3, 0, 20, 30), entry(0, 7, 0, 10), entry(2, 7, 10, 20)]
    found = plan(overlapping + others)
    assert found.commits[0].source_ids == (2, 3)
    assert [exclusion.object_id for exclusion in found.excluded] == [0, 1]
    assert "stream 0 [0, 10) of object 0 overlaps" in found.excluded[0].detail


def test_a_long_entry_overlaps_all_that_lie_in_it() -> None:
    entries = [
        *(entry(0, 3, 0, 100), entry(1, 3, 10, 20), entry(2, 3, 20, 30), entry(3, 3, 30, 40)),
        *(entry(4, 3, 100, 110), entry(5, 3, 110, 120)),
    ]
    found = plan(entries)
    assert [exclusion.object_id for exclusion in found.excluded] == [0, 1, 2, 3]
    assert found.commits[0].source_ids == (4, 5)


def test_an_object_with_an_entry_over_the_budget_is_left_out_and_says_so() -> None:
    entries = [
        *(entry(0, 0, 0, 10), entry(0, 1, 0, 101), entry(1, 0, 10, 20)),
        *(entry(2, 0, 20, 30), entry(2, 1, 101, 201)),
    ]
    found = plan(entries, 100)
    assert found.commits[0].source_ids == (1, 2)
    assert left_out(found) == [(0, ExclusionReason.OVERSIZED_ENTRY)]
    assert "101 bytes, over the memory budget of 100" in found.excluded[0].detail
    assert plan(entries, 101).excluded == ()


def test_stream_objects_and_streams_of_a_commit_are_limited_together() -> None:
    small = [entry(o, s, 2 * o, 2 * o + 2) for o in range(2) for s in range(4)]
    large = [entry(o, 9, 100 * o, 100 * o + 100) for o in (2, 3)]
    assert plan(small + large, max_rows=5).excluded == ()
    found = plan(small + large, max_rows=4)
    assert left_out(found) == [
        (0, ExclusionReason.TOO_MANY_ROWS),
        (1, ExclusionReason.TOO_MANY_ROWS),
    ]
    assert found.commits[0].source_ids == (2, 3)


def test_where_all_objects_take_part_a_broken_limit_makes_several_commits() -> None:
    entries = placed([entry(o, s, 10 * o, 10 * o + 10) for o in range(5) for s in (o, o + 1)])
    limits = CompactionLimits(split_size=100, max_streams=4)
    found = plan_compaction(EntryTable.of_rows(entries), limits, sharing_only=False)
    assert [commit.source_ids for commit in found.commits] == [(0, 1), (2, 3, 4)]
    assert (found.excluded, found.left_alone) == ((), ())
    alone = CompactionLimits(split_size=5, max_stream_objects=1)
    found = plan_compaction(EntryTable.of_rows(entries), alone, sharing_only=False)
    assert found.commits == ()
    assert left_out(found) == [(o, ExclusionReason.TOO_MANY_STREAM_OBJECTS) for o in range(5)]


def test_sources_are_parted_in_the_order_in_which_they_are_given() -> None:
    """A merged object has a larger id than objects whose offsets come behind its own."""
    order = [90, 4, 70, 5, 6]
    ranges = [entry(o, s, 10 * at, 10 * at + 10) for at, o in enumerate(order) for s in (0, 1)]
    table = EntryTable.of_rows(ranges).place()
    halved = plan_compaction(
        table, CompactionLimits(20, 10, max_stream_objects=3), sharing_only=False
    )
    assert [commit.source_ids for commit in halved.commits] == [(4, 90), (5, 6)]
    assert halved.left_alone == (70,)


@pytest.mark.parametrize(
    "limits", [{"memory_budget": 0}, {"split_size": -1}, {"max_streams": 0}, {"max_rows": 0}]
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, int]) -> None:
    (name,) = limits
    with pytest.raises(ValueError, match=f"{name} is"):
        CompactionLimits(**limits)


Outputs = list[list[tuple[str, list[tuple[int, int, int]]]]]


def split(entries: list[Entry], budget: int = 1000, size: int = 0, **limits: int) -> CompactionPlan:
    table = EntryTable.of_rows(placed(entries))
    return plan_force_split(table, CompactionLimits(budget, size, **limits))


def entries_of_outputs(found: CompactionPlan) -> Outputs:
    return [
        [(kind, [(e.stream_id, e.start_offset, e.end_offset) for e in rows]) for kind, rows in row]
        for row in plan_rows(found)
    ]


def kinds(found: CompactionPlan) -> list[str]:
    return [kind for iteration in entries_of_outputs(found) for kind, _ in iteration]


ONE_OBJECT = [
    *(entry(7, 0, 0, 20), entry(7, 1, 25, 30), entry(7, 1, 30, 60), entry(7, 1, 90, 95)),
    entry(7, 2, 5, 6),
]


def test_every_contiguous_range_becomes_a_stream_object() -> None:
    found = split(ONE_OBJECT)
    assert entries_of_outputs(found) == [
        [
            *(("SPLIT", [(0, 0, 20)]), ("SPLIT", [(1, 25, 30), (1, 30, 60)])),
            *(("SPLIT", [(1, 90, 95)]), ("SPLIT", [(2, 5, 6)])),
        ]
    ]
    assert found.commits[0].source_ids == (7,)


def test_dead_bytes_between_ranges_count_toward_the_stretch_that_is_read() -> None:
    rows = placed([entry(0, 0, 0, 10), entry(0, 1, 0, 70), entry(0, 2, 0, 10), entry(0, 3, 0, 10)])
    live = EntryTable.of_rows(row for row in rows if row.stream_id != 1)
    found = plan_force_split(live, CompactionLimits(89, 0))
    assert [len(iteration) for iteration in entries_of_outputs(found)] == [1, 2]


def test_a_range_over_the_budget_is_cut() -> None:
    entries = [entry(0, 0, 0, 5), *(entry(0, 1, at, at + 10) for at in range(0, 50, 10))]
    found = split([*entries, entry(0, 2, 0, 5)], 25)
    assert entries_of_outputs(found) == [
        [("SPLIT", [(0, 0, 5)])],
        [("SPLIT", [(1, 0, 10), (1, 10, 20)])],
        [("SPLIT", [(1, 20, 30), (1, 30, 40)])],
        [("SPLIT", [(1, 40, 50)]), ("SPLIT", [(2, 0, 5)])],
    ]


def test_an_entry_over_the_budget_excludes_its_object_alone() -> None:
    found = split([entry(0, 0, 0, 26), entry(1, 0, 26, 30)], 25)
    assert [(exclusion.object_id, exclusion.reason) for exclusion in found.excluded] == [
        (0, ExclusionReason.OVERSIZED_ENTRY)
    ]
    assert [commit.source_ids for commit in found.commits] == [(1,)]


def test_beyond_the_limit_the_smallest_ranges_stay_together() -> None:
    entries = [entry(0, stream, 0, 10 + stream % 5) for stream in range(10)]
    found = split(entries, max_stream_objects=4)
    (iteration,) = entries_of_outputs(found)
    assert iteration[-1] == ("COMPACT", [(s, 0, 10 + s % 5) for s in (0, 1, 2, 5, 6, 7)])
    assert [kind for kind, _ in iteration[:-1]] == ["SPLIT"] * 4


def test_of_a_stream_with_a_gap_one_range_may_stay() -> None:
    entries = [entry(0, 0, 0, 2), entry(0, 0, 10, 11), entry(0, 0, 20, 23), entry(0, 1, 0, 50)]
    assert entries_of_outputs(split(entries, size=100)) == [
        [
            *(("SPLIT", [(0, 0, 2)]), ("SPLIT", [(0, 20, 23)])),
            ("COMPACT", [(0, 10, 11), (1, 0, 50)]),
        ]
    ]


def test_ranges_of_up_to_the_split_size_stay_and_an_object_of_such_is_left_alone() -> None:
    entries = [entry(0, 0, 0, 10), entry(0, 1, 0, 11)]
    assert kinds(split(entries, size=10)) == ["SPLIT", "COMPACT"]
    found = split(entries, size=11)
    assert (found.commits, found.left_alone) == ((), (0,))


def test_objects_that_break_a_limit_together_are_split_in_several_commits() -> None:
    entries = [entry(o, s, 0, 10) for o in range(5) for s in (2 * o, 2 * o + 1)]
    found = split(entries, max_rows=4)
    assert [commit.source_ids for commit in found.commits] == [(0, 1), (2,), (3, 4)]
    assert found.excluded == ()


def test_cuts_that_make_more_stream_objects_than_allowed_exclude_the_object() -> None:
    gaps = [entry(0, 0, 20 * at, 20 * at + 10) for at in range(3)]
    found = split(gaps, max_stream_objects=1)
    assert [left.reason for left in found.excluded] == [ExclusionReason.TOO_MANY_STREAM_OBJECTS]
    assert kinds(split(gaps, max_stream_objects=2)) == ["SPLIT", "SPLIT", "COMPACT"]
