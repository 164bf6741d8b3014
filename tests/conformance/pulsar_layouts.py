"""Tables of the layouts of offloaded ledgers, held against bytes that the product makes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from streammeta.brokers.pulsar.blobs import range_stream
from streammeta.brokers.pulsar.formats import blocks, index_block, object_names, wire_fields
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.index_block import (
    IndexBlock,
    LedgerIndex,
    StreamingIndexBlock,
)
from streammeta.brokers.pulsar.formats.ledger_values import (
    LedgerInfo,
    LedgerMetadata,
    OffloadContext,
)
from streammeta.brokers.pulsar.ledger_list import OffloadPolicy, reads_copy
from tests.conformance.conformance_report import Mismatch, compare
from tests.conformance.shape_facts import Words

_CODES = {"u32": "I", "i32": "i", "i64": "q"}


def defaults() -> dict[str, Any]:
    policy = OffloadPolicy()
    never = policy.deletion_lag_ms is None
    lag = "none in the policy class (never); 14400000 in the broker configuration"
    copy_first = reads_copy(LedgerInfo(1, context=OffloadContext("u", complete=True)))
    return {
        "max_block_size": blocks.DEFAULT_MAX_BLOCK_SIZE,
        "read_buffer_size": range_stream.DEFAULT_BUFFER_SIZE,
        "minimum_part_size": blocks.MIN_BLOCK_SIZE,
        "deletion_lag_ms": Words({lag.replace("(", r"\(").replace(")", r"\)"): never}),
        "offload_threshold_bytes": Words({"none or -1 = off": policy.threshold_bytes is None}),
        "read_priority": Words({"tiered-storage-first": copy_first}),
    }


def _name(name: Callable[[str, int], str]) -> Callable[[str], Iterator[Mismatch]]:
    def check(stated: str) -> Iterator[Mismatch]:
        made = stated.replace("<uuid>", "u").replace("<ledger id>", "7")
        yield from compare(made, name("u", 7), "name")

    return check


def _streaming_names(stated: list[str]) -> Iterator[Mismatch]:
    yield from compare(stated, ["<uuid>", "<uuid>-index"], "streaming_names")


def _user_metadata(stated: dict[str, str]) -> Iterator[Mismatch]:
    made = object_names.object_metadata("data", {"ManagedLedgerName": "ml"})
    for key in ("role", "ManagedLedgerName", object_names.VERSION_KEY):
        if key not in stated or key not in made:
            yield Mismatch(key, "a key of the table and of objects", made)
    if f'"{made[object_names.VERSION_KEY]}"' not in stated[object_names.VERSION_KEY]:
        yield Mismatch(object_names.VERSION_KEY, stated[object_names.VERSION_KEY], made)


def _fixed(data: bytes, rows: list[list[str]]) -> Iterator[Mismatch]:
    """Look at the leading fields of fixed size: their magic, if one is stated."""
    at = 0
    for row in rows:
        code = _CODES.get(row[1])
        if code is None:
            return
        (found,) = struct.unpack_from(f">{code}", data, at)
        at += struct.calcsize(code)
        magic = re.fullmatch(r"0x[0-9a-f]{8}", str(row[2])) if len(row) > 2 else None
        if magic is not None and found != int(magic[0], 16):
            yield Mismatch(row[0], row[2], hex(found))


def _entry(stated: dict[str, Any]) -> Iterator[Mismatch]:
    block = blocks.encode_block([Entry(5, b"abc")], 200, 5)
    yield from compare(stated["header_size"], blocks.ENTRY_HEADER_SIZE, "header_size")
    if block.data[128:143] != struct.pack(">iq", 3, 5) + b"abc":
        yield Mismatch("fields", stated["fields"], block.data[128:143].hex())


def _padding(stated: str) -> Iterator[Mismatch]:
    said = bytes.fromhex("".join(re.findall(r"\b[0-9a-f]{2}\b", stated)[:4]))
    yield from compare(said.hex(), blocks.PADDING.hex(), "padding")


def _index_v1(stated: dict[str, Any]) -> Iterator[Mismatch]:
    places = index_block.place_blocks([(0, 1, 9)], 128)
    data = IndexBlock(LedgerMetadata(1, 0), 9, 128, LedgerIndex(places, 0)).encode()
    yield from _fixed(data, stated["fields"])
    if data[-20:] != struct.pack(">qiq", 0, 1, 0):
        yield Mismatch("entries", stated["fields"][-1], data[-20:].hex())


def _index_v2(stated: dict[str, Any]) -> Iterator[Mismatch]:
    places = index_block.place_blocks([(0, 1, 9)], 128)
    ledgers = {4: (LedgerInfo(4, 1, 1), LedgerIndex(places, 0))}
    data = StreamingIndexBlock(9, 128, ledgers).encode()
    yield from _fixed(data, stated["fields"])
    if data[24:36] != struct.pack(">qi", 4, 1):
        yield Mismatch("ledger", stated["fields"][-1], data[24:36].hex())


def _protobuf(stated: dict[str, str]) -> Iterator[Mismatch]:
    """Look at the numbers of the fields that the product writes."""
    context = OffloadContext("00000000-0000-0000-0000-000000000001", True, True, 5)
    made = {
        "LedgerInfo": LedgerInfo(1, 2, 3, 4, context).encode(),
        "OffloadContext": context.encode(),
        "LedgerMetadataFormat": LedgerMetadata(1, 0).encode(),
    }
    for name, data in made.items():
        numbers = {number for number, _ in wire_fields.fields(data)}
        listed = {int(number) for number in re.findall(r"\b\w+ (\d+)\b", stated[name])}
        if not numbers <= listed:
            yield Mismatch(name, stated[name], sorted(numbers))


LAYOUTS: dict[str, Callable[[Any], Iterator[Mismatch]]] = {
    "data_object_name": _name(object_names.data_name),
    "index_object_name": _name(object_names.index_name),
    "streaming_names": _streaming_names,
    "object_user_metadata": _user_metadata,
    "entry": _entry,
    "padding": _padding,
    "index_v1": _index_v1,
    "index_v2": _index_v2,
    "protobuf_fields": _protobuf,
}
