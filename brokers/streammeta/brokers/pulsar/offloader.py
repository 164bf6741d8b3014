"""Offload of closed ledgers to two objects each, reads of them, and deletion.

The index object is written once the data object is whole, so an index never names missing bytes. A
failed offload leaves neither object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from streammeta.brokers.pulsar.blobs.blobs import BlobError, Blobs, NoSuchBlobError
from streammeta.brokers.pulsar.blobs.range_stream import DEFAULT_BUFFER_SIZE
from streammeta.brokers.pulsar.block_reader import DataObject, read_index, whole_index
from streammeta.brokers.pulsar.formats import blocks as block_format
from streammeta.brokers.pulsar.formats.index_block import IndexBlock, LedgerIndex, place_blocks
from streammeta.brokers.pulsar.formats.ledger_values import LedgerMetadata
from streammeta.brokers.pulsar.formats.object_names import (
    data_name,
    index_name,
    ledger_id_of,
    managed_ledger_of,
    object_metadata,
    uuid_of,
)
from streammeta.brokers.pulsar.formats.read_errors import (
    IncorrectParameterError,
    OffloadReadHandleClosedError,
)

READ_ENTRIES = 100
"""Entries in one read of a ledger."""


class NotAppendableError(Exception):
    """An offload was requested from a read-only offloader."""

    def __init__(self) -> None:
        super().__init__("the offloader does not support offload: it is read only")


class LedgerSource(Protocol):
    """A ledger to offload."""

    @property
    def ledger_id(self) -> int:
        """Id of the ledger."""
        ...

    @property
    def metadata(self) -> LedgerMetadata:
        """Its metadata."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is closed for appends."""
        ...

    async def read(self, first: int, last: int) -> Sequence[block_format.Entry]:
        """Return entries, both ends included."""
        ...


async def read_entries(ledger: LedgerSource, first: int) -> Sequence[block_format.Entry]:
    """Return entries of a ledger from `first` on, at most `READ_ENTRIES`.

    A copy with other entries than its ledger would replace it once the source is deleted.

    Raises:
        ValueError: the source returned no entries, or other ones than the next.
    """
    # A bound on memory: a ledger may be larger than it.
    last = min(first + READ_ENTRIES - 1, ledger.metadata.last_entry)
    entries = await ledger.read(first, last)

    ids = [entry.entry_id for entry in entries]
    if not ids or ids != list(range(first, first + len(ids))) or ids[-1] > last:
        found = f"{ids[0]}..{ids[-1]}" if ids else "none"
        raise ValueError(
            f"ledger {ledger.ledger_id} returned {len(ids)} entries, {found}, for"
            f" {first}..{last}. Check its source, then offload it again"
        )
    return entries


def check_offloadable(ledger: LedgerSource) -> None:
    """Raise `ValueError` if a ledger is open or empty."""
    metadata = ledger.metadata
    # An index needs a last entry, and the copy of an open ledger would miss later entries.
    if not ledger.is_closed or metadata.last_entry < 0 or metadata.length <= 0:
        raise ValueError(f"ledger {ledger.ledger_id} is open or empty, expected a closed one")


