"""Sans-I/O writer of normal objects: sorted records in, parts of an upload out.

Owns the boundaries of data blocks, the order of blocks, index and footer, and the grouping of
blocks into parts. The caller passes streams in ascending order, and the writer rejects any other
input before it changes. It keeps references to the payloads of the remaining parts, and copies them
once, when a part is requested.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streammeta.storage.object_format import index_block
from streammeta.storage.object_format import record as record_format
from streammeta.storage.object_format.checksum import ObjectChecksum

# Readers fetch whole blocks, so a block bounds the waste of a small read.
DEFAULT_BLOCK_SIZE_THRESHOLD = 512 * 1024
DEFAULT_PART_SIZE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ObjectSummary:
    """Content of a written object: size in bytes, index, and the range of each stream, by id.

    `crc32c` is the CRC-32C of all bytes, or None if the writer does not compute it.
    """

    size: int
    entries: tuple[index_block.IndexEntry, ...]
    stream_ranges: tuple[index_block.StreamRange, ...]
    crc32c: int | None


@dataclass(slots=True)
class _Block:
    """A block under construction: the chunks after its header, and its offsets."""

    chunks: list[bytes]
    start_offset: int
    end_offset: int
    data_length: int


class ObjectWriter:
    """Encodes writes of one stream each, ascending by (stream id, offset), into parts.

    A block closes when the payload bytes since the last block closed by size reach
    `block_size_threshold`. That count outlives the end of a write: the tail of one stream counts
    toward the first block of the next. Other writers of this format cut the same way, and the same
    input has to produce the same bytes. A block also closes at the end of a write, before a gap in
    the offsets (so that an index entry covers exactly its records), and before a 32-bit field
    overflows.

    A part consists of whole blocks, as many as needed to reach `part_size` bytes. Only the last
    part, with index and footer, may be smaller. The boundaries of parts do not change the bytes of
    the object. With `checksum`, the writer computes the CRC-32C of all parts as they are requested.

    In a `relative` object each stream starts at offset 0 and has no gaps.
    """

    def __init__(
        self,
        block_size_threshold: int = DEFAULT_BLOCK_SIZE_THRESHOLD,
        *,
        part_size: int = DEFAULT_PART_SIZE,
        checksum: bool = False,
        relative: bool = False,
    ) -> None:
        for name, value in (
            ("block_size_threshold", block_size_threshold),
            ("part_size", part_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")

        self._threshold = block_size_threshold
        self._part_size = part_size
        self._checksum = ObjectChecksum() if checksum else None
        self._relative = relative
        # See the class: the count continues over writes, as in AutoMQ's writer.
        self._payload_since_cut = 0
        self._full: deque[list[bytes]] = deque()
        self._filling: list[bytes] = []
        self._part_start = 0
        self._entries: list[index_block.IndexEntry] = []
        self._ranges: list[index_block.StreamRange] = []
        self._data_size = 0
        self._taken_size = 0
        self._size: int | None = None

    @property
    def data_size(self) -> int:
        """Bytes of all blocks so far."""
        return self._data_size

    def write(self, records: Sequence[record_format.RecordBatch]) -> None:
        """Append records of one stream, ascending by offset. An empty write does nothing.

        Raises `ValueError`, without a change, if the records belong to several streams or to a
        smaller stream than the last write, overlap, or have a field out of range. In a relative
        object also if they leave a gap. Raises `RuntimeError` after `finish`.
        """
        if self._size is not None:
            raise RuntimeError("the object is finished and rejects further records")
        if not records:
            return
        # All checks first. After this line nothing can fail, so a rejected write leaves no trace.
        blocks, payload_since_cut = self._lay_out(records)
        self._payload_since_cut = payload_since_cut
        stream_id = records[0].stream_id
        for block in blocks:
            self._add_block(stream_id, block)
        self._extend_ranges(stream_id, blocks[0].start_offset, blocks[-1].end_offset)

    def finish(self) -> None:
        """Finish the object: the remaining blocks, index and footer are the last part.

        Raises `ValueError` without records, `RuntimeError` if the object is finished already.
        """
        if self._size is not None:
            raise RuntimeError("the object is finished already")
        if not self._entries:
            raise ValueError("the object has no records, expected at least one. Call write() first")
        trailer = encode_trailer(self._entries, self._data_size, relative=self._relative)
        self._filling.append(trailer)
        self._full.append(self._filling)
        self._filling = []
        self._size = self._data_size + len(trailer)

    def parts(self) -> Iterator[bytes]:
        """Yield the full parts, in the order of the object, each once.

        A part is joined when it is requested and not kept. A caller that drops each part before the
        next one needs the memory of one part.
        """
        while self._full:
            part = b"".join(self._full.popleft())
            self._taken_size += len(part)
            if self._checksum is not None:
                self._checksum.update(part)
            yield part
            del part  # so that the next one may take its memory

    @property
    def summary(self) -> ObjectSummary:
        """Content of the object. Raises `RuntimeError` before `finish` and the last of `parts`."""
        # The checksum covers only the parts that were requested.
        if self._size is None or self._taken_size != self._size:
            raise RuntimeError(
                f"only {self._taken_size} bytes of the object were read. Call finish(), then read"
                " all of parts()"
            )
        return ObjectSummary(
            self._size,
            tuple(self._entries),
            tuple(self._ranges),
            None if self._checksum is None else self._checksum.value,
        )

    def _lay_out(self, records: Sequence[record_format.RecordBatch]) -> tuple[list[_Block], int]:
        """Cut `records` into blocks, and return them and the payload since the last cut by size.

        Changes nothing, so a failed write leaves the writer unchanged. Ends ascend, so only the
        last end needs a check of its range. Packing checks all other upper limits.
        """
        stream_id = records[0].stream_id
        next_offset = self._lowest_offset(stream_id)
        contiguous = self._relative
        block = _Block([], records[0].base_offset, records[0].base_offset, 0)
        blocks, chunks, length = [block], block.chunks, 0
        threshold, since_cut, is_cut = self._threshold, self._payload_since_cut, False

        try:
            for record in records:
                base, count, payload = record.base_offset, record.count, record.payload
                size = len(payload)
                if (
                    record.stream_id != stream_id
                    or base < next_offset
                    or (contiguous and base != next_offset)
                    or count < 1
                    or record.epoch < 0
                    or size > record_format.MAX_PAYLOAD_SIZE
                ):
                    raise _invalid_record(record, stream_id, next_offset)

                # A cut waits for the next record, so that no block at the end is empty.
                if chunks and (
                    is_cut
                    or base != next_offset
                    or base + count - block.start_offset > record_format.INT32_MAX
                    or length + record_format.RECORD_HEADER_SIZE + size
                    > record_format.MAX_BLOCK_DATA
                ):
                    block.end_offset, block.data_length = next_offset, length
                    block = _Block([], base, base, 0)
                    blocks.append(block)
                    chunks, length, is_cut = block.chunks, 0, False
                chunks.append(
                    record_format.pack_record_header(
                        record_format.RECORD_MAGIC, stream_id, record.epoch, base, count, size
                    )
                )
                chunks.append(payload)
                length += record_format.RECORD_HEADER_SIZE + size
                next_offset = base + count
                since_cut += size
                if since_cut >= threshold:
                    is_cut, since_cut = True, 0
        except struct.error:
            raise _invalid_record(record, stream_id, next_offset) from None

        if next_offset > record_format.INT64_MAX:
            raise _invalid_record(records[-1], stream_id, next_offset)

        block.end_offset, block.data_length = next_offset, length
        return blocks, since_cut

    def _lowest_offset(self, stream_id: int) -> int:
        """Return the lowest allowed start of the stream's next record."""
        if stream_id < 0:
            raise ValueError(
                f"record stream_id is {stream_id}, expected 0..{record_format.INT64_MAX}"
            )
        last = self._ranges[-1] if self._ranges else None
        if last is not None and stream_id < last.stream_id:
            raise ValueError(
                f"stream {stream_id} is written after stream {last.stream_id},"
                " expected ascending stream ids"
            )
        return last.end_offset if last is not None and stream_id == last.stream_id else 0

    def _add_block(self, stream_id: int, block: _Block) -> None:
        # Header and payload of each record are separate chunks.
        count = len(block.chunks) // 2
        self._filling.append(record_format.encode_block_header(count, block.data_length))
        self._filling += block.chunks
        size = record_format.BLOCK_HEADER_SIZE + block.data_length
        self._entries.append(
            index_block.IndexEntry(
                stream_id, block.start_offset, block.end_offset, count, self._data_size, size
            )
        )
        self._data_size += size
        # Whole blocks only, so a part is at least `part_size`, as the store's minimum requires.
        if self._data_size - self._part_start >= self._part_size:
            self._full.append(self._filling)
            self._filling = []
            self._part_start = self._data_size

    def _extend_ranges(self, stream_id: int, start: int, end: int) -> None:
        if self._ranges and self._ranges[-1].stream_id == stream_id:
            # A later write of the same stream extends its range.
            start = self._ranges.pop().start_offset
        self._ranges.append(index_block.StreamRange(stream_id, start, end))


