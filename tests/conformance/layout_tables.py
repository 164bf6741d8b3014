"""Checks tables of fields against bytes: what is encoded must read by the table as it was put in.

A table names its fields in order, each with its type and for a magic number its value. Sentences
beside the tables state nothing that could be run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import (
    Footer,
    IndexEntry,
    encode_footer,
    encode_index,
)
from streammeta.storage.object_format.record import RecordBatch, encode_block_header, encode_record
from tests.conformance.conformance_report import Mismatch, ScenarioResult
from tests.conformance.scenario_args import Args

_NUMBER = re.compile(r"(?P<sign>[iu])(?P<bits>8|16|32|64)")
_FILLER = re.compile(r"(?P<size>\d+) bytes")
SENTENCES = frozenset(
    ("endianness", "last_offset", "objects_block_size", "then", "object", "composite_logical_size")
)
_ENTRY = IndexEntry(11, 12, 25, 5, 0, 700)
_COMPOSITE_HEAD_SIZE = 5 + 14

_SAMPLES: dict[str, tuple[bytes, list[object]]] = {
    "record": (
        encode_record(RecordBatch(11, 12, 13, 14, b"hello")),
        [0x22, 11, 12, 13, 14, 5, b"hello"],
    ),
    "data_block": (encode_block_header(11, 12) + b"rest", [0x5A, 2, 11, 12, b"rest"]),
    "index_entry": (encode_index([_ENTRY]), [11, 12, 13, 5, 0, 700]),
    "footer": (
        encode_footer(Footer(11, 12)),
        [11, 12, bytes(28), 0x88E241B785F4CFF7],
    ),
    "objects_block": (
        encode_composite([LinkedObject(11, -2, (_ENTRY,))])[:_COMPOSITE_HEAD_SIZE],
        [0x52, 1, 11, 0, -2],
    ),
}


def check_layout(table: str, args: Args, _: ScenarioResult) -> Iterator[Mismatch]:
    """Check the rows and sizes of one table."""
    name, fields = {"composite_object": ("objects_block",) * 2}.get(table, (table, "fields"))
    if name not in _SAMPLES:
        args.names()
        yield Mismatch(name, name, "unknown table")
        return
    for sentence in SENTENCES:
        args.take(sentence, None)
    data, values = _SAMPLES[name]
    rows = args.take(fields)
    if len(rows) != len(values):
        yield Mismatch(fields, rows, f"{len(values)} fields")
        return
    at = header_size = 0
    for row, wanted in zip(rows, values, strict=True):
        size, found = _field(data, at, str(row[1]))
        at += size
        header_size = at if str(row[1]) != "bytes" else header_size
        if found != wanted:
            yield Mismatch(str(row[0]), wanted, found)
        if len(row) > 2 and found != int(str(row[2]), 0):
            yield Mismatch(str(row[0]), row[2], found)
    for stated in ("header_size", "size"):
        if args.take(stated, header_size) != header_size:
            yield Mismatch(stated, args.take(stated), header_size)
    if at != len(data):
        yield Mismatch(fields, f"{len(data)} bytes", f"{at} bytes")


def _field(data: bytes, at: int, kind: str) -> tuple[int, object]:
    """Read the field at `at`; `bytes` is all that is left."""
    if (number := _NUMBER.fullmatch(kind)) is not None:
        size = int(number["bits"]) // 8
        return size, int.from_bytes(data[at : at + size], "big", signed=number["sign"] == "i")
    if (filler := _FILLER.fullmatch(kind)) is not None:
        return int(filler["size"]), data[at : at + int(filler["size"])]
    if kind == "bytes":
        return len(data) - at, data[at:]
    raise ValueError(f"type {kind!r}: wanted u8, i16, i32, i64, u64, n bytes or bytes")
