"""Streaming offload: entries are taken as they are written, into segments of a bounded size.

A segment is two objects, named by a uuid alone, and may hold several ledgers. It takes entries that
follow each other, and closes itself when it is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from streammeta.brokers.pulsar.blobs import BlobError, Blobs
from streammeta.brokers.pulsar.blocks import (
    ENTRY_HEADER_SIZE,
    HEADER_SIZE,
    Entry,
    decode_block,
    encode_block,
)
from streammeta.brokers.pulsar.index_block import LedgerIndex, StreamingIndexBlock, placed
from streammeta.brokers.pulsar.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.object_names import object_metadata


class OfferResult(StrEnum):
    """Outcomes of an offer; the names are those of the source."""

    SUCCESS = "SUCCESS"
    FAIL_SEGMENT_CLOSED = "FAIL_SEGMENT_CLOSED"
    FAIL_NOT_CONSECUTIVE = "FAIL_NOT_CONSECUTIVE"


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The last entry of a segment."""

    ledger_id: int
    entry_id: int


class StreamingSegment:
    """A segment that takes entries from a first one on; `max_bytes` of data close it."""

    def __init__(
        self, blobs: Blobs, uuid: str, first_ledger: int, first_entry: int, max_bytes: int
    ) -> None:
        self._blobs = blobs
        self.uuid = uuid
        self._max_bytes = max_bytes
        self._next = (first_ledger, first_entry)
        self._entries: dict[int, list[Entry]] = {}
        self._bytes = 0

    @property
    def is_closed(self) -> bool:
        """Whether the segment is full."""
        return self._bytes >= self._max_bytes

    def offer(self, ledger_id: int, entry: Entry) -> OfferResult:
        """Take an entry if it follows the one before, or begins a later ledger."""
        if self.is_closed:
            return OfferResult.FAIL_SEGMENT_CLOSED
        wanted_ledger, wanted_entry = self._next
        begins_later = bool(self._entries) and ledger_id > wanted_ledger and not entry.entry_id
        if (ledger_id, entry.entry_id) != (wanted_ledger, wanted_entry) and not begins_later:
            return OfferResult.FAIL_NOT_CONSECUTIVE
        self._entries.setdefault(ledger_id, []).append(entry)
        self._bytes += len(entry.data)
        self._next = (ledger_id, entry.entry_id + 1)
        return OfferResult.SUCCESS

    async def finish(self, extra: Mapping[str, str]) -> SegmentEnd:
        """Write data, then index; return the last entry.

        Raises:
            ValueError: the segment is empty.
            BlobError: the store failed; neither object is left, unless it can't be deleted either.
        """
        if not self._entries:
            raise ValueError(f"segment {self.uuid} is empty, wanted an entry")
        try:
            index = await self._write_data(extra)
            metadata = object_metadata("index", extra)
            await self._blobs.put(f"{self.uuid}-index", index.encode(), metadata)
        except BaseException:
            with contextlib.suppress(BlobError):
                await self._blobs.delete([self.uuid, f"{self.uuid}-index"])
            raise
        ledger_id, entry_id = self._next
        return SegmentEnd(ledger_id, entry_id - 1)

    async def _write_data(self, extra: Mapping[str, str]) -> StreamingIndexBlock:
        upload = await self._blobs.begin(self.uuid, object_metadata("data", extra))
        ledgers, offset = {}, 0
        try:
            for number, (ledger_id, entries) in enumerate(self._entries.items(), start=1):
                data = sum(len(one.data) for one in entries)
                size = HEADER_SIZE + ENTRY_HEADER_SIZE * len(entries) + data
                first = entries[0].entry_id
                await upload.part(number, encode_block(entries, size, first, ledger_id).data)
                info = LedgerInfo(ledger_id, entries[-1].entry_id + 1, data)
                places = placed([(first, number, size)], HEADER_SIZE, offset)
                ledgers[ledger_id] = (info, LedgerIndex(places, entries[-1].entry_id))
                offset += size
            await upload.complete()
        except BaseException:
            await upload.abort()
            raise
        return StreamingIndexBlock(offset, HEADER_SIZE, ledgers)


async def read_segment(
    blobs: Blobs, uuid: str, ledger_id: int, first: int, last: int
) -> list[Entry]:
    """Return the entries of a segment that lie in a range of a ledger, both ends included.

    Raises `NoSuchBlobError`, `BlobError`, and `EOFError` or `PayloadError` on damaged objects.
    """
    index = StreamingIndexBlock.decode(await blobs.read(f"{uuid}-index", 0, 1 << 31))
    if ledger_id not in index.ledgers:
        return []
    found: list[Entry] = []
    entries = index.ledgers[ledger_id][1].entries
    following = sorted(one.offset for _, ledger in index.ledgers.values() for one in ledger.entries)
    for place in entries:
        ends = (at for at in following if at > place.offset)
        end = next(ends, index.data_object_length)
        block = await blobs.read(uuid, place.offset, end - place.offset)
        found += [one for one in decode_block(block) if first <= one.entry_id <= last]
    return found
