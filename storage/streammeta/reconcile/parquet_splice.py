"""Parquet files made of columns of other Parquet files, which are copied as they are encoded.

A column that a table takes over unchanged need not be decoded, encoded and compressed again: its
bytes are copied, and a new footer says where they lie. Tables have the two types of `tables`. The
layout is that of Parquet's `parquet.thrift`, in Thrift's compact protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from streammeta.reconcile.errors import ReconcileError

_MAGIC = b"PAR1"
_COPY_BYTES = 1 << 20
_CREATED_BY = b"streammeta"

_INT32, _INT64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_OPTIONAL, _UTF8 = 1, 0
_NUMBERS = {"INT64": 2, "BYTE_ARRAY": 6}
_TYPES = {pa.int64(): "INT64", pa.string(): "BYTE_ARRAY"}
_ENCODINGS = {
    "PLAIN": 0,
    "PLAIN_DICTIONARY": 2,
    "RLE": 3,
    "BIT_PACKED": 4,
    "DELTA_BINARY_PACKED": 5,
    "DELTA_LENGTH_BYTE_ARRAY": 6,
    "DELTA_BYTE_ARRAY": 7,
    "RLE_DICTIONARY": 8,
}
_CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "ZSTD": 6, "LZ4": 7}


class SpliceError(ReconcileError):
    """The files do not fit together."""


class Readable(Protocol):
    """A file open for reading, or bytes in memory."""

    def seek(self, position: int, /) -> object:
        """Go to a byte."""
        ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer, or a part of it; returns the number of bytes, 0 at the end."""
        ...


@dataclass(frozen=True, slots=True)
class SplicePart:
    """Row groups of an open Parquet file, by their numbers."""

    file: Readable
    metadata: pq.FileMetaData
    groups: Sequence[int]


