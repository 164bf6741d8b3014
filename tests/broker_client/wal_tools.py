"""Tools for tests of write-ahead logs: records with known contents, logs on disk and in slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from streammeta.client.wal.bucket import reading
from streammeta.client.wal.bucket.bucket_slots import BucketSlots, SlotStore
from streammeta.client.wal.disk.config import LogConfig, LogIdentity
from streammeta.client.wal.disk.disk_log import DiskLog, RecordGroup
from streammeta.client.wal.disk.quarantine import quarantine
from streammeta.storage.durable_files import FileSystem
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE, RecordBatch, encode_record
from streammeta.storage.object_log.slot import LogName, Sealer
from streammeta.storage.object_store.protocol.base import ObjectInfo
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.memory_store import MemoryObjectStore

LOG = Path("log")
IDENTITY = LogIdentity("_streammeta_test", 1000, 1)
SMALL = LogConfig(max_bytes=4096, segment_bytes=400, group_bytes=256, max_unflushed_bytes=2048)
STREAMS = 3


NODE = 7
BY = Sealer(8, 1)
"""The process that seals the log of `NODE`."""


class LateSlots(BucketSlots):
    """Slots whose listings leave out chosen keys, each for some listings; reads are noted.

    Several logs share it, so it outlives them.
    """

    def __init__(self, store: MemoryObjectStore) -> None:
        super().__init__(store, 4)
        self.store = store
        self.hidden: dict[str, int] = {}
        self.reads: list[str] = []

    def close(self) -> None:
        """Stay open for the next log."""

    def end(self) -> None:
        """Release the threads."""
        super().close()

    async def list(self, prefix: str) -> list[ObjectInfo]:
        found = [info for info in await super().list(prefix) if not self.hidden.get(info.key)]
        self.hidden = {key: times - 1 for key, times in self.hidden.items() if times > 1}
        return found

    async def get(self, key: str) -> bytes | None:
        self.reads.append(key)
        return await super().get(key)


def name_of(epoch: int = 1) -> LogName:
    return LogName(NAMESPACE, NODE, epoch)


async def read_sealed(slots: SlotStore, epoch: int = 1) -> list[RecordBatch]:
    """Seal a log and return its records."""
    sealed = await reading.seal_log(slots, name_of(epoch), BY)
    assert sealed is not None
    return [record async for records in reading.read_log(slots, sealed) for record in records]


def record_at(sequence: int, size: int = 20) -> RecordBatch:
    """Return record `sequence` of a log that goes round the streams."""
    payload = f"{sequence}:".encode().ljust(size, b"x")
    return RecordBatch(sequence % STREAMS, 7, sequence // STREAMS, 1, payload)


def encoded(record: RecordBatch) -> tuple[bytes, bytes]:
    return encode_record(record)[:RECORD_HEADER_SIZE], record.payload


def group_of(sequences: Sequence[int], size: int = 20) -> RecordGroup:
    pieces = [piece for sequence in sequences for piece in encoded(record_at(sequence, size))]
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
