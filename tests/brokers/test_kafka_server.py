"""Connections at a server without a broker: order, authentication, bounds, memory, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from streammeta.brokers.kafka.calls.record_calls import UnansweredRefusalError
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.wire import Request
from streammeta.brokers.kafka.service import server
from streammeta.brokers.kafka.service import server as module
from streammeta.brokers.kafka.service.users import Users, user_entry
from tests.kit.kafka_wire import framed, request_bytes

_LIST_GROUPS, _SYNC_GROUP = (16, 0), (14, 0)
_HANDSHAKE, _TOKEN = (17, 1), (36, 1)


class Calls:
    """Calls by their correlation ids: each waits for its own release."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.released: dict[int, asyncio.Event] = {}
        self.news = asyncio.Event()

    async def call(self, request: Request) -> Awaitable[Any]:
        number = request.correlation_id
        if number == 666:
            raise KeyError("unforeseen")
        self.begun.append(number)
        self.released.setdefault(number, asyncio.Event())
        self.news.set()
        return self._answer(number)

    async def answer(self, request: Request) -> Any:
        """Answer in one part."""
        return await (await self.call(request))

    async def _answer(self, number: int) -> Any:
        try:
            await self.released[number].wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            self.news.set()
            raise
        if number == 667:
            raise UnansweredRefusalError(["t-0: NOT_LEADER_OR_FOLLOWER"])
        return {"error_code": 0, "groups": ()}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()


class Peer:
    """A client's side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def ask(self, number: int, api: tuple[int, int] = _LIST_GROUPS, tree: Any = None) -> None:
        self.writer.write(framed(request_bytes(*api, tree or {}, number)))

    async def answered(self) -> int:
        """Read an answer; return the number of its request."""
        async with asyncio.timeout(60):
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return int.from_bytes((await self.reader.readexactly(size))[:4], "big")

    async def ends(self) -> bytes:
        """Return what comes until the server ends the connection."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    async def authenticate(self, password: str) -> None:
        self.ask(1, _HANDSHAKE, {"mechanism": "PLAIN"})
        await self.answered()
        self.ask(2, _TOKEN, {"auth_bytes": b"\0alice\0" + password.encode()})


class CountingServer(server.KafkaServer):
    """Counts the frames that it has read."""

    frames = 0
    news: asyncio.Event

    async def _read_frame(self, reader: asyncio.StreamReader, size: int) -> bytes:
        frame = await super()._read_frame(reader, size)
        self.frames += 1
        self.news.set()
        return frame


