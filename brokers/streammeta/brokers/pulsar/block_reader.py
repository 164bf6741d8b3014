"""Entries of one ledger, read from the blocks of a data object in the order of their ids.

A read begins at the nearest known entry, and uses the read-ahead of the read before. Bytes that are
not an entry are skipped, as in the peer: the reader searches the rest of the block for the
requested entry.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from streammeta.brokers.pulsar.blobs.blobs import BlobError, Blobs, NoSuchBlobError
from streammeta.brokers.pulsar.blobs.range_stream import RangeStream, ReadAhead
from streammeta.brokers.pulsar.formats import blocks as block_format
from streammeta.brokers.pulsar.formats.index_block import IndexEntry, LedgerIndex
from streammeta.brokers.pulsar.formats.object_names import is_known_version
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.storage.errors import PayloadError

# Places of entries of earlier reads, so that a read in the middle of a block begins near it.
#
# An index object names only the first entry of a block, and a block has 64 MiB. The places stay
# valid, because an object never changes under its name. Their number is bounded: above it, every
# second place is dropped, and new ones are twice as far apart.

# A read starts at most this far before its entry.
SPACING_BYTES = 64 << 10
MOST_PLACES = 4096


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Place of an entry's head in a data object. `block_end` is the end of its block."""

    entry_id: int
    offset: int
    block_end: int


@dataclass(slots=True)
class EntryPlaces:
    """Places of some entries of one ledger in one object, at least `spacing` bytes apart."""

    spacing: int = SPACING_BYTES
    most: int = MOST_PLACES
    _kept: list[EntryPlace] = field(default_factory=list)
    _noted_at: int = -SPACING_BYTES
    _next: EntryPlace | None = None
    """Place after the last read, where a sequential reader continues."""

    def note(self, entry_id: int, offset: int, block_end: int) -> None:
        """Add a place, unless a known one lies near it."""
        # Checked first: most entries of a sequential read lie near the last place.
        if self._noted_at <= offset < self._noted_at + self.spacing:
            return

        self._noted_at = offset
        at = bisect_right(self._kept, entry_id, key=lambda place: place.entry_id)
        # Only the neighbours can lie within the spacing.
        near = self._kept[max(0, at - 1) : at + 1]
        if any(abs(offset - place.offset) < self.spacing for place in near):
            return

        # Kept in the order of entries for the binary search.
        self._kept.insert(at, EntryPlace(entry_id, offset, block_end))
        if len(self._kept) > self.most:
            # Memory stays bounded, and the places stay evenly spread.
            self._kept = self._kept[::2]
            self.spacing *= 2

    def note_next(self, entry_id: int, offset: int, block_end: int) -> None:
        """Note the place at which a read ended."""
        self._next = EntryPlace(entry_id, offset, block_end)

    def find(self, entry_id: int, from_entry: int) -> EntryPlace | None:
        """Return the nearest place of `from_entry..entry_id`, None if none is known."""
        at = bisect_right(self._kept, entry_id, key=lambda place: place.entry_id)
        known = self._kept[max(0, at - 1) : at]
        # The end of the last read may be nearer than any spaced place.
        known += [] if self._next is None else [self._next]
        # Places of earlier blocks do not help: the read begins in the entry's own block.
        usable = (place for place in known if from_entry <= place.entry_id <= entry_id)
        return max(usable, key=lambda place: place.entry_id, default=None)


SEARCHED_BYTES = 1 << 20
"""Bytes that are searched for an entry that is not at its place."""

_log = logging.getLogger(__name__)


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
        # Read as a whole. The bound only has to exceed every index.
        return await blobs.read(name, 0, 1 << 31)
    except NoSuchBlobError as error:
        raise NoSuchLedgerError(str(error)) from error


@contextlib.contextmanager
def whole_index() -> Iterator[None]:
    """Raise `PayloadError` for a cut index."""
    try:
        yield
    except EOFError as error:
        raise PayloadError(0, "index object", error, "a whole index") from error


