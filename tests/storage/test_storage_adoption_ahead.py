"""Entries are ahead of a map if they end beyond the end offsets of its streams."""

import pytest

from streammeta.storage.adoption.ahead import entries_ahead
from streammeta.storage.object_format.index_block import IndexEntry


def entry(stream_id: int, start: int, end: int) -> IndexEntry:
    return IndexEntry(stream_id, start, end, record_count=1, position=0, size=100)


@pytest.mark.parametrize(
    ("end", "is_ahead"),
    [(0, True), (4, True), (5, True), (7, True), (9, True), (10, False), (11, False)],
)
def test_an_entry_is_ahead_until_its_stream_has_reached_its_end(end: int, is_ahead: bool) -> None:
    spans = entry(1, 5, 10)
    assert entries_ahead([spans], {1: end}) == ((spans,) if is_ahead else ())


def test_a_deleted_stream_has_no_entry_ahead_and_a_stream_to_come_has_all() -> None:
    of_deleted, of_later = entry(1, 0, 10), entry(7, 0, 1)
    assert entries_ahead([of_deleted, of_later], {7: 0}) == (of_later,)


def test_only_the_entries_ahead_are_returned_in_their_order() -> None:
    entries = [entry(1, 0, 5), entry(1, 5, 9), entry(2, 0, 3), entry(3, 8, 9)]
    assert entries_ahead(entries, {1: 5, 2: 3, 3: 0}) == (entries[1], entries[3])
