"""Record batches as producers send them: what is accepted, and the bytes that a broker changes.

Format 2 of the Kafka documentation ("Record Batch"). Records are never decompressed on this path:
offset and leader epoch lie before what the checksum covers, so assigning them leaves it as it is.
"""

from __future__ import annotations

import struct

from streammeta.brokers.partition.errors import (
    BatchTooLargeError,
    CorruptBatchError,
    InvalidBatchError,
    UnsupportedBatchError,
)
from streammeta.storage.errors import PayloadError
from streammeta.storage.inspection.kafka_batch import KafkaBatch, decode_kafka_batches

MAX_BATCH_BYTES = 1_048_588
"""Largest batch in bytes unless a topic says otherwise (`max.message.bytes` of Kafka)."""

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LENGTH_AT, _LENGTH_END = 8, 12
_LEADER_EPOCH_AT = 12
_CODEC_MASK = 0x07
_CODEC_MAX = 4


def read_batches(payload: bytes | memoryview) -> list[KafkaBatch]:
    """Read the headers of the batches that fill `payload`.

    Raises `CorruptBatchError` when it is anything else.
    """
    try:
        return decode_kafka_batches(payload)
    except PayloadError as error:
        raise CorruptBatchError(str(error)) from error


def check_produced(payload: bytes, max_bytes: int = MAX_BATCH_BYTES) -> KafkaBatch:
    """Return the one batch that a producer sent.

    Raises `BatchTooLargeError` above `max_bytes`, `CorruptBatchError` for bytes that are no batch
    or fail their checksum, `UnsupportedBatchError` for one of a transaction, and
    `InvalidBatchError` for less than a batch, what only brokers may write, or a contradiction.
    """
    if len(payload) > max_bytes:
        raise BatchTooLargeError(f"the batch has {len(payload)} bytes, wanted at most {max_bytes}")

    _require_whole(payload)
    batches = read_batches(payload)
    if len(batches) != 1:
        raise InvalidBatchError(f"{len(batches)} batches for a partition, wanted one")

    (batch,) = batches
    if not batch.is_intact:
        raise CorruptBatchError(
            f"CRC-32C of the batch is {batch.computed_checksum:#010x}, its header has"
            f" {batch.checksum:#010x}"
        )

    if batch.is_control:
        raise InvalidBatchError("the batch is a control batch, which only brokers write")
    if batch.is_transactional:
        raise UnsupportedBatchError("the batch is part of a transaction; they are not offered")
    if batch.attributes & _CODEC_MASK > _CODEC_MAX:
        raise InvalidBatchError(f"the batch has codec {batch.compression_name}, wanted 0..4")

    if batch.record_count < 1 or batch.record_count != batch.last_offset_delta + 1:
        raise InvalidBatchError(
            f"the batch says {batch.record_count} records and last offset delta"
            f" {batch.last_offset_delta}, wanted at least one record and one offset for each"
        )

    if batch.producer_id >= 0 and (batch.producer_epoch < 0 or batch.base_sequence < 0):
        raise InvalidBatchError(
            f"the batch of producer {batch.producer_id} has epoch {batch.producer_epoch} and"
            f" sequence {batch.base_sequence}, wanted both >= 0"
        )

    return batch


def _require_whole(payload: bytes) -> None:
    size = 0
    if len(payload) >= _LENGTH_END:
        size = _LENGTH_END + int.from_bytes(payload[_LENGTH_AT:_LENGTH_END], "big", signed=True)
    if not _LENGTH_END <= size <= len(payload):
        raise InvalidBatchError(f"{len(payload)} bytes are no whole batch; send exactly one")


def rebased(batch: bytes | memoryview, base_offset: int, leader_epoch: int) -> bytes:
    """Return the batch with the offset of its first record and the epoch of its leader."""
    patched = bytearray(batch)
    _BASE_OFFSET.pack_into(patched, 0, base_offset)
    _LEADER_EPOCH.pack_into(patched, _LEADER_EPOCH_AT, leader_epoch)
    return bytes(patched)
