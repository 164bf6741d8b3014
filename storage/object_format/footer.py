"""The last 48 bytes of an object: where its index is, and whether it is a normal or composite one.

Layout, big-endian: i64 index position, i32 index size, 28 zero bytes, u64 magic.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from storage.errors import CorruptObjectError

FOOTER_SIZE = 48
NORMAL_MAGIC = 0x88E241B785F4CFF7
COMPOSITE_MAGIC = 0x88E241B785F4CFF8

_FOOTER = struct.Struct(">qi28sQ")
_RESERVED = bytes(28)


@dataclass(frozen=True, slots=True)
class Footer:
    """Byte position and size of the index block, and the kind of the object."""

    index_position: int
    index_size: int
    composite: bool = False


def encode_footer(footer: Footer) -> bytes:
    """Encode `footer` as its 48 bytes."""
    magic = COMPOSITE_MAGIC if footer.composite else NORMAL_MAGIC
    return _FOOTER.pack(footer.index_position, footer.index_size, _RESERVED, magic)


def decode_footer(
    data: memoryview, object_size: int, *, composite: bool, source: str = "footer"
) -> Footer:
    """Read the footer, the last 48 bytes of `data`, of an object of `object_size` bytes.

    Raises `CorruptObjectError` when it is cut short, has the magic of another kind than wanted,
    uses the reserved bytes, or when the index it names does not end where the footer starts.
    """
    position = object_size - FOOTER_SIZE
    if position < 0 or len(data) < FOOTER_SIZE:
        size = min(object_size, len(data))
        raise CorruptObjectError(source, 0, f"{size} bytes can't hold a {FOOTER_SIZE}-byte footer")
    index_position, index_size, reserved, magic = _FOOTER.unpack_from(data, len(data) - FOOTER_SIZE)
    wanted = COMPOSITE_MAGIC if composite else NORMAL_MAGIC
    if magic != wanted:
        raise CorruptObjectError(
            source, position + 40, f"footer magic is {magic:#018x}, wanted {wanted:#018x}"
        )
    if reserved != _RESERVED:
        raise CorruptObjectError(
            source, position + 12, f"reserved footer bytes are {reserved.hex()}, wanted zeros"
        )
    if index_position < 0 or index_size < 0 or index_position + index_size != position:
        raise CorruptObjectError(
            source,
            position,
            f"index at {index_position} of {index_size} bytes does not end at the footer,"
            f" wanted the end at {position}",
        )
    return Footer(index_position, index_size, composite)
