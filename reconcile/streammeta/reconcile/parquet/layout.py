"""Encoding of a Parquet file's structures: page headers, row groups, footer.

The structures are defined in `parquet.thrift` and encoded in Thrift's compact protocol, for
nullable columns of the two types of `tables`.
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
    """Consecutive pages of a column in a row group, sizes in bytes.

    `encodings` and `codec` are names in `ENCODINGS` and `CODECS`. A dictionary page comes first,
    with `dictionary_size` bytes, or 0 without one. `size` includes it.
    """

    physical_type: str
    encodings: tuple[str, ...]
    codec: str
    rows: int
    dictionary_size: int
    size: int
    uncompressed_size: int


def data_page_header(sizes: tuple[int, int], rows: int, encoding: str) -> bytes:
    """Encode the `PageHeader` of a data page. `sizes` are uncompressed and compressed bytes."""
    values = _struct(
        (1, _INT32, integer(rows)),
        (2, _INT32, integer(ENCODINGS[encoding])),
        (3, _INT32, integer(ENCODINGS["RLE"])),
        (4, _INT32, integer(ENCODINGS["RLE"])),
    )
    return _page_header(_DATA_PAGE, sizes, (5, _STRUCT, values))


def dictionary_page_header(sizes: tuple[int, int], values: int) -> bytes:
    """Encode the `PageHeader` of a dictionary page, with uncompressed and compressed `sizes`."""
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
    """Encode the `RowGroup` of columns, each with its name and its first byte in the file."""
    _, _, first = chunks[0]
    return _struct(
        (1, _LIST, _list(_STRUCT, [_column_chunk(*chunk) for chunk in chunks])),
        (2, _INT64, integer(sum(chunk.uncompressed_size for _, chunk, _ in chunks))),
        (3, _INT64, integer(rows)),
        (5, _INT64, integer(first)),
        (6, _INT64, integer(sum(chunk.size for _, chunk, _ in chunks))),
    )


def _column_chunk(name: str, chunk: Chunk, start: int) -> bytes:
    """Encode the `ColumnChunk` with its `ColumnMetaData`."""
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
    """Encode the fields of `ColumnMetaData` that are equal in most row groups."""
    numbers = [integer(ENCODINGS[encoding]) for encoding in encodings]
    return _fields(
        0,
        (1, _INT32, integer(_NUMBERS[physical_type])),
        (2, _LIST, _list(_INT32, numbers)),
        (3, _LIST, _list(_BINARY, [_binary(name.encode())])),
        (4, _INT32, integer(CODECS[codec])),
    )


def footer(schema: pa.Schema, rows: int, groups: Sequence[bytes]) -> bytes:
    """Encode the end of a file: `FileMetaData`, its length and the magic bytes."""
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
    """Encode a struct in Thrift's compact protocol."""
    return _fields(0, *fields) + _STOP


def _fields(before: int, *fields: tuple[int, int, bytes]) -> bytes:
    """Encode fields in ascending order. `before` is the number of the previous field."""
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
    """Encode a signed 64-bit number in zigzag form, which keeps small numbers short."""
    return varint(2 * value if value >= 0 else -2 * value - 1)


def varint(value: int) -> bytes:
    """Encode a nonnegative number, seven bits per byte, lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
