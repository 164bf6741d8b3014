"""Bounds and ends of calls: sizes, torn messages, memory that comes back, listeners' shares."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from scripts.benchmarks.http2 import request_headers
from streammeta.controller.grpc_server import http2_connection
from streammeta.controller.grpc_server.frames import ErrorCode, Flag, Kind, frame
from streammeta.controller.grpc_server.headers import literal
from streammeta.controller.grpc_server.limits import DEFAULT, Limits
from streammeta.controller.grpc_server.messages import framed
from streammeta.controller.grpc_server.server import Server
from streammeta.rpc.connections import client_channel
from streammeta.rpc.failures import read_failure
from tests.grpc_server.test_grpc_calls import Raw, Service, failure, opened, serving, unary
from tests.grpc_server.turn_meter import GREETING, Client, echoed, new_server
from tests.kit.grpc_servers import started
from tests.kit.waiting import until

_STATUS = b"grpc-status"


def status_of(payload: bytes) -> str:
    """Return the status in a block of headers that indexes nothing: a length, and digits."""
    _, found, rest = payload.partition(_STATUS)
    assert found
    return rest[1 : 1 + rest[0]].decode()


def number(code: grpc.StatusCode) -> str:
    return str(code.value[0])


class Handlers:
    """Handlers that use what a context offers."""

    def __init__(self) -> None:
        self.given_up: list[bool] = []
        self.remaining: list[float | None] = []
        self.ended = asyncio.Event()
        self.lengths: list[int] = []

    async def cancel(self, request: bytes, context: Any) -> bytes:
        raise asyncio.CancelledError

    async def wait(self, request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda call: self.given_up.append(call.cancelled()))
        self.remaining.append(context.time_remaining())
        await self.ended.wait()
        return request

    async def begin(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata((("began", "yes"),))
        await context.send_initial_metadata((("began", "again"),))
        for part in (b"a", b"b"):
            yield part

    async def code(self, request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.DATA_LOSS)
        context.set_details("it is gone")
        context.set_trailing_metadata((("why", "lost"),))
        return request

    async def swell(self, request: bytes, context: Any) -> None:
        await context.write(b"small")
        await context.write(bytes(int(request)))

    async def late(self, request: bytes, context: Any) -> None:
        """Write after the end: nothing may come behind a status."""
        try:
            await context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        except grpc.aio.AbortError:
            with pytest.raises(grpc.aio.UsageError):
                await context.write(b"late")
            self.ended.set()
            raise

    async def take(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        await self.ended.wait()
        self.lengths = [len(message) async for message in messages]
        return b"%d" % sum(self.lengths)

    def handler(self) -> grpc.GenericRpcHandler:
        one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Any] = {
            "Cancel": one(self.cancel),
            "Wait": one(self.wait),
            "Begin": many(self.begin),
            "Code": one(self.code),
            "Swell": many(self.swell),
            "Late": many(self.late),
            "Take": grpc.stream_unary_rpc_method_handler(self.take),
        }
        return grpc.method_handlers_generic_handler("t.S", handlers)


@asynccontextmanager
async def handling(limits: Limits = DEFAULT) -> AsyncIterator[tuple[Server, Handlers, str]]:
    handlers = Handlers()
    server, endpoint = await started(handlers.handler(), limits=limits)
    try:
        yield server, handlers, endpoint
    finally:
        await server.stop(None)


def streamed(channel: grpc.aio.Channel, name: str, request: bytes = b"", **options: Any) -> Any:
    call: Any = channel.unary_stream(f"/t.S/{name}")
    return call(request, **options)


# -- sizes


async def test_a_request_and_an_answer_may_be_as_long_as_the_limit_and_no_longer() -> None:
    for limits, code in (
        (Limits(request_bytes=100), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Limits(answer_bytes=100), grpc.StatusCode.INTERNAL),
    ):
        async with serving(limits) as (_, service, endpoint), client_channel(endpoint) as channel:
            assert await unary(channel, "Echo", bytes(100)) == bytes(100)
            refused = await failure(unary(channel, "Echo", bytes(101)))
            assert refused.code() is code
            assert read_failure(refused).reason
            assert "101 bytes" in str(refused.details())
            assert service.echoed == (1 if limits.request_bytes == 100 else 2)
            assert await unary(channel, "Echo", b"on") == b"on"


async def test_a_message_too_long_is_refused_before_its_bytes_come() -> None:
    async with serving(Limits(request_bytes=100)) as (server, service, endpoint):
        async with Raw.to(endpoint) as raw:
            raw.say(opened("Echo"), frame(Kind.DATA, 0, 1, framed(bytes(101))[:5]))
            _, payload = await raw.until(Kind.HEADERS, 1)
            assert status_of(payload) == number(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert server.held == service.echoed == 0


async def test_a_message_of_a_stream_that_is_too_long_ends_it_with_a_status() -> None:
    limits = Limits(answer_bytes=100)
    async with handling(limits) as (_, _, endpoint), client_channel(endpoint) as channel:
        call = streamed(channel, "Swell", b"101")
        assert await call.read() == b"small"
        refused = await failure(call.read())
        assert refused.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (framed(b"a") + framed(b"b"), grpc.StatusCode.INTERNAL),
        (b"", grpc.StatusCode.INTERNAL),
        (framed(b"abc")[:-1], grpc.StatusCode.INTERNAL),
        (b"\1" + framed(b"abc")[1:], grpc.StatusCode.UNIMPLEMENTED),
        (b"\2" + framed(b"abc")[1:], grpc.StatusCode.INTERNAL),
    ],
    ids=["several", "none", "torn", "compressed", "unknown flags"],
)
async def test_a_request_that_is_none_is_refused_and_not_begun(
    sent: bytes, code: grpc.StatusCode
) -> None:
    async with serving() as (server, service, endpoint), Raw.to(endpoint) as raw:
        raw.say(opened("Echo"), frame(Kind.DATA, Flag.END_STREAM, 1, sent))
        _, payload = await raw.until(Kind.HEADERS, 1)
        assert status_of(payload) == number(code)
        assert service.echoed == server.held == server.calls == 0


@pytest.mark.parametrize("name", ["Echo", "Sum"], ids=["unary", "stream"])
async def test_a_compressed_message_is_refused_with_the_encodings_that_are_accepted(
    name: str,
) -> None:
    block = request_headers(f"/t.S/{name}", "here") + literal(b"grpc-encoding", b"gzip")
    async with serving() as (server, service, endpoint), Raw.to(endpoint) as raw:
        raw.say(frame(Kind.HEADERS, Flag.END_HEADERS, 1, block))
        raw.say(frame(Kind.DATA, 0, 1, b"\1" + framed(gzip.compress(bytes(1_000)))[1:]))
        flags, payload = await raw.until(Kind.HEADERS, 1)
        assert flags & Flag.END_STREAM
        assert status_of(payload) == number(grpc.StatusCode.UNIMPLEMENTED)
        assert literal(b"grpc-accept-encoding", b"identity") in payload
        assert b"(grpc-encoding gzip)" in payload
        assert service.echoed == server.held == server.calls == 0


async def test_a_client_that_offers_compression_and_does_not_use_it_is_served() -> None:
    block = request_headers("/t.S/Echo", "here") + literal(b"grpc-encoding", b"gzip")
    async with serving() as (_, _, endpoint), Raw.to(endpoint) as raw:
        raw.say(frame(Kind.HEADERS, Flag.END_HEADERS, 1, block))
        raw.say(frame(Kind.DATA, Flag.END_STREAM, 1, framed(b"plain")))
        assert (await raw.until(Kind.DATA, 1))[1] == framed(b"plain")


async def test_a_second_request_in_another_frame_is_refused_too() -> None:
    async with serving() as (_, service, endpoint), Raw.to(endpoint) as raw:
        raw.say(opened("Echo"), frame(Kind.DATA, 0, 1, framed(b"a")))
        raw.say(frame(Kind.DATA, Flag.END_STREAM, 1, framed(b"b")))
        _, payload = await raw.until(Kind.HEADERS, 1)
        assert status_of(payload) == number(grpc.StatusCode.INTERNAL)
        assert service.echoed == 0


async def test_a_stream_of_requests_that_ends_amid_one_is_not_taken_for_complete() -> None:
    async with handling() as (_, handlers, endpoint), Raw.to(endpoint) as raw:
        handlers.ended.set()
        torn = framed(b"ab") + framed(b"cd")[:-1]
        raw.say(opened("Take"), frame(Kind.DATA, Flag.END_STREAM, 1, torn))
        _, payload = await raw.until(Kind.HEADERS, 1)
        assert status_of(payload) == number(grpc.StatusCode.INTERNAL)
        assert handlers.lengths == []


# -- memory


async def test_memory_of_requests_comes_back_when_they_are_taken_or_given_up() -> None:
    async with handling() as (server, handlers, endpoint):
        for is_taken in (True, False):
            async with Raw.to(endpoint) as raw:
                raw.say(opened("Take"), frame(Kind.DATA, 0, 1, framed(bytes(5_000))))
                raw.say(frame(Kind.DATA, 0, 1, framed(bytes(9_000))[:7_000]))
                await until(lambda: server.held >= 12_000, "requests that are held")
                if is_taken:
                    raw.say(frame(Kind.DATA, Flag.END_STREAM, 1, framed(bytes(9_000))[7_000:]))
                    handlers.ended.set()
                    _, answer = await raw.until(Kind.DATA, 1)
                    assert answer.endswith(b"14000")
                    handlers.ended.clear()
            await until(lambda: server.held == server.calls == 0, "memory that comes back")


async def test_a_stream_of_requests_goes_on_beyond_what_may_be_held() -> None:
    """What the handler has taken counts no more."""
    limits = Limits(held_bytes_of_connection=50_000, held_bytes=50_000, lookahead_bytes=10_000)

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(4_000)

    async with handling(limits) as (server, handlers, endpoint):
        handlers.ended.set()
        async with client_channel(endpoint) as channel:
            call: Any = channel.stream_unary("/t.S/Take")
            assert await asyncio.wait_for(call(messages()), 60) == b"400000"
        assert server.held == 0


@pytest.mark.parametrize(
    "broken",
    [framed(bytes(200))[:9], b"\1" + framed(b"a")[1:], b"\7" + framed(b"a")[1:], framed(b"a")[:-1]],
    ids=["too large", "compressed", "unknown flags", "torn"],
)
async def test_calls_that_end_by_a_broken_message_count_as_resets(
    broken: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their handlers have begun, and are cancelled as if the client had reset the stream."""
    monkeypatch.setattr(http2_connection, "RESETS", (5, 0.0))
    async with handling(Limits(request_bytes=100)) as (_, _, endpoint), Raw.to(endpoint) as raw:
        for stream_id in range(1, 21, 2):
            raw.say(opened("Take", stream_id))
            raw.say(frame(Kind.DATA, Flag.END_STREAM, stream_id, broken))
        _, payload = await raw.until(Kind.GOAWAY)
        assert payload[:4] == (11).to_bytes(4, "big")
        assert payload[4:8] == ErrorCode.ENHANCE_YOUR_CALM.to_bytes(4, "big")


