"""Encoding of a slot of a write-ahead log in a bucket.

A slot is a header of 84 bytes and a body, integers big endian:

| at | field | |
|---|---|---|
| 0 | `SMOS` | magic |
| 4 | u8 version, u8 kind, u16 0 | version 1 |
| 8 | i32 node id, i64 node epoch | the process whose log it is |
| 20 | i64 sequence | number of the slot in its log, from 0 on |
| 28 | i64 first needed | recovery needs no slot below it |
| 36 | i64 durable below | all slots below it were in the bucket when this one was written |
| 44 | i32 records, i64 body length | |
| 56 | 16 bytes | id of the log, drawn by its process |
| 72 | u32 CRC-32C of the body | |
| 76 | u32 0 | |
| 80 | u32 CRC-32C of bytes 0 to 79 | |

The body depends on the kind. Kind 1, records, has the consecutive records of an object
(`record.py`). Kind 2, a seal, has i32 id and i64 epoch of the sealing node. Kind 3, the mark of a
recovered log, has the same fields. Kind 4, records set aside, has u32 length and text of the
reason, then the records. Pure.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import google_crc32c

from streammeta.storage.errors import CorruptObjectError, Source
from streammeta.storage.object_format import record as record_format
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.record import INT64_MAX

# Keys of write-ahead logs in a bucket.
#
# A process of a node has one log, `<namespace>/wal/<node id>/<node epoch>/`. Ids and epochs are
# decimal numbers of fixed width, so that a listing has logs in their order. A log contains slots,
# `<sequence>` in 16 hex digits, and possibly the marks `recovered` and `swept`. Records that
# cannot be committed are kept under `<namespace>/wal/<node id>/aside/`. All keys lie under the
# namespace, where no object's key begins (see `object_key`). Parsing is strict: a key that this
# module would not have written belongs to no log.

_NODE_DIGITS = 10
_EPOCH_DIGITS = 19
_ASIDE = "aside"
_RECOVERED = "recovered"
_SWEPT = "swept"
_NODE = re.compile(r"[0-9]{10}", re.ASCII)
_EPOCH = re.compile(r"[0-9]{19}", re.ASCII)
_SEQUENCE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ASIDE_NAME = re.compile(r"[0-9]{19}-[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogName:
    """Log of the process `node_epoch` of a node."""

    namespace: str
    node_id: int
    node_epoch: int

    @property
    def prefix(self) -> str:
        """Prefix of all keys of the log."""
        return f"{node_prefix(self.namespace, self.node_id)}{self.node_epoch:0{_EPOCH_DIGITS}}/"

    def slot_key(self, sequence: int) -> str:
        """Return the key of a slot."""
        return f"{self.prefix}{sequence:016x}"

    @property
    def recovered_key(self) -> str:
        """Key of the mark that the log is no longer needed."""
        return f"{self.prefix}{_RECOVERED}"

    @property
    def swept_key(self) -> str:
        """Key of the mark that this log and all earlier logs of the node were swept."""
        return f"{self.prefix}{_SWEPT}"

    def aside_key(self, token: str) -> str:
        """Return the key of a file of records set aside. `token` has 32 hex digits."""
        node = node_prefix(self.namespace, self.node_id)
        return f"{node}{_ASIDE}/{self.node_epoch:0{_EPOCH_DIGITS}}-{token}"


@dataclass(frozen=True, slots=True)
class SlotKey:
    """Key of a slot."""

    log: LogName
    sequence: int


@dataclass(frozen=True, slots=True)
class RecoveredKey:
    """Key of the mark that a log is no longer needed."""

    log: LogName


@dataclass(frozen=True, slots=True)
class SweptKey:
    """Key of the mark that a log and all earlier logs of its node were swept."""

    log: LogName


@dataclass(frozen=True, slots=True)
class AsideKey:
    """Key of a file of records set aside."""

    node_id: int


LogKey: TypeAlias = SlotKey | RecoveredKey | SweptKey | AsideKey


def logs_prefix(namespace: str) -> str:
    """Return the prefix of the logs of all nodes."""
    return f"{namespace}/wal/"


def node_prefix(namespace: str, node_id: int) -> str:
    """Return the prefix of all logs of a node."""
    return f"{logs_prefix(namespace)}{node_id:0{_NODE_DIGITS}}/"


def parse_log_key(key: str, namespace: str) -> LogKey | None:
    """Parse a key of the namespace's logs. Returns None for any other key."""
    prefix = logs_prefix(namespace)
    if not key.startswith(prefix):
        return None

    parts = key[len(prefix) :].split("/")
    if len(parts) != 3 or not _NODE.fullmatch(parts[0]):
        return None

    node, epoch, name = parts
    if epoch == _ASIDE:
        return AsideKey(int(node)) if _ASIDE_NAME.fullmatch(name) else None
    if not _EPOCH.fullmatch(epoch) or int(epoch) > INT64_MAX:
        return None

    log = LogName(namespace, int(node), int(epoch))
    if name == _RECOVERED:
        return RecoveredKey(log)
    if name == _SWEPT:
        return SweptKey(log)
    if not _SEQUENCE.fullmatch(name) or int(name, 16) > INT64_MAX:
        return None

    return SlotKey(log, int(name, 16))


SLOT_HEADER_SIZE = 84
LOG_ID_SIZE = 16

