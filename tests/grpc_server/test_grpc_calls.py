"""Calls of stock clients and of raw frames: statuses, deadlines, flow control, an orderly end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from scripts.benchmarks.http2 import request_headers
from streammeta.controller.grpc_server.frames import PREFACE, ErrorCode, Flag, Kind, Setting, frame
from streammeta.controller.grpc_server.http2_connection import PINGS
from streammeta.controller.grpc_server.limits import DEFAULT, Limits
from streammeta.controller.grpc_server.messages import framed
from streammeta.controller.grpc_server.server import Server
from streammeta.rpc.connections import client_channel
from streammeta.v1 import metadata_pb2, metadata_pb2_grpc, objects_pb2, objects_pb2_grpc
from tests.grpc_server.turn_meter import GREETING, Client, echoed, new_server, settings
from tests.kit.grpc_servers import listening, started, unimplemented
from tests.kit.waiting import counted_turns, until

_MIB = 1 << 20


class Service:
    """Calls of every kind, and what has become of them."""

    def __init__(self) -> None:
        self.cancelled = self.written = self.done = self.echoed = 0
        self.release = asyncio.Event()
        self.under_way = 0

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.echoed += 1
        context.set_trailing_metadata(context.invocation_metadata())
        return request

    async def wait(self, request: bytes, context: Any) -> bytes:
        context.add_done_callback(self._count)
        self.under_way += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        return request

    def _count(self, _: Any) -> None:
        self.done += 1

    async def fail(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "né\n", (("why-bin", b"\x01\xff"),))
        raise AssertionError

    async def break_(self, request: bytes, context: Any) -> bytes:
        raise KeyError("secret")

    async def pour(self, request: bytes, context: Any) -> None:
        """Write as many messages of a MiB as are asked for."""
        context.add_done_callback(self._count)
        for _ in range(int(request)):
            await context.write(bytes(_MIB))
            self.written += 1

    async def sum(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        """Take messages once it may."""
        await self.release.wait()
        return str(sum([len(message) async for message in messages])).encode()

    def handler(self) -> grpc.GenericRpcHandler:
        unary, given = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Any] = {
            "Echo": unary(self.echo),
            "Wait": unary(self.wait),
            "Fail": unary(self.fail),
            "Break": unary(self.break_),
            "Pour": given(self.pour),
            "Sum": grpc.stream_unary_rpc_method_handler(self.sum),
        }
        return grpc.method_handlers_generic_handler("t.S", handlers)


@asynccontextmanager
async def serving(limits: Limits = DEFAULT) -> AsyncIterator[tuple[Server, Service, str]]:
    service = Service()
    server, endpoint = await started(service.handler(), limits=limits)
    try:
        yield server, service, endpoint
    finally:
        await server.stop(None)


def unary(channel: grpc.aio.Channel, name: str, request: bytes = b"", **options: Any) -> Any:
    call: Any = channel.unary_unary(f"/t.S/{name}")
    return call(request, **options)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


class Raw:
    """A client that says and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def to(cls, endpoint: str, *settings: tuple[int, int]) -> AsyncIterator[Raw]:
        host, _, port = endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        raw = cls(reader, writer)
        said = b"".join(struct.pack(">HI", *setting) for setting in settings)
        raw.say(PREFACE, frame(Kind.SETTINGS, 0, 0, said))
        try:
            yield raw
        finally:
            writer.transport.abort()

    def say(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def until(self, kind: int, stream_id: int | None = None) -> tuple[int, bytes]:
        """Read to a frame; return its flags and payload."""
        async with asyncio.timeout(60):
            while True:
                head = await self.reader.readexactly(9)
                length, found, flags, of = struct.unpack(">IBBI", b"\0" + head)
                payload = await self.reader.readexactly(length)
                if found == kind and stream_id in (None, of):
                    return flags, payload


def opened(name: str, stream_id: int = 1) -> bytes:
    block = request_headers(f"/t.S/{name}", "here")
    return frame(Kind.HEADERS, Flag.END_HEADERS, stream_id, block)


async def test_metadata_goes_both_ways() -> None:
    async with serving() as (_, _, endpoint), client_channel(endpoint) as channel:
        call = unary(channel, "Echo", b"ab", metadata=(("one", "1"), ("two-bin", b"\0\xff")))
        assert await call == b"ab"
        said = dict(await call.trailing_metadata())
    assert (said["one"], said["two-bin"]) == ("1", b"\0\xff")


async def test_failures_are_statuses_and_tell_no_secret() -> None:
    async with serving() as (_, _, endpoint), client_channel(endpoint) as channel:
        aborted = await failure(unary(channel, "Fail"))
        assert (aborted.code(), aborted.details()) == (grpc.StatusCode.NOT_FOUND, "né\n")
        assert dict(aborted.trailing_metadata() or ())["why-bin"] == b"\x01\xff"
        broken = await failure(unary(channel, "Break"))
        assert broken.code() is grpc.StatusCode.UNKNOWN
        assert "secret" not in (broken.details() or "")
        assert (await failure(unary(channel, "No"))).code() is grpc.StatusCode.UNIMPLEMENTED
        options = {"compression": grpc.Compression.Gzip}
        packed = await failure(unary(channel, "Echo", bytes(9_000), **options))
        assert packed.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await unary(channel, "Echo", b"still") == b"still"


async def test_a_call_that_is_given_up_or_late_ends_at_the_server_too() -> None:
    async with serving() as (server, service, endpoint), client_channel(endpoint) as channel:
        late = await failure(unary(channel, "Wait", timeout=0.2))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: service.cancelled == 1, "the end of a late call")
        given_up = unary(channel, "Wait")
        await until(lambda: service.under_way == 1, "a call")
        given_up.cancel()
        await until(lambda: service.cancelled == 2, "the end of a call that is given up")
        assert (server.calls, service.done) == (0, 2)


