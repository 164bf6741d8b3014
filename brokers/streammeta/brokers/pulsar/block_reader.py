"""Entries of one ledger, read out of the blocks of a data object in the order of their ids."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streammeta.brokers.pulsar.blobs import BlobError, Blobs, NoSuchBlobError
from streammeta.brokers.pulsar.blocks import ENTRY_HEADER_SIZE, HEADER_SIZE, BlockHeader, Entry
from streammeta.brokers.pulsar.index_block import IndexEntry, LedgerIndex
from streammeta.brokers.pulsar.object_names import is_known_version
from streammeta.brokers.pulsar.range_stream import RangeStream
from streammeta.brokers.pulsar.read_errors import NoSuchLedgerError
from streammeta.storage.errors import PayloadError

_ENTRY = struct.Struct(">iq")


async def read_index(blobs: Blobs, name: str) -> bytes:
    """Return the bytes of an index object.

    Raises:
        NoSuchLedgerError: it does not exist.
        OSError: it has a format that is not known.
        BlobError: the store failed.
    """
    try:
        metadata: Mapping[str, str] = await blobs.metadata(name)
        if not is_known_version(metadata):
            raise OSError(f"Invalid object version of {name}")
        return await blobs.read(name, 0, 1 << 31)
    except NoSuchBlobError as error:
        raise NoSuchLedgerError(str(error)) from error


@contextlib.contextmanager
def whole_index() -> Iterator[None]:
    """Raise `PayloadError` for an index that is cut."""
    try:
        yield
    except EOFError as error:
        raise PayloadError(0, "index object", error, "a whole index") from error


@dataclass(slots=True)
class DataObject:
    """A data object and its length; `ledger_id` is None where its blocks are of one ledger."""

    blobs: Blobs
    name: str
    size: int
    buffer_size: int
    ledger_id: int | None = None
    _is_checked: bool = False

    async def entries(self, index: LedgerIndex, first: int, last: int) -> list[Entry]:
        """Return entries of a ledger, both ends included; an entry that is damaged ends the read.

        Raises:
            NoSuchLedgerError: the object is gone.
            OSError: it has a format that is not known, or can't be read.
            PayloadError: it is damaged, or a block is not where the index says.
        """
        try:
            await self._check_version()
            return await self._walk(index, first, last)
        except NoSuchBlobError as error:
            raise NoSuchLedgerError(str(error)) from error
        except BlobError as error:
            raise OSError(f"Error reading from BlobStore: {error}") from error

    async def _check_version(self) -> None:
        if not self._is_checked and not is_known_version(await self.blobs.metadata(self.name)):
            raise OSError(f"Error reading from BlobStore: format version of {self.name}")
        self._is_checked = True

    async def _read(self, start: int, length: int) -> bytes:
        return await self.blobs.read(self.name, start, length)

    async def _walk(self, index: LedgerIndex, first: int, last: int) -> list[Entry]:
        place = index.find(first)
        stream = RangeStream(self._read, self.size, self.buffer_size, place.offset)
        end, found = await self._enter(stream, place), list[Entry]()
        for wanted in range(place.first_entry, last + 1):
            if index.find(wanted) != place:
                place = index.find(wanted)
                end = await self._enter(stream, place)
            at = stream.position
            length, entry_id = await _entry_header(stream, end)
            if entry_id != wanted or stream.position + length > end:
                raise PayloadError(at, "entry", "padding" if length < 0 else entry_id, wanted)
            if wanted < first:
                stream.seek_forward(stream.position + length)
            else:
                found.append(Entry(entry_id, await stream.read(length)))
        return found

    async def _enter(self, stream: RangeStream, place: IndexEntry) -> int:
        """Go to the entries of a block; return where the block ends."""
        if place.offset < stream.position:
            raise PayloadError(stream.position, "block", place.offset, "a later place in the index")
        stream.seek_forward(place.offset)
        wanted = f"the block of entry {place.first_entry}"
        try:
            header = BlockHeader.decode(await stream.read(HEADER_SIZE))
        except (EOFError, PayloadError) as error:
            raise PayloadError(place.offset, "block header", error, wanted) from error
        if (header.ledger_id, header.first_entry_id) != (self.ledger_id, place.first_entry):
            raise PayloadError(place.offset, "block header", header, wanted)
        return place.offset + header.block_length


async def _entry_header(stream: RangeStream, end: int) -> tuple[int, int]:
    """Return length and id of the next entry; -1 for both where there is none before `end`."""
    if stream.position + ENTRY_HEADER_SIZE > end:
        return -1, -1
    data = await stream.read(ENTRY_HEADER_SIZE)
    length, entry_id = _ENTRY.unpack(data.ljust(ENTRY_HEADER_SIZE, b"\xff"))
    return (length, entry_id) if length >= 0 else (-1, -1)
