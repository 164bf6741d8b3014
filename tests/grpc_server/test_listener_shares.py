"""Each listener has its own share of a server's bounds: none is starved by a crowd at another."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from streammeta.controller.grpc_server.frames import Flag, Kind, frame
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.server import Server
from streammeta.rpc.connections import client_channel
from tests.grpc_server.test_grpc_calls import Raw, Service, opened, unary
from tests.grpc_server.turn_meter import GREETING, Client, echoed, new_server
from tests.kit.waiting import until

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
