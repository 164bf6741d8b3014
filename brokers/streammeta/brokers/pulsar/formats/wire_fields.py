"""Fields of protobuf messages (proto2): tags, varints and bytes, in the order of writing."""

from __future__ import annotations

from collections.abc import Iterator

from streammeta.storage.errors import PayloadError

_VARINT, _BYTES = 0, 2
_MASK = (1 << 64) - 1


def varint(value: int) -> bytes:
    """Return a signed 64-bit number as protobuf's int64."""
    # Negative numbers take ten bytes, as in protobuf's int64.
    value &= _MASK
    out = bytearray()
    # Seven bits in each byte, the lowest first. The high bit announces another byte.
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int | None) -> bytes:
    """Return a field, or nothing if it is not set."""
    return b"" if value is None else varint(number << 3 | _VARINT) + varint(value)


def bytes_field(number: int, value: bytes | str | None) -> bytes:
    """Return a field, or nothing if it is not set."""
    if value is None:
        return b""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield numbers and values of the fields of a message.

    Raises:
        PayloadError: the message is cut, or a field has another type.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == _VARINT:
            yield tag >> 3, value - (1 << 64) if value >> 63 else value
        elif tag & 7 == _BYTES and at + value <= len(data):
            yield tag >> 3, data[at : at + value]
            at += value
        else:
            raise PayloadError(at, "field", f"type {tag & 7}", "a number or bytes inside")


def numbers(data: bytes) -> dict[int, int]:
    """Return the numeric fields of a message."""
    return {number: value for number, value in fields(data) if isinstance(value, int)}


def parts(data: bytes, wanted: int) -> list[bytes]:
    """Return the values of a repeated field of bytes."""
    return [
        value for number, value in fields(data) if number == wanted and isinstance(value, bytes)
    ]


def text(data: bytes, wanted: int) -> str:
    """Return the last value of a text field, empty if it is not set."""
    found = parts(data, wanted)
    return found[-1].decode() if found else ""


def pairs(entries: list[bytes]) -> dict[str, str]:
    """Return messages of a key 1 and a value 2 as a map."""
    return {text(entry, 1): text(entry, 2) for entry in entries}


def pair_fields(number: int, pairs: dict[str, str]) -> bytes:
    """Return a map as repeated messages of a key 1 and a value 2."""
    return b"".join(
        bytes_field(number, bytes_field(1, key) + bytes_field(2, value))
        for key, value in pairs.items()
    )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, at
        shift += 7
    raise PayloadError(at, "varint", "cut or too long", "at most 10 bytes")
