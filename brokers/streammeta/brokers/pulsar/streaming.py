"""Streaming offload: entries are taken as they are written, into segments of a bounded size.

A segment is two objects, named by a uuid alone, and may hold several ledgers. It takes entries that
follow each other, uploads them in blocks as they come, and closes itself when it is full.
Source: the streaming half of `BlobStoreManagedLedgerOffloader`, and `BufferedOffloadStream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from streammeta.brokers.pulsar.blobs.blobs import BlobError, Blobs, BlobUpload
from streammeta.brokers.pulsar.formats.blocks import (
    ENTRY_HEADER_SIZE,
    HEADER_SIZE,
    MIN_BLOCK_SIZE,
    PADDING,
    Entry,
    encode_block,
)
from streammeta.brokers.pulsar.formats.index_block import (
    IndexEntry,
    LedgerIndex,
    StreamingIndexBlock,
)
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.formats.object_names import object_metadata, segment_names

DEFAULT_SEGMENT_BYTES = 1 << 30
DEFAULT_BUFFER_BYTES = 10 << 20
_LAST_ENTRY_READ_FROM_START = 127
"""Last id of a segment's first entry that the peer reads without padding before the first block.

The peer reads a block header as an entry with the id 128, and only of a later one it knows that it
has to seek; padding makes it seek at once.
"""


class OfferResult(StrEnum):
    """Outcomes of an offer; the names are those of the source."""

    SUCCESS = "SUCCESS"
    FAIL_BUFFER_FULL = "FAIL_BUFFER_FULL"
    FAIL_SEGMENT_CLOSED = "FAIL_SEGMENT_CLOSED"
    FAIL_NOT_CONSECUTIVE = "FAIL_NOT_CONSECUTIVE"


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The last entry of a segment."""

    ledger_id: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """Bytes: of entries that close a segment, that wait for an upload, and of the least block.

    An object store takes parts of `block_bytes` or more. What waits is at least a block.
    """

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    block_bytes: int = MIN_BLOCK_SIZE


def streaming_block_size(entries: int, data_bytes: int, least: int) -> int:
    """Return the length of a block: with at least 4 bytes of padding, which send a reader on."""
    wanted = HEADER_SIZE + ENTRY_HEADER_SIZE * entries + data_bytes + len(PADDING)
    return max(least, wanted)