class Offloader:
    """Writes, opens and deletes the objects of ledgers."""

    def __init__(
        self,
        blobs: Blobs,
        max_block_size: int = block_format.DEFAULT_MAX_BLOCK_SIZE,
        buffer_size: int = DEFAULT_BUFFER_SIZE,
        *,
        is_appendable: bool = True,
    ) -> None:
        self._blobs = blobs
        self._max_block_size = max_block_size
        self._buffer_size = buffer_size
        self.is_appendable = is_appendable

    async def offload(self, ledger: LedgerSource, uuid: str, extra: Mapping[str, str]) -> None:
        """Copy a closed ledger to two objects under a new uuid.

        Raises:
            NotAppendableError: this offloader only reads.
            ValueError: the ledger is open or empty, its source returns wrong entries, or an entry
                is too large for a block.
            BlobError: the store failed. Neither object is left, unless the deletion fails too.
        """
        if not self.is_appendable:
            raise NotAppendableError
        check_offloadable(ledger)

        names = data_name(uuid, ledger.ledger_id), index_name(uuid, ledger.ledger_id)
        try:
            index = await self._write_data(ledger, names[0], extra)
            await self._blobs.put(names[1], index.encode(), object_metadata("index", extra))
        except BaseException:
            with contextlib.suppress(BlobError):
                # Errors of the deletion must not hide the first error.
                await self._blobs.delete(names)
            raise

    async def _write_data(
        self, ledger: LedgerSource, name: str, extra: Mapping[str, str]
    ) -> IndexBlock:
        upload = await self._blobs.begin(name, object_metadata("data", extra))

        blocks: list[tuple[int, int, int]] = []
        last, left = ledger.metadata.last_entry, ledger.metadata.length
        first, waiting = 0, list[block_format.Entry]()
        try:
            while first <= last:
                size = block_format.block_size(self._max_block_size, last - first + 1, left)
                await self._gather(ledger, waiting, first, size)
                block = block_format.encode_block(waiting, size, first)
                # Without an entry the loop would never end.
                if not block.entries:
                    raise block_format.EntryTooLargeError(first, len(waiting[0].data), size)
                number = len(blocks) + 1
                await upload.part(number, block.data)
                blocks.append((first, number, size))
                # Entries that did not fit begin the next block.
                del waiting[: block.entries]
                first, left = block.end_entry + 1, left - block.entry_bytes
            await upload.complete()
        except BaseException:
            # An upload that is not aborted keeps its parts in the bucket.
            await upload.abort()
            raise

        entries = place_blocks(blocks, block_format.HEADER_SIZE)
        size = sum(size for _, _, size in blocks)
        return IndexBlock(
            ledger.metadata, size, block_format.HEADER_SIZE, LedgerIndex(entries, last)
        )

    async def _gather(
        self, ledger: LedgerSource, waiting: list[block_format.Entry], first: int, size: int
    ) -> None:
        """Read entries until they fill a block or the ledger ends."""
        last = ledger.metadata.last_entry
        # Entry headers take room in the block too.
        held = sum(block_format.ENTRY_HEADER_SIZE + len(entry.data) for entry in waiting)
        following = first + len(waiting)
        while following <= last and held < size:
            read = await read_entries(ledger, following)
            waiting += read
            held += sum(block_format.ENTRY_HEADER_SIZE + len(entry.data) for entry in read)
            following += len(read)

    async def open(self, ledger_id: int, uuid: str) -> OffloadedLedger:
        """Return a handle that reads an offloaded ledger.

        Raises:
            NoSuchLedgerError: the index object does not exist.
            OSError: the index object has an unknown format.
            PayloadError: it is damaged.
            BlobError: the store failed.
        """
        data = await read_index(self._blobs, index_name(uuid, ledger_id))
        with whole_index():
            index = IndexBlock.decode(data)
        name = data_name(uuid, ledger_id)
        kept = DataObject(self._blobs, name, index.data_object_length, self._buffer_size)
        return OffloadedLedger(kept, index)

    async def delete(self, ledger_id: int, uuid: str) -> None:
        """Delete both objects. Raise `BlobError` if one may be left. May be repeated."""
        # The index first: without it the ledger can't be opened half deleted.
        await self._blobs.delete([index_name(uuid, ledger_id), data_name(uuid, ledger_id)])

    async def list_copies(self) -> list[tuple[int, str]]:
        """Return ledger ids and uuids of all copies, whole or not."""
        found = dict[tuple[int, str], None]()
        for name in await self._blobs.names():
            ledger_id = ledger_id_of(name)
            uuid = uuid_of(name, ledger_id)
            if ledger_id is not None and uuid is not None:
                found[ledger_id, uuid] = None
        return list(found)

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        """Whether a copy's object names this managed ledger. Raise `BlobError`."""
        for name in (data_name(uuid, ledger_id), index_name(uuid, ledger_id)):
            # An interrupted offload or deletion leaves only one of the objects.
            with contextlib.suppress(NoSuchBlobError):
                return managed_ledger_of(await self._blobs.metadata(name)) == managed_ledger
        return False


class OffloadedLedger:
    """Handle that reads an offloaded ledger."""

    def __init__(self, data: DataObject, block: IndexBlock) -> None:
        self._data = data
        self._block = block
        self.is_closed = False

    @property
    def metadata(self) -> LedgerMetadata:
        """Metadata of the ledger as it was offloaded."""
        return self._block.metadata

    async def read(self, first: int, last: int) -> list[block_format.Entry]:
        """Return entries, both ends included.

        Raises:
            OffloadReadHandleClosedError: the handle is closed.
            IncorrectParameterError: the ledger does not have them all.
            NoSuchLedgerError: the data object is missing.
            OSError: the data object has an unknown format, or can't be read.
            PayloadError: it is damaged.
        """
        if self.is_closed:
            raise OffloadReadHandleClosedError(f"{self._data.name} is closed. Open it again")
        if not 0 <= first <= last <= self.metadata.last_entry:
            raise IncorrectParameterError(
                f"entries are {first}..{last}, expected some of 0..{self.metadata.last_entry}"
            )

        return await self._data.entries(self._block.index, first, last)

    def close(self) -> None:
        """Reject reads from now on."""
        self.is_closed = True
