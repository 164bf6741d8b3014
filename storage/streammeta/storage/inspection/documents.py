"""The same as `text_lines`, as values that JSON can carry; nothing is cut, bytes are in base64."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.inspection.errors import PayloadError
from streammeta.storage.inspection.kafka_batch import KafkaBatch, KafkaRecord
from streammeta.storage.inspection.meta_stream import LeaderEpochs, MetaEntry
from streammeta.storage.inspection.object_report import ObjectOutline, PlacedRecord
from streammeta.storage.object_format.deviation import Deviation


def outline_document(outline: ObjectOutline, object_id: int | None) -> dict[str, Any]:
    """Footer, links, index, and what it covers."""
    footer = outline.footer
    kind = None
    if footer is not None:
        kind = "composite" if footer.composite else "normal"
    return {
        "source": outline.source,
        "object_id": object_id,
        "size": outline.size,
        "kind": kind,
        "footer": None
        if footer is None
        else {"index_position": footer.index_position, "index_size": footer.index_size},
        "links": [
            {
                "object_id": link.object_id,
                "bucket_id": link.bucket_id,
                "index_entries": len(link.entries),
            }
            for link in outline.links
        ],
        "index": [asdict(entry) for entry in outline.entries],
        "ranges": [asdict(one) for one in outline.ranges] if outline.is_sound else None,
    }


def fault_document(fault: CorruptObjectError) -> dict[str, Any]:
    """What is wrong with the object, and where."""
    return {
        "position": fault.position,
        "problem": fault.problem,
        "found": fault.found,
        "expected": fault.expected,
    }


def deviation_document(deviation: Deviation) -> dict[str, Any]:
    """A deviation of a foreign object, and its position."""
    return {
        "position": deviation.position,
        "problem": deviation.problem,
        "found": deviation.found,
        "expected": deviation.expected,
    }


def record_document(placed: PlacedRecord) -> dict[str, Any]:
    """One record of a stream; its size is that of the payload."""
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
    return {
        "message": str(error),
        "position": error.position,
        "found": error.found,
        "expected": error.expected,
    }


def kafka_document(batch: KafkaBatch, records: list[KafkaRecord]) -> dict[str, Any]:
    """A Kafka record batch and its records."""
    return {
        "base_offset": batch.base_offset,
        "last_offset": batch.last_offset,
        "size": batch.size,
        "partition_leader_epoch": batch.partition_leader_epoch,
        "magic": 2,
        "checksum": batch.checksum,
        "checksum_holds": batch.is_intact,
        "compression": batch.compression_name,
        "timestamp_type": batch.timestamp_type,
        "base_timestamp": batch.base_timestamp,
        "max_timestamp": batch.max_timestamp,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "base_sequence": batch.base_sequence,
        "last_sequence": batch.last_sequence,
        "is_transactional": batch.is_transactional,
        "is_control": batch.is_control,
        "record_count": batch.record_count,
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


def meta_document(entry: MetaEntry) -> dict[str, Any]:
    """A key-value of a MetaStream; `value` is null where only the bytes are known."""
    match entry.value:
        case LeaderEpochs(version, entries):
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
