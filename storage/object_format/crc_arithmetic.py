"""CRC-32C of bytes that nobody has at hand, from those of the pieces they are made of.

A CRC is a remainder of polynomials over GF(2): appending n bytes multiplies it by x^(8n). So the
checksum of a whole follows from those of its parts, and that of a part from those of the whole and
the rest. That is how an object gets a checksum which the store has put together by itself.
"""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78
"""Of Castagnoli, with the coefficient of x^0 in the highest bit."""
_ONE = 1 << 31
_X = 1 << 30
_ORDER = 2**31 - 1
"""x to this power is 1: the polynomial is x + 1 times a primitive one of degree 31."""


def joined_crc(first: int, second: int, second_size: int) -> int:
    """Return the checksum of two pieces, one after the other, of which the second has this size."""
    return _times(_power(8 * second_size), first) ^ second


def crc_without_tail(whole: int, tail: int, tail_size: int) -> int:
    """Return the checksum of all but the last `tail_size` bytes of `whole`."""
    return _times(_power(-8 * tail_size), whole ^ tail)


def _power(exponent: int) -> int:
    """Return x to a power, which may be negative."""
    left, square, result = exponent % _ORDER, _X, _ONE
    while left:
        if left & 1:
            result = _times(square, result)
        square = _times(square, square)
        left >>= 1
    return result


def _times(first: int, second: int) -> int:
    """Multiply two remainders."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
