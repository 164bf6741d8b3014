"""What the tests of the write-ahead log share: records with known contents, and ways to log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.disk_log import DiskLog, RecordGroup
from streammeta.client.wal.disk.quarantine import quarantine
from streammeta.storage.durable_files import FileSystem
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch, encode_record

LOG = Path("log")
IDENTITY = LogIdentity("_streammeta_test", 1000, 1)
SMALL = LogConfig(max_bytes=4096, segment_bytes=400, group_bytes=256, max_unflushed_bytes=2048)
STREAMS = 3


def record_at(sequence: int, size: int = 20) -> RecordBatch:
    """Return record `sequence` of a log that goes round the streams."""
    payload = f"{sequence}:".encode().ljust(size, b"x")
    return RecordBatch(sequence % STREAMS, 7, sequence // STREAMS, 1, payload)


def encoded(record: RecordBatch) -> tuple[bytes, bytes]:
    return encode_record(record)[:RECORD_HEADER_SIZE], record.payload


def group_of(sequences: Sequence[int], size: int = 20) -> RecordGroup:
    pieces = [piece for one in sequences for piece in encoded(record_at(one, size))]
    return RecordGroup(sequences[0], len(sequences), pieces)


def open_disk(
    files: FileSystem,
    directory: Path = LOG,
    identity: LogIdentity = IDENTITY,
    *,
    mends: bool = False,
) -> DiskLog:
    missing = quarantine(files, directory, identity) if mends else 0
    disk = DiskLog.open(files, directory, identity, SMALL)
    disk.lost += missing
    return disk


def recovered(disk: DiskLog) -> list[RecordBatch]:
    return list(disk.records(disk.end))


def sequences_of(records: Iterable[RecordBatch]) -> list[int]:
    """Return the sequences of records, each of which must be what was appended as it."""
    found = []
    for record in records:
        sequence = record.base_offset * STREAMS + record.stream_id
        assert record == record_at(sequence, len(record.payload))
        found.append(sequence)
    return found
