"""Handshakes with starved peers end well: their limits grow with failures, and shrink again."""

import asyncio

import pytest

from streammeta.controller.peers import server as peer_server
from streammeta.controller.peers.connection import Patience
from streammeta.controller.peers.frames import (
    CONTROL_REQUESTS,
    HELLO_ONLY,
    FrameKind,
    FrameParser,
    seal,
)
from streammeta.controller.peers.hello import HelloAnswer
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.peers.wire import decode_request
from streammeta.controller.tls.peer_contexts import PeerTls
from streammeta.tls.listener import Bounds, Listener
from tests.quorum.fake_replica import FakeReplica
from tests.quorum.test_peer_dialled import voted
from tests.quorum.test_quorum_peers import (
    AS_PEER,
    CLUSTER,
    NEVER_MS,
    PEER,
    caller_with,
    calling,
    fetch,
    vote,
)


def test_the_limit_doubles_with_each_cut_and_shrinks_with_quick_answers() -> None:
    patience = Patience(2.0)
    limits = []
    for _ in range(5):
        limits.append(patience.limit_s)
        patience.cut_off()
    assert limits == [2.0, 4.0, 8.0, 16.0, 16.0]
    patience.record_answer(3.0)
    assert patience.limit_s == 16.0, "a peer that takes so long needs it"
    patience.record_answer(1.0)
    assert patience.limit_s == 4.0
    patience.record_answer(0.01)
    assert patience.limit_s == 2.0


async def test_answers_that_arrived_while_the_process_was_stopped_are_read_first() -> None:
    """A timer that is late says nothing of the peer."""
    loop = asyncio.get_running_loop()
    async with calling(timeout_ms=NEVER_MS) as caller:
        assert await caller.ask(vote(1))
        (connection,) = caller.transport._connections.values()
        caller.transport.send(fetch(2))
        connection._timer_at = loop.time() - NEVER_MS
        connection._progress_at = connection._timer_at
        connection._calls = {
            number: call._replace(asked_at=connection._timer_at)
            for number, call in connection._calls.items()
        }
        connection._on_time()
        assert not connection.is_closed
        connection._timer_at = loop.time()
        connection._on_time()
        assert connection.is_closed


async def test_a_peer_that_takes_several_limits_for_its_hello_is_reached() -> None:
    """Each attempt that is given up is lost, so only a longer one can succeed."""
    timeout_ms = 300
    greeting = seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(CLUSTER, PEER).encoded()])

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser(HELLO_ONLY)
        await asyncio.sleep(3 * timeout_ms / 1000)
        writer.write(greeting)
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while (frame := parser.next()) is not None:
                if frame.kind is FrameKind.HELLO:
                    parser.expect(CONTROL_REQUESTS)
                    continue
                writer.write(voted(frame.call_id, decode_request(frame.kind, frame.payload)))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    endpoint = "{}:{}".format(*server.sockets[0].getsockname())
    async with caller_with(seed=endpoint, timeout_ms=timeout_ms) as caller:
        outcomes = [await caller.ask(vote(number)) for number in range(1, 5)]
    server.close()
    assert outcomes[0] is False
    assert any(outcomes)


def test_silent_connections_have_less_time_when_their_places_are_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = PeerServer(FakeReplica(PEER), AS_PEER)
    roomy = server.hello_limit_s("a")
    for number in range(peer_server.SILENT_MAX_PER_HOST // 2 + 1):
        server._silent[number] = "a"  # type: ignore[index]
    assert server.hello_limit_s("a") == peer_server.HELLO_TIMEOUT_S < roomy
    assert server.hello_limit_s("b") == roomy, "another host's are not"


async def test_handshakes_have_less_time_when_their_places_are_scarce() -> None:
    told: list[str] = []
    listening = Listener(
        PeerTls(takes_plain_text=True, listening=None),
        lambda _: asyncio.Protocol(),
        lambda _host, _event, reason: told.append(reason),
        bounds=Bounds(handshakes=4, handshakes_of_host=4, handshake_s=1, handshake_patience_s=9),
    )
    assert listening._limit_s("a") == 9
    for _ in range(3):
        listening._handshakes[asyncio.create_task(asyncio.sleep(0))] = "a"
    assert listening._limit_s("a") == listening._limit_s("b") == 1