@dataclass(slots=True)
class DataObject:
    """Data object and its length. `ledger_id` is None if all blocks are of one ledger."""

    blobs: Blobs
    name: str
    size: int
    buffer_size: int
    ledger_id: int | None = None
    _is_checked: bool = False
    _places: EntryPlaces = field(default_factory=EntryPlaces)
    _ahead: ReadAhead = field(default_factory=ReadAhead)

    async def entries(self, index: LedgerIndex, first: int, last: int) -> list[block_format.Entry]:
        """Return entries of a ledger, both ends included. A missing entry ends the read.

        Raises:
            NoSuchLedgerError: the object is missing.
            OSError: its format is unknown, or it can't be read.
            PayloadError: it is damaged, or a block is not at its place in the index.
        """
        try:
            await self._check_version()
            return await self._walk(index, first, last)
        except NoSuchBlobError as error:
            raise NoSuchLedgerError(str(error)) from error
        except BlobError as error:
            raise OSError(f"Error reading from BlobStore: {error}") from error
        except EOFError as error:
            raise PayloadError(
                self.size, "data object", error, "as many as the index says"
            ) from error

    async def _check_version(self) -> None:
        if not self._is_checked and not is_known_version(await self.blobs.metadata(self.name)):
            raise OSError(f"Error reading from BlobStore: format version of {self.name}")
        # Objects never change, so one check is enough.
        self._is_checked = True

    async def _read(self, start: int, length: int) -> bytes:
        return await self.blobs.read(self.name, start, length)

    def _stream(self, position: int) -> RangeStream:
        return RangeStream(self._read, self.size, self.buffer_size, position, self._ahead)

    async def _walk(self, index: LedgerIndex, first: int, last: int) -> list[block_format.Entry]:
        block, found = index.find(first), list[block_format.Entry]()

        known = self._places.find(first, block.first_entry)
        if known is not None:
            stream, end, begin = self._stream(known.offset), known.block_end, known.entry_id
        else:
            stream, begin = self._stream(block.offset), block.first_entry
            end = await self._enter(stream, index, block)

        for wanted in range(begin, last + 1):
            # The ledger continues in another block.
            if index.find(wanted) != block:
                block = index.find(wanted)
                end = await self._enter(stream, index, block)
            length = await self._entry_length(stream, wanted, end)
            # The read began before its first entry, at the nearest known place.
            if wanted < first:
                stream.seek_forward(stream.position + length)
            else:
                found.append(block_format.Entry(wanted, await stream.read(length)))

        # A sequential reader continues here without walking the block again.
        if last < index.last_entry and index.find(last + 1) == block:
            self._places.note_next(last + 1, stream.position, end)
        self._ahead = stream.ahead
        return found

    async def _enter(self, stream: RangeStream, index: LedgerIndex, block: IndexEntry) -> int:
        """Move to the entries of a block. Return the end of the block."""
        # The stream only moves forward, and a valid index has ascending places.
        if block.offset < stream.position:
            raise PayloadError(stream.position, "block", block.offset, "a later place in the index")
        stream.seek_forward(block.offset)
        wanted = f"the block of entry {block.first_entry}"
        try:
            header = block_format.BlockHeader.decode(await stream.read(block_format.HEADER_SIZE))
        except (EOFError, PayloadError) as error:
            raise PayloadError(block.offset, "block header", error, wanted) from error

        # The header must agree with the index, or entries of another ledger would be returned.
        if (header.ledger_id, header.first_entry_id) != (self.ledger_id, block.first_entry):
            raise PayloadError(block.offset, "block header", header, wanted)
        if self.ledger_id is not None:
            return block.offset + header.block_length  # another ledger's block may follow
        # A block of one ledger ends where the next one begins, or with the object.
        following = index.ceiling(block.first_entry + 1)
        return self.size if following is None else following.offset

    async def _entry_length(self, stream: RangeStream, wanted: int, end: int) -> int:
        """Move to the data of an entry in a block. Return the length of the data."""
        at, room = stream.position, end - stream.position
        head = await stream.peek(min(2 * block_format.ENTRY_HEADER_SIZE, max(0, room)))
        # Two heads: the second one confirms an entry without data.
        length = block_format.entry_length(head, wanted, room)
        if length is None:
            # Searched without moving, because the entry may not be found.
            window = await self._read(at, min(room, SEARCHED_BYTES)) if head else b""
            found = block_format.find_entry(window, wanted, room)
            if found is None:
                _, entry_id = block_format.decode_entry_header(head)
                raise PayloadError(at, "entry", "padding" if entry_id < 0 else entry_id, wanted)
            skipped, length = found
            _log.warning(
                "the reader skips %d bytes of no entry at byte %d of object %s, before entry"
                " %d. Offload the ledger again if its source exists",
                skipped,
                at,
                self.name,
                wanted,
            )
            # Like the peer: damage between two entries does not end the read.
            stream.seek_forward(at + skipped)

        # The place of the head, not of the data: a read from here validates it again.
        self._places.note(wanted, stream.position, end)
        stream.seek_forward(stream.position + block_format.ENTRY_HEADER_SIZE)
        return length