_MAGIC = b"SMOS"
_VERSION = 1
_FIELDS = struct.Struct(">4sBBHiqqqqiq16sII")
_CRC = struct.Struct(">I")
_SEALER = struct.Struct(">iq")
_TEXT_LENGTH = struct.Struct(">I")

assert _FIELDS.size + _CRC.size == SLOT_HEADER_SIZE


SEAL_SIZE = SLOT_HEADER_SIZE + _SEALER.size
"""Size of a seal in bytes. A slot of records is larger, because of the smallest record's size."""


class SlotKind(IntEnum):
    """Contents of a slot's body."""

    RECORDS = 1
    SEAL = 2
    RECOVERED = 3
    ASIDE = 4


@dataclass(frozen=True, slots=True)
class Sealer:
    """The process that sealed a log, or recovered it."""

    node_id: int
    node_epoch: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: its position in the log, the bounds of earlier slots, and its body.

    `count` is the number of its records.
    """

    log: LogName
    log_id: bytes
    sequence: int
    first_needed: int
    durable_below: int
    kind: SlotKind
    count: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        """Encode the slot."""
        return b"".join(self.encode_around([self.body]))

    def encode_around(self, pieces: Sequence[bytes]) -> list[bytes]:
        """Encode header and body, with `pieces` in place of the slot's own body."""
        checksum = ObjectChecksum()
        for piece in pieces:
            checksum.update(piece)

        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            0,
            self.log.node_id,
            self.log.node_epoch,
            self.sequence,
            self.first_needed,
            self.durable_below,
            self.count,
            checksum.size,
            self.log_id,
            checksum.value,
            0,
        )
        return [fields, _CRC.pack(google_crc32c.value(fields)), *pieces]

    def records(self, source: str) -> list[record_format.RecordBatch]:
        """Decode the records of the body. A seal or a mark has none.

        Raises `CorruptObjectError` unless the body consists of `count` records. `source` is its
        key.
        """
        at = 0
        if self.kind in (SlotKind.SEAL, SlotKind.RECOVERED):
            return []
        if self.kind is SlotKind.ASIDE:
            at = _TEXT_LENGTH.size + _TEXT_LENGTH.unpack_from(self.body)[0]
        found: list[record_format.RecordBatch] = []
        named = Source(source, SLOT_HEADER_SIZE)
        end = record_format.decode_records(memoryview(self.body), at, self.count, found, named)
        if end != len(self.body):
            raise CorruptObjectError(
                source, SLOT_HEADER_SIZE + end, "the end of the last record", end, len(self.body)
            )
        return found

    def reason(self) -> str:
        """Return the reason why the records were set aside."""
        (length,) = _TEXT_LENGTH.unpack_from(self.body)
        return self.body[_TEXT_LENGTH.size :][:length].decode()

    def sealer(self) -> Sealer:
        """Return the process that sealed or recovered the log."""
        return Sealer(*_SEALER.unpack(self.body))


def sealer_body(sealer: Sealer) -> bytes:
    """Encode the body of a seal, or of the mark of a recovered log."""
    return _SEALER.pack(sealer.node_id, sealer.node_epoch)


def aside_body(reason: str, records: bytes) -> bytes:
    """Encode the body of records set aside. `records` are encoded already."""
    text = reason.encode()
    return _TEXT_LENGTH.pack(len(text)) + text + records


def decode_slot(data: bytes, key: str, namespace: str) -> Slot:
    """Decode a whole slot. `key` names it in errors.

    Raises `CorruptObjectError` for bytes that are not a complete slot.
    """
    if len(data) < SLOT_HEADER_SIZE:
        raise CorruptObjectError(key, 0, "the length", len(data), f"{SLOT_HEADER_SIZE} or more")

    fields = data[: _FIELDS.size]
    (crc,) = _CRC.unpack_from(data, _FIELDS.size)
    magic, version, kind, _, node_id, node_epoch, *numbers, log_id, body_crc, _ = _FIELDS.unpack(
        fields
    )
    sequence, first_needed, durable_below, count, length = numbers
    if magic != _MAGIC:
        raise CorruptObjectError(key, 0, "the magic", magic, _MAGIC)
    if crc != google_crc32c.value(fields):
        raise CorruptObjectError(
            key, 0, "the header's CRC-32C", google_crc32c.value(fields), f"{crc}, as recorded"
        )
    if version != _VERSION:
        raise CorruptObjectError(key, 4, "the version", version, _VERSION)
    if kind not in tuple(SlotKind):
        raise CorruptObjectError(key, 5, "the kind", kind, "1 to 4")

    body = data[SLOT_HEADER_SIZE:]
    if len(body) != length:
        raise CorruptObjectError(key, SLOT_HEADER_SIZE, "the body's length", len(body), length)
    if google_crc32c.value(body) != body_crc:
        raise CorruptObjectError(
            key, SLOT_HEADER_SIZE, "the body's CRC-32C", google_crc32c.value(body), body_crc
        )

    if not 0 <= first_needed <= durable_below <= sequence or count < 0:
        place = (first_needed, durable_below, sequence)
        raise CorruptObjectError(key, 20, "its place", place, "ascending numbers")

    log = LogName(namespace, node_id, node_epoch)
    return Slot(log, log_id, sequence, first_needed, durable_below, SlotKind(kind), count, body)
