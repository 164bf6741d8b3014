"""Building the bytes of a normal object from sorted records.

Owns where data blocks are cut and the order of what is written: blocks, index, footer. The caller
decides which streams go into the object and hands them over in ascending order; the builder
refuses anything else before it changes. It does no I/O and holds the whole object in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage.object_format.data_block import BLOCK_HEADER_SIZE, encode_block_header
from storage.object_format.footer import Footer, encode_footer
from storage.object_format.index_block import IndexEntry, StreamRange, encode_index
from storage.object_format.record import INT32_MAX, RecordBatch, encode_record_header

DEFAULT_BLOCK_SIZE_THRESHOLD = 512 * 1024


@dataclass(frozen=True, slots=True)
class BuiltObject:
    """A finished object: its bytes, its index, and the range of each stream, by stream id."""

    data: bytes
    entries: tuple[IndexEntry, ...]
    stream_ranges: tuple[StreamRange, ...]

    @property
    def size(self) -> int:
        """Bytes of the object, as metadata records them."""
        return len(self.data)


class ObjectBuilder:
    """Takes one stream a write, ascending by (stream id, offset), and gives the object's bytes.

    A block closes when the payload bytes written since the last block closed by size reach
    `block_size_threshold`. That count outlives the end of a write: the tail of one stream counts
    toward the first block of the next. Other writers of this format cut so, and the same input
    has to give the same bytes. A block also closes at the end of a write, before a gap in the
    offsets (an index entry then covers exactly what is there), and before a 32-bit field overflows.
    """

    def __init__(self, block_size_threshold: int = DEFAULT_BLOCK_SIZE_THRESHOLD) -> None:
        if block_size_threshold < 1:
            raise ValueError(f"block_size_threshold is {block_size_threshold}, wanted at least 1")
        self._threshold = block_size_threshold
        self._payload_since_cut = 0
        self._chunks: list[bytes] = []
        self._entries: list[IndexEntry] = []
        self._ranges: list[StreamRange] = []
        self._position = 0

    @property
    def data_size(self) -> int:
        """Bytes of all blocks so far."""
        return self._position

    def write(self, records: Sequence[RecordBatch]) -> None:
        """Append records of one stream, ascending by offset. An empty write does nothing.

        Raises `ValueError`, and leaves the builder as it was, when the records are of several
        streams, of a smaller stream than the last write, overlap, or have a field out of range.
        """
        if not records:
            return
        headers = self._checked_headers(records)
        for start, stop in self._cuts(records):
            self._add_block(records[start:stop], headers[start:stop])
        self._extend_ranges(records)

    def finish(self) -> BuiltObject:
        """Give the object. Raises `ValueError` when nothing was written."""
        if not self._entries:
            raise ValueError("the object has no records, wanted at least one; write() them first")
        trailer = encode_trailer(self._entries, self._position)
        data = b"".join([*self._chunks, trailer])
        return BuiltObject(data, tuple(self._entries), tuple(self._ranges))

    def _checked_headers(self, records: Sequence[RecordBatch]) -> list[bytes]:
        stream_id = records[0].stream_id
        next_offset = 0
        if self._ranges:
            last = self._ranges[-1]
            if stream_id < last.stream_id:
                raise ValueError(
                    f"stream {stream_id} written after stream {last.stream_id},"
                    " wanted ascending stream ids"
                )
            if stream_id == last.stream_id:
                next_offset = last.end_offset
        headers = []
        for record in records:
            if record.stream_id != stream_id:
                raise ValueError(
                    f"record of stream {record.stream_id} in a write of stream"
                    f" {stream_id}, wanted one stream a write"
                )
            if record.base_offset < next_offset:
                raise ValueError(
                    f"stream {stream_id} base offset is {record.base_offset},"
                    f" wanted at least {next_offset}, the end before it"
                )
            headers.append(encode_record_header(record))
            next_offset = record.end_offset
        return headers

    def _cuts(self, records: Sequence[RecordBatch]) -> Iterator[tuple[int, int]]:
        """Give the blocks of one write as index ranges `[start, stop)` into `records`."""
        start, data_length = 0, 0
        for i, record in enumerate(records):
            if i > start and (
                record.base_offset != records[i - 1].end_offset
                or record.end_offset - records[start].base_offset > INT32_MAX
                or data_length + record.encoded_size > INT32_MAX - BLOCK_HEADER_SIZE
            ):
                yield start, i
                start, data_length = i, 0
            data_length += record.encoded_size
            self._payload_since_cut += len(record.payload)
            if self._payload_since_cut >= self._threshold:
                yield start, i + 1
                start, data_length = i + 1, 0
                self._payload_since_cut = 0
        if start < len(records):
            yield start, len(records)

    def _add_block(self, records: Sequence[RecordBatch], headers: list[bytes]) -> None:
        data_length = sum(record.encoded_size for record in records)
        self._chunks.append(encode_block_header(len(records), data_length))
        for header, record in zip(headers, records, strict=True):
            self._chunks.append(header)
            self._chunks.append(record.payload)
        size = BLOCK_HEADER_SIZE + data_length
        self._entries.append(
            IndexEntry(
                records[0].stream_id,
                records[0].base_offset,
                records[-1].end_offset,
                len(records),
                self._position,
                size,
            )
        )
        self._position += size

    def _extend_ranges(self, records: Sequence[RecordBatch]) -> None:
        stream_id, end = records[0].stream_id, records[-1].end_offset
        start = records[0].base_offset
        if self._ranges and self._ranges[-1].stream_id == stream_id:
            start = self._ranges.pop().start_offset
        self._ranges.append(StreamRange(stream_id, start, end))


def encode_trailer(entries: Sequence[IndexEntry], data_size: int) -> bytes:
    """Encode index and footer behind blocks of `data_size` bytes that were written or copied."""
    index = encode_index(entries)
    return index + encode_footer(Footer(data_size, len(index)))
