"""Shapes of RocketMQ's byte formats: messages, items, splits, uploads, names."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import replace
from typing import Any

from streammeta.brokers.rocketmq.formats import names
from streammeta.brokers.rocketmq.formats.consume_queue import (
    ITEM_SIZE,
    ConsumeQueueItem,
    decode_items,
    encode_item,
    split_messages,
)
from streammeta.brokers.rocketmq.formats.message import (
    Magic,
    Message,
    body_crc,
    crc_property,
    decode_message,
    encode_coda,
    encode_message,
    java_hash,
    message_id,
    with_physical_offset,
)
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.segments.file_segment import UploadBody, commit_log_body
from tests.conformance.shape_facts import AnyOf, Data, Keyed, Number, Words
from tests.conformance.shape_sentences import number_of, numbers_in
from tests.conformance.shape_vocabulary import Answer, Given, Shape

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
    return encode_message(
        replace(PLAIN, queue_offset=queue_offset, store_timestamp_ms=store_timestamp_ms)
    )


# ---- messages ----

_FIELDS = {
    "topic": "topic",
    "queue_id": "queue_id",
    "queue_offset": "queue_offset",
    "physical_offset": "physical_offset",
    "flag": "flag",
    "sys_flag": "sys_flag",
    "born_timestamp": "born_timestamp_ms",
    "store_timestamp": "store_timestamp_ms",
    "reconsume_times": "reconsume_times",
    "prepared_transaction_offset": "prepared_transaction_offset",
    "body_crc": "body_crc",
}
_HOSTS = ("born_host", "store_host")


def _host(text: str) -> bytes:
    address, _, port = text.strip().rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + int(port).to_bytes(4, "big")


def _message_of(given: Given) -> Message:
    """Return the message of an input: from its bytes, or MSG or an empty one with other fields."""
    if given.has("hex"):
        return decode_message(bytes.fromhex(given.take("hex")))
    changes: dict[str, Any] = {
        field: given.take(name) for name, field in _FIELDS.items() if given.has(name)
    }
    for name in _HOSTS:
        if given.has(f"{name}_hex"):
            changes[name] = bytes.fromhex(given.take(f"{name}_hex"))
        elif given.has(name):
            changes[name] = _host(given.take(name))
    body = given.first("body_hex", "body_utf8", "body")
    if body is not None:
        is_hex = given.has("body_hex")
        changes["body"] = bytes.fromhex(body) if is_hex else str(body).encode()
    properties = given.first("properties_in_order", "properties")
    if properties is not None:
        changes["properties"] = dict(properties)
    if given.has("magic"):
        changes["magic"] = Magic[given.take("magic")]
    if given.has("message"):
        given.take("message")
        return replace(PLAIN, **changes)
    return Message(**{"topic": "", **changes})


def _message(given: Given) -> Any:
    message = _message_of(given)
    data = encode_message(message)
    decoded = decode_message(data)
    again = encode_message(replace(decoded, body_crc=message.body_crc or decoded.body_crc))
    facts = {
        "total_size": len(data),
        "size": len(data),
        "magic": AnyOf(
            decoded.magic.name, Number(int(decoded.magic)), Number(int(decoded.magic) - 2**32)
        ),
        "queue_offset": decoded.queue_offset,
        "physical_offset": decoded.physical_offset,
        "store_timestamp": decoded.store_timestamp_ms,
        "born_timestamp": decoded.born_timestamp_ms,
        "queue_id": decoded.queue_id,
        "flag": decoded.flag,
        "sys_flag": decoded.sys_flag,
        "reconsume_times": decoded.reconsume_times,
        "prepared_transaction_offset": decoded.prepared_transaction_offset,
        "topic": decoded.topic,
        "body": Data(decoded.body),
        "body_utf8": Data(decoded.body),
        "body_length": len(decoded.body),
        "born_host": Data(decoded.born_host),
        "store_host": Data(decoded.store_host),
        "properties": dict(decoded.properties),
        "keys": sorted(decoded.keys),
        "tags_code": decoded.tags_code,
        "hex": data.hex(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "round_trip": again == data,
        "body_crc": decoded.body_crc,
        "offset_id": message_id(decoded.store_host, decoded.physical_offset),
        "message_id": message_id(decoded.store_host, decoded.physical_offset),
    }
    tags = {r"tags_code_of_(.+)": lambda found: java_hash(found[1])}
    return Keyed(facts, tags)


def _crc(given: Given) -> Any:
    if given.has("crc"):
        data = crc_property(given.take("crc"))
        return {"hex": data.hex(), "size": len(data)}
    body = (
        bytes.fromhex(given.take("body_hex"))
        if given.has("body_hex")
        else given.take("body_utf8").encode()
    )
    found = body_crc(body)
    return {"crc": found, "body_crc": found, "hex": crc_property(found).hex()}


def _tags(given: Given) -> Answer:
    found = java_hash(str(given.first("tag", "tags", "text")))
    return Answer({"hash": found, "tags_code": found, "code": found}, found)


# ---- consume queue ----


def _item(given: Given) -> Any:
    fields = ("commit_log_offset", "message_size", "tags_code")
    if given.has("hex"):
        data = bytes.fromhex(given.take("hex"))
    else:
        size = given.first("message_size", "size")
        data = encode_item(ConsumeQueueItem(given.take(fields[0]), size, given.take(fields[2])))
    (item,) = decode_items(data)
    values = {name: getattr(item, name) for name in fields}
    return {"size": len(data), "hex": data.hex(), **values}


def _run_of_items(stated: Any) -> bytes:
    """Return consume queue bytes: a list of [offset, size] or [offset, size, tags], or words."""
    if isinstance(stated, list):
        return b"".join(encode_item(ConsumeQueueItem(*(*item, 0)[:3])) for item in stated)
    words = str(stated)
    if words in ("none", "null", "None", "empty", ""):
        return b""
    count, _, unit = words.partition(" ")
    return bytes(number_of(count) * (ITEM_SIZE if "item" in unit else 1))


_PART = re.compile(
    r"(?:(?P<count>\d+) (?:times |x )?)?MSG(?: \((?P<fields>[^)]*)\))?"
    r"|coda(?: \((?P<coda>[^)]*)\))?|(?P<zeros>\d+) (?:zero |empty )?bytes(?! has)"
)


def _buffer(said: Any) -> bytes:
    """Return the bytes that parts in words make up: MSG, coda, zeros, with changes said behind."""
    if isinstance(said, list):
        return b"".join(_buffer(part) for part in said)
    said = str(said)
    if said in ("none", "null", "None", "empty", ""):
        return b""
    if said in ("given", "message", "messages"):
        return plain()
    head = re.split(r"[,;](?![^(]*\))", said)[0]
    data = bytearray()
    for part in _PART.finditer(head):
        if part["zeros"]:
            data += bytes(int(part["zeros"]))
        elif "coda" in part[0]:
            data += encode_coda(11)
        else:
            offset = re.search(r"queue offset (\d+)", part["fields"] or "")
            stored = re.search(r"(?:store )?timestamp (\d+)", part["fields"] or "")
            one = plain(int(offset[1]) if offset else 6, int(stored[1]) if stored else 11)
            data += one * int(part["count"] or 1)
    return _changed(data, said)


def _changed(data: bytearray, said: str) -> bytes:
    starts = [at for at in range(len(data)) if data[at + 4 : at + 8] == plain()[4:8]]
    magic = re.search(r"magic of (?:the )?(\w+)(?: message)?(?: is)? set to (-?\w+)", said)
    if magic is not None:
        at = starts[{"first": 0, "second": 1, "third": 2, "last": -1}.get(magic[1], 0)]
        data[at + 4 : at + 8] = (int(magic[2], 0) & 0xFFFFFFFF).to_bytes(4, "big")
    cut = re.search(r"(?:cut|truncated) (?:to|at|after) (\d+)", said)
    short = re.search(r"(?:without the last|shorter by|lacks the last) (\d+)", said)
    end = int(cut[1]) if cut else len(data) - int(short[1]) if short else len(data)
    return bytes(data[:end])


def _split(given: Given) -> Any:
    messages = _buffer(given.first("buffer", "messages", default=""))
    items = _run_of_items(given.first("items", "cq", "consume_queue", default=""))
    found = split_messages(items, messages)
    places = [{"start": range_.start, "size": range_.size} for range_ in found]
    facts = {
        "found": places,
        "found_count": len(places),
        "messages": len(places),
        "count": len(places),
    }
    return Answer(facts, len(places))


# ---- uploads ----


def _upload_parts(given: Given) -> tuple[list[bytes], bytes, str]:
    """Return what is uploaded, a coda, and the kind of the segment."""
    kind = given.take("type", "COMMIT_LOG")
    coda = given.take("coda_timestamp", None)
    if given.has("items"):
        said, kind = given.take("items"), "CONSUME_QUEUE"
        if isinstance(said, str):
            counted = numbers_in(said)
            return (
                [encode_item(ConsumeQueueItem(*(counted[1:4] or (1, 2, 3))))] * counted[0],
                b"",
                kind,
            )
        return [_run_of_items(said)], b"", kind
    said = given.first("messages", "buffers", "buffer", "data_hex", "longs")
    if isinstance(said, list):
        if all(isinstance(item, int) for item in said):
            return [b"".join(n.to_bytes(8, "big", signed=True) for n in said)], b"", "INDEX"
        parts = [_buffer(part) for part in said]
    elif re.fullmatch(r"(?:[0-9a-f]{2})+", str(said)) and "MSG" not in str(said):
        parts = [bytes.fromhex(str(said))]
    elif "MSG" not in str(said):
        numbers = numbers_in(str(said))
        count, kind = numbers[0], "CONSUME_QUEUE" if kind == "COMMIT_LOG" else kind
        parts = [
            encode_item(ConsumeQueueItem(*(numbers[1:4] if len(numbers) > 3 else (1, 2, 3))))
        ] * count
    else:
        found = re.search(r"(\d+)", str(said))
        parts = [plain()] * (int(found[1]) if found else 1)
    return parts, encode_coda(coda) if coda is not None else b"", kind


def _upload(given: Given) -> Any:
    parts, coda, kind = _upload_parts(given)
    start = given.take("start_offset", 0)
    sizes = [number_of(re.sub(r"\D", "", str(size))) for size in given.take("read_sizes", [1, 7])]

    def body() -> UploadBody:
        if kind == "COMMIT_LOG":
            return commit_log_body(start, parts, coda=coda)
        return UploadBody(0, b"".join(parts))

    read = body().read()
    same = all(_read_in(body(), size) == read for size in sizes)
    step = len(parts[0]) if parts else 0
    offsets = [start + sum(map(len, parts[:at])) for at in range(len(parts))]
    moved = b"".join(map(with_physical_offset, parts, offsets)) if kind == "COMMIT_LOG" else b""
    is_moved = same and read == moved + coda and bool(moved)
    is_same = same and read == b"".join(parts) + coda
    numbers = (
        r"(?:the )?(\d+) messages, with the physical offset of message i = (\d+) \+ (\d+) ?\* ?i"
    )

    def fits(found: re.Match[str]) -> bool:
        return (
            is_moved
            and not coda
            and [int(group) for group in found.groups()] == [len(parts), start, step]
        )

    behind = is_moved and bool(coda) and read.endswith(coda)
    said = Words(
        {
            numbers: fits,
            r"as without coda, then the (\d+) coda bytes unchanged": lambda m: (
                behind and int(m[1]) == len(coda)
            ),
            r"(?:all )?(?:bytes |items )?(?:unchanged|as given|equal|the same(?: bytes)?)": is_same,
            r"the (\d+) items(?:,)? unchanged": lambda m: is_same and int(m[1]) == len(parts),
        }
    )
    return {
        "bytes": said,
        "read": said,
        "reset_without_mark": Words({"io error|ioexception|error": _fails_without_mark(body())}),
        "mark_reset": Words(
            {
                r"any position,? repeated,? gives the same bytes": _rereads(body, len(read)),
                r"the same bytes|equal|same": _rereads(body, len(read)),
            }
        ),
        "sha256": hashlib.sha256(read).hexdigest(),
        "size": len(read),
        "hex": read.hex(),
        "coda_hex": coda.hex(),
        "physical_offsets": offsets,
    }


def _read_in(body: UploadBody, size: int) -> bytes:
    parts = []
    while part := body.read(size):
        parts.append(part)
    return b"".join(parts)


def _fails_without_mark(body: UploadBody) -> bool:
    body.read(5)
    try:
        body.reset()
    except OSError:
        return True
    return False


def _rereads(body: Any, size: int) -> bool:
    for at in range(0, size, 7):
        stream = body()
        stream.read(at)
        stream.mark()
        first = stream.read()
        stream.reset()
        if stream.read() != first:
            return False
    return True


# ---- names ----


def _names(given: Given) -> Any:
    facts: dict[str, Any] = {}
    if given.has("offsets"):
        found = [names.segment_file_name(offset) for offset in given.take("offsets")]
        facts["names"] = found
        facts["offsets_back"] = [names.base_offset_of(name) for name in found]
    if given.has("names"):
        facts["offsets"] = facts["offsets_back"] = [
            names.base_offset_of(name) for name in given.take("names")
        ]
    if given.has("queue"):
        queue = given.within("queue")
        broker, topic, number = queue.take("broker"), queue.take("topic"), queue.take("queue_id")
        facts["path"] = names.queue_path(broker, topic, number)
        facts["index_path"] = names.index_path(broker)
        if given.has("cluster"):
            kind = SegmentType[given.take("type", "COMMIT_LOG")]
            path = names.segment_path(
                given.take("cluster"), facts["path"], kind, given.take("base_offset", 0)
            )
            facts["full_path"] = AnyOf(path, f"<base>/{path}")
    if given.has("index_broker"):
        facts["index_path"] = names.index_path(given.take("index_broker"))
    if given.has("hash_of"):
        of = given.take("hash_of")
        is_list = isinstance(of, list)
        facts["hash"] = [names.short_hash(name) for name in of] if is_list else names.short_hash(of)
    return _NameFacts(facts)


class _NameFacts(Keyed):
    """Names, also of offsets and places that only the facts state."""

    def find(self, key: str, stated: object) -> Any:
        if key == "more_names" and isinstance(stated, list):
            return [[item[0], names.segment_file_name(item[0])] for item in stated]
        if key.startswith("full_path") and isinstance(stated, str):
            return f"<base>/{_path_again(stated)}"
        return super().find(key, stated)


def _path_again(stated: str) -> str:
    """Make a path anew from the names of its parts, which it states."""
    _, cluster, broker, topic, queue_id, kind, name = stated.split("/")
    offset = int(name[8:]) if name[8:].isdigit() else -1
    queue = names.queue_path(broker, topic, int(queue_id))
    return names.segment_path(cluster.partition("_")[2], queue, SegmentType[kind], offset)


def _type(given: Given) -> Answer:
    found: list[Any] = []
    for one in given.take("input"):
        by_code = isinstance(one, int)
        codes = {kind.value for kind in SegmentType}
        found.append(
            SegmentType(one if one in codes else 0).name if by_code else SegmentType[one].value
        )
    return Answer(found)


def _are_types(value: Any, stated: Any) -> bool:
    known = [kind.name for kind in SegmentType]
    if not isinstance(stated, list) or not value:
        return False
    if all(isinstance(item, int) for item in value):
        return all(name in known for name in stated)
    return all(name in known for name in value)


_MESSAGE_KEYS = "body_utf8 body_hex body hex born_host_hex " + " ".join((*_FIELDS, *_HOSTS))


SHAPES = (
    Shape(
        "rocketmq message",
        _message,
        "magic topic | message store_host | topic properties | "
        "topic queue_offset store_timestamp | topic properties_in_order | "
        "message queue_offset | message properties | message born_host | "
        "message store_host_hex | message | physical_offset store_host",
        "total_size|size|queue_.*|physical_offset|.*timestamp|properties|hex|body.*|offset_id|"
        "message_id|tags_code.*|keys|.*host|round_trip|magic",
        "MessageFormatUtilTest|MessageDecoder",
        keys=_MESSAGE_KEYS,
    ),
    Shape(
        "rocketmq message read",
        _message,
        "hex",
        "total_size|queue_.*|physical_offset|store_timestamp|properties|offset_id|tags_code.*|"
        "topic|body.*",
        "MessageFormatUtilTest|MessageDecoder",
    ),
    Shape("rocketmq crc", _crc, "crc | body_utf8 | body_hex", "hex|crc|body_crc|size"),
    Shape("rocketmq tags code", _tags, "tag | tags | text", "hash|tags_code|code"),
    Shape(
        "rocketmq consume queue item",
        _item,
        "commit_log_offset message_size tags_code | commit_log_offset size tags_code | hex",
        "size|commit_log_offset|message_size|tags_code|hex",
    ),
    Shape(
        "rocketmq split",
        _split,
        "buffer items | messages items | cq messages | consume_queue messages",
        "found|found_count|messages|count",
        "MessageFormatUtilTest",
    ),
    Shape(
        "rocketmq upload",
        _upload,
        "start_offset messages | read_sizes | start_offset items",
        "bytes|read|reset_without_mark|mark_reset|sha256|size|hex|coda_hex|physical_offsets",
        "FileSegmentInputStreamTest",
        keys="type coda_timestamp buffers buffer data_hex longs",
    ),
    Shape(
        "rocketmq names",
        _names,
        "offsets | queue | hash_of | index_broker | names",
        "names|offsets.*|path|index_path|hash|more_names|full_path.*",
        "MessageStoreUtilTest",
        keys="cluster type base_offset",
    ),
    Shape("rocketmq segment types", _type, sources="FileSegmentTypeTest", fits=_are_types),
)
