"""Composite objects, and what AutoMQ's reader passes over: refused by default, noted if asked."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.storage.errors import CorruptObjectError, Deviation
from streammeta.storage.object_format.composite import (
    COMPOSITE_TABLE_MAGIC,
    LinkedObject,
    decode_composite,
    encode_composite,
)
from streammeta.storage.object_format.index_block import (
    FOOTER_SIZE,
    Footer,
    IndexEntry,
    encode_footer,
    encode_index,
)
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.record import RecordBatch, encode_block_header, encode_record
from tests.kit.built_objects import ObjectBuilder
from tests.storage.format_objects import LINKS, read_whole, small_object

RECORDS = [RecordBatch(7, 2, 0, 2, b"first"), RecordBatch(7, 2, 2, 3, b"second")]


def sound() -> bytes:
    builder = ObjectBuilder()
    builder.write(RECORDS)
    return builder.finish().data


def with_byte(at: int, value: int) -> bytes:
    data = bytearray(sound())
    data[at] = value
    return bytes(data)


def with_one_entry(before: bytes, records: list[RecordBatch], end: int) -> bytes:
    body = b"".join(map(encode_record, records))
    blocks = before + encode_block_header(2, len(body)) + body
    index = encode_index([IndexEntry(7, 0, end, 2, 0, len(blocks))])
    return blocks + index + encode_footer(Footer(len(blocks), len(index)))


def with_gap() -> bytes:
    """One block and one entry, as AutoMQ's writer makes them of records with a gap."""
    records = [RECORDS[0], RecordBatch(7, 2, 10, 3, b"second")]
    return with_one_entry(b"", records, 13)


def with_empty_block() -> bytes:
    return with_one_entry(encode_block_header(0, 0), RECORDS, 5)


DEVIATING: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "flag": (lambda: with_byte(1, 0x03), 1, "block flag is 0x03, expected 0x02"),
    "reserved": (lambda: with_byte(-FOOTER_SIZE + 12, 9), len(sound()) - 36, "expected 28 zeros"),
    "gap": (with_gap, 0, "stream 7 at offset 10, expected stream 7 at offset 2"),
    "empty block": (with_empty_block, 2, "block record count is 0, expected 1 or more"),
}
deviating = pytest.mark.parametrize(
    ("make", "position", "problem"), DEVIATING.values(), ids=DEVIATING
)


def read_tolerantly(data: bytes) -> tuple[list[RecordBatch], list[Deviation]]:
    noted: list[Deviation] = []
    return read_whole(data, noted=noted)[1], noted


@deviating
def test_a_deviation_is_refused_or_noted_once_and_every_record_is_read(
    make: Callable[[], bytes], position: int, problem: str
) -> None:
    with pytest.raises(CorruptObjectError) as caught:
        read_whole(make())
    records, (deviation,) = read_tolerantly(make())

    assert [record.payload for record in records] == [b"first", b"second"]
    for told in (caught.value, deviation):
        assert told.position == position
        assert problem in told.problem


def test_a_sound_object_has_no_deviation() -> None:
    data = small_object().data

    assert read_tolerantly(data) == (read_whole(data)[1], [])


def test_an_index_read_a_second_time_notes_the_footer_once_and_is_strict_if_asked() -> None:
    """An index that starts before the guess takes two ranges, each with the footer in it."""
    builder = ObjectBuilder(1)
    builder.write([RecordBatch(7, 0, at, 1, b"x") for at in range(400)])
    data = bytearray(builder.finish().data)
    data[-FOOTER_SIZE + 12] = 9

    records, noted = read_tolerantly(bytes(data))
    assert (len(records), len(noted)) == (400, 1)

    reader = ObjectReader("ours", len(data))
    sane = bytes(data[:-36]) + bytes(28) + bytes(data[-8:])
    assert reader.needed is not None
    reader.receive(sane[reader.needed.start : reader.needed.end])
    assert reader.needed is not None, "the index starts before the first range"
    with pytest.raises(CorruptObjectError, match="reserved"):
        reader.receive(bytes(data[reader.needed.start : reader.needed.end]))


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda: b"\x00" + sound()[1:], id="magic"),
        pytest.param(lambda: sound()[:-8] + bytes(8), id="footer magic"),
        pytest.param(lambda: with_gap()[:2] + struct.pack(">i", 3) + with_gap()[6:], id="count"),
        pytest.param(
            lambda: with_gap()[: 10 + 33 + 5 + 17] + struct.pack(">q", 1) + with_gap()[73:],
            id="overlap",
        ),
    ],
)
def test_everything_else_stays_an_error(bad: Callable[[], bytes]) -> None:
    with pytest.raises(CorruptObjectError):
        read_tolerantly(bad())


def empty_composite() -> bytes:
    table = struct.pack(">Bi", COMPOSITE_TABLE_MAGIC, 0)
    return table + encode_footer(Footer(len(table), 0, composite=True))