def encode_trailer(
    entries: Sequence[index_block.IndexEntry], data_size: int, *, relative: bool = False
) -> bytes:
    """Encode index and footer after blocks of `data_size` bytes.

    Raises `ValueError` if an entry does not fit its fields.
    """
    index = index_block.encode_index(entries)
    footer = index_block.Footer(data_size, len(index), relative=relative)
    return index + index_block.encode_footer(footer)


def _invalid_record(
    record: record_format.RecordBatch, stream_id: int, next_offset: int
) -> ValueError:
    """Return the error for a `record` that cannot follow `next_offset` of a stream."""
    if record.stream_id != stream_id:
        return ValueError(
            f"record of stream {record.stream_id} in a write of stream {stream_id}, expected one"
            " stream a write"
        )

    try:
        record_format.check_encodable(record)
    except ValueError as error:
        return error

    if len(record.payload) > record_format.MAX_PAYLOAD_SIZE:
        return ValueError(
            f"record payload length is {len(record.payload)}, expected"
            f" 0..{record_format.MAX_PAYLOAD_SIZE}, the most that one data block can hold and a JVM"
            " can read"
        )

    if record.base_offset > next_offset:
        return ValueError(
            f"stream {stream_id} base offset is {record.base_offset}, expected {next_offset}: the"
            " offsets of a relative object start at 0 and have no gaps"
        )

    return ValueError(
        f"stream {stream_id} base offset is {record.base_offset}, expected at least {next_offset},"
        " the end before it"
    )
