"""Elements of Kafka requests: counted before they are read, bounded, and paced over connections."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import struct
import threading
import typing
from datetime import timedelta
from random import Random
from typing import Any, cast
from uuid import UUID

import pytest
from kio.index import load_request_schema

from streammeta.brokers.kafka.calls import record_calls
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol import request_elements, wire
from streammeta.brokers.kafka.protocol.request_elements import (
    ELEMENTS_MAX,
    count_elements,
    item_type,
)
from streammeta.brokers.kafka.protocol.wire import (
    SERVED,
    MalformedRequestError,
    Request,
    Tree,
    read_request,
)
from streammeta.brokers.kafka.service import server
from streammeta.brokers.kafka.service.server import (
    ELEMENT_BYTES,
    TURN_WORK_MAX,
    KafkaServer,
    RequestTurns,
)
from tests.kit.kafka_cluster import Cluster, opened
from tests.kit.kafka_wire import framed, request_bytes

_METADATA, _FETCH, _OFFSET_COMMIT = 3, 1, 8
_LARGE_TOPICS = 3_000_000
_PARTITION = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1}


def _fetch(topics: int, partitions: int) -> Tree:
    rows = [
        {"topic": f"topic-{number}", "partitions": [_PARTITION] * partitions}
        for number in range(topics)
    ]
    return {"replica_id": -1, "max_wait": 500, "min_bytes": 1, "topics": rows}


def _metadata(topics: int) -> Tree:
    rows = [{"topic_id": None, "name": f"topic-{number}"} for number in range(topics)]
    flags = {"allow_auto_topic_creation": True, "include_topic_authorized_operations": False}
    return {"topics": rows, **flags}


def _commit(topics: int, partitions: int) -> Tree:
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None}
    rows = [{"name": "topic", "partitions": [row] * partitions}] * topics
    return {"group_id": "group", "member_id": "", "topics": rows}


@pytest.mark.parametrize(
    ("api_key", "version", "tree", "elements"),
    [
        (_METADATA, 12, _metadata(10_000), 10_000),
        (_FETCH, 11, _fetch(1, 10_000), 10_001),
        (_FETCH, 11, _fetch(10_000, 1), 20_000),
        (_OFFSET_COMMIT, 8, _commit(1, 10_000), 10_001),
    ],
    ids=["topics", "partitions of one topic", "partitions of many topics", "offsets"],
)
def test_large_lawful_requests_are_read(
    api_key: int, version: int, tree: Tree, elements: int
) -> None:
    request = read_request(request_bytes(api_key, version, tree))
    assert request.elements == elements


def _raw(api_key: int, version: int, body: bytes, *, tags: bytes = b"") -> bytes:
    return struct.pack(">hhih", api_key, version, 1, -1) + tags + body


def _hostile_frames() -> dict[str, bytes]:
    length = _LARGE_TOPICS.to_bytes(4, "big")
    empty_tags = struct.pack("BBB", *(0x80 | _LARGE_TOPICS >> shift & 0x7F for shift in (0, 7, 14)))
    varint = empty_tags + bytes([_LARGE_TOPICS >> 21])
    fetch = struct.pack(">iiiibii", -1, 500, 1, 1, 0, 0, -1)
    row = struct.pack(">hi", 0, 0)
    half = ELEMENTS_MAX // 2
    nested = (half.to_bytes(4, "big") + row * (half - 1)) + struct.pack(">hi", 0, half + 1)
    return {
        "topics": _raw(_METADATA, 1, length + bytes(2 * _LARGE_TOPICS)),
        "compact topics": _raw(_METADATA, 9, varint + bytes([1, 0]) * _LARGE_TOPICS, tags=b"\0"),
        "topics of a fetch": _raw(_FETCH, 11, fetch + length + row * _LARGE_TOPICS),
        "lists in a list": _raw(_FETCH, 11, fetch + nested + bytes(28) * (half + 1)),
        "numbers": _raw(32, 1, struct.pack(">ibhi", 1, 2, 0, _LARGE_TOPICS) + bytes(6_000_000)),
        "tags of the header": _raw(_METADATA, 9, bytes(8), tags=varint + bytes(2 * _LARGE_TOPICS)),
        "tags of the body": _raw(60, 0, b"\0" + varint + bytes(2 * _LARGE_TOPICS), tags=b"\0"),
    }


@pytest.mark.parametrize("name", _hostile_frames())
def test_lists_beyond_the_bound_are_refused_before_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_nothing(_: Any) -> Any:
        raise AssertionError("the library read a request beyond the bound")

    monkeypatch.setattr(wire, "entity_reader", read_nothing)
    with pytest.raises(MalformedRequestError, match="elements"):
        read_request(_hostile_frames()[name])


def test_count_ends_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class CountingFrame(bytes):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    frame = CountingFrame(_hostile_frames()["compact topics"])
    with pytest.raises(request_elements.TooManyElementsError):
        count_elements(load_request_schema(_METADATA, 9), frame)
    assert looks < 10


_VALUES: dict[str, Any] = {
    "bool": True,
    "string": "text" * 50,
    "bytes": b"bytes" * 40,
    "records": b"records",
    "timedelta_i64": timedelta(milliseconds=1),
    "uuid": UUID(int=5),
}


def _tree_of(schema: Any, random: Random) -> Tree:
    """Return a tree with lists of random lengths."""
    hints = typing.get_type_hints(schema)
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        kind = field.metadata.get("kafka_type", "")
        item: Any = item_type(hints[field.name])
        if type(None) in typing.get_args(hints[field.name]) and random.randrange(4) == 0:
            tree[field.name] = None
        elif item is None:
            tree[field.name] = _VALUES.get(kind, 1)
        elif hasattr(item, "__dataclass_fields__"):
            tree[field.name] = [_tree_of(item, random) for _ in range(random.randrange(4))]
        else:
            tree[field.name] = [_VALUES.get(kind, 1)] * random.randrange(4)
    return tree


def _elements_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return len(value) + sum(map(_elements_of, value))
    return sum(map(_elements_of, value.values())) if isinstance(value, dict) else 0


def test_count_is_exact_for_all_served_requests() -> None:
    random = Random(38)
    for api_key, (lowest, highest) in SERVED.items():
        for version in range(max(lowest, 3) if api_key == 0 else lowest, highest + 1):
            tree = _tree_of(load_request_schema(api_key, version), random)
            request = read_request(request_bytes(api_key, version, tree))
            assert request.elements == _elements_of(tree), (api_key, version)


async def test_turn_of_the_event_loop_begins_bounded_work_over_all_connections() -> None:
    turns = RequestTurns()
    loop = asyncio.get_running_loop()
    begun_in_turn = [0]

    def next_turn() -> None:
        begun_in_turn.append(0)
        loop.call_soon(next_turn)

    async def send(frame_bytes: int) -> None:
        for _ in range(10):
            await turns.wait(frame_bytes)
            begun_in_turn[-1] += min(frame_bytes, ELEMENTS_MAX)

    loop.call_soon(next_turn)
    sizes = [100, ELEMENTS_MAX // 2, ELEMENTS_MAX // 3, ELEMENTS_MAX, 32 * 1024 * 1024]
    await asyncio.gather(*map(send, sizes))
    assert sum(begun_in_turn) == 10 * sum(min(size, ELEMENTS_MAX) for size in sizes)
    assert max(begun_in_turn) <= TURN_WORK_MAX


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(framed(request_bytes(18, 0, {})))
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def test_connection_ends_with_a_clear_line_and_others_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = cast(Broker, None)
    served = KafkaServer(broker, Groups(broker))
    listener = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    address = listener.sockets[0].getsockname()
    honest, hostile = (
        await asyncio.open_connection(*address),
        await asyncio.open_connection(*address),
    )
    assert await _exchange(*honest)
    with caplog.at_level(logging.WARNING, "streammeta"):
        hostile[1].write(framed(_hostile_frames()["lists in a list"]))
        assert await hostile[0].read() == b""
    assert "API 1 in version 11 has more than 32768 elements" in caplog.text
    assert await _exchange(*honest)
    assert served._request_memory == 0
    honest[1].close()
    hostile[1].close()
    listener.close()
    await served.close()


async def test_elements_hold_memory_until_the_answer() -> None:
    broker = cast(Broker, None)
    served = KafkaServer(broker, Groups(broker))
    begun, released = asyncio.Event(), asyncio.Event()

    async def wait(_: Request) -> Tree:
        begun.set()
        await released.wait()
        return {"responses": ()}

    served._calls = {**served._calls, _FETCH: server.answer_concurrently(wait)}
    listener = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    frame = request_bytes(_FETCH, 11, _fetch(1, 1000))
    writer.write(framed(frame))
    await begun.wait()
    assert served._request_memory == len(frame) + 1001 * ELEMENT_BYTES
    released.set()
    await reader.readexactly(4)
    assert served._request_memory == 0
    writer.close()
    listener.close()
    await served.close()


@pytest.mark.parametrize(("topics", "is_large"), [(10_000, True), (10, False)])
async def test_large_answers_are_written_beside_the_event_loop(
    topics: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def write(*_: Any) -> list[bytes]:
        threads.add(threading.get_ident())
        return [b"answer"]

    monkeypatch.setattr(wire, "write_response", write)
    by_name = read_request(request_bytes(_METADATA, 12, _metadata(topics)))
    of_all = read_request(request_bytes(_METADATA, 12, {**_metadata(0), "topics": None}))
    answers: list[tuple[Request, Tree]] = [(by_name, {}), (of_all, {"topics": [{}] * topics})]
    for request, tree in answers:
        threads.clear()
        assert await server._write_answer(request, tree) == [b"answer"]
        assert (threads == {threading.get_ident()}) is not is_large


async def test_fetch_of_many_partitions_takes_several_turns() -> None:
    turns = 0
    loop = asyncio.get_running_loop()

    def next_turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(next_turn)

    broker = await Cluster().join(1)
    await opened(broker)
    request = read_request(request_bytes(_FETCH, 11, _fetch(1000, 10)))
    loop.call_soon(next_turn)
    responses, _, _ = await record_calls._fetch_once(broker, request.body)
    assert sum(len(topic["partitions"]) for topic in responses) == 10_000
    assert turns >= 10_000 // record_calls._TURN_ROWS_MAX
    await broker.abandon()
