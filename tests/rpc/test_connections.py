"""Options of channels and limits of servers by their effect.

gRPC passes over an option that it does not know without a word.
"""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from scripts.benchmarks.http2 import PING, PREFACE, SETTINGS, frame
from streammeta.controller.grpc_server.limits import (
    ANSWER_BYTES_MAX,
    DEFAULT,
    REQUEST_BYTES_MAX,
    Limits,
)
from streammeta.controller.grpc_server.server import Server, new_server, open_connections
from streammeta.rpc import connections
from streammeta.rpc.connections import client_channel, operator_channel
from tests.kit.grpc_servers import ANY_PORT, served
from tests.kit.waiting import until

_ACK = 1  # the flag of a frame that answers
_PING_FRAME_BYTES = 17
_PINGS = 500


class Service:
    """A call that waits until the test lets it, and one that answers as many bytes as are asked."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()
        self.blocking = threading.Event()
        self.peers: set[str] = set()
        self.waiting = self.filled = 0

    async def wait(self, _request: bytes, context: Any) -> bytes:
        self.peers.add(context.peer())
        self.begun.set()
        self.waiting += 1
        try:
            await self.end.wait()
        finally:
            self.waiting -= 1
        return b"answer"

    async def block(self, request: bytes, _context: Any) -> bytes:
        """Hold the whole process up for as many milliseconds as are asked."""
        self.blocking.set()
        threading.Event().wait(int(request) / 1000)
        return b"answer"

    async def fill(self, request: bytes, _context: Any) -> bytes:
        self.filled += 1
        return bytes(int(request.lstrip(b"\0") or b"0"))

    async def fill_each(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self.fill(request, context)

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "test.Service",
            {
                "Wait": grpc.unary_unary_rpc_method_handler(self.wait),
                "Fill": grpc.unary_unary_rpc_method_handler(self.fill),
                "FillEach": grpc.stream_stream_rpc_method_handler(self.fill_each),
                "Block": grpc.unary_unary_rpc_method_handler(self.block),
            },
        )


def wait(channel: grpc.aio.Channel) -> Any:
    call: Any = channel.unary_unary("/test.Service/Wait")
    return call(b"")


def fill(channel: grpc.aio.Channel, request: bytes) -> Any:
    call: Any = channel.unary_unary("/test.Service/Fill")
    return call(request)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    """Give a service and its endpoint."""
    service = Service()
    async with served(service.handlers()) as endpoint:
        yield service, endpoint
        service.end.set()


class Relay:
    """Carries one connection to a server; counts the client's pings, and may fall silent."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._tasks: list[asyncio.Task[None]] = []
        self.pings = 0
        self.is_silent = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, behind[1]), (behind[0], writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, target, source is reader)))

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_client: bool
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                # Nothing else is said on the connection, so every frame comes by itself.
                is_ping = len(data) == _PING_FRAME_BYTES and data[3] == PING
                self.pings += is_client and is_ping and not data[4] & _ACK
                if not self.is_silent:
                    target.write(data)
        finally:
            target.close()


def ping_often(monkeypatch: pytest.MonkeyPatch, answered_within_s: float) -> Limits:
    """Have new channels ping fifty times as often, as a server of the returned limits does."""
    given_ms = round(1000 * answered_within_s)
    usual = dict(connections._CLIENT)
    faster = usual | {
        "grpc.keepalive_time_ms": int(usual["grpc.keepalive_time_ms"]) // 50,
        "grpc.keepalive_timeout_ms": given_ms,
        "grpc.http2.ping_timeout_ms": given_ms,
    }
    monkeypatch.setattr(connections, "_CLIENT", tuple(faster.items()))
    return Limits(keepalive_s=DEFAULT.keepalive_s / 50, keepalive_timeout_s=answered_within_s)


@asynccontextmanager
async def quiet_call(service: Service, limits: Limits) -> AsyncIterator[tuple[Relay, Any]]:
    """Give a call through a relay that waits for an answer, once it has been pinged for long."""
    async with served(service.handlers(), limits=limits) as endpoint:
        relay = Relay(endpoint)
        async with relay.running() as through, client_channel(through) as channel:
            call = wait(channel)
            await service.begun.wait()
            await until(lambda: relay.pings >= 5 or call.done(), "pings")
            try:
                yield relay, call
            finally:
                service.end.set()


async def test_a_quiet_call_is_pinged_for_as_long_as_it_waits_and_the_server_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    async with quiet_call(service, ping_often(monkeypatch, answered_within_s=60)) as (_, call):
        service.end.set()
        assert await call == b"answer"


