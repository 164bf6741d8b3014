"""Damage of every kind on every layer: nothing but `CorruptObjectError`, and at no great cost.

Inputs are made by hypothesis from sound bytes: cut, flipped, overwritten with the numbers that
break programs, spliced with other sound bytes. What is not refused must read as a sound object.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammeta.storage.errors import CorruptObjectError, Source
from streammeta.storage.inspection import rendering
from streammeta.storage.inspection.object_report import PlacedRecord, read_outline, read_records
from streammeta.storage.object_format import index_block
from streammeta.storage.object_format.composite import decode_composite, encode_composite
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import decode_blocks, decode_record
from tests.storage.format_objects import LINKS, read_whole, small_object

OBJECT = small_object().data
ENTRIES = small_object().entries
DATA_SIZE = ENTRIES[-1].position + ENTRIES[-1].size
COMPOSITE = encode_composite(LINKS)
NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**62, 36, 48]


@st.composite
def damaged(draw: st.DrawFn, sound: bytes) -> bytes:
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "head", "number", "splice", "insert"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "head":
            del data[:at]
        elif kind == "number":
            number, width = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from([4, 8]))
            data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "big")
        elif kind == "splice":
            other = draw(st.sampled_from([OBJECT, COMPOSITE]))
            start = draw(st.integers(0, len(other) - 1))
            data[at : at + 40] = other[start : start + 40]
        else:
            data[at:at] = draw(st.binary(max_size=40))
    return bytes(data)


SOURCE = Source("test")

LAYERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "record": (OBJECT[10:46], lambda data: decode_record(memoryview(data), 0, source=SOURCE)),
    "block": (OBJECT[46:202], lambda data: decode_blocks(memoryview(data), SOURCE)),
    "index": (
        OBJECT[DATA_SIZE:-48],
        lambda data: index_block.decode_index(memoryview(data), data_size=DATA_SIZE, source=SOURCE),
    ),
    "linked index": (
        OBJECT[DATA_SIZE:-48],
        lambda data: index_block.decode_index(memoryview(data), data_size=None, source=SOURCE),
    ),
    "footer": (
        OBJECT[-48:],
        lambda data: index_block.decode_footer(
            memoryview(data), len(OBJECT) - 48 + len(data), composite=None, source=SOURCE
        ),
    ),
    "object": (OBJECT, read_whole),
    "composite": (COMPOSITE, lambda data: decode_composite(data, source="test")),
}


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=150)
@given(data=st.data())
def test_damage_on_any_layer_is_corruption_or_unseen(layer: str, data: st.DataObject) -> None:
    sound, decode = LAYERS[layer]
    decode(sound)
    try:
        decode(data.draw(damaged(sound)))
    except CorruptObjectError as error:
        caught = error
    else:
        return
    assert caught.source == "test"
    assert caught.position >= 0
    assert caught.found
    assert caught.expected
    for said in (caught.found, caught.expected, f"byte {caught.position}", "test"):
        assert said in str(caught)


@given(damaged(OBJECT))
def test_what_is_not_refused_is_a_sound_object(data: bytes) -> None:
    try:
        index, records = read_whole(data)
    except CorruptObjectError:
        return
    entries = list(index)
    assert sum(entry.record_count for entry in entries) == len(records)
    assert index.data_size == sum(10 + 33 * e.record_count for e in entries) + sum(
        len(record.payload) for record in records
    )
    for before, after in pairwise(entries):
        assert (before.stream_id, before.end_offset) <= (after.stream_id, after.start_offset) or (
            before.stream_id < after.stream_id
        )


@settings(max_examples=150)
@given(st.one_of(damaged(OBJECT), damaged(COMPOSITE)), st.integers(-3, 3))
def test_looking_into_a_damaged_object_always_ends_in_a_report(data: bytes, off: int) -> None:
    """Also when its size is not what was said, as when it is cut while it is looked into."""
    size = max(0, len(data) + off)
    outline = read_outline("test", size, lambda start, end: data[start:end])
    faults = list(outline.faults)
    list(rendering.outline_lines(outline, None))
    rendering.outline_document(outline, None)
    for finding in read_records(outline, lambda start, end: data[start:end]):
        if isinstance(finding, PlacedRecord):
            rendering.record_document(finding)
        else:
            assert isinstance(finding, CorruptObjectError), "nothing is passed over unasked"
            faults.append(finding)
    assert all(rendering.problem_document(fault)["found"] for fault in faults)
    if outline.footer is not None and not outline.is_composite and not faults and off == 0:
        read_whole(data)


def with_footer(data: bytes, position: int, size: int, *, composite: bool = False) -> bytes:
    return data + index_block.encode_footer(index_block.Footer(position, size, composite))


LIARS: dict[str, Callable[[], object]] = {
    "payload length is 2147483647, expected 0..0": lambda: decode_record(
        memoryview(struct.pack(">Bqqqii", 0x22, 1, 0, 0, 1, 2**31 - 1)), 0
    ),
    "record count is 2147483647, expected 1..1": lambda: decode_blocks(
        memoryview(struct.pack(">BBii", 0x5A, 2, 2**31 - 1, 33) + bytes(33))
    ),
    "block data length is 2147483647": lambda: decode_blocks(
        memoryview(struct.pack(">BBii", 0x5A, 2, 1, 2**31 - 1) + bytes(33))
    ),
    "link count of a table of 5 bytes is 2147483647": lambda: decode_composite(
        with_footer(struct.pack(">Bi", 0x52, 2**31 - 1), 5, 0, composite=True)
    ),
    "place of the index is 36 bytes at": lambda: index_block.decode_footer(
        memoryview(index_block.encode_footer(index_block.Footer(2**62, 36))), 1000, composite=False
    ),
}


@pytest.mark.parametrize("problem", LIARS)
def test_a_count_that_lies_is_not_believed_and_costs_no_memory(problem: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError, match=problem):
            LIARS[problem]()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20, f"{peak} bytes"


def test_an_index_too_large_for_its_blocks_is_not_fetched() -> None:
    """A footer may name any place; what can't be an index there is refused before it is read."""
    size = 2**36
    reader = ObjectReader("test", size)
    assert reader.needed is not None
    tail = bytes(reader.needed.end - reader.needed.start - 48)
    index_size = 2**31 - 12
    position = size - 48 - index_size
    reader.receive(with_footer(tail, position, index_size))
    assert reader.needed is not None, "so many entries may be"
    small = 200_000
    reader = ObjectReader("test", small)
    assert reader.needed is not None
    tail = bytes(reader.needed.end - reader.needed.start - 48)
    with pytest.raises(CorruptObjectError, match="index") as caught:
        reader.receive(with_footer(tail, 1000, small - 48 - 1000))
    assert caught.value.position == small - 48


def test_a_footer_that_changes_between_two_reads_is_not_followed() -> None:
    streams = 10_000
    entries_size = 36 * streams
    position = 43 * streams
    size = position + entries_size + 48
    reader = ObjectReader("test", size)
    assert reader.needed is not None
    tail = bytes(reader.needed.end - reader.needed.start - 48)
    reader.receive(with_footer(tail, position, entries_size))
    assert reader.needed is not None
    assert (reader.needed.start, reader.needed.end) == (position, size)
    with pytest.raises(RuntimeError, match="read"):
        _ = reader.index
    other = with_footer(bytes(entries_size), position - 36, entries_size + 36)
    with pytest.raises(CorruptObjectError, match="footer"):
        reader.receive(other)
    assert (reader.needed.start, reader.needed.end) == (position, size)


@given(st.binary(max_size=400), st.integers(0, 400))
def test_noise_of_any_size_is_corruption(noise: bytes, size: int) -> None:
    with pytest.raises(CorruptObjectError):
        read_whole(noise, size)
    with pytest.raises(CorruptObjectError):
        decode_composite(noise)
