"""Connections of Kafka clients: bounded frames, answers in the order of requests.

Requests of a connection begin in order; those that wait for something do so side by side, a bounded
number of them. What can't be read, is too large, or fails unforeseen ends its own connection.
Memory for requests counts as their bytes arrive and as their elements are read. When it is too
much, the connection whose unfinished request holds the most ends. Requests of all connections
share the turns of the event loop. Where there are users, a connection has to authenticate before
anything else. A server that closes begins no more requests, and answers those that have begun
before it ends the connections: the answer to a producer's batch reaches it if it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streammeta.brokers.kafka.calls import admin_calls, config_calls, record_calls, topic_calls
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.request_turns import RequestTurns
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.protocol.wire import (
    API_VERSIONS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    MalformedRequestError,
    Request,
    Tree,
    api_versions,
    read_request,
    write_response,
)
from streammeta.brokers.kafka.service.authentication import (
    APIS_BEFORE,
    Authentication,
    AuthenticationFailedError,
    refused_later,
)
from streammeta.brokers.kafka.service.users import Users

FRAME_MAX = 32 * 1024 * 1024
"""Largest request in bytes."""
FRAME_MAX_BEFORE = 64 * 1024
"""Largest request of a connection that has not authenticated."""
AUTHENTICATED_WITHIN_S = 10.0
"""Time that a connection has to authenticate."""
REFUSAL_HEARD_WITHIN_S = 1.0
"""Time that a client has to read why it is refused, before its connection ends."""
PENDING_MAX = 32
"""Requests of a connection that may wait for their answers."""
HELD_MAX = 256 * 1024 * 1024
"""Bytes of requests of all connections that are being read or answered."""
ELEMENT_BYTES = 256
"""Memory that an element of a request holds beyond the bytes of its frame."""
FRAME_WITHIN_S = 60.0
"""Time in which a request has to arrive, once its size is known."""
ROWS_ON_THE_LOOP = 1000
"""Elements and rows of an answer that is written on the event loop; a thread writes larger ones."""
ANSWERED_WITHIN_S = 5.0
"""Time for answers of begun requests when the server closes."""
_PIECE = 64 * 1024
_WAITING_APIS = frozenset((1, 11, 14))
"""Fetch, JoinGroup and SyncGroup wait for others, and change nothing that a client must know of."""

_log = logging.getLogger(__name__)

Call = Callable[[Request], Awaitable[Any]]


class KafkaServer:
    """Serves one broker, to `users` alone if they are given, and counts in `tally`."""

    def __init__(
        self,
        broker: Broker,
        groups: Groups,
        users: Users | None = None,
        tally: BrokerTally | None = None,
    ) -> None:
        self._calls = _calls(broker, groups)
        self._tally = tally or BrokerTally()
        self._users = users
        self._connections: set[asyncio.Task[None]] = set()
        self._arriving: dict[asyncio.Task[None], int] = {}
        self._held = 0
        self._turns = RequestTurns()
        self._owed: Counter[asyncio.Task[None]] = Counter()
        self._paid = asyncio.Event()
        self._is_closing = False

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends; a callback of `asyncio.start_server`."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._tally.connections_opened += 1
        try:
            await self._authenticate(reader, writer)
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (MalformedRequestError, AuthenticationFailedError) as error:
            self._tally.connections_refused += 1
            peer = writer.get_extra_info("peername")
            _log.warning("a connection of %s is closed: %s", peer and peer[0], error)
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            self._connections.discard(task)
            self._pay(task, self._owed[task])
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def close(self) -> None:
        """Begin no more requests, answer what has begun in a bounded time, end all connections."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERED_WITHIN_S):
                while self._owed:
                    self._paid.clear()
                    await self._paid.wait()
        for one in tuple(self._connections):
            one.cancel()
        if self._connections:
            await asyncio.wait(tuple(self._connections))

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Return once the client may be served.

        Raises `AuthenticationFailedError`, `MalformedRequestError`, and `TimeoutError`.
        """
        if self._users is None:
            return
        authentication = Authentication(self._users)
        async with asyncio.timeout(AUTHENTICATED_WITHIN_S):
            while authentication.user is None:
                frame = await reader.readexactly(await _size(reader, FRAME_MAX_BEFORE, 0))
                if authentication.takes_bare_tokens:
                    await authentication.take(frame)
                    writer.write(bytes(4))
                else:
                    request = _read_secret(frame)
                    self._tally.requests[request.api_key] += 1
                    try:
                        answer = await authentication.answer(request)
                        self._tally.answered(answer)
                        writer.writelines(write_response(request, answer))
                    except AuthenticationFailedError as error:
                        if error.answer is not None:
                            self._tally.answered(error.answer)
                            writer.writelines(write_response(request, error.answer))
                            await writer.drain()
                            await _heard(reader)
                        raise
                await writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers: asyncio.Queue[Answering] = asyncio.Queue(PENDING_MAX)
        task = asyncio.current_task()
        assert task is not None
        sending = asyncio.create_task(self._send_answers(answers, writer, task))
        try:
            await self._read_requests(reader, answers, task)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            while not answers.empty():
                answers.get_nowait().task.cancel()

    async def _read_requests(
        self,
        reader: asyncio.StreamReader,
        answers: asyncio.Queue[Answering],
        connection: asyncio.Task[None],
    ) -> None:
        while True:
            size = await _size(reader, FRAME_MAX)
            frame = await self._read_frame(reader, size)
            if self._is_closing:
                # Read all the same: what lies unread at the end takes answers with it.
                self._release(size)
                continue
            try:
                request = read_request(frame)
                size += self._hold(request.elements * ELEMENT_BYTES)
                self._tally.requests[request.api_key] += 1
                is_owed = request.api_key not in _WAITING_APIS
                if is_owed:
                    self._owed[connection] += 1
                answer = await self._begin(request)
            except BaseException:
                self._held -= size
                raise
            task = asyncio.ensure_future(answer)
            task.add_done_callback(lambda _, size=size: self._release(size))  # type: ignore[misc]
            await answers.put(Answering(request, task, is_owed=is_owed))

    async def _send_answers(
        self,
        answers: asyncio.Queue[Answering],
        writer: asyncio.StreamWriter,
        connection: asyncio.Task[None],
    ) -> None:
        """Write answers in order, until cancelled; a failure closes the connection."""
        try:
            while True:
                one = await answers.get()
                try:
                    tree = await one.task
                except asyncio.CancelledError:
                    one.task.cancel()
                    raise
                if tree is not None:
                    self._tally.answered(tree)
                    for piece in await _write_answer(one.request, tree):
                        writer.write(piece)
                        await writer.drain()
                self._pay(connection, one.is_owed)
        except OSError:
            pass
        except record_calls.UnansweredRefusalError as error:
            peer = writer.get_extra_info("peername")
            _log.warning("the broker closes a connection of %s: %s", peer and peer[0], error)
        except Exception:  # noqa: BLE001 - it is logged, and ends no more than this connection
            _log.exception("an answer could not be made")
        writer.close()
        while True:  # the reader of requests ends soon, and must not wait for room until then
            (await answers.get()).task.cancel()

    def _pay(self, connection: asyncio.Task[None], answers: int) -> None:
        """Note that so many answers are written, or never will be."""
        self._owed[connection] -= answers
        if not self._owed[connection]:
            del self._owed[connection]
        self._paid.set()

    async def _read_frame(self, reader: asyncio.StreamReader, size: int) -> bytes:
        """Read a request of a size in its turn, and hold its memory. Raises `TimeoutError`."""
        task = asyncio.current_task()
        assert task is not None
        pieces = []
        self._arriving[task] = 0
        try:
            async with asyncio.timeout(FRAME_WITHIN_S):
                while (left := size - self._arriving[task]) > 0:
                    piece = await reader.readexactly(min(left, _PIECE))
                    pieces.append(piece)
                    self._arriving[task] += len(piece)
                    self._held += len(piece)
                    self._make_room()
                await self._turns.wait(size)
        except BaseException:
            self._held -= self._arriving[task]
            raise
        finally:
            del self._arriving[task]
        return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    def _make_room(self) -> None:
        """End the connection whose unfinished request holds the most, if all hold too much."""
        if self._held > HELD_MAX:
            largest = max(self._arriving, key=self._arriving.__getitem__)
            _log.warning("a connection is closed: requests under way hold too much memory")
            largest.cancel()

    def _hold(self, size: int) -> int:
        self._held += size
        return size

    def _release(self, size: int) -> None:
        self._held -= size

    async def _begin(self, request: Request) -> Awaitable[Tree | None]:
        """Do what is done in order; return what gives the answer."""
        if request.api_key == API_VERSIONS:
            return _given(api_versions(request))
        try:
            outcome = await self._calls[request.api_key](request)
        except Exception as error:
            _log.exception("API %d failed", request.api_key)
            raise MalformedRequestError(f"API {request.api_key} failed: {error}") from error
        return outcome if asyncio.iscoroutine(outcome) else _given(outcome)


async def _write_answer(request: Request, tree: Tree) -> Sequence[bytes]:
    """Return the pieces of an answer; other connections are served while a large one is written."""
    rows = sum(len(field) for field in tree.values() if isinstance(field, (list, tuple)))
    if request.elements + rows <= ROWS_ON_THE_LOOP:
        return write_response(request, tree)
    return await asyncio.to_thread(write_response, request, tree)


def _read_secret(frame: bytes) -> Request:
    """Read a request of a client that may send a password; errors have nothing of it."""
    try:
        return read_request(frame, APIS_BEFORE)
    except MalformedRequestError:
        raise MalformedRequestError("a request before authentication can't be read") from None


async def _heard(reader: asyncio.StreamReader) -> None:
    """Wait until a refused client leaves, or says more.

    Some clients look at the end of a connection before what came last on it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_HEARD_WITHIN_S):
            await reader.read(1)


