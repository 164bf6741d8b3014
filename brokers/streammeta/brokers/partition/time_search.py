"""Lookup of offsets by time in a partition log: segments, then time index, then records.

The result is the first record, in offset order, that is not older than the given time, even where
times do not ascend.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.brokers.partition.log import PartitionLog
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.brokers.partition.segments import Segment
from streammeta.brokers.partition.state import Entry, lookup
from streammeta.storage.errors import PayloadError
from streammeta.storage.inspection.kafka_batch import KafkaBatch, decode_kafka_records

_SCAN_BYTES = 1024 * 1024
_DECOMPRESSED_MAX = 16 * 1024 * 1024


def first_in_batch(batch: KafkaBatch, timestamp: int, from_offset: int) -> Entry | None:
    """Return time and offset of the first record at or after both, None for none.

    A batch with unreadable records, or with too many decompressed bytes, counts as a whole.
    """
    if batch.max_timestamp < timestamp or batch.last_offset < from_offset:
        return None
    try:
        records = decode_kafka_records(batch, _DECOMPRESSED_MAX)
    except PayloadError:
        return batch.max_timestamp, max(batch.base_offset, from_offset)
    for record in records:
        if record.timestamp >= timestamp and record.offset >= from_offset:
            return record.timestamp, record.offset
    return None


def segments_to_search(segments: Sequence[Segment], timestamp: int) -> list[Segment]:
    """Return the segments that may contain a record not older than `timestamp`."""
    return [segment for segment in segments if segment.size and segment.last_time[0] >= timestamp]


async def offset_by_time(log: PartitionLog, timestamp: int) -> Entry | None:
    """Return time and offset of the first durable record not older than `timestamp`."""
    for segment in segments_to_search(log.segments, timestamp):
        entries = await log.time_entries(segment)
        _, offset = lookup(entries, timestamp - 1, segment.base_offset)
        end = log.high_watermark if segment.end_offset < 0 else segment.end_offset
        found = await _scan(log, max(offset, log.start_offset), end, timestamp)
        if found is not None:
            return found
    return None


async def _scan(log: PartitionLog, offset: int, end: int, timestamp: int) -> Entry | None:
    start = log.start_offset
    while offset < end:
        batches = read_batches(await log.read(offset, _SCAN_BYTES))
        for batch in batches:
            found = first_in_batch(batch, timestamp, start)
            if found is not None:
                return found
        offset = batches[-1].last_offset + 1
    return None