async def test_requests_that_were_never_begun_are_refused_however_many_are_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that compresses learns from each refusal that it must not, and is not cut off."""
    monkeypatch.setattr(http2_connection, "RESETS", (5, 0.0))
    async with serving() as (_, service, endpoint), Raw.to(endpoint) as raw:
        for stream_id in range(1, 41, 2):
            raw.say(opened("Echo", stream_id))
            raw.say(frame(Kind.DATA, Flag.END_STREAM, stream_id, b"\1" + framed(b"a")[1:]))
        raw.say(opened("Echo", 41), frame(Kind.DATA, Flag.END_STREAM, 41, framed(b"plain")))
        assert (await raw.until(Kind.DATA, 41))[1] == framed(b"plain")
        assert service.echoed == 1


# -- overload


async def test_a_call_that_is_not_begun_is_refused_so_that_it_may_be_sent_again() -> None:
    """Its client knows from the reset that nothing was done (RFC 9113, 8.7)."""
    limits = Limits(waiting_some=1, waiting_most=1, begun_a_turn=1)
    async with serving(limits) as (_, service, endpoint), Raw.to(endpoint) as raw:
        for call in range(1, 21, 2):
            raw.say(opened("Echo", call), frame(Kind.DATA, Flag.END_STREAM, call, framed(b"a")))
        _, payload = await raw.until(Kind.RST_STREAM)
        assert payload == ErrorCode.REFUSED_STREAM.to_bytes(4, "big")
        assert service.echoed < 10


# -- what handlers and clients hear


async def test_a_handler_that_is_cancelled_from_within_answers_its_client() -> None:
    async with handling() as (_, _, endpoint), client_channel(endpoint) as channel:
        refused = await failure(asyncio.wait_for(unary(channel, "Cancel"), 60))
        assert refused.code() is grpc.StatusCode.CANCELLED


async def test_a_handler_hears_whether_its_client_gave_up_and_how_long_it_waits() -> None:
    async with handling() as (_, handlers, endpoint), client_channel(endpoint) as channel:
        given_up = unary(channel, "Wait")
        await until(lambda: len(handlers.remaining) == 1, "a call under way")
        given_up.cancel()
        await until(lambda: handlers.given_up == [True], "the end of the call")
        handlers.ended.set()
        assert await unary(channel, "Wait", b"on", timeout=600) == b"on"
        await until(lambda: handlers.given_up == [True, False], "the end of the other")
    first, second = handlers.remaining
    assert first is None
    assert second is not None
    assert 500 < second < 700


async def test_metadata_is_sent_once_before_the_first_message() -> None:
    async with handling() as (_, _, endpoint), client_channel(endpoint) as channel:
        call = streamed(channel, "Begin")
        assert [message async for message in call] == [b"a", b"b"]
        assert dict(await call.initial_metadata())["began"] == "yes"
        assert await call.code() is grpc.StatusCode.OK


async def test_a_status_that_a_handler_sets_is_the_answer() -> None:
    async with handling() as (_, _, endpoint), client_channel(endpoint) as channel:
        refused = await failure(unary(channel, "Code", b"a"))
    assert (refused.code(), refused.details()) == (grpc.StatusCode.DATA_LOSS, "it is gone")
    assert dict(refused.trailing_metadata())["why"] == "lost"


async def test_nothing_comes_behind_a_status() -> None:
    async with handling() as (_, handlers, endpoint), client_channel(endpoint) as channel:
        refused = await failure(streamed(channel, "Late").read())
        assert refused.code() is grpc.StatusCode.NOT_FOUND
        await asyncio.wait_for(handlers.ended.wait(), 60)


_OVERLOADED = b"grpc-status\x018"  # RESOURCE_EXHAUSTED


@asynccontextmanager
async def two_listeners(limits: Limits) -> AsyncIterator[tuple[Server, str, str]]:
    """Serve at two listeners, as for certificates and for tokens."""
    server, service = Server(limits), Service()
    server.add_generic_rpc_handlers([service.handler()])
    crowded, other = (f"127.0.0.1:{server.listen('127.0.0.1:0')}" for _ in range(2))
    await server.start()
    try:
        yield server, crowded, other
    finally:
        await server.stop(None)


async def test_a_listener_that_is_full_leaves_another_its_connections() -> None:
    async with (
        two_listeners(Limits(connections=3)) as (server, crowded, other),
        AsyncExitStack() as stack,
    ):
        for _ in range(3):
            await stack.enter_async_context(Raw.to(crowded))
        await until(lambda: len(server.connections) == 3, "a full listener")
        reader, writer = await asyncio.open_connection(*crowded.rsplit(":", 1))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        async with client_channel(other) as channel:
            assert await unary(channel, "Echo", b"a", timeout=60) == b"a"


async def test_calls_at_one_listener_leave_another_its_own() -> None:
    async with (
        two_listeners(Limits(calls=8)) as (server, crowded, other),
        Raw.to(crowded) as raw,
        client_channel(other) as channel,
    ):
        raw.say(*[opened("Echo", stream_id) for stream_id in (1, 3, 5, 7, 9)])
        _, payload = await raw.until(Kind.HEADERS, 9)
        assert _OVERLOADED in payload
        assert server.calls == 4
        assert await unary(channel, "Echo", b"a", timeout=60) == b"a"


async def test_requests_that_are_never_complete_leave_another_listener_its_memory() -> None:
    part = struct.pack(">BI", 0, 1 << 20) + bytes(15_000)
    async with (
        two_listeners(Limits(held_bytes=100_000)) as (server, crowded, other),
        Raw.to(crowded) as raw,
        client_channel(other) as channel,
    ):
        for stream_id in range(1, 13, 2):
            raw.say(opened("Echo", stream_id), frame(Kind.DATA, 0, stream_id, part))
        flags, payload = await raw.until(Kind.HEADERS)
        assert flags & Flag.END_STREAM
        assert _OVERLOADED in payload
        assert server.held <= 50_000
        assert await unary(channel, "Echo", bytes(40_000), timeout=60) == bytes(40_000)


async def test_calls_that_wait_at_one_listener_do_not_hold_up_another() -> None:
    limits = Limits(work_a_turn_s=3_600, waiting_some=100, waiting_most=100)
    server = new_server(limits)
    crowded, other = server.add_share(), server.add_share()
    crowd, bystander = Client(server, crowded), Client(server, other)
    crowd.say(GREETING + b"".join(map(echoed, range(1, 801, 2))))
    bystander.say(GREETING)
    while len(crowded.waiting) < 90:  # noqa: ASYNC110 - turns
        await asyncio.sleep(0)
    bystander.say(echoed(1, b"bystander"))
    turns = 0
    while b"bystander" not in bystander.transport.sent:
        turns += 1
        assert turns < 4
        await asyncio.sleep(0)
