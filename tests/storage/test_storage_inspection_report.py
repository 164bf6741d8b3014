"""Looking into objects: what is shown of sound ones, and how much of damaged ones is found."""

from __future__ import annotations

import pytest

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.inspection import object_report
from streammeta.storage.inspection.object_report import (
    Fetch,
    Finding,
    ObjectOutline,
    PlacedRecord,
    read_outline,
    read_records,
)
from streammeta.storage.inspection.rendering import outline_lines
from streammeta.storage.object_format.composite import encode_composite
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.built_objects import ObjectBuilder
from tests.storage.format_objects import (
    LINKS,
    PUBLISHED_LINES,
    published_object,
    read_whole,
    small_object,
)


def fetching(data: bytes, asked: list[tuple[int, int]] | None = None) -> Fetch:
    """Return what reads the bytes, and adds to `asked` from where to where."""

    def fetch(start: int, end: int) -> bytes:
        if asked is not None:
            asked.append((start, end))
        return data[start:end]

    return fetch


def looked_into(
    data: bytes, stream_id: int | None = None
) -> tuple[ObjectOutline, list[PlacedRecord], list[CorruptObjectError]]:
    outline = read_outline("test", len(data), fetching(data))
    findings: list[Finding] = list(read_records(outline, fetching(data), stream_id))
    records = [finding for finding in findings if isinstance(finding, PlacedRecord)]
    faults = [finding for finding in findings if isinstance(finding, CorruptObjectError)]
    return outline, records, [*outline.faults, *faults]


def test_a_published_object_shows_as_it_was_published() -> None:
    data = published_object().data
    outline = read_outline("78", len(data), fetching(data))
    assert list(outline_lines(outline, 78)) == PUBLISHED_LINES


def test_every_record_of_a_sound_object_is_found_where_it_is() -> None:
    data = small_object().data
    outline, records, faults = looked_into(data)
    assert faults == []
    assert outline.entries == small_object().entries
    assert [record.record for record in records] == read_whole(data)[1]
    for record in records:
        assert data[record.position] == 0x22
        header = 33
        payload = data[record.position + header : record.position + record.record.encoded_size]
        assert payload == record.record.payload


def test_one_stream_is_read_without_the_blocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_report, "MAX_FETCH_BYTES", 100)
    data = small_object().data
    outline = read_outline("test", len(data), fetching(data))
    asked: list[tuple[int, int]] = []
    found = list(read_records(outline, fetching(data, asked), 4))
    offsets = [item.record.base_offset for item in found if isinstance(item, PlacedRecord)]
    assert offsets == [10, 15, 20]
    blocks = [(e.position, e.position + e.size) for e in outline.entries if e.stream_id == 4]
    assert asked[0][0] == blocks[0][0]
    assert asked[-1][1] == blocks[-1][1]
    assert len(asked) == len(blocks), "each of them is larger than the bound"


def test_neighbours_are_fetched_together_within_a_bound() -> None:
    builder = ObjectBuilder(2**20)
    builder.write([RecordBatch(1, 0, i, 1, bytes(2**18)) for i in range(40)])
    data = builder.finish().data
    outline = read_outline("test", len(data), fetching(data))
    asked: list[tuple[int, int]] = []
    assert sum(1 for _ in read_records(outline, fetching(data, asked))) == 40
    assert len(outline.entries) == 10
    assert len(asked) == 4
    assert max(end - start for start, end in asked) <= object_report.MAX_FETCH_BYTES


def test_a_broken_footer_hides_no_record() -> None:
    sound = small_object().data
    wanted = read_whole(sound)[1]
    for bad in (sound[:-1], sound[:-48], sound[:-8] + bytes(8), sound + b"x"):
        outline, records, faults = looked_into(bad)
        assert (outline.footer, outline.entries) == (None, ())
        assert [record.record for record in records] == wanted
        assert faults[0].problem.startswith(
            ("footer magic", "reserved bytes", "place of the index")
        )


def test_a_broken_index_hides_no_record_and_is_shown() -> None:
    data = bytearray(small_object().data)
    entry_at = small_object().entries[-1].position + small_object().entries[-1].size
    data[entry_at + 36 + 20] ^= 0x40  # record count of the second entry
    outline, records, faults = looked_into(bytes(data))
    assert [fault.position for fault in faults] == [entry_at + 36]
    assert len(outline.entries) == len(small_object().entries)
    assert outline.entries[0] == small_object().entries[0]
    assert outline.entries[1].record_count > 10**9
    assert [record.record for record in records] == read_whole(small_object().data)[1]
    assert looked_into(bytes(data), 4)[1] == [row for row in records if row.record.stream_id == 4]


def test_a_broken_block_costs_only_what_is_behind_it_in_its_entry() -> None:
    entries = small_object().entries
    sound = looked_into(small_object().data)[1]
    data = bytearray(small_object().data)
    second_record = sound[2].position
    assert entries[1].position < second_record < entries[1].position + entries[1].size
    data[second_record] ^= 1
    _, records, faults = looked_into(bytes(data))
    assert [fault.position for fault in faults] == [second_record]
    assert records == [*sound[:2], *sound[3:]]


def test_what_the_index_says_otherwise_is_a_fault_though_all_records_read() -> None:
    data = bytearray(small_object().data)
    record = looked_into(small_object().data)[1][0]
    data[record.position + 24] ^= 1  # base offset 4 becomes 5
    _, records, faults = looked_into(bytes(data))
    assert len(records) == len(looked_into(small_object().data)[1])
    assert [fault.found for fault in faults] == ["of stream 3 at offset 5"]


def test_a_composite_shows_its_links_and_has_no_records() -> None:
    data = encode_composite(LINKS)
    outline, records, faults = looked_into(data)
    assert (records, faults) == ([], [])
    assert list(outline_lines(outline, 7)) == [
        "indexStartPosition: 33",
        "indexBlockLength: 108",
        "linkedObjectId=101, bucketId=0, firstIndexEntry=0, indexEntryCount=1",
        "linkedObjectId=102, bucketId=2, firstIndexEntry=1, indexEntryCount=2",
        "streamId=9, startOffset=0, endOffset=10, recordCount=1, startPosition=0, size=53",
        "streamId=9, startOffset=10, endOffset=20, recordCount=1, startPosition=0, size=113",
        "streamId=9, startOffset=20, endOffset=25, recordCount=1, startPosition=113, size=48",
        "objectId=7, ranges=[9:0-25, ]",
    ]
    broken = bytearray(data)
    broken[0] = 0x51
    outline, records, faults = looked_into(bytes(broken))
    assert (outline.is_composite, outline.links, records) == (True, (), [])
    assert len(outline.entries) == 3
    assert [fault.position for fault in faults] == [0]


def test_a_block_said_to_be_huge_is_not_fetched_without_an_index() -> None:
    asked: list[int] = []
    size = 2**33
    head = bytes([0x5A, 2]) + (1).to_bytes(4, "big") + (2**31 - 1).to_bytes(4, "big")

    def fetch(start: int, end: int) -> bytes:
        asked.append(end - start)
        assert end - start <= object_report.MAX_FETCH_BYTES
        return (head + bytes(end - start))[: end - start]

    outline = read_outline("test", size, fetch)
    assert not outline.is_sound
    (fault,) = read_records(outline, fetch)
    assert isinstance(fault, CorruptObjectError)
    assert fault.found == f"{2**31 + 9} bytes"
    assert max(asked) == object_report.MAX_FETCH_BYTES
