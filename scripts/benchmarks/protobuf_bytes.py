"""Protocol Buffers' wire format, as far as loads write it by hand to save the cost of messages."""

from collections.abc import Iterator


def varint(value: int) -> bytes:
    """Return a non-negative number as a varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number(field: int, value: int) -> bytes:
    """Return a field of a varint type."""
    return varint(field << 3) + varint(value)


def length_delimited(field: int, value: bytes) -> bytes:
    """Return a field of bytes, a message, or a packed column."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def fields(message: bytes) -> dict[int, int | bytes]:
    """Return the fields of a message by number, the last value of repeated ones."""
    return dict(_fields(message))


def count_of_field(message: bytes, field: int) -> int:
    """Return how often a field occurs in a message."""
    return sum(found == field for found, _ in _fields(message))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        match key & 7:
            case 0:
                value, at = _read_varint(message, at)
                yield key >> 3, value
            case 2:
                size, at = _read_varint(message, at)
                yield key >> 3, message[at : at + size]
                at += size
            case kind:
                raise ValueError(f"field {key >> 3} at {at}: wire type {kind}, expected 0 or 2")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
