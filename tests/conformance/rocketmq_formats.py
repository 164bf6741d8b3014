"""Scenarios about the byte formats of RocketMQ's files: messages, items, names, index files."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from streammeta.brokers.rocketmq import key_index, names
from streammeta.brokers.rocketmq.consume_queue import (
    ITEM_SIZE,
    ConsumeQueueItem,
    decode_items,
    encode_item,
    split_messages,
)
from streammeta.brokers.rocketmq.file_segment import commit_log_body
from streammeta.brokers.rocketmq.key_index import IndexHeader, LocalIndex
from streammeta.brokers.rocketmq.message import (
    Magic,
    Message,
    crc_property,
    decode_message,
    encode_coda,
    encode_message,
    message_id,
)
from streammeta.brokers.rocketmq.names import SegmentType
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said

PLAIN = Message(
    topic="",
    body_crc=3,
    queue_id=4,
    flag=5,
    queue_offset=6,
    physical_offset=7,
    sys_flag=8,
    born_timestamp_ms=9,
    born_host=bytes(7) + b"\x0a",
    store_timestamp_ms=11,
    store_host=bytes(7) + b"\x0a",
    reconsume_times=13,
    prepared_transaction_offset=14,
    properties={"UserKey": "UserValue0", "UNIQ_KEY": "uk"},
)
"""The message that most scenarios are about: MSG, of 123 bytes."""


def plain(queue_offset: int = 6, store_timestamp_ms: int = 11) -> bytes:
    fields = {name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}
    fields |= {"queue_offset": queue_offset, "store_timestamp_ms": store_timestamp_ms}
    return encode_message(Message(**fields))


# ---- messages ----


def _host(given: Args, name: str) -> bytes:
    if given.has(f"{name}_hex"):
        return bytes.fromhex(given.take(f"{name}_hex"))
    address, _, port = given.take(name).rpartition(":")
    return ipaddress.ip_address(address).packed + int(port).to_bytes(4, "big")


def _message(given: Args) -> dict[str, Any]:
    message = Message(
        topic=given.take("topic"),
        body=given.take("body_utf8").encode(),
        queue_id=given.take("queue_id"),
        queue_offset=given.take("queue_offset"),
        physical_offset=given.take("physical_offset"),
        flag=given.take("flag"),
        sys_flag=given.take("sys_flag"),
        born_timestamp_ms=given.take("born_timestamp"),
        born_host=_host(given, "born_host"),
        store_timestamp_ms=given.take("store_timestamp"),
        store_host=_host(given, "store_host"),
        reconsume_times=given.take("reconsume_times"),
        prepared_transaction_offset=given.take("prepared_transaction_offset"),
        properties=dict(given.take("properties_in_order")),
        magic=Magic[given.take("magic")],
        body_crc=given.take("body_crc", None),
    )
    data = encode_message(message)
    decoded = decode_message(data)
    facts = {
        "total_size": len(data),
        "size": len(data),
        "queue_offset": decoded.queue_offset,
        "physical_offset": decoded.physical_offset,
        "store_timestamp": decoded.store_timestamp_ms,
        "properties": dict(decoded.properties),
        "hex": data.hex(),
        "body_crc": decoded.body_crc,
        "offset_id": message_id(decoded.store_host, decoded.physical_offset),
        f"tags_code_of_{decoded.properties.get('TAGS', '')}": decoded.tags_code,
    }
    return {"expect": facts, "derived": facts}


def _crc_property(given: list[Mapping[str, int]]) -> dict[str, Any]:
    return {"derived": [{"hex": crc_property(one["crc"]).hex()} for one in given]}


def _item(given: Args) -> dict[str, Any]:
    fields = ("commit_log_offset", "message_size", "tags_code")
    data = encode_item(ConsumeQueueItem(*(given.take(name) for name in fields)))
    (item,) = decode_items(data)
    values = {name: getattr(item, name) for name in fields}
    return {"expect": {"size": len(data), **values}, "derived": {"hex": data.hex()}}


_RUNS = {"none": b"", "empty": b"", "1 item": bytes(ITEM_SIZE), "10 zero bytes": bytes(10)}


def _bad_splits(given: list[Mapping[str, str]]) -> dict[str, Any]:
    found = []
    for one in given:
        data = plain() if one["messages"] == "given" else b""
        found.append(len(split_messages(_RUNS[one["cq"]], data)))
    return {"expect": found}


_PART = re.compile(r"MSG \(queue offset (\d+)\)|coda \((\d+) bytes\)")


def _split(given: Args) -> dict[str, Any]:
    said = given.take("buffer")
    parts = [plain(int(offset)) if offset else encode_coda(11) for offset, _ in _PART.findall(said)]
    data = bytearray(b"".join(parts))
    if "magic of the first message set to -1" in said:
        data[4:8] = b"\xff" * 4
    items = b"".join(encode_item(ConsumeQueueItem(at, size, 0)) for at, size in given.take("items"))
    found = split_messages(items, bytes(data))
    places = [{"start": one.start, "size": one.size} for one in found]
    return {"expect": {"found": places, "found_count": len(places)}}


def _upload(given: Args) -> dict[str, Any]:
    count = int(re.fullmatch(r"(\d+) times MSG", given.take("messages"))[1])  # type: ignore[index]
    start = given.take("start_offset")
    given.take("read_sizes", None)
    has_coda = given.has("coda_timestamp")
    coda = encode_coda(given.take("coda_timestamp")) if has_coda else b""
    body = commit_log_body(start, [plain()] * count, coda=coda)
    whole = b"".join(
        encode_message(
            Message(
                **{
                    **{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__},
                    "physical_offset": start + 123 * at,
                }
            )
        )
        for at in range(count)
    )
    read = body.read()
    rewritten = f"the {count} messages, with the physical offset of message i = {start} + 123*i"
    unchanged = "as without coda, then the 16 coda bytes unchanged"
    return {
        "expect": {
            "bytes": Said.of({rewritten: read == whole, unchanged: read == whole + coda}),
            "reset_without_mark": Said(IO_error=_fails_without_mark(start, count)),
            "mark_reset": Said.of(
                {
                    "any position, repeated, gives the same bytes": _rereads(start, count),
                }
            ),
        },
        "derived": {
            "sha256": hashlib.sha256(read).hexdigest(),
            "size": len(read),
            "coda_hex": coda.hex(),
        },
    }


def _fails_without_mark(start: int, count: int) -> bool:
    body = commit_log_body(start, [plain()] * count)
    body.read(5)
    try:
        body.reset()
    except OSError:
        return True
    return False


def _rereads(start: int, count: int) -> bool:
    for at in range(0, 123 * count, 7):
        body = commit_log_body(start, [plain()] * count)
        body.read(at)
        body.mark()
        first = body.read()
        body.reset()
        if body.read() != first:
            return False
    return True


# ---- names ----


def _names(given: Args) -> dict[str, Any]:
    offsets, queue = given.take("offsets"), given.within("queue")
    broker = given.take("index_broker")
    path = names.queue_path(queue.take("broker"), queue.take("topic"), queue.take("queue_id"))
    found = [names.segment_file_name(offset) for offset in offsets]
    example = names.segment_path(
        "DefaultCluster",
        names.queue_path("broker-a", "TopicTest", 1),
        SegmentType.COMMIT_LOG,
        1000,
    )
    return {
        "expect": {
            "names": found,
            "offsets_back": [names.base_offset_of(name) for name in found],
            "path": path,
            "index_path": names.index_path(broker),
            "hash": names.short_hash(given.take("hash_of")),
        },
        "derived": {
            "more_names": [[at, names.segment_file_name(at)] for at in (1, 23, 1000)],
            "full_path_example": f"<base>/{example}",
        },
    }


# ---- index files ----


def index_constants(given: Args) -> dict[str, Any]:
    slots = given.take("slots")
    text = key_index.index_key(given.take("topic"), given.take("key"))
    index = LocalIndex(0, slots, 20)
    return {
        "expect": {
            "key_string": text,
            "hash": key_index.key_hash(text),
            "header_size": key_index.HEADER_SIZE,
            "slot_position": {at: key_index.slot_position(int(at)) for at in ("2", "5")},
            "item_position": {at: key_index.item_position(slots, int(at)) for at in ("2", "5")},
            "begin_magic": hex(index.header().magic),
            "end_magic": hex(IndexHeader.decode(index.compact()).magic),
        }
    }


def filled_index(given: Args) -> LocalIndex:
    index = LocalIndex(given.take("created_ms"), given.take("slots"), given.take("items"))
    for put in given.each("puts"):
        index.put(
            put.take("topic"),
            put.take("topic_id"),
            put.take("queue_id"),
            put.take("keys"),
            put.take("offset"),
            put.take("size"),
            put.take("timestamp"),
        )
    return index


def _local_bytes(given: Args) -> dict[str, Any]:
    index = filled_index(given)
    data = index.encode()
    again = LocalIndex.decode(data, index.slots, index.max_items)
    used = len(index.encode().rstrip(b"\0"))
    end = key_index.item_position(index.slots, index.item_count + 1)
    return {
        "derived": {
            "file_size": len(data) if again.encode() == data else "another file when read again",
            "used_part_hex": data[:end].hex(),
            "rest": Said(zero=used <= end),
        }
    }


def _compacted_bytes(given: Args) -> dict[str, Any]:
    """Compact the file of another scenario of the same file, which the input holds by now."""
    data = filled_index(given.within("file")).compact()
    is_sealed = IndexHeader.decode(data).magic == key_index.END_MAGIC
    return {"derived": {"hex": data.hex(), "status": Said(SEALED=is_sealed)}}


RUNNERS: dict[str, Runner] = {
    "message_v2_layout": _message,
    "message_v1_real": _message,
    "crc32_property": _crc_property,
    "consume_queue_item_layout": _item,
    "split_buffer_rejects_bad_arguments": _bad_splits,
    "split_buffer_skips_coda": _split,
    "split_buffer_item_points_at_coda": _split,
    "split_buffer_bad_magic_skipped": _split,
    "commit_log_stream_rewrites_physical_offsets": _upload,
    "commit_log_stream_with_coda": _upload,
    "segment_file_names": _names,
    "index_local_bytes": _local_bytes,
    "index_compacted_bytes": _compacted_bytes,
}