def test_a_composite_without_links() -> None:
    with pytest.raises(CorruptObjectError, match="link count"):
        decode_composite(empty_composite())
    noted: list[Deviation] = []
    assert decode_composite(empty_composite(), noted=noted).links == ()
    assert [deviation.position for deviation in noted] == [1]


def test_an_entry_of_a_composite_without_links_is_no_deviation() -> None:
    table = struct.pack(">Bi", COMPOSITE_TABLE_MAGIC, 0)
    index = encode_index([IndexEntry(7, 0, 5, 2, 0, 100)])
    data = table + index + encode_footer(Footer(len(table), len(index), composite=True))

    with pytest.raises(CorruptObjectError, match="link 0"):
        decode_composite(data, noted=[])


@deviating
def test_dump_shows_deviations_if_it_is_tolerant_and_fails_else(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    make: Callable[[], bytes],
    position: int,
    problem: str,
) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(make())
    words = ["object", "dump", str(path)]

    assert run_cli(cli, [*words, "--format", "json"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["error"]["code"] == "CORRUPT_OBJECT"
    assert refused["deviations"] == []
    assert run_cli(cli, [*words, "--tolerant", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["records"]), shown["faults"]) == (2, [])
    (deviation,) = shown["deviations"]
    assert deviation["position"] == position
    assert problem in deviation["problem"]
    assert run_cli(cli, [*words, "--tolerant"]) == 0
    assert f"DEVIATION at byte {position}: " in capsys.readouterr().out


def test_dump_of_no_records_is_sound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(encode_footer(Footer(0, 0)))

    assert run_cli(cli, ["object", "dump", str(path)]) == 0
    assert "ranges=[]" in capsys.readouterr().out


GOLDEN_SHA256 = "19bc8b605f4352cd9581db68fab93a630f1b4c5a9d3bfca715599fead146984f"


def test_the_golden_composite_holds_in_both_directions() -> None:
    data = encode_composite(LINKS)
    assert len(data) == 189
    assert data[:33].hex() == (
        "5200000002" + "0000000000000065" + "00000000" + "0000"
        "0000000000000066" + "00000001" + "0002"
    )
    assert data[-48:].hex() == "0000000000000021" + "0000006c" + "00" * 28 + "88e241b785f4cff8"
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256
    composite = decode_composite(data)
    assert composite.links == LINKS
    assert composite.index.data_size == 214
    assert encode_composite(composite.links) == data


def test_each_entry_leads_to_the_object_that_holds_it() -> None:
    composite = decode_composite(encode_composite(LINKS))
    assert composite.first_ordinals == (0, 1)
    found = composite.index.find(9, 15, 22, 10_000)
    assert found.first_ordinal == 1
    assert found.fulfilled


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        ((), "at least one link"),
        ((LinkedObject(1, 0, ()),), "at least one entry"),
        (LINKS[::-1], "expected stream 9 from offset 25"),
        ((LINKS[0], LinkedObject(2, 0, (IndexEntry(9, 11, 12, 1, 0, 50),))), "from offset 11"),
        ((LINKS[0], LinkedObject(2, 0, (IndexEntry(8, 10, 12, 1, 0, 50),))), "of stream 8"),
    ],
)
def test_links_with_a_break_are_refused(links: tuple[LinkedObject, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_composite(links)


def test_a_composite_cut_at_any_byte_is_corrupt() -> None:
    data = encode_composite(LINKS)
    for size in range(len(data)):
        with pytest.raises(CorruptObjectError, match="at byte"):
            decode_composite(data[:size])


def test_a_flipped_bit_is_seen_or_leaves_one_unbroken_range() -> None:
    """Ids, buckets, positions, sizes and the outer bounds have nothing to be held against."""
    data = encode_composite(LINKS)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            composite = decode_composite(bytes(damaged))
        except CorruptObjectError:
            continue
        assert encode_composite(composite.links) == bytes(damaged), bit
        assert len(composite.index) == 3


@pytest.mark.parametrize(
    ("ordinals", "link"), [((1, 2), 0), ((0, 0), 1), ((0, 3), 1), ((0, -1), 1), ((-1, 1), 0)]
)
def test_ordinals_that_leave_something_out_are_named(ordinals: tuple[int, int], link: int) -> None:
    data = bytearray(encode_composite(LINKS))
    for i, ordinal in enumerate(ordinals):
        struct.pack_into(">i", data, 5 + 14 * i + 8, ordinal)
    with pytest.raises(CorruptObjectError, match=f"link {link}") as caught:
        decode_composite(bytes(data))
    assert caught.value.position == 5 + 14 * link + 8


@pytest.mark.parametrize(("object_id", "bucket_id"), [(-1, 0), (2**63, 0), (1, 2**15)])
def test_a_link_out_of_range_is_refused(object_id: int, bucket_id: int) -> None:
    with pytest.raises(ValueError, match=f"{object_id}.*{bucket_id}"):
        encode_composite([LinkedObject(object_id, bucket_id, LINKS[0].entries)])
