"""Key-values of a MetaStream, in which AutoMQ's brokers keep the state of a partition.

Owns the frame (u8 magic 0, i32 key length, key in UTF-8, value) and the values of known keys.
PARTITION and LOG are JSON. LEADER_EPOCH_CHECKPOINT and PRODUCER_SNAPSHOTS are binary, big-endian,
the latter with Kafka's producer snapshots, version 1. Values of other keys stay bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import google_crc32c

from streammeta.storage.errors import PayloadError
from streammeta.storage.parsing import DocumentError, parse_json

META_MAGIC = 0
SNAPSHOTS_MAGIC = 0x18
SNAPSHOT_VERSION = 1

_FRAME = struct.Struct(">Bi")
_CHECKPOINT = struct.Struct(">ii")
_EPOCH = struct.Struct(">iq")
_SNAPSHOT = struct.Struct(">qi")
_SNAPSHOT_HEADER = struct.Struct(">hIi")
_SNAPSHOT_CHECKED_FROM = 6
_PRODUCER = struct.Struct(">qhiqiqiq")


@dataclass(frozen=True, slots=True)
class LeaderEpochs:
    """Start offsets of leader epochs: pairs of epoch and start offset."""

    version: int
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ProducerState:
    """State of a producer. Its last batch ends at `last_offset`, timestamps are in ms since 1970.

    Sequence, offset and first offset of a transaction are -1 if absent.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int
    first_transaction_offset: int

    @property
    def has_batch(self) -> bool:
        """Whether the state has a last batch."""
        return self.last_offset >= 0


@dataclass(frozen=True, slots=True)
class ProducerSnapshot:
    """States of a partition's producers at `offset`."""

    offset: int
    producers: tuple[ProducerState, ...]


MetaValue: TypeAlias = (
    Mapping[str, Any] | list[Any] | LeaderEpochs | tuple[ProducerSnapshot, ...] | None
)


@dataclass(frozen=True, slots=True)
class MetaEntry:
    """A key, its value as bytes, and decoded: JSON, a class above, or None for unknown keys."""

    key: str
    raw: bytes
    value: MetaValue


def decode_meta_entry(payload: bytes | memoryview) -> MetaEntry:
    """Decode the payload of a record. Raises `PayloadError` unless it is a key-value."""
    data = bytes(payload)
    _expect_bytes(data, 0, _FRAME.size, "a key-value")
    magic, key_length = _FRAME.unpack_from(data)
    if magic != META_MAGIC:
        raise PayloadError(0, "magic of a MetaStream key-value", magic, META_MAGIC)

    end = _FRAME.size + key_length
    if key_length < 0 or end > len(data):
        raise PayloadError(1, "key length", key_length, f"0..{len(data) - _FRAME.size}")

    try:
        key = data[_FRAME.size : end].decode()
    except UnicodeDecodeError as error:
        raise PayloadError(_FRAME.size, "key", error.reason, "UTF-8") from error

    raw = data[end:]
    decode = _DECODERS.get(key)
    return MetaEntry(key, raw, None if decode is None else decode(raw, end))


def _decode_json(raw: bytes, origin: int) -> MetaValue:
    try:
        value = parse_json(raw)
    except DocumentError as error:
        raise PayloadError(origin, "value", f"no JSON: {error}", "JSON") from error
    if not isinstance(value, dict | list):
        raise PayloadError(origin, "value", type(value).__name__, "a JSON object")
    return value


def _decode_epochs(raw: bytes, origin: int) -> LeaderEpochs:
    _expect_bytes(raw, origin, _CHECKPOINT.size, "leader epochs")
    version, count = _CHECKPOINT.unpack_from(raw)
    if len(raw) != _CHECKPOINT.size + count * _EPOCH.size:
        raise PayloadError(
            origin + 4,
            f"number of leader epochs in {len(raw)} bytes",
            count,
            (len(raw) - _CHECKPOINT.size) // _EPOCH.size,
        )
    return LeaderEpochs(version, tuple(_EPOCH.iter_unpack(raw[_CHECKPOINT.size :])))


def _decode_snapshots(raw: bytes, origin: int) -> tuple[ProducerSnapshot, ...]:
    _expect_bytes(raw, origin, 1, "producer snapshots")
    if raw[0] != SNAPSHOTS_MAGIC:
        raise PayloadError(origin, "magic of producer snapshots", raw[0], SNAPSHOTS_MAGIC)

    snapshots: list[ProducerSnapshot] = []
    at = 1
    while at < len(raw):
        _expect_bytes(raw[at:], origin + at, _SNAPSHOT.size, "a producer snapshot")
        offset, length = _SNAPSHOT.unpack_from(raw, at)
        at += _SNAPSHOT.size
        if not 0 <= length <= len(raw) - at:
            raise PayloadError(origin + at - 4, "snapshot length", length, f"0..{len(raw) - at}")
        producers = _decode_producers(raw[at : at + length], origin + at)
        snapshots.append(ProducerSnapshot(offset, producers))
        at += length

    return tuple(snapshots)


def _decode_producers(raw: bytes, origin: int) -> tuple[ProducerState, ...]:
    _expect_bytes(raw, origin, _SNAPSHOT_HEADER.size, "the header of a producer snapshot")
    version, checksum, count = _SNAPSHOT_HEADER.unpack_from(raw)
    if version != SNAPSHOT_VERSION:
        raise PayloadError(origin, "version of a producer snapshot", version, SNAPSHOT_VERSION)

    computed = google_crc32c.value(raw[_SNAPSHOT_CHECKED_FROM:])
    if computed != checksum:
        raise PayloadError(
            origin + 2, "CRC-32C of a producer snapshot", f"{computed:#010x}", f"{checksum:#010x}"
        )
    if len(raw) != _SNAPSHOT_HEADER.size + count * _PRODUCER.size:
        raise PayloadError(
            origin + _SNAPSHOT_CHECKED_FROM,
            f"number of producers in {len(raw)} bytes",
            count,
            (len(raw) - _SNAPSHOT_HEADER.size) // _PRODUCER.size,
        )

    rows = _PRODUCER.iter_unpack(raw[_SNAPSHOT_HEADER.size :])
    return tuple(ProducerState(*row) for row in rows)


def _expect_bytes(data: bytes, origin: int, wanted: int, what: str) -> None:
    if len(data) < wanted:
        raise PayloadError(
            origin, f"remaining size for {what}", f"{len(data)} bytes", f"{wanted} bytes"
        )


_DECODERS: dict[str, Callable[[bytes, int], MetaValue]] = {
    "PARTITION": _decode_json,
    "LOG": _decode_json,
    "LEADER_EPOCH_CHECKPOINT": _decode_epochs,
    "PRODUCER_SNAPSHOTS": _decode_snapshots,
}
"""Decoder of a value and its position in the payload, by key."""
