"""Bytes of stored messages: codec, fields at fixed positions, tags and message ids.

Integers are big endian. Positions of fields after the born host depend on its size, which is in the
system flag. Source: `MessageDecoder` of RocketMQ's module common.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from streammeta.storage.errors import PayloadError

MIN_MESSAGE_SIZE = 91
"""Size of a message without body, topic and properties, in bytes."""
_HEAD = struct.Struct(">iIiiiqqiq")
_MIDDLE = struct.Struct(">iqi")
_CODA = struct.Struct(">iIq")
_I64 = struct.Struct(">q")

QUEUE_OFFSET_AT = 20
PHYSICAL_OFFSET_AT = 28
PHYSICAL_OFFSET_END = 36
_SYS_FLAG_AT = 36
BORN_HOST_V6 = 16
STORE_HOST_V6 = 32
BLANK_MAGIC = 0xCBD43194
"""Magic at the end of a commit log file and in a coda, in place of a message's magic."""
CODA_SIZE = _CODA.size
CRC_PROPERTY = "__CRC32#"
KEYS_PROPERTY = "KEYS"
UNIQUE_KEY_PROPERTY = "UNIQ_KEY"
TAGS_PROPERTY = "TAGS"
_NAME_END, _VALUE_END = "\x01", "\x02"


class Magic(IntEnum):
    """Versions of the layout. The topic's length is one byte in V1 and two in V2."""

    V1 = 0xDAA320A7
    V2 = 0xDAA320AB


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Stored message. Times are ms since 1970, hosts an IP address and an i32 port.

    An address has 4 or 16 bytes. `body_crc` None stands for the CRC-32 of the body without its
    highest bit, as brokers write it.
    """

    topic: str
    body: bytes = b""
    queue_id: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    born_host: bytes = bytes(8)
    store_timestamp_ms: int = 0
    store_host: bytes = bytes(8)
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)
    magic: Magic = Magic.V2
    body_crc: int | None = None

    @property
    def tags_code(self) -> int:
        """Java hash of the tags, 0 without tags."""
        tags = self.properties.get(TAGS_PROPERTY)
        return java_hash(tags) if tags else 0

    @property
    def keys(self) -> frozenset[str]:
        """Keys that index the message: its unique key and the producer's keys."""
        keys = set(self.properties.get(KEYS_PROPERTY, "").split())
        keys.add(self.properties.get(UNIQUE_KEY_PROPERTY, ""))
        return frozenset(keys - {""})


