"""Ledgers in segments of streaming offload: opened, read and deleted.

A segment may contain several ledgers, and a ledger may continue in the next segment. If two
segments contain the same entry, the later one counts, as in the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.brokers.pulsar.blobs.blobs import Blobs
from streammeta.brokers.pulsar.blobs.range_stream import DEFAULT_BUFFER_SIZE
from streammeta.brokers.pulsar.block_reader import DataObject, read_index, whole_index
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.index_block import LedgerIndex, StreamingIndexBlock
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.formats.object_names import segment_names
from streammeta.brokers.pulsar.formats.read_errors import (
    IncorrectParameterError,
    NoSuchLedgerError,
    OffloadReadHandleClosedError,
)


class Segments:
    """The segments of one place, named by their uuids."""

    def __init__(self, blobs: Blobs, buffer_size: int = DEFAULT_BUFFER_SIZE) -> None:
        self._blobs = blobs
        self._buffer_size = buffer_size

    async def open(self, ledger_id: int, uuids: Sequence[str]) -> SegmentedLedger:
        """Return a handle that reads a ledger from segments, given in the order of their entries.

        Segments without entries of the ledger are skipped.

        Raises:
            NoSuchLedgerError: an index object does not exist, or none contains the ledger.
            OSError: an index object has an unknown format.
            PayloadError: one is damaged.
            BlobError: the store failed.
        """
        parts = []
        for uuid in uuids:
            data_name, index_name = segment_names(uuid)
            data = await read_index(self._blobs, index_name)
            with whole_index():
                block = StreamingIndexBlock.decode(data)
            info, index = block.ledgers.get(ledger_id, (None, None))
            # An index may name a ledger without having entries of it.
            if info is not None and index is not None and index.entries:
                # From the index, which saves a request for the object's size.
                size = block.data_object_length
                kept = DataObject(self._blobs, data_name, size, self._buffer_size, ledger_id)
                parts.append(_Part(kept, info, index))

        if not parts:
            raise NoSuchLedgerError(
                f"ledger {ledger_id} is in none of {len(uuids)} segments. Check the offload context"
            )

        return SegmentedLedger(ledger_id, parts)

    async def delete(self, uuid: str) -> None:
        """Delete both objects. Raise `BlobError` if one may be left. May be repeated."""
        data_name, index_name = segment_names(uuid)
        # The index first: without it the segment can't be opened half deleted.
        await self._blobs.delete([index_name, data_name])


@dataclass(slots=True)
class _Part:
    """A ledger in one segment."""

    data: DataObject
    info: LedgerInfo
    index: LedgerIndex

    @property
    def first_entry(self) -> int:
        return self.index.entries[0].first_entry


class SegmentedLedger:
    """Handle that reads a ledger from its segments."""

    def __init__(self, ledger_id: int, parts: Sequence[_Part]) -> None:
        self.ledger_id = ledger_id
        self._parts = parts
        self.is_closed = False

    @property
    def info(self) -> LedgerInfo:
        """The ledger as in the last segment. An open ledger ends at its last offloaded entry."""
        return self._parts[-1].info

    @property
    def first_entry(self) -> int:
        """First entry in the segments."""
        return min(part.first_entry for part in self._parts)

    @property
    def last_entry(self) -> int:
        """Last entry of the ledger. Earlier segments may still be missing."""
        return self.info.entries - 1

    async def read(self, first: int, last: int) -> list[Entry]:
        """Return entries, both ends included.

        Raises:
            OffloadReadHandleClosedError: the handle is closed.
            IncorrectParameterError: the segments do not have them all.
            NoSuchLedgerError: a data object is missing.
            OSError: a data object has a format that is not known, or can't be read.
            PayloadError: one is damaged.
        """
        if self.is_closed:
            raise OffloadReadHandleClosedError(f"ledger {self.ledger_id} is closed. Open it again")
        if not self.first_entry <= first <= last <= self.last_entry:
            raise IncorrectParameterError(
                f"entries are {first}..{last}, expected some of"
                f" {self.first_entry}..{self.last_entry}"
            )

        found: list[list[Entry]] = []
        # From the last segment on, since later segments win where entries overlap.
        for part in reversed(self._parts):
            begin = max(first, part.first_entry)
            if begin <= last:
                found.append(await part.data.entries(part.index, begin, last))
                last = begin - 1

        return [entry for entries in reversed(found) for entry in entries]

    def close(self) -> None:
        """Reject reads from now on."""
        self.is_closed = True
