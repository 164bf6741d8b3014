"""Parquet files made of columns of other Parquet files, which are copied as they are encoded.

A column that a table takes over unchanged need not be decoded, encoded and compressed again: its
bytes are copied, columns that are new are written after them, and a new footer says where all of
it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.parquet import layout
from streammeta.reconcile.parquet.pages import Pages
from streammeta.reconcile.vocabulary.errors import ReconcileError

_COPY_BYTES = 1 << 18
_Placed: TypeAlias = tuple[layout.Chunk, int]
"""A chunk, and the byte that it begins at."""


class SpliceError(ReconcileError):
    """The columns do not fit together."""


class Readable(Protocol):
    """A file open for reading, or bytes in memory."""

    def seek(self, position: int, /) -> object:
        """Go to a byte."""
        ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer or a part of it, and return the number of bytes, 0 at the end."""
        ...


@dataclass(frozen=True, slots=True)
class SplicePart:
    """A row group of an open Parquet file, by its number."""

    file: Readable
    metadata: pq.FileMetaData
    group: int


class Splice:
    """A Parquet file under construction. See `open_splice`."""

    def __init__(self, file: BufferedWriter, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._types = {field.name: layout.PHYSICAL_TYPES[field.type] for field in schema}
        self._groups: list[bytes] = []
        self._rows = 0
        self._end = file.write(layout.MAGIC)
        self._buffer = bytearray(_COPY_BYTES)

    def add(self, part: SplicePart, made: Mapping[str, Pages]) -> None:
        """Add a row group. The columns in `made` are new, the others are copied.

        A group without rows is left out.

        Raises:
            SpliceError: a column is missing, is of another type, or has other rows than others.
        """
        there = _chunks_of(part, self._types.keys() - made.keys())
        rows = part.metadata.row_group(part.group).num_rows
        sizes = {name: chunk for name, (chunk, _) in there.items()}
        self._check(sizes | {name: pages.chunk for name, pages in made.items()}, rows)
        if not rows:
            return  # its chunks have no page of values, and some readers refuse the file for that

        moved = self._copy(part.file, there.values())
        chunks = {name: (chunk, start + moved) for name, (chunk, start) in there.items()}
        for name, pages in made.items():
            chunks[name] = (pages.chunk, self._end)
            self._end += self._file.write(pages.content)
        self._groups.append(layout.row_group([(name, *chunks[name]) for name in self._types], rows))
        self._rows += rows

    def _check(self, chunks: Mapping[str, layout.Chunk], rows: int) -> None:
        """Raise `SpliceError` for a chunk of another type or another number of rows."""
        for name, wanted in self._types.items():
            found = chunks[name]
            if (found.physical_type, found.rows) != (wanted, rows):
                raise SpliceError(
                    f"column {name} has {found.rows} rows of {found.physical_type}, expected {rows}"
                    f" of {wanted}"
                )

    def finish(self) -> None:
        """Write the footer."""
        self._file.write(layout.footer(self._schema, self._rows, self._groups))

    def _copy(self, source: Readable, chunks: Iterable[_Placed]) -> int:
        """Copy these chunks and all between them, and return the distance that they moved."""
        places = [(start, start + chunk.size) for chunk, start in chunks]
        at, end = min(start for start, _ in places), max(end for _, end in places)
        moved = self._end - at
        # One pass over adjacent columns, including the gaps, is faster than a read per column.
        source.seek(at)
        view = memoryview(self._buffer)
        while at < end:
            count = source.readinto(view[: end - at])
            if not count:
                raise SpliceError(f"a file ends at byte {at}, expected {end}")
            self._file.write(view[:count])
            at += count
            self._end += count
        return moved


@contextmanager
def open_splice(path: Path, schema: pa.Schema) -> Iterator[Splice]:
    """Give a new Parquet file, whose footer is written at the end of the block."""
    with path.open("wb") as file:
        splice = Splice(file, schema)
        yield splice
        splice.finish()


def _chunks_of(part: SplicePart, names: Iterable[str]) -> dict[str, _Placed]:
    """Chunks of these columns, which may be null and hold no lists, as they lie in their file."""
    schema, group = part.metadata.schema, part.metadata.row_group(part.group)
    numbers = {name: number for number, name in enumerate(schema.names)}
    chunks = {}
    for name in names:
        if name not in numbers:
            raise SpliceError(f"column {name} is neither made nor in the file")
        column = schema.column(numbers[name])
        levels = (column.max_definition_level, column.max_repetition_level)
        if levels != (1, 0):
            raise SpliceError(f"column {name} has levels up to {levels}, expected (1, 0)")
        chunks[name] = _chunk_of(name, group.column(numbers[name]))
    return chunks


def _chunk_of(name: str, column: pq.ColumnChunkMetaData) -> _Placed:
    codec, encodings = column.compression, column.encodings
    if codec not in layout.CODECS or not set(encodings) <= layout.ENCODINGS.keys():
        raise SpliceError(
            f"column {name} is encoded as {', '.join(encodings)} and compressed by {codec},"
            f" expected {', '.join(layout.CODECS)}, and of encodings {', '.join(layout.ENCODINGS)}"
        )

    data = start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < data:
        start = column.dictionary_page_offset

    chunk = layout.Chunk(
        physical_type=column.physical_type,
        encodings=encodings,
        codec=codec,
        rows=column.num_values,
        dictionary_size=data - start,
        size=column.total_compressed_size,
        uncompressed_size=column.total_uncompressed_size,
    )
    return chunk, start