def encode_message(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises:
        ValueError: a field does not fit its place, or a host disagrees with the system flag.
    """
    for name, host, bit in (
        ("born_host", message.born_host, BORN_HOST_V6),
        ("store_host", message.store_host, STORE_HOST_V6),
    ):
        if len(host) != _host_size(message.sys_flag, bit):
            raise ValueError(
                f"{name} has {len(host)} bytes, expected {_host_size(message.sys_flag, bit)}"
                f" with sys_flag {message.sys_flag}"
            )

    topic = message.topic.encode()
    properties = encode_properties(message.properties)
    topic_limit = 0x7F if message.magic is Magic.V1 else 0x7FFF
    if len(topic) > topic_limit:
        raise ValueError(f"topic has {len(topic)} bytes, expected at most {topic_limit}")
    if len(properties) > 0x7FFF:
        raise ValueError(f"properties have {len(properties)} bytes, expected at most 32767")

    crc = body_crc(message.body) if message.body_crc is None else message.body_crc
    rest = b"".join(
        (
            message.born_host,
            _I64.pack(message.store_timestamp_ms),
            message.store_host,
            _MIDDLE.pack(
                message.reconsume_times, message.prepared_transaction_offset, len(message.body)
            ),
            message.body,
            # V1 has one byte for the topic's length.
            struct.pack(">B" if message.magic is Magic.V1 else ">h", len(topic)),
            topic,
            struct.pack(">h", len(properties)),
            properties,
        )
    )
    try:
        head = _HEAD.pack(
            _HEAD.size + len(rest),
            message.magic,
            crc,
            message.queue_id,
            message.flag,
            message.queue_offset,
            message.physical_offset,
            message.sys_flag,
            message.born_timestamp_ms,
        )
    except struct.error as error:
        raise ValueError(f"a field of the message's head is out of range: {error}") from None
    return head + rest


def decode_message(data: bytes) -> Message:
    """Return the message in these bytes.

    Raises:
        PayloadError: they are not one whole message.
    """
    reader = _Reader(data)
    (size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born) = (
        _HEAD.unpack(reader.take(_HEAD.size, "head"))
    )
    if size != len(data):
        raise PayloadError(0, "message size", size, len(data))
    if magic not in (Magic.V1, Magic.V2):
        raise PayloadError(4, "message magic", f"{magic:#x}", "0xdaa320a7 or 0xdaa320ab")
    born_host = reader.take(_host_size(sys_flag, BORN_HOST_V6), "born host")
    (stored,) = _I64.unpack(reader.take(8, "store timestamp"))
    store_host = reader.take(_host_size(sys_flag, STORE_HOST_V6), "store host")
    # The layout after the hosts depends on their sizes.
    times, prepared, body_size = _MIDDLE.unpack(reader.take(_MIDDLE.size, "body length"))
    body = reader.take(body_size, "body")
    length_size = 1 if magic == Magic.V1 else 2
    topic = reader.take(int.from_bytes(reader.take(length_size, "topic length"), "big"), "topic")

    (properties_size,) = struct.unpack(">h", reader.take(2, "properties length"))
    properties_at = reader.at
    properties = reader.take(properties_size, "properties")
    if reader.at != size:
        raise PayloadError(reader.at, "message end", reader.at, size)

    return Message(
        topic=_text(topic, reader.at, "topic"),
        body=body,
        queue_id=queue_id,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        flag=flag,
        sys_flag=sys_flag,
        born_timestamp_ms=born,
        born_host=born_host,
        store_timestamp_ms=stored,
        store_host=store_host,
        reconsume_times=times,
        prepared_transaction_offset=prepared,
        properties=decode_properties(_text(properties, properties_at, "properties")),
        magic=Magic(magic),
        body_crc=crc,
    )


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return properties in their order. Raise `ValueError` if one contains a separator."""
    for name, value in properties.items():
        if any(mark in text for mark in (_NAME_END, _VALUE_END) for text in (name, value)):
            raise ValueError(f"property {name!r} is {value!r}, expected no bytes 0x01 and 0x02")
    return "".join(
        f"{name}{_NAME_END}{value}{_VALUE_END}" for name, value in properties.items()
    ).encode()


def decode_properties(text: str) -> dict[str, str]:
    """Return the properties in a text. Values without a name are left out, as in the peer."""
    pairs = (pair.partition(_NAME_END) for pair in text.split(_VALUE_END))
    return {name: value for name, separator, value in pairs if separator}


def body_crc(body: bytes) -> int:
    """Return the CRC-32 of a body without its highest bit."""
    return zlib.crc32(body) & 0x7FFFFFFF


def crc_property(crc: int) -> bytes:
    """Return the 20 bytes of the CRC property: ten digits, the least significant first."""
    return f"{CRC_PROPERTY}{_NAME_END}{f'{crc:010d}'[::-1]}{_VALUE_END}".encode()


def queue_offset_of(message: bytes) -> int:
    """Return the queue offset of a stored message, given at least its first 28 bytes."""
    return int(_I64.unpack_from(message, QUEUE_OFFSET_AT)[0])


def physical_offset_of(message: bytes) -> int:
    """Return the physical offset of a stored message, given at least its first 36 bytes."""
    return int(_I64.unpack_from(message, PHYSICAL_OFFSET_AT)[0])


def store_timestamp_of(message: bytes) -> int:
    """Return the store time of a message in ms since 1970, for both sizes of hosts."""
    # The born host before the timestamp has 8 or 20 bytes.
    sys_flag = int.from_bytes(message[_SYS_FLAG_AT : _SYS_FLAG_AT + 4], "big")
    return int(_I64.unpack_from(message, _HEAD.size + _host_size(sys_flag, BORN_HOST_V6))[0])


def message_id(store_host: bytes, physical_offset: int) -> str:
    """Return the id that clients see: store host and physical offset in hexadecimal."""
    return f"{store_host.hex()}{physical_offset:016x}".upper()


def with_physical_offset(message: bytes, physical_offset: int) -> bytes:
    """Return a message as stored at this offset of a commit log."""
    return b"".join(
        (
            message[:PHYSICAL_OFFSET_AT],
            _I64.pack(physical_offset),
            message[PHYSICAL_OFFSET_END:],
        )
    )


def encode_coda(max_store_timestamp_ms: int) -> bytes:
    """Return the coda that older versions wrote after the last message of a sealed segment."""
    return _CODA.pack(CODA_SIZE, BLANK_MAGIC, max_store_timestamp_ms)


def is_coda(data: bytes, at: int = 0) -> bool:
    """Whether a coda, or the end of a commit log file, begins at `at`."""
    return len(data) >= at + 8 and int.from_bytes(data[at + 4 : at + 8], "big") == BLANK_MAGIC


def is_message(data: bytes, at: int, size: int) -> bool:
    """Whether a whole message of this size begins at `at`, by its size and magic."""
    if at < 0 or size < 8 or at + size > len(data):
        return False
    found, magic = struct.unpack_from(">iI", data, at)
    return found == size and magic in (Magic.V1, Magic.V2)


def java_hash(text: str) -> int:
    """Return `String.hashCode()` of Java, a signed 32-bit number."""
    value = 0
    units = text.encode("utf-16-be")
    for at in range(0, len(units), 2):
        # Java hashes UTF-16 units in 32-bit arithmetic.
        value = (31 * value + int.from_bytes(units[at : at + 2], "big")) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _host_size(sys_flag: int, bit: int) -> int:
    return 20 if sys_flag & bit else 8


def _text(data: bytes, at: int, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PayloadError(at, what, data.hex(), "UTF-8") from None


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int = 0

    def take(self, size: int, what: str) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            left = len(self.data) - self.at
            raise PayloadError(self.at, what, f"{left} bytes", f"{size} bytes")
        self.at += size
        return self.data[self.at - size : self.at]
