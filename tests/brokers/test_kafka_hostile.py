"""Hostile clients of a broker hurt nobody but themselves: an honest one beside them goes on."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from kio.index import load_request_schema

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.service import server as module
from streammeta.brokers.kafka.service.server import KafkaServer
from streammeta.brokers.kafka.service.users import Users, user_entry
from tests.kit.kafka_batches import Rec, make_batch
from tests.kit.kafka_brokers import KafkaBrokers, running_brokers
from tests.kit.kafka_wire import WireClient, framed, metadata_tree, produce_tree, request_bytes
from tests.kit.waiting import wait_until

_TOPIC = "honest"
_PRODUCE, _METADATA = (0, 8), (3, 8)
_HEAD = ">hhih"
_MIB = 1024 * 1024


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBrokers]:
    with running_brokers(tmp_path_factory.mktemp("hostile")) as found:
        found.start(1)
        yield found


def _batch(**fields: Any) -> bytes:
    return make_batch([Rec(time.time_ns() // 1_000_000, b"key", b"value")], **fields)


def _produced(client: WireClient, batch: bytes, topic: str = _TOPIC) -> tuple[Code, int]:
    row = (
        client.call(*_PRODUCE, produce_tree({0: batch}, topic)).responses[0].partition_responses[0]
    )
    return Code(row.error_code), row.base_offset


def _topic_is_there(client: WireClient) -> bool:
    client.call(*_METADATA, metadata_tree(_TOPIC))
    return _produced(client, _batch())[0] is Code.NONE


def _raw(api_key: int, version: int, body: bytes, *, is_flexible: bool = False) -> bytes:
    head = struct.pack(_HEAD, api_key, version, 1, -1)
    return framed(head + (b"\0" if is_flexible else b"") + body)


def _cut_after(frame: bytes, size: int) -> bytes:
    """Return a frame whose body is cut, and whose length says so."""
    return framed(frame[4 : 4 + size])


def _hostile_frames() -> dict[str, bytes]:
    many = b"\x7f\xff\xff\xff"
    endless = b"\xff" * 64
    produce = framed(request_bytes(*_PRODUCE, produce_tree({0: _batch()}, _TOPIC)))
    return {
        "array of 2^31 topics": _raw(*_METADATA, many),
        "array of 2^31 topics of a fetch": _raw(1, 11, bytes(21) + many),
        "records of 2^31 bytes": _raw(0, 8, b"\xff\xff\xff\xff" + bytes(8) + many),
        "array of topics that nest arrays": _raw(0, 8, b"\xff\xff\xff\xff" + many * 5000),
        "endless number": _raw(18, 3, endless, is_flexible=True),
        "endless tags": _raw(60, 1, b"\0\1" + endless, is_flexible=True),
        "negative string": _raw(10, 2, b"\x80\x00"),
        "text that is none": _raw(10, 0, b"\x00\x04\xff\xfe\xfd\xfc"),
        "more than a request": framed(produce[4:] + bytes(100)),
        **{f"cut after {size}": _cut_after(produce, size) for size in (8, 10, 16, 30, 60, 100)},
        "flood of requests": produce[:4] + bytes(4),
        "huge": many,
        "negative": b"\xff\xff\xff\xff",
        "tiny": framed(b"ab"),
        "unknown API": _raw(999, 0, b""),
        "old produce": _raw(0, 0, b""),
        "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    }


@pytest.mark.process
def test_honest_client_goes_on_beside_hostile_frames(brokers: KafkaBrokers) -> None:
    host, _, port = brokers.addresses[1].rpartition(":")
    process = psutil.Process(brokers.children[1].pid)
    with WireClient(brokers.addresses[1]) as honest:
        wait_until(lambda: _topic_is_there(honest), "the topic to have a leader")
        offset = _produced(honest, _batch())[1]
        before = process.memory_info().rss
        for name, frame in _hostile_frames().items():
            with socket.create_connection((host, int(port)), 30) as connection:
                connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):  # closed before all of it was read
                    assert connection.recv(4096) == b"", name
            offset += 1
            assert _produced(honest, _batch()) == (Code.NONE, offset), name
        assert process.memory_info().rss - before < 64 * _MIB
    log = brokers.children[1].log_path.read_text()
    assert max(map(len, log.splitlines())) < 1000


@pytest.mark.process
def test_damaged_batches_are_refused_and_leave_the_log_as_it_was(brokers: KafkaBrokers) -> None:
    good = _batch()
    damaged = {
        "checksum": good[:-1] + bytes([good[-1] ^ 1]),
        "checksum itself": good[:17] + bytes(4) + good[21:],
        "cut": good[:-3],
        "head alone": good[:40],
        "length too large": good[:8] + b"\x7f\xff\xff\xff" + good[12:],
        "length negative": good[:8] + b"\xff\xff\xff\xff" + good[12:],
        "count too large": _batch(record_count=1 << 30),
        "magic": good[:16] + b"\x07" + good[17:],
        "nothing": b"",
    }
    with WireClient(brokers.addresses[1]) as honest, WireClient(brokers.addresses[1]) as hostile:
        wait_until(lambda: _topic_is_there(honest), "the topic to have a leader")
        offset = _produced(honest, good)[1]
        for name, batch in damaged.items():
            assert _produced(hostile, batch)[0] is not Code.NONE, name
            offset += 1
            assert _produced(honest, good) == (Code.NONE, offset), name


@pytest.mark.process
def test_frames_that_are_announced_and_never_come_hold_no_memory(brokers: KafkaBrokers) -> None:
    host, _, port = brokers.addresses[1].rpartition(":")
    with ExitStack() as stack:
        for _ in range(64):
            connection = socket.create_connection((host, int(port)), 30)
            stack.enter_context(connection)
            connection.sendall(module.FRAME_MAX.to_bytes(4, "big") + bytes(100))
        with WireClient(brokers.addresses[1]) as honest:
            wait_until(lambda: _topic_is_there(honest), "the topic to have a leader")


class Crowd:
    """Connections to a server that serves no broker, in one process."""

    def __init__(self) -> None:
        broker = cast(Broker, None)
        self.server = KafkaServer(broker, Groups(broker))
        self.readers: list[asyncio.StreamReader] = []

    async def arrives(self, size: int) -> asyncio.Task[bytes]:
        """Begin a frame of 32 MiB of which so many bytes come."""
        reader = asyncio.StreamReader(limit=module.FRAME_MAX)
        task = asyncio.create_task(self.server._read_frame(reader, module.FRAME_MAX))
        reader.feed_data(bytes(size))
        self.readers.append(reader)
        await _turns()
        return task


async def _turns() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


async def test_the_largest_unfinished_frame_goes_when_all_hold_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REQUEST_MEMORY_MAX", 8 * _MIB)
    crowd = Crowd()
    small = await crowd.arrives(_MIB)
    large = await crowd.arrives(5 * _MIB)
    middle = await crowd.arrives(3 * _MIB - 1)
    assert [task.cancelled() for task in (small, middle, large)] == [False, False, True]
    crowd.readers[0].feed_data(bytes(1))
    await _turns()
    assert not small.done()
    for task in (small, middle):
        task.cancel()
    await asyncio.wait([small, middle])
    assert crowd.server._request_memory == 0


async def test_frame_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_TIMEOUT_S", 0.02)
    crowd = Crowd()
    late: Awaitable[bytes] = await crowd.arrives(100)
    with pytest.raises(TimeoutError):
        await late
    assert crowd.server._request_memory == 0


async def test_requests_of_strangers_are_not_read_but_for_those_that_authenticate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A list of 20,000 topics takes milliseconds to read, on each connection."""
    read: list[int] = []

    def count(api_key: int, version: int) -> Any:
        read.append(api_key)
        return load_request_schema(api_key, version)

    monkeypatch.setattr("streammeta.brokers.kafka.protocol.wire.load_request_schema", count)
    (users := tmp_path / "users").write_text(user_entry("alice", "open sesame"))
    broker = cast(Broker, None)
    server = KafkaServer(broker, Groups(broker), Users(users))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    writer.write(framed(request_bytes(17, 1, {"mechanism": "PLAIN"})))
    await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    topics = struct.pack(">hhihi", 3, 1, 1, -1, 20_000) + b"\0\1a" * 20_000
    writer.write(framed(topics))
    assert await reader.read() == b""
    assert read == [17]
    writer.close()
    listener.close()
