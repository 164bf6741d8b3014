"""Number of elements of a request, counted before the library parses them.

Owns the bound on elements. An element of a list costs far more time and memory than its bytes: an
empty name of two bytes becomes objects of hundreds of bytes. The count follows the schema, charges
a list before it walks the list, and stops at the bound, so its own work is bounded too.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

from streammeta.storage.installation import optional_packages

with optional_packages("the Kafka-shaped broker"):
    from kio.serial.readers import (
        read_compact_array_length,
        read_legacy_array_length,
        read_unsigned_varint,
    )

ELEMENTS_MAX = 32_768
"""Maximum elements in all lists of a request, such as 10,000 topics of one partition each."""

_HEADER_BYTES = 8
"""Bytes of a request's header before the client's name."""
_FIXED: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "timedelta_i32": 4,
    "timedelta_i64": 8,
    "uuid": 16,
}
"""Sizes of the types with a fixed size, in bytes."""
# The fast path for one byte matters: names are the most frequent values.
_ONE_BYTE_MAX = 0x7F
"""Largest value of a one-byte varint."""
_SHORT, _LONG = struct.Struct(">h"), struct.Struct(">i")


class TooManyElementsError(Exception):
    """The lists of a request have more than `ELEMENTS_MAX` elements."""


class _Count:
    """Number of elements found so far."""

    __slots__ = ("elements",)

    def __init__(self) -> None:
        self.elements = 0

    def charge(self, number: int) -> None:
        self.elements += number
        if self.elements > ELEMENTS_MAX:
            raise TooManyElementsError


_Skip = Callable[[bytes, int, _Count], int]
"""Function that returns the end of a value that begins at an offset."""


def count_elements(schema: Any, frame: bytes) -> int:
    """Return the number of elements in the lists of a request, tags included.

    Raises:
        TooManyElementsError: the number exceeds the bound.
        Exception: the frame is not a request of this schema.
    """
    count = _Count()
    at = _skip_short_bytes(frame, _HEADER_BYTES, count)
    # Flexible headers end with tagged fields (KIP-482).
    if schema.__header_schema__.__flexible__:
        at = _skip_tags(frame, at, count)
    _skipper(schema)(frame, at, count)
    return count.elements


def item_type(hint: Any) -> Any:
    """Return the type of a list's items, None for a field that is not a list."""
    for candidate in (hint, *typing.get_args(hint)):
        if typing.get_origin(candidate) is tuple:
            return typing.get_args(candidate)[0]
    return None


@cache
def _skipper(schema: Any) -> _Skip:
    """Return the function that skips an entity of a schema."""
    hints = typing.get_type_hints(schema)
    skips = [
        _field_skipper(field, hints[field.name], is_flexible=schema.__flexible__)
        for field in dataclasses.fields(schema)
    ]
    # Every flexible entity ends with tagged fields, even an empty one.
    if schema.__flexible__:
        skips.append(_skip_tags)

    def skip(frame: bytes, at: int, count: _Count) -> int:
        for skip_field in skips:
            at = skip_field(frame, at, count)
        return at

    return skip


def _field_skipper(field: Any, hint: Any, *, is_flexible: bool) -> _Skip:
    kind = field.metadata.get("kafka_type")
    item = item_type(hint)
    if item is None:
        return _value_skipper(kind, is_flexible=is_flexible)
    if not hasattr(item, "__dataclass_fields__"):
        size = _FIXED.get(kind)
        if size is not None:
            return _list_of_fixed(size, is_flexible=is_flexible)
        return _list_of(_value_skipper(kind, is_flexible=is_flexible), is_flexible=is_flexible)
    size = _fixed_size(item)
    if size is not None:
        return _list_of_fixed(size, is_flexible=is_flexible)
    return _list_of(_skipper(item), is_flexible=is_flexible)


def _fixed_size(schema: Any) -> int | None:
    """Return the size shared by all entities of a schema, None if sizes vary."""
    hints = typing.get_type_hints(schema)
    fields = dataclasses.fields(schema)
    if schema.__flexible__ or any(item_type(hints[field.name]) for field in fields):
        return None
    sizes = [_FIXED.get(field.metadata["kafka_type"]) for field in fields]
    return None if None in sizes else sum(size for size in sizes if size)


def _value_skipper(kind: str, *, is_flexible: bool) -> _Skip:
    if kind in _FIXED:
        size = _FIXED[kind]
        return lambda _, at, __: at + size
    if is_flexible:
        return _skip_compact_bytes
    return {"string": _skip_short_bytes, "bytes": _skip_long_bytes, "records": _skip_long_bytes}[
        kind
    ]


def _list_of(skip_item: _Skip, *, is_flexible: bool) -> _Skip:
    read_length = read_compact_array_length if is_flexible else read_legacy_array_length

    def skip(frame: bytes, at: int, count: _Count) -> int:
        length, at = _length(read_length(frame, at), at)
        # Charge before the walk: a forged length must not cost its work.
        count.charge(length)
        for _ in range(length):
            at = skip_item(frame, at, count)
        return at

    return skip


def _list_of_fixed(size: int, *, is_flexible: bool) -> _Skip:
    read_length = read_compact_array_length if is_flexible else read_legacy_array_length

    def skip(frame: bytes, at: int, count: _Count) -> int:
        length, at = _length(read_length(frame, at), at)
        count.charge(length)
        return at + length * size

    return skip


def _length(read: tuple[Any, int], at: int) -> tuple[int, int]:
    """Return the length of a list, 0 for a null one, and the offset of its first item."""
    length, used = read
    return max(0, length or 0), at + used


def _skip_short_bytes(frame: bytes, at: int, _: _Count) -> int:
    (size,) = _SHORT.unpack_from(frame, at)
    return at + _SHORT.size + max(0, int(size))


def _skip_long_bytes(frame: bytes, at: int, _: _Count) -> int:
    (size,) = _LONG.unpack_from(frame, at)
    return at + _LONG.size + max(0, int(size))


def _skip_compact_bytes(frame: bytes, at: int, _: _Count) -> int:
    if frame[at] <= _ONE_BYTE_MAX:
        # A compact length is stored plus one, so that 0 means null. Its value is also the total
        # size here.
        return at + (frame[at] or 1)
    size, used = read_unsigned_varint(frame, at)
    return at + used + max(0, size - 1)


def _skip_tags(frame: bytes, at: int, count: _Count) -> int:
    if not frame[at]:
        return at + 1
    number, used = read_unsigned_varint(frame, at)
    at += used
    # Tags are allocated by the library like elements of a list.
    count.charge(number)
    for _ in range(number):
        _, used = read_unsigned_varint(frame, at)
        size, used_by_size = read_unsigned_varint(frame, at + used)
        at += used + used_by_size + size
    return at
