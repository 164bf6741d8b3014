"""The dialling side against a listener that breaks the protocol: requests fail, it dials anew."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers.frames import CONTROL_REQUESTS, FrameKind, FrameParser, seal
from streammeta.controller.peers.hello import VERSION, Hello, HelloAnswer, Refusal
from streammeta.controller.peers.wire import decode_request, encode_answer, encode_request
from streammeta.controller.quorum import messages
from streammeta.controller.runtime.interfaces import Endpoints
from tests.quorum.fake_replica import answer_header
from tests.quorum.peer_messages import FETCHED, VOTE
from tests.quorum.test_quorum_peers import (
    CLUSTER,
    NEVER_MS,
    PEER,
    caller_with,
    calling,
    fetch,
    vote,
)

GREETING = seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(CLUSTER, PEER).encoded()])


def voted(call_id: int, request: messages.Request) -> bytes:
    header = answer_header(PEER, request.header)
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
        caller_with(seed=endpoint, timeout_ms=NEVER_MS) as caller,
    ):
        caller.transport.send(fetch(7))  # waits, and ends with the connection
        caller.transport.send(vote(1))
        assert not await caller.ended(7)
        assert await caller.ask(vote(2)), "over a new connection"
        assert caller.lost == [], "the peer's process has not ended"


@pytest.mark.parametrize(
    "greeting",
    [
        seal(FrameKind.HELLO_ANSWER, 0, [b"nothing of the kind, though long enough"]),
        seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(ClusterId("c"), NodeId(5)).encoded()]),
        seal(FrameKind.HELLO_ANSWER, 0, [HelloAnswer(ClusterId("d"), PEER).encoded()]),
        seal(
            FrameKind.HELLO_ANSWER,
            0,
            [HelloAnswer(CLUSTER, PEER, Refusal.UNKNOWN_VERSION).encoded()],
        ),
        b"SSH-2.0-OpenSSH_9.6\r\n-----------",
    ],
    ids=["no hello", "another node", "another cluster", "another version", "ssh"],
)
async def test_no_request_is_sent_after_a_wrong_greeting(greeting: bytes) -> None:
    async with (
        listener_that_sends(greeting) as (endpoint, calls),
        caller_with(seed=endpoint, timeout_ms=NEVER_MS) as caller,
    ):
        assert not await caller.ask(vote(1))
        assert calls == []
        assert caller.lost == []


async def test_the_address_for_tokens_is_that_of_the_last_hello_if_it_names_one() -> None:
    told = iter([("10.0.0.2:3", VERSION), ("10.0.0.2:4", 2), ("10.0.0.2:5", 3), ("nowhere", 3)])

    def greeting(_: bytes) -> bytes:
        endpoint, version = next(told)
        answer = HelloAnswer(CLUSTER, PEER, version=version, token_endpoint=endpoint)
        return seal(FrameKind.HELLO_ANSWER, 0, [answer.encoded()])

    async with (
        listener_that_sends(greeting, lambda *_: b"nonsense" * 8) as (endpoint, _),
        caller_with(seed=endpoint) as caller,
    ):
        assert caller.transport.endpoints(PEER).tokens is None
        for number, known in enumerate(("10.0.0.2:3", None, "10.0.0.2:5", None)):
            assert not await caller.ask(vote(number))
            assert caller.transport.endpoints(PEER).tokens == known


async def test_a_listener_of_version_1_is_dialled_in_its_version_until_it_disconnects() -> None:
    versions: list[int] = []

    def of_version_1(hello: bytes) -> bytes:
        versions.append(Hello.decoded(hello).version)
        refusal = Refusal.NONE if versions[-1] == 1 else Refusal.UNKNOWN_VERSION
        answer = HelloAnswer(CLUSTER, PEER, refusal, version=1)
        return seal(FrameKind.HELLO_ANSWER, 0, [answer.encoded()])

    def third_breaks(call_id: int, request: messages.Request) -> bytes:
        number = request.header.request_id
        return b"nonsense" * 3 if number == 3 else voted(call_id, request)

    async with (
        listener_that_sends(of_version_1, third_breaks) as (endpoint, _),
        caller_with(seed=endpoint, timeout_ms=NEVER_MS) as caller,
    ):
        assert not await caller.ask(vote(1))
        assert await caller.ask(vote(2))
        assert versions == [VERSION, 1]
        assert not await caller.ask(vote(3))
        assert not await caller.ask(vote(4)), "it may be a newer one by now"
        assert versions == [VERSION, 1, VERSION]
        assert caller.lost == []


async def test_a_bad_answer_fails_its_request_alone() -> None:
    async with (
        listener_that_sends(GREETING, answered_with(FrameKind.VOTE_ANSWER, b"short")) as (here, _),
        caller_with(seed=here, timeout_ms=NEVER_MS) as caller,
    ):
        assert not await caller.ask(vote(1))
        assert caller.transport.connected_to == {(PEER, here)}


async def test_requests_fail_at_once_while_too_much_waits_to_leave() -> None:
    async with calling(timeout_ms=NEVER_MS) as caller:
        assert await caller.ask(vote(1))
        (connection,) = caller.transport._connections.values()
        connection.pause_writing()
        caller.transport.send(vote(2))
        assert caller.failed == [], "in a turn of its own"
        assert not await caller.ended(2)
        connection.resume_writing()
        assert await caller.ask(vote(3))