async def _size(reader: asyncio.StreamReader, most: int, least: int = 8) -> int:
    """Read the size of the next frame. Raises `MalformedRequestError`."""
    size = int.from_bytes(await reader.readexactly(4), "big", signed=True)
    if not least <= size <= most:
        raise MalformedRequestError(f"a request has {size} bytes, wanted {least}..{most}")
    return size


class Answering:
    """A request whose answer is on its way."""

    __slots__ = ("is_owed", "request", "task")

    def __init__(
        self, request: Request, task: asyncio.Future[Tree | None], *, is_owed: bool
    ) -> None:
        self.request = request
        self.task = task
        self.is_owed = is_owed


async def _given(tree: Tree | None) -> Tree | None:
    return tree


def answered_later(call: Call) -> Call:
    """Return a call that begins in its turn, and does not delay the requests after it."""

    async def begin(request: Request) -> Any:
        return call(request)

    return begin


def _calls(broker: Broker, groups: Groups) -> Mapping[int, Call]:
    """Return the calls by API key."""

    def on(call: Callable[[Broker, Request], Awaitable[Any]]) -> Call:
        return lambda request: call(broker, request)

    return {
        0: on(record_calls.produce),
        1: on(record_calls.fetch),
        2: on(record_calls.list_offsets),
        3: answered_later(on(topic_calls.metadata)),
        8: groups.commit,
        9: groups.fetch_offsets,
        10: groups.find_coordinator,
        11: groups.join,
        12: groups.heartbeat,
        13: groups.leave,
        14: groups.sync,
        15: groups.describe,
        16: groups.list_groups,
        SASL_HANDSHAKE: refused_later,
        19: on(topic_calls.create_topics),
        20: on(topic_calls.delete_topics),
        21: on(record_calls.delete_records),
        22: on(topic_calls.init_producer_id),
        23: on(record_calls.offset_for_leader_epoch),
        29: on(admin_calls.describe_acls),
        32: on(config_calls.describe_configs),
        33: on(config_calls.alter_configs),
        35: on(admin_calls.describe_log_dirs),
        SASL_AUTHENTICATE: refused_later,
        37: on(topic_calls.create_partitions),
        42: groups.delete,
        44: on(config_calls.incremental_alter_configs),
        47: groups.delete_offsets,
        60: on(topic_calls.describe_cluster),
    }
