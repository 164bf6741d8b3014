"""The last 48 bytes of an object: where its index is, and whether it is a normal or composite one.

Layout, big-endian: i64 index position, i32 index size, 28 zero bytes, u64 magic.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.deviation import Deviation, deviate

FOOTER_SIZE = 48
NORMAL_MAGIC = 0x88E241B785F4CFF7
COMPOSITE_MAGIC = 0x88E241B785F4CFF8

_FOOTER = struct.Struct(">qi28sQ")
_RESERVED = bytes(28)
_RESERVED_POSITION, _MAGIC_POSITION = 12, 40


@dataclass(frozen=True, slots=True)
class Footer:
    """Byte position and size of the index block, and the kind of the object."""

    index_position: int
    index_size: int
    composite: bool = False


def encode_footer(footer: Footer) -> bytes:
    """Encode `footer` as its 48 bytes. Raises `ValueError` when a number does not fit its field."""
    magic = COMPOSITE_MAGIC if footer.composite else NORMAL_MAGIC
    try:
        return _FOOTER.pack(footer.index_position, footer.index_size, _RESERVED, magic)
    except struct.error as error:
        raise ValueError(f"{footer}: wanted a 64-bit position and a 32-bit size") from error


def decode_footer(
    data: memoryview,
    object_size: int,
    *,
    composite: bool | None,
    source: str = "footer",
    noted: list[Deviation] | None = None,
) -> Footer:
    """Read the footer, the last 48 bytes of `data`, of an object of `object_size` bytes.

    `composite` is the kind that the object must be of; None takes either. Raises
    `CorruptObjectError` when the footer is cut short, has another magic than wanted, uses the
    reserved bytes (passed over if that is to be `noted`), or when the index it names does not end
    where the footer starts.
    """
    position = object_size - FOOTER_SIZE
    if position < 0 or len(data) < FOOTER_SIZE:
        raise CorruptObjectError(
            source,
            0,
            "what there is for the footer",
            found=f"{max(0, min(object_size, len(data)))} bytes",
            expected=f"at least {FOOTER_SIZE} bytes",
        )
    index_position, index_size, reserved, magic = _FOOTER.unpack_from(data, len(data) - FOOTER_SIZE)
    kinds = (False, True) if composite is None else (composite,)
    magics = [COMPOSITE_MAGIC if kind else NORMAL_MAGIC for kind in kinds]
    if magic not in magics:
        raise CorruptObjectError(
            source,
            position + _MAGIC_POSITION,
            "footer magic",
            found=f"{magic:#018x}",
            expected=" or ".join(f"{wanted:#018x}" for wanted in magics),
        )
    if reserved != _RESERVED:
        deviate(
            noted,
            source,
            position + _RESERVED_POSITION,
            "reserved bytes of the footer",
            found=reserved.hex(),
            expected="28 zeros",
        )
    if index_position < 0 or index_size < 0 or index_position + index_size != position:
        raise CorruptObjectError(
            source,
            position,
            "place of the index",
            found=f"{index_size} bytes at {index_position}",
            expected=f"one that ends at {position}, where the footer starts",
        )
    return Footer(index_position, index_size, magic == COMPOSITE_MAGIC)
