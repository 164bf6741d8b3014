"""Stores in memory for what brokers keep in the cluster: lists of ledgers, tables, segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.brokers.pulsar.cluster_lists import decode_list, encode_list
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import VersionConflictError
from streammeta.brokers.rocketmq.formats.metadata import MetadataTable
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.storage import SegmentWriteError, TimeBounds


@dataclass(slots=True)
class MemoryListStore:
    """List in memory, stored as bytes."""

    data: bytes = b""
    version: int = field(default=0)

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers and the version."""
        return decode_list(self.data), self.version

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version."""
        # The same rule as in the cluster, so that tests see real conflicts.
        if version != self.version:
            raise VersionConflictError(f"list has version {self.version}, expected {version}")
        self.data, self.version = encode_list(ledgers), version + 1
        return self.version


@dataclass(slots=True)
class MemoryKeeper:
    """Metadata in memory."""

    table: MetadataTable = field(default_factory=MetadataTable)
    saves: int = 0

    async def save(self) -> None:
        """Count the call: the table itself is the store."""
        self.saves += 1

    def require_owner(self) -> None:
        """Do nothing: no other process has the table."""

    async def prove_owner(self) -> None:
        """Save the time: no other process has the table."""
        await self.save()


class MemorySegment:
    """A segment in memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    async def size(self) -> int | None:
        """Return the number of stored bytes."""
        return len(self.data)

    async def reload(self) -> int | None:
        """Return the number of stored bytes."""
        return len(self.data)

    async def write(self, position: int, data: bytes, times: TimeBounds) -> None:
        """Store bytes at the end. Raise `SegmentWriteError` elsewhere."""
        if position != len(self.data):
            raise SegmentWriteError(f"position is {position}", len(self.data))
        self.data += data

    async def read(self, position: int, length: int) -> bytes:
        """Return stored bytes."""
        return bytes(self.data[position : position + length])

    async def seal(self) -> None:
        """Do nothing: bytes in memory have one form."""

    async def destroy(self) -> None:
        """Drop all bytes."""
        self.data.clear()


class MemorySegmentStore:
    """Segments in memory."""

    def __init__(self) -> None:
        self.segments: dict[tuple[str, SegmentType, int], MemorySegment] = {}

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> MemorySegment:
        """Return the segment, empty if it is new."""
        return self.segments.setdefault((path, kind, base_offset), MemorySegment())


@dataclass(slots=True)
class MemoryShelf:
    """Index files in memory."""

    local: dict[int, bytes] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)

    async def save(self, begin_ms: int, data: bytes) -> None:
        """Store a local file."""
        self.local[begin_ms] = data

    async def load(self) -> dict[int, bytes]:
        """Return all local files."""
        return dict(self.local)

    async def remove(self, begin_ms: int) -> None:
        """Drop a local file."""
        self.local.pop(begin_ms, None)

    async def list_uploaded(self) -> list[int]:
        """Return the begins of uploaded files."""
        return list(self.done)

    async def note_uploaded(self, begin_ms: int) -> None:
        """Note that a file is uploaded."""
        self.done.append(begin_ms)

    async def note_deleted(self, begin_ms: int) -> None:
        """Note that an uploaded file is deleted."""
        self.done.remove(begin_ms)
        self.marked.append(begin_ms)

    async def list_deleted(self) -> list[int]:
        """Return the begins of deleted files."""
        return list(self.marked)

    async def forget(self, begin_ms: int) -> None:
        """Forget a deleted file."""
        self.marked.remove(begin_ms)
