"""Reading a normal object without doing any I/O.

The reader says which byte range it needs, the caller fetches it from wherever the object is and
hands it in; then it says which bytes hold which blocks and turns them into records. No length in
the bytes is believed before it is checked against what is known from elsewhere: the object size
from metadata, the footer against the size, the index against the footer, the blocks against the
index. What no check can see, the format having no checksum, is a change of payload or epoch bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import CorruptObjectError
from storage.object_format.data_block import decode_blocks
from storage.object_format.footer import Footer, decode_footer
from storage.object_format.index_block import (
    INDEX_ENTRY_SIZE,
    IndexBlock,
    IndexEntry,
    decode_index,
)
from storage.object_format.record import RecordBatch

_GUESS_BASE = 8192
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[start, end)` of an object."""

    start: int
    end: int


class ObjectReader:
    """Parses the object named `source` (for messages) of `object_size` bytes.

    While `needed` is a range, fetch it and pass it to `receive`; then `index` is known. The first
    range is a guess at the tail, 8192 bytes and 36 more for each full MiB; an index that starts
    before it takes one more range.
    """

    def __init__(self, source: str, object_size: int) -> None:
        self._source = source
        self._size = object_size
        guess = _GUESS_BASE + object_size // _MIB * INDEX_ENTRY_SIZE
        self._needed: ByteRange | None = ByteRange(max(0, object_size - guess), object_size)
        self._index: IndexBlock | None = None

    @property
    def needed(self) -> ByteRange | None:
        """The bytes to fetch next, or None when the index is known."""
        return self._needed

    @property
    def index(self) -> IndexBlock:
        """The index. Raises `RuntimeError` while bytes are still needed for it."""
        if self._index is None:
            raise RuntimeError(f"index of {self._source} is not read yet: receive {self._needed}")
        return self._index

    def receive(self, data: bytes | memoryview) -> None:
        """Take the bytes of the range in `needed`.

        Raises `CorruptObjectError` when they are fewer or more than asked for, or when footer or
        index break the format; the reader then stays as it was.
        """
        if self._needed is None:
            raise RuntimeError(f"index of {self._source} is known already, no bytes are needed")
        view = self._exactly(self._needed, data)
        footer = decode_footer(view, self._size, composite=False, source=self._source)
        if footer.index_position < self._needed.start:
            self._needed = ByteRange(footer.index_position, self._size)
            return
        self._index = self._decode_index(view, self._needed.start, footer)
        self._needed = None

    def block_range(self, entry: IndexEntry) -> ByteRange:
        """Give the bytes that hold the blocks of `entry`."""
        return ByteRange(entry.position, entry.position + entry.size)

    def records(self, entry: IndexEntry, data: bytes | memoryview) -> list[RecordBatch]:
        """Decode the records of `entry`, whose bytes are `data`.

        Raises `CorruptObjectError` when the bytes break the format or are not what the index says.
        """
        view = self._exactly(self.block_range(entry), data)
        return read_entry(entry, view, self._source)

    def _exactly(self, wanted: ByteRange, data: bytes | memoryview) -> memoryview:
        length = wanted.end - wanted.start
        if len(data) != length:
            raise CorruptObjectError(
                self._source,
                wanted.start + min(len(data), length),
                f"got {len(data)} bytes, wanted {length} at {wanted.start}",
            )
        return memoryview(data)

    def _decode_index(self, view: memoryview, view_start: int, footer: Footer) -> IndexBlock:
        at = footer.index_position - view_start
        return decode_index(
            view[at : at + footer.index_size],
            data_size=footer.index_position,
            source=self._source,
            origin=footer.index_position,
        )


def read_entry(entry: IndexEntry, data: memoryview, source: str) -> list[RecordBatch]:
    """Decode the blocks of `entry` and hold them against it: stream, offsets, record count.

    Offsets must follow each other without a gap, since an entry covers exactly what is in it.
    Raises `CorruptObjectError`.
    """
    records = decode_blocks(data, source=source, origin=entry.position)
    if len(records) != entry.record_count:
        raise CorruptObjectError(
            source,
            entry.position,
            f"blocks hold {len(records)} records, index wanted {entry.record_count}",
        )
    next_offset = entry.start_offset
    for record in records:
        if record.stream_id != entry.stream_id or record.base_offset != next_offset:
            raise CorruptObjectError(
                source,
                entry.position,
                f"record of stream {record.stream_id} at offset {record.base_offset},"
                f" wanted stream {entry.stream_id} at {next_offset}",
            )
        next_offset = record.end_offset
    if next_offset != entry.end_offset:
        raise CorruptObjectError(
            source, entry.position, f"blocks end at offset {next_offset}, wanted {entry.end_offset}"
        )
    return records
