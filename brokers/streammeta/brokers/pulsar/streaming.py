"""Streaming offload: entries go into segments of a bounded size as they are written.

A segment is two objects named by a uuid alone, and may contain several ledgers. It accepts
consecutive entries, uploads them in blocks, and closes itself when it is full. Source: the
streaming half of `BlobStoreManagedLedgerOffloader`, and `BufferedOffloadStream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from streammeta.brokers.pulsar.blobs.blobs import BlobError, Blobs, BlobUpload
from streammeta.brokers.pulsar.formats import index_block
from streammeta.brokers.pulsar.formats.blocks import (
    ENTRY_HEADER_SIZE,
    HEADER_SIZE,
    MIN_BLOCK_SIZE,
    PADDING,
    Entry,
    encode_block,
)
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.formats.object_names import object_metadata, segment_names

DEFAULT_SEGMENT_BYTES = 1 << 30
DEFAULT_BUFFER_BYTES = 10 << 20
_LAST_ENTRY_READ_FROM_START = 127
"""Largest first entry id that the peer reads without padding before the first block.

The peer reads a block header as an entry with the id 128. It seeks only if it looks for a later
entry, and padding makes it seek at once.
"""


class OfferResult(StrEnum):
    """Outcomes of an offer. The names are the source's."""

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
    """Bounds in bytes: entries of a segment, entries waiting for an upload, smallest block.

    An object store accepts parts of `block_bytes` or more. The buffer has room for at least one
    block.
    """

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    block_bytes: int = MIN_BLOCK_SIZE


def streaming_block_size(entries: int, data_bytes: int, least: int) -> int:
    """Return a block's length, with at least 4 bytes of padding that make readers seek."""
    wanted = HEADER_SIZE + ENTRY_HEADER_SIZE * entries + data_bytes + len(PADDING)
    return max(least, wanted)


class StreamingSegment:
    """Segment that accepts entries from a first one on.

    `known` returns a managed ledger's information on one of its ledgers. For a closed ledger the
    index contains the number of its entries, for an open one the number of offloaded entries.
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
        """Whether the segment is closed for entries, because it is full or finished."""
        return self._is_finished or self._bytes >= self._limits.segment_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes of entries that are not uploaded yet."""
        return self._waiting_bytes

    def offer(self, ledger_id: int, entry: Entry) -> OfferResult:
        """Accept an entry if it follows the last one, or begins a later ledger.

        A full buffer has room again after `upload_blocks`.
        """
        if self.is_closed:
            return OfferResult.FAIL_SEGMENT_CLOSED
        wanted_ledger, wanted_entry = self._next
        # A segment may continue with a later ledger, but only from its first entry.
        begins_later = self._taken > 0 and ledger_id > wanted_ledger and not entry.entry_id
        if (ledger_id, entry.entry_id) != (wanted_ledger, wanted_entry) and not begins_later:
            return OfferResult.FAIL_NOT_CONSECUTIVE
        # A buffer smaller than a block could never be uploaded.
        if self._waiting_bytes >= max(self._limits.buffer_bytes, self._limits.block_bytes):
            return OfferResult.FAIL_BUFFER_FULL

        self._waiting.append((ledger_id, entry))
        self._taken += 1
        self._waiting_bytes += len(entry.data)
        self._bytes += len(entry.data)
        self._next = (ledger_id, entry.entry_id + 1)
        return OfferResult.SUCCESS

    async def upload_blocks(self) -> None:
        """Upload waiting entries in whole blocks, until less than one is left. Calls take turns.

        Raises:
            ValueError: the segment is abandoned.
            BlobError: the store failed. The segment accepts no more entries, and its objects are
                deleted unless that fails too.
        """
        async with self._uploading:
            while self._waiting_bytes >= self._limits.block_bytes:
                await self._abandon_on_failure(self._upload_block)

    async def finish(self) -> SegmentEnd:
        """Close the segment, write the rest of its data and its index. Return the last entry.

        Raises:
            ValueError: the segment is empty, abandoned, or was finished before.
            BlobError: as `upload_blocks`.
        """
        # An empty segment has no last entry to return.
        if not self._taken or self._is_finished:
            state = "is finished" if self._is_finished else "is empty"
            raise ValueError(f"segment {self.uuid} {state}, expected an open one with entries")
        # Set before the upload, so that no entry is accepted during it.
        self._is_finished = True
        async with self._uploading:
            # The last blocks may be smaller than a full one.
            while self._waiting:
                await self._abandon_on_failure(self._upload_block)
            await self._abandon_on_failure(self._complete)

        ledger_id, entry_id = self._next
        return SegmentEnd(ledger_id, entry_id - 1)

    async def abandon(self) -> None:
        """Reject entries from now on and delete uploaded data. Raise `BlobError` on failure."""
        # Set first: no entry is accepted even if the deletion fails.
        self._is_finished = self._is_abandoned = True

        if self._upload is not None:
            await self._upload.abort()
        await self._blobs.delete([self._index_name, self._data_name])

    async def _abandon_on_failure(self, step: Callable[[], Awaitable[None]]) -> None:
        if self._is_abandoned:
            raise ValueError(f"segment {self.uuid} is abandoned. Offer its entries to another one")
        try:
            await step()
        except BaseException:
            with contextlib.suppress(BlobError):
                await self.abandon()
            raise

    async def _upload_block(self) -> None:
        """Upload one block of the first waiting ledger, or a shorter one at its end."""
        ledger_id, first = self._waiting[0]
        entries, data, least = list[Entry](), 0, self._limits.block_bytes
        # A block contains entries of one ledger only.
        while self._waiting and self._waiting[0][0] == ledger_id and data < least:
            entries.append(self._waiting.popleft()[1])
            data += len(entries[-1].data)
        if self._upload is None:
            metadata = object_metadata("data", self._extra)
            self._upload = await self._blobs.begin(self._data_name, metadata)
            # Padding before the first block sends the peer's reader on.
            if first.entry_id > _LAST_ENTRY_READ_FROM_START:
                self._size = len(PADDING)

        size = streaming_block_size(len(entries), data, least)
        block = encode_block(entries, size, first.entry_id, ledger_id)
        # Parts of an upload are numbered from 1.
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
            # An open ledger: only its offloaded entries are known.
            if not info.entries:
                info = replace(info, entries=end + 1)
            places = tuple(index_block.IndexEntry(*block) for block in blocks)
            ledgers[ledger_id] = (info, index_block.LedgerIndex(places, end))

        index = index_block.StreamingIndexBlock(self._size, HEADER_SIZE, ledgers)
        metadata = object_metadata("index", self._extra)
        # The index comes last: it must not name bytes that do not exist.
        await self._blobs.put(self._index_name, index.encode(), metadata)
