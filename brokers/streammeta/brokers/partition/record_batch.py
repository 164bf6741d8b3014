"""Validation of producers' record batches, and the bytes that a broker changes in them.

Format 2 of the Kafka documentation ("Record Batch"). Records are never decompressed on this path:
offset and leader epoch precede the checksummed part, so assigning them does not change the
checksum.
"""

from __future__ import annotations

import struct

from streammeta.brokers.partition.errors import (
    BatchTooLargeError,
    CorruptBatchError,
    InvalidBatchError,
    InvalidTimestampError,
    UnsupportedBatchError,
)
from streammeta.storage.errors import PayloadError
from streammeta.storage.inspection.kafka_batch import KafkaBatch, decode_kafka_batches

MAX_BATCH_BYTES = 1_048_588
"""Default maximum size of a batch in bytes (Kafka's `max.message.bytes`)."""

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LENGTH_AT, _LENGTH_END = 8, 12
_LEADER_EPOCH_AT = 12
_CODEC_MASK = 0x07
_CODEC_MAX = 4


def read_batches(payload: bytes | memoryview) -> list[KafkaBatch]:
    """Parse the headers of the batches that fill `payload`.

    Raises `CorruptBatchError` for anything else.
    """
    try:
        return decode_kafka_batches(payload)
    except PayloadError as error:
        raise CorruptBatchError(str(error)) from error


def check_produced(payload: bytes, max_bytes: int = MAX_BATCH_BYTES) -> KafkaBatch:
    """Return the single batch of a producer.

    Raises `BatchTooLargeError` above `max_bytes`, `CorruptBatchError` for bytes that are not a
    batch or fail their checksum, `UnsupportedBatchError` for a transactional batch, and
    `InvalidBatchError` for an incomplete or contradictory batch or one that only brokers may write.
    """
    if len(payload) > max_bytes:
        raise BatchTooLargeError(
            f"the batch has {len(payload)} bytes, expected at most {max_bytes}"
        )

    # The size is checked before the parser, which would report an incomplete batch as corrupt.
    _require_whole(payload)
    batches = read_batches(payload)
    if len(batches) != 1:
        raise InvalidBatchError(f"{len(batches)} batches for a partition, expected one")

    (batch,) = batches
    if not batch.is_intact:
        raise CorruptBatchError(
            f"the batch has CRC-32C {batch.computed_checksum:#010x}, but its header says"
            f" {batch.checksum:#010x}"
        )

    if batch.is_control:
        raise InvalidBatchError("the batch is a control batch, which only brokers may write")
    if batch.is_transactional:
        raise UnsupportedBatchError("the batch is transactional, which is not supported")
    if batch.attributes & _CODEC_MASK > _CODEC_MAX:
        raise InvalidBatchError(f"the batch has codec {batch.compression_name}, expected 0 to 4")

    # A gap between records would shift the offsets of all later ones.
    if batch.record_count < 1 or batch.record_count != batch.last_offset_delta + 1:
        raise InvalidBatchError(
            f"the batch claims {batch.record_count} records and last offset delta"
            f" {batch.last_offset_delta}, expected at least one record and one offset for each"
        )

    if batch.producer_id >= 0 and (batch.producer_epoch < 0 or batch.base_sequence < 0):
        raise InvalidBatchError(
            f"the batch of producer {batch.producer_id} has epoch {batch.producer_epoch} and"
            f" sequence {batch.base_sequence}, expected both to be at least 0"
        )

    return batch


def check_time(batch: KafkaBatch, latest_ms: int) -> None:
    """Reject records later than `latest_ms`: retention would keep everything with them.

    Raises `InvalidTimestampError`.
    """
    newest_ms = max(batch.base_timestamp, batch.max_timestamp)
    if newest_ms > latest_ms:
        raise InvalidTimestampError(
            f"the batch has records of {newest_ms} ms since 1970, expected at most"
            f" {latest_ms}: the current time plus message.timestamp.after.max.ms"
        )


def _require_whole(payload: bytes) -> None:
    size = 0
    if len(payload) >= _LENGTH_END:
        size = _LENGTH_END + int.from_bytes(payload[_LENGTH_AT:_LENGTH_END], "big", signed=True)
    if not _LENGTH_END <= size <= len(payload):
        raise InvalidBatchError(f"{len(payload)} bytes are not a whole batch. Send exactly one")


def rebased(batch: bytes | memoryview, base_offset: int, leader_epoch: int) -> bytes:
    """Return the batch with its base offset and its leader's epoch."""
    patched = bytearray(batch)
    _BASE_OFFSET.pack_into(patched, 0, base_offset)
    _LEADER_EPOCH.pack_into(patched, _LEADER_EPOCH_AT, leader_epoch)
    return bytes(patched)
