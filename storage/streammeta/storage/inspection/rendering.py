"""Rendering of an inspected object: lines of text for people, documents for JSON.

The lines have the format of AutoMQ's published dumps, so that two dumps of an object can be
compared. Unprintable characters are escaped and long values truncated. Documents contain the same
facts without truncation, bytes in base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from streammeta.storage.errors import CorruptObjectError, Deviation, PayloadError
from streammeta.storage.inspection import meta_stream
from streammeta.storage.inspection.kafka_batch import KAFKA_MAGIC, KafkaBatch, KafkaRecord
from streammeta.storage.inspection.object_report import ObjectOutline, PlacedRecord
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.record import RecordBatch

_SHOWN_BYTES = 64


def outline_lines(outline: ObjectOutline, object_id: int | None) -> Iterator[str]:
    """Yield footer, links, index, ranges, deviations and faults."""
    if outline.footer is not None:
        yield f"indexStartPosition: {outline.footer.index_position}"
        yield f"indexBlockLength: {outline.footer.index_size}"
    if outline.is_relative:
        yield "relative: true, to offsets add the start of the stream's range in the metadata"

    first = 0
    for link in outline.links:
        count = len(link.entries)
        yield (
            f"linkedObjectId={link.object_id}, bucketId={link.bucket_id},"
            f" firstIndexEntry={first}, indexEntryCount={count}"
        )
        first += count

    yield from map(index_line, outline.entries)
    if outline.is_sound:
        ranges = "".join(
            f"{range_.stream_id}:{range_.start_offset}-{range_.end_offset}, "
            for range_ in outline.ranges
        )
        name = "" if object_id is None else f"objectId={object_id}, "
        yield f"{name}ranges=[{ranges}]"

    yield from map(deviation_line, outline.deviations or ())
    yield from map(fault_line, outline.faults)


def index_line(entry: IndexEntry) -> str:
    """Render an entry of the index."""
    return (
        f"streamId={entry.stream_id}, startOffset={entry.start_offset},"
        f" endOffset={entry.end_offset}, recordCount={entry.record_count},"
        f" startPosition={entry.position}, size={entry.size}"
    )


def fault_line(fault: CorruptObjectError) -> str:
    """Render a fault and its position."""
    return f"CORRUPT at byte {fault.position}: {fault.problem}"


def deviation_line(deviation: Deviation) -> str:
    """Render a deviation of a foreign object and its position."""
    return f"DEVIATION at byte {deviation.position}: {deviation.problem}"


def record_line(record: RecordBatch) -> str:
    """Render the header of a record. The size is the payload's size."""
    return (
        f"==========="
        f"StreamRecordBatch{{streamId={record.stream_id}, epoch={record.epoch},"
        f" baseOffset={record.base_offset}, count={record.count}, size={len(record.payload)}}}"
    )


def payload_error_line(error: PayloadError) -> str:
    """Why a payload is not shown."""
    return f"not decoded: {error}"


def kafka_lines(batch: KafkaBatch, records: list[KafkaRecord]) -> Iterator[str]:
    """Render a Kafka record batch and its records, indented."""
    yield (
        f"checksum={batch.checksum}, baseOffset={batch.base_offset},"
        f" maxTimestamp={batch.max_timestamp}, timestampType={batch.timestamp_type},"
        f" baseOffset={batch.base_offset}, lastOffset={batch.last_offset},"
        f" nextOffset={batch.last_offset + 1}, magic=2, producerId={batch.producer_id},"
        f" producerEpoch={batch.producer_epoch}, baseSequence={batch.base_sequence},"
        f" lastSequence={batch.last_sequence}, compressionType={batch.compression_name},"
        f" sizeInBytes={batch.size}, partitionLeaderEpoch={batch.partition_leader_epoch},"
        f" isControlBatch={_boolean(batch.is_control)},"
        f" isTransactional={_boolean(batch.is_transactional)}"
    )
    for record in records:
        headers = ", ".join(
            f"{json.dumps(name)}: {_bytes(value)}" for name, value in record.headers
        )
        yield (
            f"  offset={record.offset}, timestamp={record.timestamp}, key={_bytes(record.key)},"
            f" value={_bytes(record.value)}, headers=[{headers}]"
        )


def meta_lines(entry: meta_stream.MetaEntry) -> Iterator[str]:
    """Render a key-value of a MetaStream."""
    key = _printable(entry.key)
    match entry.value:
        case meta_stream.LeaderEpochs(version, entries):
            shown = ", ".join(
                f"EpochEntry(epoch={epoch}, startOffset={start})" for epoch, start in entries
            )
            meta = f"ElasticLeaderEpochCheckpointMeta{{version={version}, entries=[{shown}]}}"
            yield f"key={key}, value={meta}"
        case tuple(snapshots):
            yield f"key={key}"
            yield from map(_snapshot_line, snapshots)
        case None:
            yield f"key={key}, value={_bytes(entry.raw)}"
        case _:
            yield f"key={key}, value={_printable(entry.raw.decode())}"


