"""Composite objects: golden bytes in both directions, the link rules, damage."""

from __future__ import annotations

import hashlib
import struct

import pytest

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.composite import (
    LinkedObject,
    decode_composite,
    encode_composite,
)
from streammeta.storage.object_format.index_block import IndexEntry
from tests.storage.format_objects import LINKS

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
        (LINKS[::-1], "wanted stream 9 from offset 25"),
        ((LINKS[0], LinkedObject(2, 0, (IndexEntry(9, 11, 12, 1, 0, 50),))), "from offset 11"),
        ((LINKS[0], LinkedObject(2, 0, (IndexEntry(8, 10, 12, 1, 0, 50),))), "of stream 8"),
    ],
)
def test_links_that_are_no_unbroken_range_are_refused(
    links: tuple[LinkedObject, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_composite(links)


def test_a_composite_cut_at_any_byte_is_corrupt() -> None:
    data = encode_composite(LINKS)
    for size in range(len(data)):
        with pytest.raises(CorruptObjectError, match="is corrupt at byte"):
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
def test_first_ordinals_that_leave_out_an_entry_or_a_link_are_named(
    ordinals: tuple[int, int], link: int
) -> None:
    data = bytearray(encode_composite(LINKS))
    for i, ordinal in enumerate(ordinals):
        struct.pack_into(">i", data, 5 + 14 * i + 8, ordinal)
    with pytest.raises(CorruptObjectError, match=f"first ordinal of link {link} is") as caught:
        decode_composite(bytes(data))
    assert caught.value.position == 5 + 14 * link + 8


@pytest.mark.parametrize(("object_id", "bucket_id"), [(-1, 0), (2**63, 0), (1, 2**15)])
def test_a_link_out_of_range_is_refused(object_id: int, bucket_id: int) -> None:
    with pytest.raises(ValueError, match=f"to object {object_id} in bucket {bucket_id}"):
        encode_composite([LinkedObject(object_id, bucket_id, LINKS[0].entries)])