class Place:
    """A server, its calls, and connections to it."""

    def __init__(self, users: Users | None) -> None:
        broker = cast(Broker, None)
        self.server = CountingServer(broker, Groups(broker), users)
        self.calls = Calls()
        self.server.news = self.calls.news
        self.server._calls = dict.fromkeys((_LIST_GROUPS[0], _SYNC_GROUP[0]), self.calls.call)
        self.address: Any = None

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Peer]:
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            yield Peer(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def _place(users: Users | None = None) -> AsyncIterator[Place]:
    place = Place(users)
    listener = await asyncio.start_server(place.server.serve, "127.0.0.1", 0)
    place.address = listener.sockets[0].getsockname()
    try:
        yield place
    finally:
        listener.close()
        for event in place.calls.released.values():
            event.set()
        await place.server.close()


async def _turns() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


@pytest.fixture
def users(tmp_path: Path) -> Users:
    path = tmp_path / "users"
    path.write_text(user_entry("alice", "right"), "utf-8")
    return Users(path)


async def test_answers_come_in_the_order_of_requests_whichever_is_ready_first() -> None:
    async with _place() as place, place.peer() as peer:
        for number in (1, 2, 3):
            peer.ask(number)
        await place.calls.until(lambda: place.calls.begun == [1, 2, 3])
        for number in (3, 1, 2):
            place.calls.released[number].set()
        assert [await peer.answered() for _ in range(3)] == [1, 2, 3]
        await _turns()
        assert place.server._request_memory == 0


async def test_no_more_requests_wait_for_answers_than_may() -> None:
    async with _place() as place, place.peer() as peer:
        for number in range(3 * module.PENDING_MAX):
            peer.ask(number)
        await place.calls.until(lambda: len(place.calls.begun) >= module.PENDING_MAX)
        await _turns()
        # One is being answered, and one waits for room.
        assert len(place.calls.begun) <= module.PENDING_MAX + 2


async def test_calls_of_a_connection_that_ends_are_given_up() -> None:
    async with _place() as place:
        async with place.peer() as peer:
            for number in (1, 2, 3):
                peer.ask(number)
            await place.calls.until(lambda: len(place.calls.begun) == 3)
        await place.calls.until(lambda: sorted(place.calls.cancelled) == [1, 2, 3])
        await _turns()
        assert place.server._request_memory == 0


async def test_a_call_that_fails_unforeseen_ends_its_own_connection() -> None:
    async with _place() as place, place.peer() as other, place.peer() as peer:
        peer.ask(666)
        assert await peer.ends() == b""
        await _turns()
        assert place.server._request_memory == 0
        place.calls.released[1] = asyncio.Event()
        place.calls.released[1].set()
        other.ask(1)
        assert await other.answered() == 1


async def test_a_refusal_without_an_answer_ends_its_connection_in_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _place() as place, place.peer() as peer:
        for number in (1, 667, 2):
            peer.ask(number)
        await place.calls.until(lambda: len(place.calls.begun) == 3)
        for number in (2, 667, 1):
            place.calls.released[number].set()
        assert await peer.answered() == 1
        assert await peer.ends() == b""
    (logged,) = [row for row in caplog.records if "NOT_LEADER_OR_FOLLOWER" in row.getMessage()]
    assert logged.levelname == "WARNING"
    assert logged.exc_info is None


async def test_requests_behind_one_that_is_answered_later_begin_meanwhile() -> None:
    async with _place() as place, place.peer() as peer:
        place.server._calls = {_LIST_GROUPS[0]: module.answer_concurrently(place.calls.answer)}
        for number in (1, 2):
            peer.ask(number)
        await place.calls.until(lambda: place.calls.begun == [1, 2])
        for number in (1, 2):
            place.calls.released[number].set()
        assert [await peer.answered() for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("size", [-1, 0, 7, server.FRAME_MAX + 1, 2**31 - 1])
async def test_a_frame_of_a_size_that_no_request_has_ends_its_connection_unread(size: int) -> None:
    async with _place() as place, place.peer() as peer:
        peer.writer.write(size.to_bytes(4, "big", signed=True))
        assert await peer.ends() == b""
        assert place.server._request_memory == 0


async def test_a_stranger_is_served_nothing(users: Users) -> None:
    async with _place(users) as place, place.peer() as peer:
        peer.ask(1)
        assert await peer.ends() == b""
        assert place.calls.begun == []


async def test_a_wrong_password_ends_the_connection_before_what_was_sent_behind_it(
    users: Users,
) -> None:
    async with _place(users) as place, place.peer() as peer:
        await peer.authenticate("wrong")
        peer.ask(3)
        assert await peer.answered() == 2
        assert await peer.ends() == b""
        assert place.calls.begun == []


async def test_a_user_is_served_after_the_right_password(users: Users) -> None:
    async with _place(users) as place, place.peer() as peer:
        await peer.authenticate("right")
        assert await peer.answered() == 2
        peer.ask(3)
        await place.calls.until(lambda: place.calls.begun == [3])


async def test_a_stranger_may_send_small_frames_alone(users: Users) -> None:
    async with _place(users) as place, place.peer() as peer:
        peer.writer.write((server.UNAUTHENTICATED_FRAME_MAX + 1).to_bytes(4, "big"))
        assert await peer.ends() == b""
        assert place.server._tally.connections_refused == 1, "by its size, not for its silence"


async def test_a_stranger_that_says_nothing_is_sent_away(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AUTHENTICATION_TIMEOUT_S", 0.05)
    async with _place(users) as place, place.peer() as peer:
        assert await peer.ends() == b""
        assert place.server.connections == 0


# ---- a server that closes ----


async def _closing(place: Place) -> asyncio.Task[None]:
    await place.calls.until(lambda: place.calls.begun == [1])
    closing = asyncio.create_task(place.server.close())
    await asyncio.sleep(0)
    return closing


async def test_begun_request_is_answered_before_its_connection_ends() -> None:
    async with _place() as place, place.peer() as peer:
        peer.ask(1)
        closing = await _closing(place)
        place.calls.released[1].set()
        assert await peer.answered() == 1
        assert await peer.ends() == b""
        await closing


async def test_request_is_not_begun_once_the_server_closes() -> None:
    async with _place() as place, place.peer() as peer:
        peer.ask(1)
        closing = await _closing(place)
        peer.ask(2)
        await peer.writer.drain()
        await place.calls.until(lambda: place.server.frames == 2)
        place.calls.released[1].set()
        await closing
        assert await peer.answered() == 1
        assert await peer.ends() == b""
        assert place.calls.begun == [1]
        assert place.server._request_memory == 0


async def test_requests_that_wait_for_others_do_not_hold_up_the_end() -> None:
    async with _place() as place, place.peer() as peer:
        sync = {"group_id": "g", "generation_id": 1, "member_id": "m", "assignments": []}
        peer.ask(1, _SYNC_GROUP, sync)
        await (await _closing(place))
        assert await peer.ends() == b""
        assert not place.calls.released[1].is_set()


async def test_answers_that_do_not_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    async with _place() as place, place.peer() as peer:
        peer.ask(1)
        await (await _closing(place))
        assert await peer.ends() == b""


async def test_client_that_leaves_is_owed_nothing() -> None:
    async with _place() as place, place.peer() as peer:
        peer.ask(1)
        await place.calls.until(lambda: place.calls.begun == [1])
        peer.writer.close()
        await place.server.close()
        assert not place.calls.released[1].is_set()
        assert not place.server._unanswered