def _snapshot_line(snapshot: meta_stream.ProducerSnapshot) -> str:
    producers = ", ".join(map(_producer, snapshot.producers))
    return f"offset={snapshot.offset}, content=[{producers}]"


def _producer(state: meta_stream.ProducerState) -> str:
    first_offset = state.first_transaction_offset
    transaction = f"OptionalLong[{first_offset}]" if first_offset >= 0 else "OptionalLong.empty"
    batches = ""
    if state.has_batch:
        batches = (
            f"BatchMetadata(firstSeq={state.last_sequence - state.offset_delta},"
            f" lastSeq={state.last_sequence},"
            f" firstOffset={state.last_offset - state.offset_delta},"
            f" lastOffset={state.last_offset}, timestamp={state.timestamp})"
        )

    return (
        f"ProducerStateEntry(producerId={state.producer_id}, producerEpoch={state.producer_epoch},"
        f" currentTxnFirstOffset={transaction}, coordinatorEpoch={state.coordinator_epoch},"
        f" lastTimestamp={state.timestamp}, batchMetadata=[{batches}])"
    )


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _bytes(value: bytes | None) -> str:
    """Render bytes as quoted text, truncated if long, or null."""
    if value is None:
        return "null"
    shown = json.dumps(value[:_SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    left = len(value) - _SHOWN_BYTES
    return shown if left <= 0 else f"{shown}... and {left} bytes"


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def outline_document(outline: ObjectOutline, object_id: int | None) -> dict[str, Any]:
    """Return a document of footer, links, index and ranges."""
    footer = outline.footer and asdict(outline.footer)
    kind = footer and ("composite" if footer.pop("composite") else "normal")
    relative = footer and footer.pop("relative")
    return {
        "source": outline.source,
        "object_id": object_id,
        "size": outline.size,
        "kind": kind,
        "relative": relative,
        "footer": footer,
        "links": [
            {
                "object_id": link.object_id,
                "bucket_id": link.bucket_id,
                "index_entries": len(link.entries),
            }
            for link in outline.links
        ],
        "index": [asdict(entry) for entry in outline.entries],
        "ranges": [asdict(range_) for range_ in outline.ranges] if outline.is_sound else None,
    }


def problem_document(problem: CorruptObjectError | Deviation) -> dict[str, Any]:
    """Return a document of a fault or deviation: its position, actual and required content."""
    names = ("position", "problem", "found", "expected")
    return {name: getattr(problem, name) for name in names}


def record_document(placed: PlacedRecord) -> dict[str, Any]:
    """Return a document of a record. The size is the payload's size."""
    record = placed.record
    return {
        "position": placed.position,
        "stream_id": record.stream_id,
        "epoch": record.epoch,
        "base_offset": record.base_offset,
        "count": record.count,
        "size": len(record.payload),
    }


def payload_error_document(error: PayloadError) -> dict[str, Any]:
    """Why a payload is not shown."""
    names = ("position", "found", "expected")
    return {"message": str(error), **{name: getattr(error, name) for name in names}}


_BATCH_MEMBERS = (
    *("base_offset", "last_offset", "size", "partition_leader_epoch", "checksum"),
    *("timestamp_type", "base_timestamp", "max_timestamp", "producer_id", "producer_epoch"),
    *("base_sequence", "last_sequence", "is_transactional", "is_control", "record_count"),
)


def kafka_document(batch: KafkaBatch, records: list[KafkaRecord]) -> dict[str, Any]:
    """Return a document of a Kafka record batch and its records."""
    return {
        **{name: getattr(batch, name) for name in _BATCH_MEMBERS},
        "magic": KAFKA_MAGIC,
        "compression": batch.compression_name,
        "checksum_holds": batch.is_intact,
        "records": [
            {
                "offset": record.offset,
                "timestamp": record.timestamp,
                "key_base64": _base64(record.key),
                "value_base64": _base64(record.value),
                "headers": [
                    {"name": name, "value_base64": _base64(value)} for name, value in record.headers
                ],
            }
            for record in records
        ],
    }


def meta_document(entry: meta_stream.MetaEntry) -> dict[str, Any]:
    """Return a document of a MetaStream's key-value. `value` is null for unknown keys."""
    match entry.value:
        case meta_stream.LeaderEpochs(version, entries):
            value: Any = {
                "version": version,
                "entries": [{"epoch": e, "start_offset": start} for e, start in entries],
            }
        case tuple(snapshots):
            value = [asdict(snapshot) for snapshot in snapshots]
        case other:
            value = other
    return {"key": entry.key, "value": value, "value_base64": _base64(entry.raw)}


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()
