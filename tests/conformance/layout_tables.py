"""Checks tables of keys, attributes and fields against bytes and the object format.

A table names its fields in order, each with its type and for a magic number its value. Sentences
beside the tables state nothing that could be run.

Keys of kinds of objects that this product does not have must be foreign to it: they are never
touched. Addresses of buckets are written differently here and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import (
    Footer,
    IndexEntry,
    encode_footer,
    encode_index,
)
from streammeta.storage.object_format.object_key import (
    ForeignKey,
    ObjectAttributes,
    ObjectKind,
    OwnKey,
    decode_attributes,
    encode_attributes,
    key_for,
    parse_key,
)
from streammeta.storage.object_format.record import RecordBatch, encode_block_header, encode_record
from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare
from tests.conformance.scenario_args import Args, Check

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
    "footer": (encode_footer(Footer(11, 12)), [11, 12, bytes(28), 0x88E241B785F4CFF7]),
    "objects_block": (
        encode_composite([LinkedObject(11, -2, (_ENTRY,))])[:_COMPOSITE_HEAD_SIZE],
        [0x52, 1, 11, 0, -2],
    ),
}


def check_layout(table: str, args: Args, _: ScenarioResult) -> Iterator[Mismatch]:
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
    raise ValueError(f"type {kind!r}: expected u8, i16, i32, i64, u64, n bytes or bytes")


def _object_key(args: Args) -> Iterator[Mismatch]:
    object_id, namespace, key = args.take("object"), args.take("namespace"), args.take("key")
    yield from compare(key, key_for(object_id, namespace), "key")
    parsed = parse_key(key, namespace)
    actual = parsed.object_id if isinstance(parsed, OwnKey) else repr(parsed)
    yield from compare(object_id, actual, "object")


def _foreign_key(args: Args) -> Iterator[Mismatch]:
    args.take("node"), args.take("namespace")
    yield from _check_foreign(args.take("key"), "key")


def _check_foreign(key: str, path: str) -> Iterator[Mismatch]:
    parts = key.split("/")
    parsed = parse_key(key, parts[1] if len(parts) > 1 else "DEFAULT")
    if not isinstance(parsed, ForeignKey):
        yield Mismatch(path, "a foreign key", repr(parsed))


def _wal_paths(args: Args) -> Iterator[Mismatch]:
    for name in ("cluster", "node", "type"):
        args.take(name, None)
    for name, key in args.take("expect").items():
        yield from _check_foreign(key, f"expect.{name}")


def _parse_object_id(args: Args) -> Iterator[Mismatch]:
    """Parse a key; one whose first element is not made of the id is foreign here."""
    key, object_id = args.take("key"), args.take("object", None)
    expected = args.take("expect", None)
    parts = key.split("/")
    namespace = parts[1] if len(parts) == 3 else "DEFAULT"
    parsed = parse_key(key, namespace)
    is_exact = object_id is not None and expected is None and key == key_for(object_id, namespace)
    if is_exact:
        yield from compare(OwnKey(object_id), parsed, "object")
    elif not isinstance(parsed, ForeignKey):
        yield Mismatch("object", "a foreign key", repr(parsed))


def _attributes(args: Args) -> Iterator[Mismatch]:
    chosen = args.within("set")
    kind = ObjectKind.COMPOSITE if chosen.take("composite", False) else ObjectKind.NORMAL
    attributes = ObjectAttributes(kind, chosen.take("bucket", 0), chosen.take("deep", False))
    value = args.take("attributes")
    yield from compare(value, encode_attributes(attributes), "attributes")
    decoded = decode_attributes(value)
    actual = {
        "type": decoded.kind.name.lower(),
        "bucket": decoded.bucket_id,
        "deep_delete": decoded.deep_delete,
    }
    yield from compare(args.take("decoded"), actual, "decoded")


_TABLES: dict[str, tuple[Callable[[Args], Iterator[Mismatch]], str]] = {
    "object_keys": (_object_key, ""),
    "index_keys": (_foreign_key, "no-index-objects"),
    "parse_object_id": (_parse_object_id, "strict-keys"),
    "attributes": (_attributes, ""),
    "wal_paths": (_wal_paths, "no-index-objects"),
}
"""The check of an entry, and the deviation that every entry meets."""


def _check(section: str, args: Args, result: ScenarioResult) -> Iterator[Mismatch]:
    check, feature = _TABLES[section]
    if feature:
        result.deviate(0, section, feature)
    yield from check(args)


KEY_TABLES: dict[str, Check] = {section: partial(_check, section) for section in _TABLES}

NOT_OFFERED = ("bucket_uris", "id_uris", "position_cache")
"""Sections about what the contract does not have."""
