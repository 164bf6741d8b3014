"""Sans-I/O reader of normal objects.

The reader requests a byte range, the caller fetches it and passes it in, and the reader locates and
decodes blocks. Every length is checked before use: the footer against the object size in the
metadata, the index against the footer, the blocks against the index. The format has no checksum, so
a change of payload or epoch bytes goes unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streammeta.storage.errors import Deviation, Source
from streammeta.storage.object_format import index_block
from streammeta.storage.object_format import record as record_format

# About 230 index entries. The rest of the guess grows with the object.
_GUESS_BASE = 8192
_MIB = 1024 * 1024
_SMALLEST_BLOCK = record_format.BLOCK_HEADER_SIZE + record_format.RECORD_HEADER_SIZE


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[start, end)` of an object."""

    start: int
    end: int


def tail_guess(size: int, source: str) -> ByteRange:
    """Return the end of a file of `size` bytes that probably contains its index and footer.

    The guess is 8192 bytes and 36 more for each full MiB. Raises `CorruptObjectError` if the file
    named `source` is too small for a footer.
    """
    if size < index_block.FOOTER_SIZE:
        wanted = f"at least the {index_block.FOOTER_SIZE} bytes of a footer"
        raise Source(source).corrupt(0, "size of the object", f"{size} bytes", wanted)
    return ByteRange(max(0, size - _GUESS_BASE - size // _MIB * index_block.INDEX_ENTRY_SIZE), size)


def check_length(wanted: ByteRange, data: bytes | memoryview, source: str) -> memoryview:
    """Return `data` as the bytes of `wanted`.

    Raises `CorruptObjectError` on another length, as from an object of another size.
    """
    length = wanted.end - wanted.start
    if len(data) != length:
        raise Source(source, wanted.start).corrupt(
            min(len(data), length),
            f"length of the bytes from {wanted.start} on",
            f"{len(data)} bytes",
            f"{length} bytes",
        )
    return memoryview(data)


class ObjectReader:
    """Parses the object named `source` (for messages) of `object_size` bytes.

    While `needed` is a range, fetch it and pass it to `receive`. After that, `index` is known. The
    first range is a guess at the tail, 8192 bytes and 36 more for each full MiB. An index that
    starts before it takes one more range, never a third. Raises `CorruptObjectError` if the size is
    too small for an object. Deviations (see `storage.errors`) are errors unless a list `noted`
    collects them. Relative objects are rejected unless the caller, which then adds the bases, sets
    `accept_relative`.
    """

    def __init__(
        self,
        source: str,
        object_size: int,
        noted: list[Deviation] | None = None,
        *,
        accept_relative: bool = False,
    ) -> None:
        self._source = Source(source, noted=noted)
        self._size = object_size
        self._accept_relative = accept_relative
        self._needed: ByteRange | None = tail_guess(object_size, source)
        self._footer: index_block.Footer | None = None
        self._index: index_block.IndexBlock | None = None
        self._relative = False

    @property
    def needed(self) -> ByteRange | None:
        """The bytes to fetch next, or None once the index is known."""
        return self._needed

    @property
    def index(self) -> index_block.IndexBlock:
        """The index. Raises `RuntimeError` while `needed` is a range."""
        if self._index is None:
            raise RuntimeError(
                f"index of {self._source.name} is not read yet, receive {self._needed} first"
            )
        return self._index

    @property
    def relative(self) -> bool:
        """Whether the offsets count from 0 in each stream, once `index` is known."""
        return self._relative

    def receive(self, data: bytes | memoryview) -> None:
        """Process the bytes of the range in `needed`.

        Raises `CorruptObjectError` on another length, or if footer or index break the format. The
        reader is then unchanged.
        """
        if self._needed is None:
            raise RuntimeError(
                f"index of {self._source.name} is known already, no bytes are needed"
            )

        view, source = check_length(self._needed, data, self._source.name), self._source
        if self._footer is not None and source.noted is not None:
            source = replace(source, noted=[])  # noted at the first reading

        footer = index_block.decode_footer(
            view,
            self._size,
            composite=False,
            accept_relative=self._accept_relative,
            source=source,
        )
        if self._footer is None:
            # A damaged footer must not cause a read of gigabytes.
            self._check_place(footer)
        # The key named another object between the two reads.
        elif footer != self._footer:
            raise source.corrupt(
                self._size - index_block.FOOTER_SIZE,
                "footer at the second reading",
                footer,
                f"{self._footer}, as at the first",
            )

        # The guess was too short. The exact position is known now.
        if footer.index_position < self._needed.start:
            self._footer = footer
            # Up to the end again, so that footer and index come from one response.
            self._needed = ByteRange(footer.index_position, self._size)
            return

        at = footer.index_position - self._needed.start
        self._index = index_block.decode_index(
            view[at : at + footer.index_size],
            data_size=footer.index_position,
            relative=footer.relative,
            source=Source(source.name, footer.index_position),
        )
        self._relative = footer.relative
        self._needed = None

    def block_range(self, entry: index_block.IndexEntry) -> ByteRange:
        """Return the byte range of the blocks of `entry`."""
        return ByteRange(entry.position, entry.position + entry.size)

    def records(
        self, entry: index_block.IndexEntry, data: bytes | memoryview
    ) -> list[record_format.RecordBatch]:
        """Decode the records of `entry`, with the offsets in the object, from its bytes `data`.

        Raises `CorruptObjectError` if the bytes break the format or contradict the index.
        """
        view = check_length(self.block_range(entry), data, self._source.name)
        return read_entry(entry, view, self._source.name, self._source.noted)

    def _check_place(self, footer: index_block.Footer) -> None:
        """Raise if the index is larger than its blocks allow, before it is fetched.

        Every entry stands for a block with at least one record.
        """
        most = footer.index_position // _SMALLEST_BLOCK * index_block.INDEX_ENTRY_SIZE
        if footer.index_size > most:
            raise self._source.corrupt(
                self._size - index_block.FOOTER_SIZE,
                "size of the index",
                f"{footer.index_size} bytes",
                f"at most {most} bytes for {footer.index_position} bytes of blocks",
            )


def read_entry(
    entry: index_block.IndexEntry,
    data: memoryview,
    source: str,
    noted: list[Deviation] | None = None,
    *,
    base: int = 0,
) -> list[record_format.RecordBatch]:
    """Decode the blocks of `entry` and compare them with it: stream, offsets, record count.

    An entry covers exactly its records, so their offsets have no gap. `entry` and the records have
    absolute offsets, the bytes `base` less. Raises `CorruptObjectError`. Deviations are errors
    unless a list `noted` collects them.
    """
    place = Source(source, entry.position, noted)
    records = record_format.decode_blocks(data, place, shift=base)
    if len(records) != entry.record_count:
        what = "number of records in the blocks of an index entry"
        raise place.corrupt(0, what, len(records), f"{entry.record_count}, as in the index")

    stream_id, next_offset = entry.stream_id, entry.start_offset
    for ordinal, record in enumerate(records):
        if record.stream_id != stream_id or record.base_offset != next_offset:
            is_gap = record.stream_id == stream_id and record.base_offset > next_offset
            place.deviate(
                0,
                f"record {ordinal} of an index entry",
                f"of stream {record.stream_id} at offset {record.base_offset}",
                f"stream {stream_id} at offset {next_offset}",
                # A gap before the first record would contradict the index, which readers search.
                is_allowed=is_gap and ordinal > 0,
            )
            next_offset = record.base_offset
        next_offset += record.count

    if next_offset != entry.end_offset:
        what = "end of the last record of an index entry"
        raise place.corrupt(0, what, f"offset {next_offset}", f"offset {entry.end_offset}")

    return records
