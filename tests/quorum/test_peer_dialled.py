"""The dialling side against listeners that break the protocol or are slow to shake hands."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers import server as peer_server
from streammeta.controller.peers.connection import Patience
from streammeta.controller.peers.frames import (
    CONTROL_REQUESTS,
    HELLO_ONLY,
    FrameKind,
    FrameParser,
    seal,
)
from streammeta.controller.peers.hello import VERSION, Hello, HelloAnswer, Refusal
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.peers.wire import decode_request, encode_answer, encode_request
from streammeta.controller.quorum import messages
from streammeta.controller.runtime.interfaces import Endpoints
from streammeta.controller.tls.manager import PeerTls
from streammeta.tls.listener import Bounds, Listener
from tests.quorum import test_quorum_peers as peers
from tests.quorum.fake_replica import FakeReplica, answer_header
from tests.quorum.peer_messages import FETCHED, VOTE

GREETING = seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(peers.CLUSTER, peers.PEER).encoded()])


def voted(call_id: int, request: messages.Request) -> bytes:
    header = answer_header(peers.PEER, request.header)
    answer = messages.VoteResponse(header=header, pre_vote=True, granted=True)
    kind, parts = encode_answer(answer, Endpoints())
    return seal(kind, call_id, parts)


Greeting = Callable[[bytes], bytes]
"""From a hello to the bytes that answer it."""

Script = Callable[[int, messages.Request], bytes]
"""From a call to the bytes that answer it."""


@asynccontextmanager
async def listener_that_sends(
    greeting: bytes | Greeting, script: Script = voted
) -> AsyncIterator[tuple[str, list[int]]]:
    """Greets so, and answers requests by the script; gives its endpoint and the calls so far."""
    calls: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = FrameParser({FrameKind.HELLO: 1000, **CONTROL_REQUESTS})
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while frame := parser.next():
                if frame.kind is FrameKind.HELLO:
                    said = greeting if isinstance(greeting, bytes) else greeting(frame.payload)
                    writer.write(said)
                    continue
                calls.append(frame.call_id)
                writer.write(script(frame.call_id, decode_request(frame.kind, frame.payload)))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()), calls
    finally:
        server.close()


def answered_with(kind: FrameKind, *parts: bytes) -> Script:
    return lambda call_id, _: seal(kind, call_id, parts)


@pytest.mark.parametrize(
    "script",
    [
        lambda call_id, request: voted(call_id + 1, request),
        lambda call_id, request: voted(call_id, request) * 2,
        lambda call_id, request: voted(call_id, request)[:-1] + b"\x07",
        answered_with(encode_answer(FETCHED, Endpoints())[0], b""),
        answered_with(FrameKind.VOTE, *encode_request(VOTE)[1]),
        lambda _, __: GREETING,
        lambda _, __: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["no call", "twice", "damaged", "another kind", "a request", "hello again", "http"],
)
async def test_answers_that_break_the_protocol_end_the_connection(script: Script) -> None:
    broken: set[int] = set()

    def once(call_id: int, request: messages.Request) -> bytes:
        number = request.header.request_id
        if number == 1:
            broken.add(call_id)
            return script(call_id, request)
        return b"" if isinstance(request, messages.FetchRequest) else voted(call_id, request)

    async with (
        listener_that_sends(GREETING, once) as (endpoint, _),
        peers.caller_with(seed=endpoint, timeout_ms=peers.NEVER_MS) as caller,
    ):
        caller.transport.send(peers.fetch(7))  # waits, and ends with the connection
        caller.transport.send(peers.vote(1))
        assert not await caller.ended(7)
        assert await caller.ask(peers.vote(2)), "over a new connection"
        assert caller.lost == [], "the peer's process has not ended"


@pytest.mark.parametrize(
    "greeting",
    [
        seal(FrameKind.HELLO_ANSWER, 0, [b"nothing of the kind, though long enough"]),
        seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(ClusterId("c"), NodeId(5)).encoded()]),
        seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(ClusterId("d"), peers.PEER).encoded()]),
        seal(
            FrameKind.HELLO_ANSWER,
            0,
            [HelloAnswer(peers.CLUSTER, peers.PEER, Refusal.UNKNOWN_VERSION).encoded()],
        ),
        b"SSH-2.0-OpenSSH_9.6\r\n-----------",
    ],
    ids=["no hello", "another node", "another cluster", "another version", "ssh"],
)
async def test_no_request_is_sent_after_a_wrong_greeting(greeting: bytes) -> None:
    async with (
        listener_that_sends(greeting) as (endpoint, calls),
        peers.caller_with(seed=endpoint, timeout_ms=peers.NEVER_MS) as caller,
    ):
        assert not await caller.ask(peers.vote(1))
        assert calls == []
        assert caller.lost == []


async def test_the_address_for_tokens_is_that_of_the_last_hello_if_it_names_one() -> None:
    told = iter([("10.0.0.2:3", VERSION), ("10.0.0.2:4", 2), ("10.0.0.2:5", 3), ("nowhere", 3)])

    def greeting(_: bytes) -> bytes:
        endpoint, version = next(told)
        answer = HelloAnswer(peers.CLUSTER, peers.PEER, version=version, token_endpoint=endpoint)
        return seal(FrameKind.HELLO_ANSWER, 0, [answer.encoded()])

    async with (
        listener_that_sends(greeting, lambda *_: b"nonsense" * 8) as (endpoint, _),
        peers.caller_with(seed=endpoint) as caller,
    ):
        assert caller.transport.endpoints(peers.PEER).tokens is None
        for number, known in enumerate(("10.0.0.2:3", None, "10.0.0.2:5", None)):
            assert not await caller.ask(peers.vote(number))
            assert caller.transport.endpoints(peers.PEER).tokens == known


async def test_a_listener_of_version_1_is_dialled_in_its_version_until_it_disconnects() -> None:
    versions: list[int] = []

    def of_version_1(hello: bytes) -> bytes:
        versions.append(Hello.decoded(hello).version)
        refusal = Refusal.NONE if versions[-1] == 1 else Refusal.UNKNOWN_VERSION
        answer = HelloAnswer(peers.CLUSTER, peers.PEER, refusal, version=1)
        return seal(FrameKind.HELLO_ANSWER, 0, [answer.encoded()])

    def third_breaks(call_id: int, request: messages.Request) -> bytes:
        number = request.header.request_id
        return b"nonsense" * 3 if number == 3 else voted(call_id, request)

    async with (
        listener_that_sends(of_version_1, third_breaks) as (endpoint, _),
        peers.caller_with(seed=endpoint, timeout_ms=peers.NEVER_MS) as caller,
    ):
        assert not await caller.ask(peers.vote(1))
        assert await caller.ask(peers.vote(2))
        assert versions == [VERSION, 1]
        assert not await caller.ask(peers.vote(3))
        assert not await caller.ask(peers.vote(4)), "it may be a newer one by now"
        assert versions == [VERSION, 1, VERSION]
        assert caller.lost == []


async def test_a_bad_answer_fails_its_request_alone() -> None:
    async with (
        listener_that_sends(GREETING, answered_with(FrameKind.VOTE_ANSWER, b"short")) as (here, _),
        peers.caller_with(seed=here, timeout_ms=peers.NEVER_MS) as caller,
    ):
        assert not await caller.ask(peers.vote(1))
        assert caller.transport.connected_to == {(peers.PEER, here)}


async def test_requests_fail_at_once_while_too_much_waits_to_leave() -> None:
    async with peers.calling(timeout_ms=peers.NEVER_MS) as caller:
        assert await caller.ask(peers.vote(1))
        (connection,) = caller.transport._connections.values()
        connection.pause_writing()
        caller.transport.send(peers.vote(2))
        assert caller.failed == [], "in a turn of its own"
        assert not await caller.ended(2)
        connection.resume_writing()
        assert await caller.ask(peers.vote(3))


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
    async with peers.calling(timeout_ms=peers.NEVER_MS) as caller:
        assert await caller.ask(peers.vote(1))
        (connection,) = caller.transport._connections.values()
        caller.transport.send(peers.fetch(2))
        connection._timer_at = loop.time() - peers.NEVER_MS
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
    greeting = seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(peers.CLUSTER, peers.PEER).encoded()])

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
    async with peers.caller_with(seed=endpoint, timeout_ms=timeout_ms) as caller:
        outcomes = [await caller.ask(peers.vote(number)) for number in range(1, 5)]
    server.close()
    assert outcomes[0] is False
    assert any(outcomes)


def test_silent_connections_have_less_time_when_their_places_are_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = PeerServer(FakeReplica(peers.PEER), peers.AS_PEER)
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