async def test_a_deadline_that_only_the_server_keeps_is_told() -> None:
    block = request_headers("/t.S/Wait", "here") + b"\0\x0cgrpc-timeout\x0350m"
    async with serving() as (_, service, endpoint), Raw.to(endpoint) as raw:
        raw.say(frame(Kind.HEADERS, Flag.END_HEADERS, 1, block))
        raw.say(frame(Kind.DATA, Flag.END_STREAM, 1, framed(b"")))
        flags, payload = await raw.until(Kind.HEADERS, 1)
        assert flags & Flag.END_STREAM
        assert b"grpc-status\x014" in payload
        await until(lambda: service.cancelled == 1, "the end of the handler")


async def test_a_writer_waits_for_its_reader_and_ends_with_it() -> None:
    async with serving() as (_, service, endpoint):
        async with Raw.to(endpoint, (Setting.INITIAL_WINDOW_SIZE, 1 << 30)) as raw:
            raw.say(opened("Pour"), frame(Kind.DATA, Flag.END_STREAM, 1, framed(b"100")))
            raw.say(frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
            await until(lambda: service.written > 0, "a message")
            for _ in range(5):
                raw.writer.write(frame(Kind.PING, 0, 0, bytes(8)))
                await asyncio.sleep(0.02)
            # What the sockets and this reader hold, not all that there is.
            assert service.written < 50
            assert service.done == 0
        await until(lambda: service.done == 1, "the end of a call whose reader has gone")


async def test_a_window_that_is_closed_holds_an_answer_and_not_its_neighbours() -> None:
    closed = (Setting.INITIAL_WINDOW_SIZE, 0)
    async with serving() as (_, service, endpoint), Raw.to(endpoint, closed) as raw:
        raw.say(opened("Pour"), frame(Kind.DATA, Flag.END_STREAM, 1, framed(b"2")))
        raw.say(opened("Echo", 3), frame(Kind.DATA, Flag.END_STREAM, 3, framed(b"a")))
        raw.say(frame(Kind.WINDOW_UPDATE, 0, 3, struct.pack(">I", 6)))
        assert (await raw.until(Kind.DATA))[1] == framed(b"a")
        assert service.written == 0
        raw.say(frame(Kind.WINDOW_UPDATE, 0, 1, struct.pack(">I", 3)))
        assert (await raw.until(Kind.DATA))[1] == framed(bytes(_MIB))[:3]


async def test_what_a_handler_does_not_take_is_not_granted_anew() -> None:
    limits = Limits(lookahead_bytes=40_000)
    message, count = framed(bytes(995)), 200
    async with serving(limits) as (server, service, endpoint), Raw.to(endpoint) as raw:
        raw.say(opened("Sum"), *[frame(Kind.DATA, 0, 1, message)] * 40)
        await until(lambda: server.held == 40 * len(message), "all that was granted")
        raw.say(frame(Kind.DATA, 0, 1, message))
        _, payload = await raw.until(Kind.RST_STREAM, 1)
        assert payload == struct.pack(">I", ErrorCode.FLOW_CONTROL_ERROR)
        assert server.held == 0
    async with serving(limits) as (server, service, endpoint), client_channel(endpoint) as channel:
        call: Any = channel.stream_unary("/t.S/Sum")
        summing = asyncio.ensure_future(call(iter([bytes(995)] * count)))
        await until(lambda: server.held > 30_000, "what is granted")
        service.release.set()
        assert await summing == str(995 * count).encode()
        assert server.held == 0


async def test_a_message_larger_than_what_is_granted_ahead_is_taken() -> None:
    async with (
        serving(Limits(lookahead_bytes=1_000)) as (_, service, endpoint),
        client_channel(endpoint) as channel,
    ):
        service.release.set()
        assert len(await unary(channel, "Echo", bytes(3 * _MIB))) == 3 * _MIB
        call: Any = channel.stream_unary("/t.S/Sum")
        assert await call(iter([bytes(_MIB)] * 3)) == str(3 * _MIB).encode()


@pytest.mark.parametrize(
    "limits", [Limits(held_bytes=100_000), Limits(held_bytes_of_connection=100_000)]
)
async def test_requests_that_are_never_complete_are_bounded(limits: Limits) -> None:
    part = struct.pack(">BI", 0, _MIB) + bytes(15_000)
    async with serving(limits) as (server, _, endpoint), Raw.to(endpoint) as raw:
        for stream_id in range(1, 21, 2):
            raw.say(opened("Echo", stream_id), frame(Kind.DATA, 0, stream_id, part))
        flags, payload = await raw.until(Kind.HEADERS)
        assert flags & Flag.END_STREAM
        assert b"grpc-status\x018" in payload
        assert server.held <= 100_000
    await until(lambda: server.held == 0, "what a connection held that is gone")


async def test_a_stop_lets_calls_under_way_end_and_refuses_others() -> None:
    async with serving() as (server, service, endpoint), client_channel(endpoint) as channel:
        running = unary(channel, "Wait", b"a")
        await until(lambda: service.under_way == 1, "a call")
        stopping = asyncio.ensure_future(server.stop(20))
        await until(lambda: server.is_stopping, "the stop")
        refused = await failure(unary(channel, "Echo"))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        service.release.set()
        assert await running == b"a"
        await stopping
        assert not server.connections


async def test_a_stop_that_is_hurried_gives_calls_no_more_time() -> None:
    async with serving() as (server, service, endpoint), client_channel(endpoint) as channel:
        running, hurried = unary(channel, "Wait"), asyncio.Event()
        await until(lambda: service.under_way == 1, "a call")
        stopping = asyncio.ensure_future(server.stop(3_600, hurried))
        await until(lambda: server.is_stopping, "the stop")
        assert not stopping.done()
        hurried.set()
        await asyncio.wait_for(stopping, 60)
        assert (await failure(running)).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stop_waits_no_longer_than_its_grace() -> None:
    async with serving() as (server, service, endpoint), client_channel(endpoint) as channel:
        running = unary(channel, "Wait")
        await until(lambda: service.under_way == 1, "a call")
        await server.stop(0.1)
        assert (await failure(running)).code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: service.cancelled == 1, "the end of its handler")


