"""Force split: every range leaves, and what happens when the limits don't allow it."""

from __future__ import annotations

import pytest

from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.plan import CompactionLimits, CompactionPlan, ExclusionReason
from streammeta.storage.compaction.planner import plan_force_split
from tests.storage.compaction_model import entry, placed, plan_rows

Outputs = list[list[tuple[str, list[tuple[int, int, int]]]]]


def split(entries: list[Entry], budget: int = 1000, size: int = 0, **limits: int) -> CompactionPlan:
    table = EntryTable.of_rows(placed(entries))
    return plan_force_split(table, CompactionLimits(budget, size, **limits))


def outputs(found: CompactionPlan) -> Outputs:
    """Entries of the outputs, by iteration."""
    return [
        [(kind, [(e.stream_id, e.start_offset, e.end_offset) for e in rows]) for kind, rows in one]
        for one in plan_rows(found)
    ]


def kinds(found: CompactionPlan) -> list[str]:
    return [kind for iteration in outputs(found) for kind, _ in iteration]


ONE_OBJECT = [
    *(entry(7, 0, 0, 20), entry(7, 1, 25, 30), entry(7, 1, 30, 60), entry(7, 1, 90, 95)),
    entry(7, 2, 5, 6),
]


def test_every_contiguous_range_becomes_a_stream_object() -> None:
    found = split(ONE_OBJECT)
    assert outputs(found) == [
        [
            *(("SPLIT", [(0, 0, 20)]), ("SPLIT", [(1, 25, 30), (1, 30, 60)])),
            *(("SPLIT", [(1, 90, 95)]), ("SPLIT", [(2, 5, 6)])),
        ]
    ]
    assert found.commits[0].source_ids == (7,)


def test_iterations_take_whole_ranges_while_they_fit() -> None:
    found = split(ONE_OBJECT, 40)
    assert [len(iteration) for iteration in outputs(found)] == [1, 2, 1]
    assert kinds(found) == ["SPLIT"] * 4


def test_dead_bytes_between_ranges_count_toward_the_stretch_that_is_read() -> None:
    rows = placed([entry(0, 0, 0, 10), entry(0, 1, 0, 70), entry(0, 2, 0, 10), entry(0, 3, 0, 10)])
    live = EntryTable.of_rows(one for one in rows if one.stream_id != 1)
    found = plan_force_split(live, CompactionLimits(89, 0))
    assert [len(iteration) for iteration in outputs(found)] == [1, 2]


def test_a_range_over_the_budget_is_cut() -> None:
    entries = [entry(0, 0, 0, 5), *(entry(0, 1, at, at + 10) for at in range(0, 50, 10))]
    found = split([*entries, entry(0, 2, 0, 5)], 25)
    assert outputs(found) == [
        [("SPLIT", [(0, 0, 5)])],
        [("SPLIT", [(1, 0, 10), (1, 10, 20)])],
        [("SPLIT", [(1, 20, 30), (1, 30, 40)])],
        [("SPLIT", [(1, 40, 50)]), ("SPLIT", [(2, 0, 5)])],
    ]


def test_an_entry_over_the_budget_excludes_its_object_alone() -> None:
    found = split([entry(0, 0, 0, 26), entry(1, 0, 26, 30)], 25)
    assert [(one.object_id, one.reason) for one in found.excluded] == [
        (0, ExclusionReason.OVERSIZED_ENTRY)
    ]
    assert [commit.source_ids for commit in found.commits] == [(1,)]


def test_beyond_the_limit_the_smallest_ranges_stay_together() -> None:
    entries = [entry(0, stream, 0, 10 + stream % 5) for stream in range(10)]
    found = split(entries, max_stream_objects=4)
    (iteration,) = outputs(found)
    assert iteration[-1] == ("COMPACT", [(s, 0, 10 + s % 5) for s in (0, 1, 2, 5, 6, 7)])
    assert [kind for kind, _ in iteration[:-1]] == ["SPLIT"] * 4


def test_of_a_stream_with_a_gap_one_range_may_stay() -> None:
    entries = [entry(0, 0, 0, 2), entry(0, 0, 10, 11), entry(0, 0, 20, 23), entry(0, 1, 0, 50)]
    assert outputs(split(entries, size=100)) == [
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


def test_several_objects_are_split_together() -> None:
    entries = [entry(o, s, 10 * o, 10 * o + 10) for o in range(3) for s in range(2)]
    found = split(entries)
    assert outputs(found) == [
        [("SPLIT", [(s, at, at + 10) for at in (0, 10, 20)]) for s in range(2)]
    ]
    assert found.commits[0].source_ids == (0, 1, 2)


def test_objects_that_break_a_limit_together_are_split_in_several_commits() -> None:
    entries = [entry(o, s, 0, 10) for o in range(5) for s in (2 * o, 2 * o + 1)]
    found = split(entries, max_rows=4)
    assert [commit.source_ids for commit in found.commits] == [(0, 1), (2,), (3, 4)]
    assert found.excluded == ()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_stream_objects": 1, "max_streams": 1}, ExclusionReason.TOO_MANY_STREAMS),
        ({"max_rows": 2}, ExclusionReason.TOO_MANY_ROWS),
    ],
)
def test_an_object_that_breaks_a_limit_alone_is_excluded(
    limits: dict[str, int], reason: ExclusionReason
) -> None:
    found = split([entry(4, s, 0, 10) for s in range(3)], **limits)
    assert [(one.object_id, one.reason) for one in found.excluded] == [(4, reason)]
    assert found.commits == ()


def test_cuts_that_make_more_stream_objects_than_allowed_exclude_the_object() -> None:
    gaps = [entry(0, 0, 20 * at, 20 * at + 10) for at in range(3)]
    found = split(gaps, max_stream_objects=1)
    assert [one.reason for one in found.excluded] == [ExclusionReason.TOO_MANY_STREAM_OBJECTS]
    assert kinds(split(gaps, max_stream_objects=2)) == ["SPLIT", "SPLIT", "COMPACT"]
