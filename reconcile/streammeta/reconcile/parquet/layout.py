"""Structures of a Parquet file that is written here: headers of pages, row groups, the footer.

They are those of Parquet's `parquet.thrift`, in Thrift's compact protocol, for columns of the two
types of `tables` that may be null. Knows nothing of how values are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

MAGIC = b"PAR1"
CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "ZSTD": 6, "LZ4": 7}
ENCODINGS = {
    "PLAIN": 0,
    "PLAIN_DICTIONARY": 2,
    "RLE": 3,
    "BIT_PACKED": 4,
    "DELTA_BINARY_PACKED": 5,
    "DELTA_LENGTH_BYTE_ARRAY": 6,
    "DELTA_BYTE_ARRAY": 7,
    "RLE_DICTIONARY": 8,
}
PHYSICAL_TYPES = {pa.int64(): "INT64", pa.string(): "BYTE_ARRAY"}
_NUMBERS = {"INT64": 2, "BYTE_ARRAY": 6}
_CREATED_BY = b"streammeta"
_OPTIONAL, _UTF8 = 1, 0
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2

_INT32, _INT64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_STOP = b"\0"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of a column of a row group, one after the other; sizes are bytes.

    `encodings` and `codec` are names in `ENCODINGS` and `CODECS`. A page of a dictionary comes
    first and takes `dictionary_size`, 0 if there is none; `size` counts it too.
    """

    physical_type: str
    encodings: tuple[str, ...]
    codec: str
    rows: int
    dictionary_size: int
    size: int
    uncompressed_size: int


def data_page_header(sizes: tuple[int, int], rows: int, encoding: str) -> bytes:
    """`PageHeader` of a page of values; `sizes` are those before and after compression."""
    values = _struct(
        (1, _INT32, integer(rows)),
        (2, _INT32, integer(ENCODINGS[encoding])),
        (3, _INT32, integer(ENCODINGS["RLE"])),
        (4, _INT32, integer(ENCODINGS["RLE"])),
    )
    return _page_header(_DATA_PAGE, sizes, (5, _STRUCT, values))


def dictionary_page_header(sizes: tuple[int, int], values: int) -> bytes:
    """`PageHeader` of a page of a dictionary; `sizes` are those before and after compression."""
    plain = _struct((1, _INT32, integer(values)), (2, _INT32, integer(ENCODINGS["PLAIN"])))
    return _page_header(_DICTIONARY_PAGE, sizes, (7, _STRUCT, plain))


def _page_header(kind: int, sizes: tuple[int, int], header: tuple[int, int, bytes]) -> bytes:
    before, after = sizes
    return _struct(
        (1, _INT32, integer(kind)),
        (2, _INT32, integer(before)),
        (3, _INT32, integer(after)),
        header,
    )


def row_group(chunks: Sequence[tuple[str, Chunk, int]], rows: int) -> bytes:
    """`RowGroup` of columns, each with its name and the byte of the file that it begins at."""
    _, _, first = chunks[0]
    return _struct(
        (1, _LIST, _list(_STRUCT, [_column_chunk(*one) for one in chunks])),
        (2, _INT64, integer(sum(chunk.uncompressed_size for _, chunk, _ in chunks))),
        (3, _INT64, integer(rows)),
        (5, _INT64, integer(first)),
        (6, _INT64, integer(sum(chunk.size for _, chunk, _ in chunks))),
    )


def _column_chunk(name: str, chunk: Chunk, start: int) -> bytes:
    """`ColumnChunk` with its `ColumnMetaData`."""
    fields = [
        (5, _INT64, integer(chunk.rows)),
        (6, _INT64, integer(chunk.uncompressed_size)),
        (7, _INT64, integer(chunk.size)),
        (9, _INT64, integer(start + chunk.dictionary_size)),
    ]
    if chunk.dictionary_size:
        fields.append((11, _INT64, integer(start)))
    kind = _column_kind(chunk.physical_type, name, chunk.encodings, chunk.codec)
    metadata = kind + _fields(4, *fields) + _STOP
    return _struct((2, _INT64, integer(0)), (3, _STRUCT, metadata))


@cache
def _column_kind(physical_type: str, name: str, encodings: tuple[str, ...], codec: str) -> bytes:
    """The fields of `ColumnMetaData` that are the same in most row groups."""
    numbers = [integer(ENCODINGS[one]) for one in encodings]
    return _fields(
        0,
        (1, _INT32, integer(_NUMBERS[physical_type])),
        (2, _LIST, _list(_INT32, numbers)),
        (3, _LIST, _list(_BINARY, [_binary(name.encode())])),
        (4, _INT32, integer(CODECS[codec])),
    )


def footer(schema: pa.Schema, rows: int, groups: Sequence[bytes]) -> bytes:
    """The end of a file: `FileMetaData`, its length and the magic bytes."""
    root = _struct((4, _BINARY, _binary(b"schema")), (5, _INT32, integer(len(schema))))
    elements = [root, *map(_schema_element, schema)]
    metadata = _struct(
        (1, _INT32, integer(2)),
        (2, _LIST, _list(_STRUCT, elements)),
        (3, _INT64, integer(rows)),
        (4, _LIST, _list(_STRUCT, groups)),
        (6, _BINARY, _binary(_CREATED_BY)),
    )
    return metadata + len(metadata).to_bytes(4, "little") + MAGIC


def _schema_element(field: pa.Field) -> bytes:
    fields = [
        (1, _INT32, integer(_NUMBERS[PHYSICAL_TYPES[field.type]])),
        (3, _INT32, integer(_OPTIONAL)),
        (4, _BINARY, _binary(field.name.encode())),
    ]
    if field.type == pa.string():
        fields += [(6, _INT32, integer(_UTF8)), (10, _STRUCT, _struct((1, _STRUCT, _struct())))]
    return _struct(*fields)


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """A struct of Thrift's compact protocol."""
    return _fields(0, *fields) + _STOP


def _fields(before: int, *fields: tuple[int, int, bytes]) -> bytes:
    """Number, type and value of each field, ascending; `before` is the number of one before."""
    found = bytearray()
    for number, kind, value in fields:
        found.append(number - before << 4 | kind)
        found += value
        before = number
    return bytes(found)


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    count = len(items)
    head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)
    return head + b"".join(items)


def _binary(value: bytes) -> bytes:
    return varint(len(value)) + value


def integer(value: int) -> bytes:
    """A signed number of 64 bits: near 0 it takes one byte, with either sign."""
    return varint(2 * value if value >= 0 else -2 * value - 1)


def varint(value: int) -> bytes:
    """A number from 0 on, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
