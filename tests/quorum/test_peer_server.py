"""Listener for peers: refusals and bounds; nothing but a sound request reaches the replica."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streammeta.controller.features import Levels, Software
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.peers import server as peer_server
from streammeta.controller.peers.dialled import Identity
from streammeta.controller.peers.frames import (
    ANSWERS,
    HELLO_ANSWER_ONLY,
    Frame,
    FrameKind,
    FrameParser,
    seal,
)
from streammeta.controller.peers.hello import VERSION, Hello, HelloAnswer, Purpose, Refusal
from streammeta.controller.peers.server import CALLS_MAX, PeerServer
from streammeta.controller.peers.wire import encode_answer, encode_request
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.runtime.interfaces import Endpoints, Reply
from tests.kit.seeds import seeds
from tests.kit.waiting import until
from tests.quorum.fake_replica import FakeReplica
from tests.quorum.peer_messages import ASK, FETCH, FETCH_SNAPSHOT, VOTE, VOTED, with_field

CLUSTER = ClusterId("c")
HERE = Identity(CLUSTER, NodeId(2), token_endpoint="h:3")
HELLO = Hello(CLUSTER, ASK.sender.node_id, HERE.node_id, Purpose.CONTROL)


class Peer:
    """The other end of a connection, which may send anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.parser = FrameParser(HELLO_ANSWER_ONLY)

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def frame(self, timeout_s: float = 10) -> Frame | None:
        """Return the next frame; None when the connection has ended."""
        async with asyncio.timeout(timeout_s):
            while (frame := self.parser.next()) is None:
                data = await self._read()
                if not data:
                    return None
                self.parser.feed(data)
        return frame

    async def _read(self) -> bytes:
        try:
            return await self.reader.read(1 << 16)
        except ConnectionError:
            return b""

    async def greet(self, hello: Hello = HELLO) -> HelloAnswer:
        self.send(greeting(hello))
        frame = await self.frame()
        assert frame is not None
        self.parser.expect(ANSWERS)
        return HelloAnswer.decoded(frame.payload)


def greeting(hello: Hello = HELLO) -> bytes:
    return seal(FrameKind.HELLO, 0, [hello.encoded()])


def asked(request: messages.Request, call_id: int) -> bytes:
    kind, parts = encode_request(request)
    return seal(kind, call_id, parts)


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica(HERE.node_id)


@pytest.fixture
async def server(replica: FakeReplica) -> AsyncIterator[PeerServer]:
    server = PeerServer(replica, HERE)
    yield server
    await server.stop()


@pytest.fixture
async def port(server: PeerServer) -> int:
    return await server.start("127.0.0.1:0")


@pytest.fixture
async def peer(port: int) -> AsyncIterator[Peer]:
    async with connected(port) as peer:
        yield peer


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Peer]:
    peer = Peer(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield peer
    finally:
        peer.writer.transport.abort()
        await asyncio.sleep(0)


# -- turns


async def test_what_a_request_sets_off_goes_ahead_of_another_peers_that_came_with_it(
    replica: FakeReplica, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    committed = asyncio.Event()

    async def caller() -> None:
        await committed.wait()
        seen.append("caller is answered")

    def handle(request: messages.Request, _reply: Reply) -> None:
        seen.append(f"request of {request.header.sender.node_id}")
        committed.set()

    other = dataclasses.replace(HELLO, sender=NodeId(HELLO.sender + 2))
    header = dataclasses.replace(
        FETCH.header, sender=ReplicaKey(other.sender, FETCH.header.sender.directory_id)
    )
    async with connected(port) as first, connected(port) as second, asyncio.TaskGroup() as tasks:
        await first.greet()
        await second.greet(other)
        monkeypatch.setattr(replica, "handle", handle)
        tasks.create_task(caller())
        await asyncio.sleep(0)  # the caller waits
        first.send(asked(FETCH, 1))
        second.send(asked(dataclasses.replace(FETCH, header=header), 1))
        await until(lambda: len(seen) == 3, "all of it")
    requests = {f"request of {HELLO.sender}", f"request of {other.sender}"}
    assert {seen[0], seen[2]} == requests
    assert seen[1] == "caller is answered"


# -- hello


async def test_each_side_learns_who_the_other_is(peer: Peer) -> None:
    assert await peer.greet() == HelloAnswer(CLUSTER, HERE.node_id, token_endpoint="h:3")
    peer.send(asked(VOTE, 1))
    answer = await peer.frame()
    assert answer is not None
    assert (answer.kind, answer.call_id) == (FrameKind.VOTE_ANSWER, 1)


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("cluster_id", "other", Refusal.FOREIGN_CLUSTER),
        ("receiver", 3, Refusal.ANOTHER_NODE),
        ("version", 0, Refusal.UNKNOWN_VERSION),
    ],
)
async def test_a_hello_meant_for_another_is_refused_with_the_reason(
    field: str, value: Any, refusal: Refusal, server: PeerServer, replica: FakeReplica, peer: Peer
) -> None:
    hello = dataclasses.replace(HELLO, **{field: value})
    peer.send(greeting(hello), asked(FETCH, 1))
    frame = await peer.frame()
    assert frame is not None
    answer = HelloAnswer.decoded(frame.payload)
    assert answer.refusal is refusal
    assert await peer.frame() is None
    assert (server.refused.total(), replica.waiting) == (1, [])


