"""Merged reads give what single reads give, and stay within their limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.errors import RangeNotSatisfiableError
from streammeta.storage.object_store.memory import MemoryObjectStore
from streammeta.storage.object_store.range_merge import (
    MAX_SPAN,
    MergedRange,
    cut_merged,
    get_ranges,
    merge_ranges,
)

RANGES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 80)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=30,
)


@settings(max_examples=200, derandomize=True)
@given(RANGES, st.integers(1, 200), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_every_range_is_read_once_and_groups_keep_their_limits(
    ranges: list[tuple[int, int]], max_span: int, max_unused: float
) -> None:
    groups = merge_ranges(ranges, max_span=max_span, max_unused=max_unused)
    assert sorted(index for group in groups for index in group.members) == list(range(len(ranges)))
    assert [group.start for group in groups] == sorted(group.start for group in groups)
    for group in groups:
        members = [ranges[index] for index in group.members]
        assert (group.start, group.end) == (
            min(start for start, _ in members),
            max(end for _, end in members),
        )
        span = group.end - group.start
        wanted = {byte for start, end in members for byte in range(start, end)}
        assert len(members) == 1 or span <= max_span
        assert span - len(wanted) <= max_unused * span


@settings(max_examples=100, derandomize=True)
@given(RANGES)
def test_what_is_cut_back_is_what_single_reads_give(ranges: list[tuple[int, int]]) -> None:
    store = MemoryObjectStore()
    store.put("key", bytes(byte % 251 for byte in range(400)))
    if any(start >= 400 for start, _ in ranges):
        with pytest.raises(RangeNotSatisfiableError):
            get_ranges(store, "key", ranges)
    else:
        wanted = [store.get_range("key", start, end) for start, end in ranges]
        assert get_ranges(store, "key", ranges) == wanted


def test_neighbours_are_read_together_up_to_four_mebibytes() -> None:
    mebibyte = 1024 * 1024
    blocks = [(i * mebibyte, (i + 1) * mebibyte) for i in range(6)]
    assert merge_ranges(blocks) == [
        MergedRange(0, 4 * mebibyte, (0, 1, 2, 3)),
        MergedRange(4 * mebibyte, 6 * mebibyte, (4, 5)),
    ]
    assert merge_ranges([(0, MAX_SPAN + 1)]) == [MergedRange(0, MAX_SPAN + 1, (0,))]


def test_half_may_be_unused_but_not_more() -> None:
    assert len(merge_ranges([(0, 50), (150, 200)])) == 1
    assert len(merge_ranges([(0, 50), (151, 201)])) == 2


def test_a_range_behind_the_end_is_named() -> None:
    merged = MergedRange(10, 40, (0, 1))
    with pytest.raises(RangeNotSatisfiableError, match="ends at or before byte 30"):
        cut_merged(merged, [(10, 20), (30, 40)], b"x" * 20, "key")
    with pytest.raises(ValueError, match="byte range"):
        merge_ranges([(0, 1), (5, 5)])
