"""Merged ranges cover what was asked for and stay within their limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.object_store.reads import MAX_SPAN, MergedRange, merge_ranges

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


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="byte range"):
        merge_ranges([(0, 1), (5, 5)])
