"""Search in an index finds what a walk through all entries finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.storage.object_format.index_block import (
    IndexBlock,
    IndexEntry,
    decode_index,
    encode_index,
)

NO_ENTRY = -1


def index_of(entries: list[IndexEntry]) -> IndexBlock:
    return decode_index(
        memoryview(encode_index(entries)), data_size=sum(entry.size for entry in entries)
    )


def walk(entries: list[IndexEntry], stream_id: int, offset: int) -> int:
    for ordinal, entry in enumerate(entries):
        if entry.stream_id == stream_id and entry.start_offset <= offset < entry.end_offset:
            return ordinal
    return NO_ENTRY


@st.composite
def indexes(draw: st.DrawFn) -> list[IndexEntry]:
    entries: list[IndexEntry] = []
    position = 0
    for stream_id in sorted(draw(st.sets(st.integers(0, 6), max_size=5))):
        offset = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(1, 6))):
            offset += draw(st.sampled_from([0, 0, 1, 3]))
            span = draw(st.integers(1, 4))
            entries.append(IndexEntry(stream_id, offset, offset + span, 1, position, 50))
            offset, position = offset + span, position + 50
    return entries


@given(indexes(), st.integers(0, 7), st.integers(0, 40), st.integers(-1, 45), st.integers(0, 60))
def test_what_is_found_from_an_offset_on_is_one_run_that_ends_for_a_reason(
    entries: list[IndexEntry], stream_id: int, start: int, end: int, max_bytes: int
) -> None:
    found = index_of(entries).find(stream_id, start, end, max_bytes)
    first = walk(entries, stream_id, start)
    if first == NO_ENTRY:
        assert (found.entries, found.next_offset, found.fulfilled) == ((), start, False)
        return
    assert found.first_ordinal == first
    assert list(found.entries) == entries[first : first + len(found.entries)]
    assert found.next_offset == found.entries[-1].end_offset
    is_partial = found.entries[0].start_offset < start
    paid = sum(entry.payload_size for entry in found.entries[is_partial:])
    is_reached = end != -1 and found.next_offset >= end
    assert found.fulfilled == (is_reached or paid >= max_bytes)
    if not found.fulfilled:
        assert walk(entries, stream_id, found.next_offset) == NO_ENTRY


def test_an_entry_that_does_not_fit_its_fields_is_refused_by_number() -> None:
    good = IndexEntry(1, 0, 1, 1, 0, 50)
    with pytest.raises(ValueError, match="index entry 1 is"):
        encode_index([good, IndexEntry(1, 1, 2**31 + 1, 1, 50, 50)])
