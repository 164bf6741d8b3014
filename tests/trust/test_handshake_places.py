"""Places of callers and of handshakes: a crowd of one host leaves the others theirs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.controller.errors import BusyError
from streammeta.controller.rpc.services.pipeline_core import PIPELINES_PER_PRINCIPAL
from streammeta.controller.rpc.watch.service import WATCHERS_PER_PRINCIPAL
from streammeta.controller.tls.manager import PeerTls
from streammeta.controller.trust.rates import Places
from streammeta.rpc.failures import read_failure
from streammeta.tls import handshakes
from streammeta.tls.handshakes import HandshakePlaces
from streammeta.tls.listener import Listener
from streammeta.v1 import metadata_pb2, objects_pb2
from tests.kit.certificates import Authority
from tests.kit.waiting import until
from tests.trust.trusted_server import trusting


class Crowd:
    """Handshakes that hold their places until they are let go."""

    def __init__(self) -> None:
        self.places = HandshakePlaces()
        self.begun: list[str] = []
        self.end = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def _shake(self, host: str) -> None:
        async with self.places.take(host):
            self.begun.append(host)
            await self.end.wait()

    def come(self, host: str, number: int) -> None:
        self.tasks += [asyncio.ensure_future(self._shake(host)) for _ in range(number)]

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    found = Crowd()
    try:
        yield found
    finally:
        await found.leave()


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_few_handshakes_begin_in_a_turn() -> None:
    async with crowd() as found:
        for host in range(8):
            found.come(f"host-{host}", 16)
        before = most = 0
        for _ in range(40):
            await asyncio.sleep(0)
            most, before = max(most, len(found.begun) - before), len(found.begun)
        assert most <= handshakes.BEGUN_A_TURN
        assert len(found.begun) == handshakes.COMPUTED_MAX


async def test_a_host_has_its_place_however_many_come_from_another() -> None:
    async with crowd() as found:
        found.come("crowded", 500)
        await turns(20)
        assert len(found.begun) == handshakes.COMPUTED_MAX_PER_HOST
        found.come("bystander", 1)
        await turns(3)
        assert found.begun[-1] == "bystander"


async def test_places_are_given_on_and_hosts_have_them_by_rounds() -> None:
    async with crowd() as found:
        for host in ("a", "b"):
            found.come(host, handshakes.COMPUTED_MAX_PER_HOST)
        await turns(20)
        found.come("a", 100)
        found.come("c", 1)
        await turns(3)
        assert len(found.begun) == handshakes.COMPUTED_MAX
        found.end.set()
        await turns(20)
        assert "c" in found.begun[handshakes.COMPUTED_MAX :][:3]
        assert len(found.begun) == handshakes.COMPUTED_MAX + 101


async def test_a_connection_that_gives_up_leaves_its_place_to_the_next() -> None:
    async with crowd() as found:
        found.come("a", handshakes.COMPUTED_MAX_PER_HOST + 2)
        await turns(20)
        waiting, begun = found.tasks[-2], found.tasks[0]
        waiting.cancel()
        begun.cancel()
        await turns(20)
        assert len(found.begun) == handshakes.COMPUTED_MAX_PER_HOST + 1


async def test_nothing_turns_while_all_wait_for_a_place() -> None:
    """Else a crowd of one host would keep the event loop busy."""
    async with crowd() as found:
        found.come("a", 100)
        await turns(20)
        assert not found.places._is_turn_due


# -- of a listener


def client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    made = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return outgoing.read()


class Counted(Listener):
    """A listener that counts the handshakes that it begins, and what it complains of."""

    def __init__(self, authority: Authority) -> None:
        self.begun = 0
        self.told: list[str] = []
        tls = PeerTls.of(authority.issue("controller/1").load())
        super().__init__(tls, self._make, lambda _host, _event, reason: self.told.append(reason))

    def _make(self, host: str) -> asyncio.Protocol:
        self.begun += 1
        return asyncio.Protocol()


@asynccontextmanager
async def listening(authority: Authority) -> AsyncIterator[tuple[Counted, int]]:
    listener = Counted(authority)
    port = await listener.start("127.0.0.1:0")
    try:
        yield listener, port
    finally:
        await listener.stop()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield writer
    finally:
        writer.transport.abort()


async def test_a_handshake_begins_once_its_first_message_is_there(authority: Authority) -> None:
    """So that many that were held back are not computed in the turn in which they come."""
    hello = client_hello()
    async with listening(authority) as (listener, port), AsyncExitStack() as stack:
        writers = [await stack.enter_async_context(connected(port)) for _ in range(20)]
        for at, end in ((0, 1), (1, 7), (7, len(hello) - 1)):
            for writer in writers:
                writer.write(hello[at:end])
            await until(lambda: len(listener._handshakes) == len(writers), "connections")
            assert listener.begun == 0
        for writer in writers:
            writer.write(hello[-1:])
        await until(lambda: listener.begun == len(writers), "all handshakes")


@pytest.mark.parametrize("sent", [b"\x16", b"\x16\x03\x01", b"GET", b""])
async def test_a_connection_that_ends_amid_its_first_message_is_let_go(
    authority: Authority, sent: bytes
) -> None:
    async with listening(authority) as (listener, port):
        async with connected(port) as writer:
            writer.write(sent)
            writer.write_eof()
            await until(lambda: len(listener.told) == 1, "the end of it")
        assert not listener._handshakes


async def test_a_first_message_in_several_records_is_refused(authority: Authority) -> None:
    """Its rest would be waited for while a place is taken."""
    hello = client_hello()
    first, rest = hello[5:100], hello[100:]
    torn = b"".join(hello[:3] + len(part).to_bytes(2, "big") + part for part in (first, rest))
    async with listening(authority) as (listener, port), connected(port) as writer:
        writer.write(torn)
        await until(lambda: len(listener.told) == 1, "a refusal")
        assert "longer than its first TLS record" in listener.told[0]
        assert listener.begun == 0


def refusal(places: Places, holder: str, limits: dict[str, int]) -> BusyError:
    with pytest.raises(BusyError) as refused, places.taken(holder, **limits):
        pass
    return refused.value


def test_places_are_counted_by_holder_and_in_all_and_come_back() -> None:
    places = Places("walks", 700)
    limits = {"per_holder": 1, "in_all": 2}
    with places.taken("a", **limits):
        refused = refusal(places, "a", limits)
        assert str(refused).startswith("a has 1 walks in flight")
        assert refused.retry_after_ms == 700
        with places.taken("b", **limits):
            assert str(refusal(places, "c", limits)).startswith("callers have 2")
    assert places.count == 0
    assert not places._held, "names of callers are not kept"
    with places.taken("a", **limits):
        assert places.count == 1


def test_callers_without_a_name_have_what_is_left_of_all() -> None:
    places = Places("walks", 1)
    with places.taken(None, per_holder=1, in_all=2), places.taken(None, per_holder=1, in_all=2):
        assert places.count == 2


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(call.read(), 60)
    return read_failure(raised.value).reason


async def test_a_principal_opens_so_many_pipelines_and_watches(tmp_path: Path) -> None:
    async with trusting(Authority(tmp_path, "ours")) as server:
        broker = await server.by("broker/1000")
        other = await server.by("broker/1001")
        empty = objects_pb2.CommitPipelineRequest(sequence=1).SerializeToString()
        watch = metadata_pb2.WatchRequest().SerializeToString()

        def pipeline(channel: grpc.aio.Channel) -> Any:
            # Written by a task of its own, since a call may be refused before the message is.
            open_stream: Any = channel.stream_stream("/streammeta.v1.ObjectService/CommitPipeline")
            return open_stream(messages())

        async def messages() -> AsyncIterator[bytes]:
            yield empty
            await asyncio.Event().wait()

        def watching(channel: grpc.aio.Channel) -> Any:
            start: Any = channel.unary_stream("/streammeta.v1.MetadataService/Watch")
            return start(watch)

        pipelines = [pipeline(broker.channel) for _ in range(PIPELINES_PER_PRINCIPAL)]
        watches = [watching(broker.channel) for _ in range(WATCHERS_PER_PRINCIPAL)]
        for call in (*pipelines, *watches):
            assert await call.read()
        # grpc.aio may tell of its own failed write before the status that is there.
        while not (reason := await refused(pipeline(broker.channel))):
            pass
        assert reason == "TOO_MANY_PIPELINES"
        assert await refused(watching(broker.channel)) == "BUSY"
        for call in (pipeline(other.channel), watching(other.channel)):
            assert await call.read()