class Splice:
    """A Parquet file under way. See `open_splice`."""

    def __init__(self, file: BufferedWriter, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._groups: list[bytes] = []
        self._rows = 0
        self._end = file.write(_MAGIC)
        self._buffer = bytearray(_COPY_BYTES)

    def add(self, parts: Sequence[SplicePart]) -> None:
        """Add the row groups of all `parts` side by side, the first of each beside one another.

        A column is that of the first part that has it.

        Raises:
            SpliceError: a column is in no part, is of another type, or has other rows than others.
        """
        columns = [self._column_of(name, parts) for name in self._schema.names]
        for numbers in zip(*(part.groups for part in parts), strict=True):
            groups = [
                part.metadata.row_group(number) for part, number in zip(parts, numbers, strict=True)
            ]
            rows = {group.num_rows for group in groups}
            if len(rows) != 1:
                raise SpliceError(f"row groups {numbers} have {sorted(rows)} rows, wanted the same")
            moved = [
                self._copied(part.file, group) for part, group in zip(parts, groups, strict=True)
            ]
            chunks = [(groups[part].column(column), moved[part]) for part, column in columns]
            self._groups.append(_row_group(chunks, rows.pop()))
            self._rows += groups[0].num_rows

    def finish(self) -> None:
        """Write the footer."""
        footer = _footer(self._schema, self._rows, self._groups)
        self._file.write(footer + len(footer).to_bytes(4, "little") + _MAGIC)

    def _column_of(self, name: str, parts: Sequence[SplicePart]) -> tuple[int, int]:
        """The part that has a column, and the number of the column in it."""
        wanted = _TYPES[self._schema.field(name).type]
        for number, part in enumerate(parts):
            names = part.metadata.schema.names
            if name in names:
                column = part.metadata.schema.column(names.index(name))
                found = (column.physical_type, column.max_definition_level)
                if found != (wanted, 1) or column.max_repetition_level:
                    raise SpliceError(f"column {name} is {found}, wanted an optional {wanted}")
                return number, names.index(name)
        raise SpliceError(f"column {name} is in none of the {len(parts)} parts")

    def _copied(self, source: Readable, group: pq.RowGroupMetaData) -> int:
        """Copy the bytes of a row group; returns how far they have moved."""
        chunks = [group.column(number) for number in range(group.num_columns)]
        start = min(map(_start_of, chunks))
        end = max(_start_of(chunk) + chunk.total_compressed_size for chunk in chunks)
        moved = self._end - start
        source.seek(start)
        view = memoryview(self._buffer)
        while start < end:
            count = source.readinto(view[: end - start])
            if not count:
                raise SpliceError(f"a file ends at byte {start}, wanted {end}")
            self._file.write(view[:count])
            start += count
            self._end += count
        return moved


@contextmanager
def open_splice(path: Path, schema: pa.Schema) -> Iterator[Splice]:
    """Give a new Parquet file, whose footer is written at the end of the block."""
    with path.open("wb") as file:
        splice = Splice(file, schema)
        yield splice
        splice.finish()


def _start_of(chunk: pq.ColumnChunkMetaData) -> int:
    start: int = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start


def _footer(schema: pa.Schema, rows: int, groups: Sequence[bytes]) -> bytes:
    """`FileMetaData`."""
    root = _struct((4, _BINARY, _binary(b"schema")), (5, _INT32, _integer(len(schema))))
    elements = [root, *map(_schema_element, schema)]
    return _struct(
        (1, _INT32, _integer(2)),
        (2, _LIST, _list(_STRUCT, elements)),
        (3, _INT64, _integer(rows)),
        (4, _LIST, _list(_STRUCT, groups)),
        (6, _BINARY, _binary(_CREATED_BY)),
    )


def _schema_element(field: pa.Field) -> bytes:
    fields = [
        (1, _INT32, _integer(_NUMBERS[_TYPES[field.type]])),
        (3, _INT32, _integer(_OPTIONAL)),
        (4, _BINARY, _binary(field.name.encode())),
    ]
    if field.type == pa.string():
        fields += [(6, _INT32, _integer(_UTF8)), (10, _STRUCT, _struct((1, _STRUCT, _struct())))]
    return _struct(*fields)


def _row_group(chunks: Sequence[tuple[pq.ColumnChunkMetaData, int]], rows: int) -> bytes:
    """`RowGroup` of chunks of columns, each with how far it has moved."""
    first, moved = chunks[0]
    return _struct(
        (1, _LIST, _list(_STRUCT, [_column_chunk(*one) for one in chunks])),
        (2, _INT64, _integer(sum(chunk.total_uncompressed_size for chunk, _ in chunks))),
        (3, _INT64, _integer(rows)),
        (5, _INT64, _integer(_start_of(first) + moved)),
        (6, _INT64, _integer(sum(chunk.total_compressed_size for chunk, _ in chunks))),
    )


def _column_chunk(chunk: pq.ColumnChunkMetaData, moved: int) -> bytes:
    """`ColumnChunk` with its `ColumnMetaData`."""
    fields = [
        (5, _INT64, _integer(chunk.num_values)),
        (6, _INT64, _integer(chunk.total_uncompressed_size)),
        (7, _INT64, _integer(chunk.total_compressed_size)),
        (9, _INT64, _integer(chunk.data_page_offset + moved)),
    ]
    start = _start_of(chunk)
    if start < chunk.data_page_offset:
        fields.append((11, _INT64, _integer(start + moved)))
    kind = _column_kind(
        chunk.physical_type, chunk.path_in_schema, chunk.encodings, chunk.compression
    )
    metadata = kind + _fields(4, *fields) + _STOP
    return _struct((2, _INT64, _integer(0)), (3, _STRUCT, metadata))


@cache
def _column_kind(physical_type: str, path: str, encodings: tuple[str, ...], codec: str) -> bytes:
    """The fields of `ColumnMetaData` that are the same in most row groups."""
    if codec not in _CODECS or not set(encodings) <= _ENCODINGS.keys():
        raise SpliceError(
            f"column {path} is encoded as {', '.join(encodings)} and compressed by {codec}; wanted"
            f" {', '.join(_CODECS)}, and of encodings {', '.join(_ENCODINGS)}"
        )
    numbers = [_integer(_ENCODINGS[one]) for one in encodings]
    return _fields(
        0,
        (1, _INT32, _integer(_NUMBERS[physical_type])),
        (2, _LIST, _list(_INT32, numbers)),
        (3, _LIST, _list(_BINARY, [_binary(path.encode())])),
        (4, _INT32, _integer(_CODECS[codec])),
    )


_STOP = b"\0"


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """A struct of Thrift's compact protocol."""
    return _fields(0, *fields) + _STOP


def _fields(before: int, *fields: tuple[int, int, bytes]) -> bytes:
    """Number, type and value of each field, ascending; `before` is the number of one before."""
    numbers = [before, *(number for number, _, _ in fields)]
    steps = [after - earlier for earlier, after in itertools.pairwise(numbers)]
    heads = [bytes([step << 4 | kind]) for step, (_, kind, _) in zip(steps, fields, strict=True)]
    return b"".join(head + value for head, (_, _, value) in zip(heads, fields, strict=True))


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    count = len(items)
    head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + _varint(count)
    return head + b"".join(items)


def _binary(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _integer(value: int) -> bytes:
    return _varint(2 * value if value >= 0 else -2 * value - 1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
