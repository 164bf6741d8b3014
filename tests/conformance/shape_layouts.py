"""Tables of the byte layouts of shapes of brokers, held against bytes that the product makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streammeta.brokers.pulsar.formats import blocks
from streammeta.brokers.pulsar.formats.blocks import BlockHeader
from streammeta.brokers.rocketmq import tiered_view
from streammeta.brokers.rocketmq.dispatch import GroupCommit
from streammeta.brokers.rocketmq.fetch import ReadAhead
from streammeta.brokers.rocketmq.formats import key_index, message, names
from streammeta.brokers.rocketmq.formats.consume_queue import ConsumeQueueItem, encode_item
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.key_index_service import IndexSizes
from streammeta.brokers.rocketmq.message_file import FileSizes
from streammeta.brokers.rocketmq.segments.file_segment import FileSegment
from tests.conformance import kafka_layouts, pulsar_layouts
from tests.conformance.conformance_report import Mismatch, compare
from tests.conformance.rocketmq_formats import plain
from tests.conformance.shape_facts import match
from tests.kit.memory_stores import MemorySegment

_FIXED = {"i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "i64": 8}
_ZEROS = re.compile(r"(\d+) bytes")
_HEX = re.compile(r"0x[0-9a-f]{8}")


def check_shape_layout(table: str, stated: Any) -> Iterator[Mismatch]:
    """Yield what does not hold of a table."""
    yield from SHAPE_LAYOUTS[table](stated)


def fields_check(data: bytes, values: list[Any]) -> Callable[[Any], Iterator[Mismatch]]:
    """Return the check of a table whose fields make up `data`, with these values."""

    def check(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
        yield from compare(stated.get("size", len(data)), len(data), "size")
        at = 0
        for row, wanted in zip(stated["fields"], values, strict=True):
            kind = str(row[1])
            zeros = _ZEROS.fullmatch(kind)
            size = len(data) - at if kind == "bytes" else int(zeros[1]) if zeros else _FIXED[kind]
            raw = data[at : at + size]
            is_number = kind in _FIXED
            found = int.from_bytes(raw, "big", signed=kind[0] == "i") if is_number else raw
            yield from compare(wanted, found, str(row[0]))
            magics = [int(one, 16) for one in _HEX.findall(str(row[2]))] if len(row) > 2 else []
            if magics and found not in magics:
                yield Mismatch(str(row[0]), row[2], found)
            at += size
        if at != len(data):
            yield Mismatch("fields", f"{len(data)} bytes", f"{at} bytes")

    return check


def _message(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    """Look at the fields whose position is stated, in a message whose fields all differ."""
    data = plain()
    known = {
        "total_size": (4, len(data)),
        "magic": (4, message.Magic.V2),
        "body_crc": (4, 3),
        "queue_id": (4, 4),
        "flag": (4, 5),
        "queue_offset": (8, 6),
        "physical_offset": (8, 7),
        "sys_flag": (4, 8),
        "born_timestamp": (8, 9),
        "born_host": (8, 10),
        "store_timestamp": (8, 11),
        "store_host": (8, 10),
        "reconsume_times": (4, 13),
        "prepared_transaction_offset": (8, 14),
        "body_length": (4, 0),
        "body": (0, 0),
    }
    for row in stated["fields"]:
        if len(row) > 2 and isinstance(row[2], int):
            size, wanted = known[row[0]]
            found = int.from_bytes(data[row[2] : row[2] + size], "big")
            yield from compare(wanted, found, str(row[0]))
    smallest = {
        magic.name: len(message.encode_message(message.Message(topic="", magic=magic)))
        for magic in message.Magic
    }
    yield from compare(stated["minimum_size_ipv4"], smallest, "minimum_size_ipv4")
    bits = stated["sys_flag_bits"]
    found_bits = {"born_host_v6": message.BORN_HOST_V6, "store_host_v6": message.STORE_HOST_V6}
    yield from compare({name: bits[name] for name in found_bits}, found_bits, "sys_flag_bits")
    yield from compare(stated["blank_magic"], hex(message.BLANK_MAGIC), "blank_magic")


def _index_local(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    index = key_index.LocalIndex(0, 1, 3)
    index.put("t", 2, 3, ["k"], 4, 5, 6000)
    data = index.encode()
    value = key_index.key_hash(key_index.index_key("t", "k"))
    row = fields_check(data[36 + 32 : 36 + 64], [value, 2, 3, 4, 5, 6, 0])
    yield from row({"size": stated["item_size"], "fields": stated["item"]})
    if data[28:36] != bytes([0, 0, 0, 1, 0, 0, 0, 0]) or any(data[36:68]):
        yield Mismatch("slot", stated["slot"], data[28:68].hex())


def _index_compacted(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    index = key_index.LocalIndex(0, 1, 3)
    index.put("t", 2, 3, ["k"], 4, 5, 6000)
    local, data = index.encode(), index.compact()
    yield from compare(stated["item_size"], len(data) - 36, "item_size")
    if data[36:] != local[68 : 68 + 28] or data[28:36] != bytes([0, 0, 0, 36, 0, 0, 0, 28]):
        yield Mismatch("item", stated["item"], data.hex())


def _file_name(_: str) -> Iterator[Mismatch]:
    name = names.segment_file_name(1000)
    yield from compare("a9b7ba7000000000000000001000", name, "segment_file_name")


def _path(_: str) -> Iterator[Mismatch]:
    found = names.segment_path("c", names.index_path("b"), SegmentType.INDEX, 0)
    wanted = f"{names.short_hash('c')}_c/b/rmq_sys_INDEX/0/INDEX/{names.segment_file_name(0)}"
    yield from compare(wanted, found, "segment_path")


def _defaults(stated: Mapping[str, Any]) -> Iterator[Mismatch]:
    groups, ahead, index, sizes = GroupCommit(), ReadAhead(), IndexSizes(), FileSizes()
    found = {
        "commit_log_segment": sizes.commit_log,
        "consume_queue_segment": sizes.consume_queue,
        "index_slots": index.slots,
        "index_items": index.max_items,
        "file_reserved_hours": tiered_view.RESERVED_HOURS,
        "delete_interval_ms": tiered_view.DELETE_INTERVAL_MS,
        "commit_log_rolling": {
            "interval_hours": groups.roll_interval_ms // 3_600_000,
            "minimum_size": groups.roll_min_size,
        },
        "group_commit": {
            "timeout_ms": groups.timeout_ms,
            "count": groups.count,
            "size": groups.size,
        },
        "max_buffers_per_segment": FileSegment(
            SegmentType.COMMIT_LOG, 0, MemorySegment()
        ).max_buffers,
        "read_ahead": {
            "count": ahead.count,
            "size": ahead.size,
            "cache_expire_ms": ahead.expire_ms,
            "cache_heap_share": 0.3,  # the share of a Java heap; here the bound is in bytes
        },
    }
    yield from match(stated, {**found, **pulsar_layouts.defaults()}, "defaults")


_INDEX = key_index.IndexHeader(key_index.BEGIN_MAGIC, 1, 2, 3, 4)

SHAPE_LAYOUTS: dict[str, Callable[[Any], Iterator[Mismatch]]] = {
    "message": _message,
    "consume_queue_item": fields_check(encode_item(ConsumeQueueItem(1, 2, 3)), [1, 2, 3]),
    "commit_log_coda": fields_check(message.encode_coda(7), [16, message.BLANK_MAGIC - 2**32, 7]),
    "index_header": fields_check(_INDEX.encode(), [key_index.BEGIN_MAGIC, 1, 2, 3, 4]),
    "index_local": _index_local,
    "index_compacted": _index_compacted,
    "segment_file_name": _file_name,
    "segment_path": _path,
    "defaults": _defaults,
    "data_block_header": fields_check(
        BlockHeader(2, 3).encode(), [blocks.MAGIC, 128, 2, 3, bytes(100)]
    ),
    "streaming_data_block_header": fields_check(
        BlockHeader(2, 3, 4).encode(), [blocks.STREAMING_MAGIC, 128, 2, 3, 4, bytes(92)]
    ),
    **pulsar_layouts.LAYOUTS,
    **kafka_layouts.LAYOUTS,
}
