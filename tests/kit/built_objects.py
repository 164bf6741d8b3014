"""Whole normal objects in memory, and seeded damages that change their bytes.

For objects that are small enough to be held; the writer says what may be written and how.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from streammeta.storage.object_format.index_block import IndexEntry, StreamRange
from streammeta.storage.object_format.object_reader import ObjectReader
from streammeta.storage.object_format.object_writer import (
    DEFAULT_BLOCK_SIZE_THRESHOLD,
    ObjectWriter,
    encode_trailer,
)
from streammeta.storage.object_format.record import INT64_MAX, RecordBatch

__all__ = ["DEFAULT_BLOCK_SIZE_THRESHOLD", "BuiltObject", "ObjectBuilder", "encode_trailer"]


@dataclass(frozen=True, slots=True)
class BuiltObject:
    """A finished object: its bytes, its index, and the range of each stream, by stream id.

    `crc32c` is the CRC-32C of its bytes, None unless the builder was told to compute it.
    """

    data: bytes
    entries: tuple[IndexEntry, ...]
    stream_ranges: tuple[StreamRange, ...]
    crc32c: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the object, as metadata records them."""
        return len(self.data)


class ObjectBuilder:
    """An `ObjectWriter` whose one part is the whole object."""

    def __init__(
        self,
        block_size_threshold: int = DEFAULT_BLOCK_SIZE_THRESHOLD,
        *,
        checksum: bool = False,
        relative: bool = False,
    ) -> None:
        self._writer = ObjectWriter(
            block_size_threshold, part_size=INT64_MAX, checksum=checksum, relative=relative
        )

    @property
    def data_size(self) -> int:
        """Bytes of all blocks so far."""
        return self._writer.data_size

    def write(self, records: Sequence[RecordBatch]) -> None:
        """See `ObjectWriter.write`."""
        self._writer.write(records)

    def finish(self) -> BuiltObject:
        """Give the object. Raises `ValueError` when nothing was written."""
        self._writer.finish()
        (data,) = self._writer.parts()
        summary = self._writer.summary
        return BuiltObject(data, summary.entries, summary.stream_ranges, summary.crc32c)


def opened(data: bytes, source: str = "object") -> ObjectReader:
    """Return a reader that has read the index of a whole object."""
    reader = ObjectReader(source, len(data))
    while (needed := reader.needed) is not None:
        reader.receive(data[needed.start : needed.end])
    return reader


def built_object(
    streams: Iterable[Sequence[RecordBatch]],
    block_size_threshold: int = DEFAULT_BLOCK_SIZE_THRESHOLD,
    *,
    checksum: bool = False,
    relative: bool = False,
) -> BuiltObject:
    """Return an object of records at their absolute offsets, one sequence per stream."""
    builder = ObjectBuilder(block_size_threshold, checksum=checksum, relative=relative)
    for records in streams:
        base = records[0].base_offset if relative else 0
        builder.write(
            [replace(record, base_offset=record.base_offset - base) for record in records]
        )
    return builder.finish()


def damage(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    """Flip, splice, cut off, or swap blocks; `other` is another object, `blocks` are ranges."""
    while True:
        kind = rng.choice([_flip, _splice, _zero, _cut, _swap, _take_from_another])
        spoiled = kind(data, other, blocks, rng)
        if spoiled != data:
            return spoiled


def _flip(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _splice(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    size = rng.randrange(1, min(500, len(data)))
    source, target = rng.randrange(len(data) - size), rng.randrange(len(data) - size)
    return data[:target] + data[source : source + size] + data[target + size :]


def _zero(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    size = rng.randrange(1, min(5000, len(data)))
    at = rng.randrange(len(data) - size)
    return data[:at] + bytes(size) + data[at + size :]


def _cut(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _swap(data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random) -> bytes:
    (first, first_end), (second, second_end) = sorted(rng.sample(blocks, 2))
    between = data[first_end:second]
    swapped = data[second:second_end] + between + data[first:first_end]
    return data[:first] + swapped + data[second_end:]


def _take_from_another(
    data: bytes, other: bytes, blocks: list[tuple[int, int]], rng: random.Random
) -> bytes:
    start, end = rng.choice(blocks)
    return data[:start] + other[start:end] + data[end:]