class StreamingSegment:
    """A segment that takes entries from a first one on.

    `known` gives what a managed ledger knows of one of its ledgers; the index says of a closed
    ledger how many entries it has, of an open one how many were offloaded.
    """

    def __init__(
        self,
        blobs: Blobs,
        uuid: str,
        first_ledger: int,
        first_entry: int,
        *,
        limits: SegmentLimits | None = None,
        extra: Mapping[str, str] | None = None,
        known: Callable[[int], LedgerInfo | None] = lambda _: None,
    ) -> None:
        self._blobs = blobs
        self.uuid = uuid
        self._data_name, self._index_name = segment_names(uuid)
        self._limits = limits or SegmentLimits()
        self._extra = extra or {}
        self._known = known
        self._next = (first_ledger, first_entry)
        self._waiting: deque[tuple[int, Entry]] = deque()
        self._waiting_bytes = self._bytes = self._taken = 0
        self._is_finished = self._is_abandoned = False
        self._uploading = asyncio.Lock()
        self._upload: BlobUpload | None = None
        self._parts = 0
        self._size = 0
        self._blocks: dict[int, list[tuple[int, int, int]]] = {}
        self._ends: dict[int, int] = {}

    @property
    def is_closed(self) -> bool:
        """Whether the segment takes no more entries: it is full, or finished."""
        return self._is_finished or self._bytes >= self._limits.segment_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes of entries that are not uploaded yet."""
        return self._waiting_bytes

    def offer(self, ledger_id: int, entry: Entry) -> OfferResult:
        """Take an entry if it follows the one before, or begins a later ledger.

        A buffer that is full has room again after `upload_blocks`.
        """
        if self.is_closed:
            return OfferResult.FAIL_SEGMENT_CLOSED
        wanted_ledger, wanted_entry = self._next
        begins_later = self._taken > 0 and ledger_id > wanted_ledger and not entry.entry_id
        if (ledger_id, entry.entry_id) != (wanted_ledger, wanted_entry) and not begins_later:
            return OfferResult.FAIL_NOT_CONSECUTIVE
        if self._waiting_bytes >= max(self._limits.buffer_bytes, self._limits.block_bytes):
            return OfferResult.FAIL_BUFFER_FULL
        self._waiting.append((ledger_id, entry))
        self._taken += 1
        self._waiting_bytes += len(entry.data)
        self._bytes += len(entry.data)
        self._next = (ledger_id, entry.entry_id + 1)
        return OfferResult.SUCCESS

    async def upload_blocks(self) -> None:
        """Upload what waits in whole blocks, until less than one is left; calls take turns.

        Raises:
            ValueError: the segment is abandoned.
            BlobError: the store failed; nothing of the segment is left, unless it can't be deleted
                either, and it takes no more entries.
        """
        async with self._uploading:
            while self._waiting_bytes >= self._limits.block_bytes:
                await self._undone_if_it_fails(self._upload_block)

    async def finish(self) -> SegmentEnd:
        """Close the segment, write the rest of its data, then its index; return the last entry.

        Raises:
            ValueError: the segment is empty, abandoned, or was finished before.
            BlobError: as `upload_blocks`.
        """
        if not self._taken or self._is_finished:
            said = "is finished" if self._is_finished else "is empty"
            raise ValueError(f"segment {self.uuid} {said}, wanted one with entries to finish")
        self._is_finished = True
        async with self._uploading:
            while self._waiting:
                await self._undone_if_it_fails(self._upload_block)
            await self._undone_if_it_fails(self._complete)
        ledger_id, entry_id = self._next
        return SegmentEnd(ledger_id, entry_id - 1)

    async def abandon(self) -> None:
        """Take no more entries and delete what was uploaded; raise `BlobError` if some is left."""
        self._is_finished = self._is_abandoned = True
        if self._upload is not None:
            await self._upload.abort()
        await self._blobs.delete([self._index_name, self._data_name])

    async def _undone_if_it_fails(self, step: Callable[[], Awaitable[None]]) -> None:
        if self._is_abandoned:
            raise ValueError(f"segment {self.uuid} is abandoned; offer its entries to another one")
        try:
            await step()
        except BaseException:
            with contextlib.suppress(BlobError):
                await self.abandon()
            raise

    async def _upload_block(self) -> None:
        """Upload a block of the first ledger that waits: a full one, or all that there is of it."""
        ledger_id, first = self._waiting[0]
        entries, data, least = list[Entry](), 0, self._limits.block_bytes
        while self._waiting and self._waiting[0][0] == ledger_id and data < least:
            entries.append(self._waiting.popleft()[1])
            data += len(entries[-1].data)
        if self._upload is None:
            metadata = object_metadata("data", self._extra)
            self._upload = await self._blobs.begin(self._data_name, metadata)
            if first.entry_id > _LAST_ENTRY_READ_FROM_START:
                self._size = len(PADDING)
        size = streaming_block_size(len(entries), data, least)
        block = encode_block(entries, size, first.entry_id, ledger_id)
        self._parts += 1
        padding = b"" if self._parts > 1 else PADDING[: self._size]
        await self._upload.part(self._parts, padding + block.data)
        self._blocks.setdefault(ledger_id, []).append((first.entry_id, self._parts, self._size))
        self._ends[ledger_id] = entries[-1].entry_id
        self._size += size
        self._waiting_bytes -= data

    async def _complete(self) -> None:
        assert self._upload is not None
        await self._upload.complete()
        ledgers = {}
        for ledger_id, blocks in self._blocks.items():
            end = self._ends[ledger_id]
            info = self._known(ledger_id) or LedgerInfo(ledger_id)
            if not info.entries:  # open: what is here is what is known of it
                info = replace(info, entries=end + 1)
            places = tuple(IndexEntry(*one) for one in blocks)
            ledgers[ledger_id] = (info, LedgerIndex(places, end))
        index = StreamingIndexBlock(self._size, HEADER_SIZE, ledgers)
        metadata = object_metadata("index", self._extra)
        await self._blobs.put(self._index_name, index.encode(), metadata)
