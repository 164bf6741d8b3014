"""Tables of index entries: what is live, how they are joined, and what the last check refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.compaction.entries import (
    Entry,
    EntryTable,
    MergeRule,
    contiguous_runs,
    encode_entries,
    live_entries,
    merge_entries,
    objects_without_entries,
    sort_by_stream,
    stream_ranges,
)
from streammeta.storage.compaction.layout import plan_reads
from streammeta.storage.compaction.plan import Iteration
from streammeta.storage.compaction.verification import CoverageError, check_coverage
from streammeta.storage.object_format.index_block import IndexEntry, StreamRange, decode_index
from streammeta.storage.object_format.record import INT32_MAX
from tests.storage.compaction_model import entry, placed
from tests.storage.format_objects import small_object

KIB = 1024


def test_a_table_of_an_index_has_its_rows_and_encodes_to_its_bytes() -> None:
    built = small_object()
    index = decode_index(memoryview(encoded_of(built.data)), data_size=None)
    table = EntryTable.of_index(9, index)
    assert [IndexEntry(*row[1:]) for row in table.rows()] == list(built.entries)
    assert table.object_ids() == (9,)
    assert encode_entries(table) == encoded_of(built.data)


def encoded_of(data: bytes) -> bytes:
    start = int.from_bytes(data[-48:-40], "big")
    return data[start:-48]


def test_live_is_what_ends_behind_the_start_of_a_stream_that_exists() -> None:
    rows = [
        *(entry(0, 1, 0, 10), entry(0, 1, 10, 20), entry(0, 1, 20, 30)),
        *(entry(0, 2, 0, 5), entry(0, 5, 0, 5), entry(1, 9, 0, 5)),
    ]
    table = EntryTable.of_rows(rows)
    live = live_entries(table, {5: 4, 1: 10, 9: 5})
    assert list(live.rows()) == [rows[1], rows[2], rows[4]]
    assert objects_without_entries((1, 0, 7), live) == (1, 7)
    assert len(live_entries(table, {})) == 0
    assert list(live_entries(table, dict.fromkeys((1, 2, 5, 9), 0)).rows()) == rows


def test_runs_are_of_one_stream_and_touch() -> None:
    table = EntryTable.of_rows(
        [entry(1, 0, 0, 20), entry(0, 0, 20, 25), entry(2, 2, 25, 30), entry(2, 2, 31, 40)]
    )
    assert contiguous_runs(table).tolist() == [0, 2, 3]
    ranges = [StreamRange(0, 0, 25), StreamRange(2, 25, 30), StreamRange(2, 31, 40)]
    assert stream_ranges(table) == ranges
    assert stream_ranges(table.span(0, 0)) == []


def test_rows_are_sorted_by_stream_offset_and_object() -> None:
    rows = [entry(2, 1, 0, 9), entry(1, 1, 0, 9), entry(3, 0, 5, 9), entry(3, 1, 9, 10)]
    found = list(sort_by_stream(EntryTable.of_rows(rows)).rows())
    assert found == [rows[2], rows[1], rows[0], rows[3]]


@pytest.mark.parametrize("field", ["end_offset", "record_count", "size"])
def test_a_number_that_does_not_fit_an_index_is_refused(field: str) -> None:
    row = Entry(0, 1, 0, 2**31 - 1, 2**31 - 1, 0, 2**31 - 1)
    assert len(encode_entries(EntryTable.of_rows([row]))) == 36
    with pytest.raises(ValueError, match=r"0\.\.2147483647"):
        encode_entries(EntryTable.of_rows([row._replace(**{field: 2**31})]))


@pytest.mark.parametrize(
    ("size", "rule", "joined"),
    [
        (400_000, MergeRule.BELOW, [800_000] * 3),
        (512 * KIB, MergeRule.BELOW, [512 * KIB] * 6),
        (512 * KIB, MergeRule.UP_TO, [1024 * KIB] * 3),
        (1024 * KIB, MergeRule.UP_TO, [1024 * KIB] * 6),
        (3000 * KIB, MergeRule.UP_TO, [3000 * KIB] * 6),
    ],
)
def test_entries_are_joined_up_to_one_mib(size: int, rule: MergeRule, joined: list[int]) -> None:
    table = EntryTable.of_rows(entry(0, 4, at, at + 1, size) for at in range(6)).place()
    found = list(merge_entries(table, 1024 * KIB, rule).rows())
    assert [row.size for row in found] == joined
    assert [row.position for row in found] == [sum(joined[:at]) for at in range(len(joined))]
    assert sum(row.record_count for row in found) == 6


@pytest.mark.parametrize(
    ("span", "records", "entries"),
    [(2**30, 1, 2), (2**30 - 1, 1, 1), (1, 2**30, 2), (2**30 - 1, 2**30 - 1, 1)],
)
def test_joined_entries_fit_their_32_bit_fields(span: int, records: int, entries: int) -> None:
    rows = [Entry(0, 1, at * span, (at + 1) * span, records, -1, 10) for at in range(2)]
    found = merge_entries(EntryTable.of_rows(rows).place(), 1024, MergeRule.BELOW)
    assert len(found) == entries
    encode_entries(found)


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
    table = EntryTable.of_rows(entries).place(100)
    assert list(merge_entries(table, threshold, rule).rows()) == joined(
        list(table.rows()), threshold, rule
    )


def joined(rows: list[Entry], threshold: int, rule: MergeRule) -> list[Entry]:
    found: list[Entry] = []
    for row in rows:
        last = found[-1] if found else None
        if last and (last.stream_id, last.end_offset) == (row.stream_id, row.start_offset):
            both = Entry(
                *(last.object_id, last.stream_id, last.start_offset, row.end_offset),
                *(last.record_count + row.record_count, last.position, last.size + row.size),
            )
            fits = both.size < threshold or (both.size == threshold and rule is MergeRule.UP_TO)
            if fits and max(both.end_offset - both.start_offset, both.record_count) <= INT32_MAX:
                found[-1] = both
                continue
        found.append(row)
    return found


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold"):
        merge_entries(EntryTable.of_rows([]), 0, MergeRule.BELOW)
    with pytest.raises(ValueError, match="max_read_bytes is 0"):
        plan_reads(Iteration(EntryTable.of_rows([]), ()), 0)


SOURCES = placed(
    [
        *(entry(0, 1, 0, 10), entry(0, 1, 10, 20), entry(0, 2, 5, 9)),
        *(entry(1, 1, 20, 30), entry(1, 2, 20, 21)),
    ]
)
WHOLE = Entry(7, 1, 0, 30, 3, 0, 30)
FIRST, SECOND = Entry(8, 2, 5, 9, 1, 0, 4), Entry(9, 2, 20, 21, 1, 30, 1)


def test_outputs_may_join_and_cut_entries_as_they_like() -> None:
    sources = EntryTable.of_rows(SOURCES)
    check_coverage(sources, EntryTable.of_rows([SECOND, WHOLE, FIRST]))
    cut = [Entry(7, 1, 0, 10, 1, 0, 10), Entry(6, 1, 10, 30, 2, 0, 20)]
    check_coverage(sources, EntryTable.of_rows([*cut, FIRST, SECOND]))
    check_coverage(EntryTable.of_rows([]), EntryTable.of_rows([]))


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ([WHOLE, FIRST], "outputs contain nothing more, expected stream 2 [20, 21) of 1 records"),
        (
            [FIRST, SECOND],
            "stream 2 [5, 9) of 1 records and 4 bytes, expected stream 1",
        ),
        ([WHOLE, FIRST, SECOND, SECOND], "outputs overlap: stream 2 [20, 21) in object 9"),
        ([WHOLE._replace(end_offset=31), FIRST, SECOND], "outputs contain stream 1 [0, 31)"),
        ([WHOLE._replace(start_offset=1), FIRST, SECOND], "outputs contain stream 1 [1, 30)"),
        ([WHOLE._replace(record_count=2), FIRST, SECOND], "of 2 records and 30 bytes, expected"),
        ([WHOLE._replace(size=29), FIRST, SECOND], "of 3 records and 29 bytes, expected"),
        (
            [WHOLE, FIRST, SECOND, Entry(9, 3, 0, 1, 1, 0, 1)],
            "contain stream 3 [0, 1) of 1",
        ),
        ([], "outputs contain nothing more, expected stream 1 [0, 30) of 3 records and 30 bytes"),
    ],
)
def test_outputs_that_lose_or_add_anything_are_refused(outputs: list[Entry], problem: str) -> None:
    with pytest.raises(CoverageError) as caught:
        check_coverage(EntryTable.of_rows(SOURCES), EntryTable.of_rows(outputs))
    assert problem in str(caught.value)
    assert "Nothing was committed" in str(caught.value)