async def test_a_call_is_answered_or_not_begun_when_connections_grow_old() -> None:
    async with (
        serving(Limits(age_s=0.05)) as (server, service, endpoint),
        client_channel(endpoint) as channel,
    ):
        peers: set[str] = set()
        answered = 0
        async with asyncio.timeout(60):
            while len(peers) < 5:
                calls = [unary(channel, "Echo", b"a") for _ in range(8)]
                for end in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(end, grpc.aio.AioRpcError):
                        assert end.code() is grpc.StatusCode.UNAVAILABLE
                    else:
                        answered += 1
                peers |= {connection.peer for connection in server.connections}
        assert service.echoed == answered > 0


async def test_a_flood_of_frames_leaves_turns_to_others() -> None:
    """One connection's frames take no more than their share of a turn."""
    frames = PINGS[0]
    async with serving() as (server, _, endpoint), Raw.to(endpoint) as raw:
        raw.say(frame(Kind.PING, 0, 0, bytes(8)) * frames)
        with counted_turns() as turns:
            for _ in range(frames):
                await raw.until(Kind.PING)
        assert len(turns) >= frames / server.limits.work_a_turn


_DECLARED = [
    *metadata_pb2.DESCRIPTOR.services_by_name["MetadataService"].methods,
    *objects_pb2.DESCRIPTOR.services_by_name["ObjectService"].methods,
]


