"""The attributes of an object as its metadata keeps them: one signed 32-bit integer.

Bits 0-1 hold the kind, bits 2-17 the bucket id (signed 16 bit when read), bit 18 the deep-delete
mark, bits 19-31 nothing. The bucket is OR-ed in as a sign-extended number, so a negative bucket id
also sets bits 18-31: it always reads back with the deep-delete mark. That is how the integers in
existing metadata are, so it stays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_DEEP_DELETE_BIT = 1 << 18
_INT32_SPAN = 1 << 32


class ObjectKind(enum.IntEnum):
    """What the bytes of an object are: data blocks, or links to other objects."""

    NORMAL = 0
    COMPOSITE = 1


@dataclass(frozen=True, slots=True)
class ObjectAttributes:
    """Kind, bucket id (-32768..32767; -1 any bucket, -2 local files) and the deep-delete mark."""

    kind: ObjectKind = ObjectKind.NORMAL
    bucket_id: int = 0
    deep_delete: bool = False


def encode_attributes(attributes: ObjectAttributes) -> int:
    """Encode as a signed 32-bit integer. Raises `ValueError` when the bucket id is not 16 bit."""
    if not -(2**15) <= attributes.bucket_id < 2**15:
        raise ValueError(f"bucket_id is {attributes.bucket_id}, wanted -32768..32767")
    mark = _DEEP_DELETE_BIT if attributes.deep_delete else 0
    return attributes.kind | attributes.bucket_id << 2 | mark


def decode_attributes(value: int) -> ObjectAttributes:
    """Read the integer; bits 19-31 are ignored.

    Raises `ValueError` when it is no signed 32-bit integer or its kind is unknown; -1, which
    metadata uses for "not set", is such a value.
    """
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"attributes are {value}, wanted a signed 32-bit integer")
    if value & 0b11 not in (ObjectKind.NORMAL, ObjectKind.COMPOSITE):
        raise ValueError(
            f"attributes {value} have kind {value & 0b11}, wanted 0 (normal) or 1 (composite)"
        )
    unsigned = value % _INT32_SPAN
    bucket = unsigned >> 2 & 0xFFFF
    return ObjectAttributes(
        kind=ObjectKind(value & 0b11),
        bucket_id=bucket - 0x10000 if bucket >= 0x8000 else bucket,
        deep_delete=bool(unsigned & _DEEP_DELETE_BIT),
    )