@pytest.mark.parametrize(("version", "spoken"), [(1, 1), (VERSION, VERSION), (9, VERSION)])
async def test_the_lower_version_of_both_is_spoken(version: int, spoken: int, peer: Peer) -> None:
    answer = await peer.greet(dataclasses.replace(HELLO, version=version))
    tokens = HERE.token_endpoint if spoken > 2 else ""
    assert answer == HelloAnswer(CLUSTER, HERE.node_id, version=spoken, token_endpoint=tokens)
    peer.send(asked(VOTE, 1))
    assert await peer.frame() is not None


async def test_the_software_of_a_peer_is_known_while_it_is_connected(
    server: PeerServer, port: int
) -> None:
    old, new = (Software(version, Levels(1, highest)) for version, highest in (("1", 2), ("2", 3)))
    sender = HELLO.sender
    async with connected(port) as first:
        await first.greet(dataclasses.replace(HELLO, software=old))
        assert server.versions.of(sender) == old
        async with connected(port) as second:
            await second.greet(dataclasses.replace(HELLO, software=new))
            assert server.versions.of(sender) == new
        await until(lambda: server.versions.of(sender) == old, "the second ended")
        async with connected(port) as stranger:
            await stranger.greet(dataclasses.replace(HELLO, software=new, receiver=NodeId(3)))
            assert server.versions.of(sender) == old, "a refused hello tells nothing"
    await until(lambda: server.versions.of(sender) is None, "all have ended")


@pytest.mark.parametrize(
    "nonsense",
    [
        asked(FETCH, 1),
        seal(FrameKind.HELLO, 0, [b"no hello of ours, but long enough"]),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        bytes.fromhex("160301020001000001fc0303") + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        greeting()[:-1] + b"\xff",
        greeting() + greeting(),
        greeting() + asked(FETCH_SNAPSHOT, 1),
        greeting() + seal(*encode_answer(VOTED, Endpoints())[:1], 1, [b""]),
        greeting() + asked(VOTE, 2) + asked(VOTE, 1),
        greeting() + asked(VOTE, 1) + asked(VOTE, 1),
        greeting() + seal(FrameKind.FETCH, 1, [b"x"])[:-1] + b"y",
    ],
    ids=[
        "frame before hello", "no hello", "http", "tls", "grpc", "damaged hello", "hello again",
        "bulk on control", "answer", "reordered", "repeated", "damaged request",
    ],
)  # fmt: skip
async def test_whoever_breaks_the_protocol_is_disconnected(
    nonsense: bytes, server: PeerServer, replica: FakeReplica, peer: Peer
) -> None:
    peer.send(nonsense)
    peer.parser.expect({**HELLO_ANSWER_ONLY, **ANSWERS})
    while (frame := await peer.frame()) is not None:
        assert frame.kind in (FrameKind.HELLO_ANSWER, FrameKind.VOTE_ANSWER)
    assert server.refused.total() == 1
    assert replica.waiting == []