async def test_a_host_that_vanishes_after_a_long_quiet_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine may answer late too: then the call ends as it shall, before it was silenced.
    limits = ping_often(monkeypatch, answered_within_s=0.5)
    async with quiet_call(Service(), limits) as (relay, call):
        relay.is_silent = True
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(call, 60)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_channels_share_no_connection(service: tuple[Service, str]) -> None:
    serving, endpoint = service
    async with client_channel(endpoint) as one, client_channel(endpoint) as another:
        calls = [wait(one), wait(another)]
        await until(lambda: len(serving.peers) == 2, "two connections")
        serving.end.set()
        await asyncio.gather(*calls)


async def test_two_servers_share_no_port(service: tuple[Service, str]) -> None:
    with pytest.raises(OSError, match="in use"):
        new_server().listen(service[1])


async def test_a_proxy_of_the_environment_is_passed_by(
    service: tuple[Service, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    async with client_channel(service[1]) as channel:
        assert len(await asyncio.wait_for(fill(channel, b"7"), 60)) == 7
    with operator_channel(service[1]) as blocking:
        call: Any = blocking.unary_unary("/test.Service/Fill")
        assert len(await asyncio.to_thread(call, b"9", 10)) == 9


@pytest.mark.parametrize(
    ("request_bytes", "answer_bytes", "code"),
    [
        (REQUEST_BYTES_MAX, 1, None),
        (REQUEST_BYTES_MAX + 1, 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (8, ANSWER_BYTES_MAX, None),
        (9, ANSWER_BYTES_MAX + 1, grpc.StatusCode.INTERNAL),
    ],
)
async def test_messages_have_the_size_that_is_said(
    service: tuple[Service, str],
    request_bytes: int,
    answer_bytes: int,
    code: grpc.StatusCode | None,
) -> None:
    request = str(answer_bytes).encode().rjust(request_bytes, b"\0")
    async with client_channel(service[1]) as channel:
        if code is None:
            assert len(await fill(channel, request)) == answer_bytes
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await fill(channel, request)
            assert raised.value.code() is code


@pytest.mark.parametrize(
    ("limit", "size_of", "code"),
    [
        (
            REQUEST_BYTES_MAX,
            lambda size: b"1".rjust(size, b"\0"),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (ANSWER_BYTES_MAX, lambda size: str(size).encode(), grpc.StatusCode.INTERNAL),
    ],
    ids=["requests", "answers"],
)
async def test_each_message_of_a_stream_has_the_size_that_is_said(
    limit: int,
    size_of: Callable[[int], bytes],
    code: grpc.StatusCode,
    service: tuple[Service, str],
) -> None:
    sizes, answered = (limit - 1, limit, limit + 1), 0

    async def read(stream: AsyncIterator[bytes]) -> None:
        nonlocal answered
        async for _ in stream:
            answered += 1

    async with client_channel(service[1]) as channel:
        open_stream: Any = channel.stream_stream("/test.Service/FillEach")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(open_stream(map(size_of, sizes)))
        assert raised.value.code() is code
        assert answered == 2
        assert len(await fill(channel, b"7")) == 7, "the connection goes on"


async def test_headers_have_the_size_that_is_said(service: tuple[Service, str]) -> None:
    async with client_channel(service[1]) as channel:
        call: Any = channel.unary_unary("/test.Service/Fill")
        assert len(await call(b"7", metadata=(("word", "a" * 4_000),))) == 7
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"7", metadata=(("word", "a" * 20_000),))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(await fill(channel, b"7")) == 7, "the connection goes on"


async def test_calls_beyond_the_limit_of_a_connection_wait_at_their_client() -> None:
    serving = Service()
    async with (
        served(serving.handlers(), limits=Limits(streams=8)) as endpoint,
        client_channel(endpoint) as channel,
        client_channel(endpoint) as another,
    ):
        calls = [asyncio.ensure_future(wait(channel)) for _ in range(12)]
        await until(lambda: serving.waiting == 8, "as many calls as may be")
        assert len(await fill(another, b"3")) == 3
        assert serving.waiting == 8
        assert not any(call.done() for call in calls)
        serving.end.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert ends.count(b"answer") >= 8
        refused = [end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert set(refused) <= {grpc.StatusCode.UNAVAILABLE}


async def test_calls_beyond_the_limit_of_a_server_are_refused() -> None:
    serving, limits = Service(), Limits(calls=3)
    async with (
        served(serving.handlers(), limits=limits) as endpoint,
        client_channel(endpoint) as channel,
    ):
        calls = [wait(channel) for _ in range(3)]
        await until(lambda: serving.waiting == 3, "as many calls as may be")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await fill(channel, b"1")
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        serving.end.set()
        await asyncio.gather(*calls)
        assert len(await fill(channel, b"1")) == 1


async def test_connections_beyond_the_limit_are_closed_until_others_have_gone() -> None:
    async with served(Service().handlers(), limits=Limits(connections=2)) as endpoint:
        async with client_channel(endpoint) as one, client_channel(endpoint) as another:
            for channel in (one, another):
                assert len(await fill(channel, b"1")) == 1
            async with client_channel(endpoint) as third:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await fill(third, b"1")
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        async with client_channel(endpoint) as fourth:
            call: Any = fourth.unary_unary("/test.Service/Fill")
            assert len(await call(b"1", wait_for_ready=True, timeout=60)) == 1


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with served(Service().handlers(), limits=Limits(handshake_s=0.2)) as endpoint:
        host, _, port = endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.wait_for(reader.read(), 60)  # to its end
        writer.close()


async def test_a_call_given_up_while_the_process_was_held_up_is_not_begun() -> None:
    service = Service()
    async with served(service.handlers()) as endpoint, client_channel(endpoint) as channel:
        assert len(await fill(channel, b"1")) == 1
        block: Any = channel.unary_unary("/test.Service/Block")
        with operator_channel(endpoint) as elsewhere:
            ask: Any = elsewhere.unary_unary("/test.Service/Fill")
            assert len(await asyncio.to_thread(ask, b"1", 20)) == 1
            begun = service.filled
            blocked = asyncio.ensure_future(block(b"2000"))

            def give_up() -> Any:
                assert service.blocking.wait(60)
                return ask(b"1", 0.5)

            asks = [asyncio.to_thread(give_up) for _ in range(4)]
            ends = await asyncio.gather(*asks, return_exceptions=True)
            await blocked
            assert len(await asyncio.to_thread(ask, b"1", 20)) == 1  # behind the others
        codes = [end.code() for end in ends if isinstance(end, grpc.RpcError)]
        assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED] * len(asks)
        assert service.filled == begun + 1


async def test_a_server_notices_a_caller_that_vanishes() -> None:
    limits = Limits(keepalive_s=DEFAULT.keepalive_s / 50, keepalive_timeout_s=0.1)
    serving = Service()
    async with served(serving.handlers(), limits=limits) as endpoint:
        relay = Relay(endpoint)
        async with relay.running() as through, client_channel(through) as channel:
            call = wait(channel)
            await until(lambda: serving.waiting == 1, "a call")
            relay.is_silent = True
            await until(lambda: serving.waiting == 0, "the call's end at the server")
            call.cancel()


async def test_every_ping_is_answered_however_many_come(service: tuple[Service, str]) -> None:
    """The defence of gRPC, to close such a connection, costs it threads and memory."""
    _, endpoint = service
    reader, writer = await asyncio.open_connection(*endpoint.rsplit(":", 1))
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    async with asyncio.timeout(60):
        for _ in range(10):
            writer.write(frame(PING, 0, 0, bytes(8)) * _PINGS)
            unanswered = _PINGS
            while unanswered:
                length, kind, flags, _ = struct.unpack(">IBBI", b"\0" + await reader.readexactly(9))
                await reader.readexactly(length)
                unanswered -= kind == PING and bool(flags & _ACK)
    writer.close()


async def test_calls_that_wait_apart_are_begun_while_others_are_refused() -> None:
    service = Service()
    server = Server(Limits(waiting_some=1, waiting_most=1, begun_a_turn=1))
    service.end.set()
    server.add_generic_rpc_handlers([service.handlers()])
    server.prioritize(["/test.Service/Wait"])
    endpoint = f"127.0.0.1:{server.listen(ANY_PORT)}"
    await server.start()

    def ask() -> tuple[int, bytes]:
        """Ask a server that is held up for more than may wait, and then for what waits apart."""
        with operator_channel(endpoint) as channel:
            fill: Any = channel.unary_unary("/test.Service/Fill")
            wait: Any = channel.unary_unary("/test.Service/Wait")
            assert service.blocking.wait(60)
            asked = [fill.future(b"1", timeout=60) for _ in range(20)]
            apart = wait.future(b"", timeout=60)
            codes = [call.code() for call in asked]
            return codes.count(grpc.StatusCode.UNAVAILABLE), apart.result()

    async with client_channel(endpoint) as channel:
        block: Any = channel.unary_unary("/test.Service/Block")
        (refused, answer), _ = await asyncio.gather(asyncio.to_thread(ask), block(b"1000"))
    await server.stop(None)
    assert refused >= 15
    assert answer == b"answer"


async def test_what_is_to_wait_apart_must_be_served() -> None:
    server = new_server()
    server.add_generic_rpc_handlers([Service().handlers()])
    with pytest.raises(ValueError, match="/a/B"):
        server.prioritize(["/a/B"])


async def test_open_connections_are_counted_however_many_they_are(
    service: tuple[Service, str],
) -> None:
    host, _, port = service[1].rpartition(":")
    before = open_connections()
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(600)]
    await until(lambda: open_connections() == before + 600, "all are counted")
    for _, writer in opened:
        writer.close()
    await until(lambda: open_connections() == before, "none is left")
