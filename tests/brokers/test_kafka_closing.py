"""A server that closes: begun requests are answered, later ones are not begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.wire import Request
from streammeta.brokers.kafka.service import server as module
from streammeta.brokers.kafka.service.server import KafkaServer
from tests.kit.kafka_wire import framed, read_response, request_bytes

_LIST_GROUPS, _SYNC_GROUP = (16, 0), (14, 0)
_SYNC = {"group_id": "g", "generation_id": 1, "member_id": "m", "assignments": []}


class CountingServer(KafkaServer):
    """Counts the frames that it has read."""

    frames = 0
    news: asyncio.Event

    async def _read_frame(self, reader: asyncio.StreamReader, size: int) -> bytes:
        frame = await super()._read_frame(reader, size)
        self.frames += 1
        self.news.set()
        return frame


class Served:
    """A server whose calls wait."""

    def __init__(self, server: CountingServer) -> None:
        self.server = server
        self.begun: list[int] = []
        self.answered = asyncio.Event()
        self.news = server.news = asyncio.Event()
        server._calls = dict.fromkeys((_LIST_GROUPS[0], _SYNC_GROUP[0]), self._call)

    async def _call(self, request: Request) -> Any:
        self.begun.append(request.api_key)
        self.news.set()
        return self._answer()

    async def _answer(self) -> Any:
        await self.answered.wait()
        return {"error_code": 0, "groups": ()}

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[Served, asyncio.StreamReader, asyncio.StreamWriter]]:
    broker = cast(Broker, None)
    served = Served(CountingServer(broker, Groups(broker)))
    listener = await asyncio.start_server(served.server.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    try:
        yield served, reader, writer
    finally:
        writer.close()
        listener.close()


def _send(writer: asyncio.StreamWriter, api: tuple[int, int], tree: Any) -> None:
    writer.write(framed(request_bytes(*api, tree)))


async def _error_code(reader: asyncio.StreamReader) -> int:
    """Read an answer to ListGroups: behind its size comes the number of its request."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    body = await reader.readexactly(size)
    return int(read_response(*_LIST_GROUPS, body[4:]).error_code)


async def _closing(served: Served) -> asyncio.Task[None]:
    closing = asyncio.create_task(served.server.close())
    await asyncio.sleep(0)
    return closing


async def test_begun_request_is_answered_before_its_connection_ends() -> None:
    async with _served() as (served, reader, writer):
        _send(writer, _LIST_GROUPS, {})
        await served.until(lambda: len(served.begun) == 1)
        closing = await _closing(served)
        served.answered.set()
        assert await _error_code(reader) == 0
        assert await reader.read() == b""
        await closing


async def test_request_is_not_begun_once_the_server_closes() -> None:
    async with _served() as (served, reader, writer):
        _send(writer, _LIST_GROUPS, {})
        await served.until(lambda: len(served.begun) == 1)
        closing = await _closing(served)
        _send(writer, _LIST_GROUPS, {})
        await writer.drain()
        await served.until(lambda: served.server.frames == 2)
        served.answered.set()
        await closing
        assert await _error_code(reader) == 0
        assert await reader.read() == b""
        assert served.begun == [_LIST_GROUPS[0]]
        assert served.server._request_memory == 0


async def test_requests_that_wait_for_others_do_not_hold_up_the_end() -> None:
    async with _served() as (served, reader, writer):
        _send(writer, _SYNC_GROUP, _SYNC)
        await served.until(lambda: len(served.begun) == 1)
        await served.server.close()
        assert await reader.read() == b""
        assert not served.answered.is_set()


async def test_answers_that_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    async with _served() as (served, reader, writer):
        _send(writer, _LIST_GROUPS, {})
        await served.until(lambda: len(served.begun) == 1)
        await served.server.close()
        assert await reader.read() == b""


async def test_client_that_leaves_is_owed_nothing() -> None:
    async with _served() as (served, _, writer):
        _send(writer, _LIST_GROUPS, {})
        await served.until(lambda: len(served.begun) == 1)
        writer.close()
        await served.server.close()
        assert not served.answered.is_set()
        assert not served.server._unanswered