async def test_a_connection_without_hello_does_not_last(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(peer_server, "HELLO_TIMEOUT_S", 0.05)
    async with connected(port) as peer:
        peer.send(greeting()[:-1])
        assert await peer.frame() is None


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(peer_server, "CONNECTIONS_MAX", 1)
    async with connected(port) as first, connected(port) as second:
        await first.greet()
        second.send(greeting())
        assert await second.frame() is None
        first.send(asked(VOTE, 1))
        assert await first.frame() is not None
    await asyncio.sleep(0.05)
    async with connected(port) as third:
        assert (await third.greet()).refusal is Refusal.NONE


async def test_connections_that_say_nothing_leave_room_for_those_that_do(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(peer_server, "SILENT_MAX_PER_HOST", 1)
    async with connected(port) as first:
        await first.greet()
        async with connected(port) as silent, connected(port) as other:
            assert await other.frame() is None
            silent.send(greeting())
            assert await silent.frame() is not None
    async with connected(port) as later:
        assert (await later.greet()).refusal is Refusal.NONE


async def test_connections_that_say_nothing_are_bounded_whatever_their_hosts(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(peer_server, "SILENT_MAX", 1)
    async with connected(port), connected(port) as other:
        assert await other.frame() is None


# -- requests


async def test_a_bad_request_fails_and_the_connection_goes_on(
    replica: FakeReplica, peer: Peer
) -> None:
    await peer.greet()
    peer.send(asked(with_field(FETCH, "fetch_offset", -1), 1))
    peer.send(asked(with_field(FETCH, "header.sender.node_id", 7), 2))
    peer.send(asked(VOTE, 3))
    first, second, third = [await peer.frame() for _ in range(3)]
    assert first is not None
    assert (first.kind, first.call_id) == (FrameKind.FAILURE, 1)
    assert first.payload.startswith(b"fetch_offset: -1")
    assert second is not None
    assert second.payload.startswith(b"header.sender.node_id: 7")
    assert third is not None
    assert third.kind is FrameKind.VOTE_ANSWER
    assert replica.waiting == []


async def test_a_flood_of_fetches_leaves_room_for_votes(replica: FakeReplica, port: int) -> None:
    peers = [Peer(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(9)]
    for index, peer in enumerate(peers):
        await peer.greet()
        peer.send(*(asked(FETCH, call) for call in range(1, 33 if index < 8 else 2)))
    refused = await peers[8].frame()
    assert refused is not None
    assert refused.kind is FrameKind.FAILURE
    assert b"256 fetches" in refused.payload
    peers[8].send(asked(VOTE, 2))
    voted = await peers[8].frame()
    assert voted is not None
    assert voted.kind is FrameKind.VOTE_ANSWER
    peers[0].writer.close()
    await until(lambda: len(replica.forgotten) == 32, "its requests are forgotten")
    peers[8].send(asked(FETCH, 3))
    await until(lambda: len(replica.waiting) == 257, "there is room again")
    for reply in replica.replies:
        reply(None)
    stopped = await peers[8].frame()
    assert stopped is not None
    assert (stopped.kind, stopped.call_id) == (FrameKind.FAILURE, 3)
    for peer in peers:
        peer.writer.transport.abort()


async def test_no_more_is_read_than_may_be_in_flight(replica: FakeReplica, peer: Peer) -> None:
    await peer.greet()
    peer.send(*(asked(FETCH, call) for call in range(1, CALLS_MAX + 11)))
    await until(lambda: len(replica.waiting) == CALLS_MAX, "the bound is reached")
    await asyncio.sleep(0.05)
    assert len(replica.waiting) == CALLS_MAX
    for reply in list(replica.replies):
        reply(None)
    await until(lambda: len(replica.waiting) == CALLS_MAX + 10, "the rest is read")


async def test_a_peer_that_does_not_read_its_answers_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, server: PeerServer, replica: FakeReplica, port: int
) -> None:
    monkeypatch.setattr(peer_server, "OUTPUT_BYTES_MAX", 1 << 20)
    chunk = messages.FetchSnapshotResponse(
        header=VOTED.header, snapshot_id=FETCH_SNAPSHOT.snapshot_id, data=bytes(1 << 20)
    )
    async with connected(port) as peer:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer.send(greeting())
        peer.send(*(asked(FETCH, call) for call in range(1, 33)))
        await until(lambda: len(replica.waiting) == 32, "all are asked")
        for reply in replica.replies:
            reply(chunk)
        await until(lambda: server.refused.total() == 1, "it is disconnected")


async def test_answers_of_a_gone_connection_are_dropped(replica: FakeReplica, port: int) -> None:
    async with connected(port) as peer:
        await peer.greet()
        peer.send(asked(FETCH, 1))
        await until(lambda: bool(replica.replies), "the Fetch arrives")
    await until(lambda: bool(replica.forgotten), "it is forgotten")
    replica.replies[0](None)


@pytest.mark.parametrize("seed", seeds(3, slow=7))
async def test_random_bytes_reach_no_replica_and_leave_the_listener_well(
    seed: int, replica: FakeReplica, port: int
) -> None:
    rng = random.Random(seed)
    pieces = [greeting(), asked(FETCH, 1), asked(VOTE, 2), rng.randbytes(rng.randrange(300))]
    for _ in range(20):
        data = bytearray(b"".join(rng.choices(pieces, k=rng.randrange(1, 5))))
        if data:
            data[rng.randrange(min(20, len(data)))] ^= 1 << rng.randrange(8)
        async with connected(port) as peer:
            peer.send(bytes(data))
            peer.writer.write_eof()
            while await peer._read():
                pass
    assert replica.waiting == [], "each began with a hello that is none"
    async with connected(port) as peer:
        assert (await peer.greet()).refusal is Refusal.NONE