@asynccontextmanager
async def generated_services() -> AsyncIterator[grpc.aio.Channel]:
    """Serve what gRPC generates for two services, without implementations; give a channel."""
    server: Any = Server()
    servicer = unimplemented(metadata_pb2_grpc, objects_pb2_grpc)()
    metadata_pb2_grpc.add_MetadataServiceServicer_to_server(servicer, server)
    objects_pb2_grpc.add_ObjectServiceServicer_to_server(servicer, server)
    async with listening(server) as endpoint, client_channel(endpoint) as channel:
        yield channel


@pytest.mark.parametrize("method", _DECLARED, ids=lambda method: method.name)
async def test_a_method_that_nobody_implemented_is_unimplemented(method: MethodDescriptor) -> None:
    """Generated code raises an error in its place, which is not a defect of the controller."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with generated_services() as channel:
        opened: Any = channel
        if method.client_streaming:
            call = opened.stream_stream(path)()
        elif method.server_streaming:
            call = opened.unary_stream(path)(b"")
        else:
            call = opened.unary_unary(path)(b"")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "not implemented" in await call.details()


@pytest.mark.parametrize("path", ["/streammeta.v1.ObjectService/No", "/no.Service/No", "/", "/no"])
async def test_a_method_that_nothing_declares_is_unimplemented(path: str) -> None:
    async with generated_services() as channel:
        opened: Any = channel
        code = await opened.unary_unary(path)(b"").code()
        assert code is grpc.StatusCode.UNIMPLEMENTED


_PING = frame(Kind.PING, 0, 0, b"the last")
_FLOODS = {
    "pings": frame(Kind.PING, 0, 0, bytes(8)) * 5_000,
    "settings": settings() * 900,
    "calls": b"".join(echoed(stream_id) for stream_id in range(1, 2_001, 2)),
}


async def test_frames_wait_while_their_answers_may_not_go() -> None:
    """Otherwise all that was read at once is answered in memory, several times as long."""
    for flood in _FLOODS.values():
        client = Client(new_server())
        client.say(GREETING)
        client.connection.pause_writing()
        before = len(client.transport.sent)
        client.say(flood, _PING)
        assert client.transport.is_paused
        assert len(client.transport.sent) == before

        client.connection.resume_writing()
        await client.settled()
        assert not client.transport.is_paused
        assert client.is_answered(b"the last")
        client.connection.connection_lost(None)


async def test_a_connection_whose_frames_wait_ends_as_others_do() -> None:
    server = new_server()
    client = Client(server)
    client.say(GREETING)
    client.connection.pause_writing()
    client.say(echoed(1))
    client.connection.connection_lost(None)
    assert not server.connections
    assert server.calls == 0
