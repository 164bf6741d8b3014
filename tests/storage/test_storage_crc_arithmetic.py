"""Checksums that are worked out are those of the bytes."""

from __future__ import annotations

import random

import google_crc32c
import pytest

from streammeta.storage.object_format.checksum import crc_without_tail, joined_crc


@pytest.mark.parametrize("seed", range(30))
def test_a_whole_follows_from_its_pieces_and_a_piece_from_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    first = rng.randbytes(rng.choice([0, 1, 7, 1000, 70_000]))
    second = rng.randbytes(rng.choice([0, 1, 3, 48, 5000]))
    whole = google_crc32c.value(first + second)
    crc = google_crc32c.value
    assert joined_crc(crc(first), crc(second), len(second)) == whole
    assert crc_without_tail(whole, crc(second), len(second)) == crc(first)


def test_sizes_beyond_32_bits_are_as_good_as_small_ones() -> None:
    """Ten GiB, in pieces of which each is added to what there is."""
    sizes = [5 * 2**30, 3 * 2**30 + 1, 2 * 2**30 - 1]
    crcs = [0x12345678, 0xDEADBEEF, 0]
    at_once = joined_crc(crcs[0], joined_crc(crcs[1], crcs[2], sizes[2]), sizes[1] + sizes[2])
    one_by_one = joined_crc(joined_crc(crcs[0], crcs[1], sizes[1]), crcs[2], sizes[2])
    assert at_once == one_by_one
    assert crc_without_tail(at_once, crcs[2], sizes[2]) == joined_crc(crcs[0], crcs[1], sizes[1])
