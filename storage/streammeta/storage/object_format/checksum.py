"""CRC-32C of whole objects (Castagnoli, as in RFC 3720): computed, compared, combined.

The object format has no checksum. A writer computes one as the bytes pass and records it in the
object's metadata. A reader that reads all bytes in order, in pieces of any size, compares it.

A CRC is a remainder of polynomials over GF(2), and appending n bytes multiplies it by x^(8n). The
checksum of a whole therefore follows from its parts, and the checksum of a part from the whole and
the rest, without the bytes. Objects that the store copies from parts get their checksum this way.
"""

from __future__ import annotations

from functools import cache

import google_crc32c

from streammeta.storage.errors import CorruptObjectError

_COPIED_BYTES = 256 * 1024
"""Piece size in bytes that stays in the CPU cache."""


class ObjectChecksum:
    """CRC-32C of the bytes so far, in order."""

    __slots__ = ("_crc", "_size")

    def __init__(self) -> None:
        self._crc = 0
        self._size = 0

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> ObjectChecksum:
        """Return the checksum of all bytes of an object."""
        checksum = cls()
        checksum.update(data)
        return checksum

    @property
    def value(self) -> int:
        """The checksum, 0..2^32-1. It is 0 for no bytes."""
        return self._crc

    @property
    def size(self) -> int:
        """Number of bytes so far."""
        return self._size

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the object."""
        if isinstance(data, bytes):
            self._crc = google_crc32c.extend(self._crc, data)
        else:
            self._update_by_copies(memoryview(data).cast("B"))
        self._size += len(data)

    def _update_by_copies(self, data: memoryview) -> None:
        """Copy the data in pieces, because the library accepts only `bytes`."""
        for start in range(0, len(data), _COPIED_BYTES):
            piece = bytes(data[start : start + _COPIED_BYTES])
            self._crc = google_crc32c.extend(self._crc, piece)

    def verify(self, expected: int, *, source: str) -> None:
        """Raise `CorruptObjectError` for the object named `source` unless the value is `expected`.

        Call it after all bytes of the object.
        """
        if self._crc != expected:
            raise CorruptObjectError(
                source,
                0,
                f"CRC-32C of its {self._size} bytes",
                f"{self._crc:#010x}",
                f"{expected:#010x}",
            )


_POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, with the coefficient of x^0 in the highest bit."""
# In the reflected order of bits, x^0 is the highest of 32 bits and x^1 the next.
_X = 1 << 30
_ORDER = 2**31 - 1
"""Order of x. The polynomial is x + 1 times a primitive polynomial of degree 31."""


def join_crcs(first: int, second: int, second_size: int) -> int:
    """Return the checksum of two adjacent pieces. The second has `second_size` bytes."""
    return _times_power(first, 8 * second_size) ^ second


def crc_without_tail(whole: int, tail: int, tail_size: int) -> int:
    """Return the checksum of all but the last `tail_size` bytes of `whole`."""
    # The inverse of `join_crcs`: remove the tail's share, then divide by its length.
    return _times_power(whole ^ tail, -8 * tail_size)


def _times_power(remainder: int, exponent: int) -> int:
    """Multiply by x to a power, which may be negative."""
    # Square and multiply: the exponent has 31 bits, whatever the size of the piece.
    left, place = exponent % _ORDER, 0
    while left:
        if left & 1:
            lowest, second, third, highest = _times_x_to_two_to(place)
            remainder = (
                lowest[remainder & 255]
                ^ second[remainder >> 8 & 255]
                ^ third[remainder >> 16 & 255]
                ^ highest[remainder >> 24]
            )
        left >>= 1
        place += 1
    return remainder


@cache
def _times_x_to_two_to(place: int) -> tuple[tuple[int, ...], ...]:
    """Return the products of x^(2^place) and each value of each byte, lowest byte first.

    The product of a remainder is the sum of its four bytes' products. Compaction joins the
    checksums of about two thousand pieces per GiB, which would take most of a second bit by bit.
    """
    factor = _X
    for _ in range(place):
        factor = _times(factor, factor)
    bits = [_times(factor, 1 << bit) for bit in range(32)]
    return tuple(_sums(bits[start : start + 8]) for start in range(0, 32, 8))


def _sums(bits: list[int]) -> tuple[int, ...]:
    """Return the sum of the set bits' products, for every value of a byte."""
    sums = [0]
    for bit in bits:
        sums += [total ^ bit for total in sums]
    return tuple(sums)


def _times(first: int, second: int) -> int:
    """Multiply two remainders modulo the polynomial."""
    product = 0
    # From the highest bit, the coefficient of x^0 in this order.
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
