"""Connections of Kafka clients: bounded frames, answers in the order of requests.

Requests of a connection start in order. Requests that wait run concurrently, up to a bound. A
request that is unreadable, too large or fails unexpectedly ends its own connection. Memory is
counted as the bytes of requests arrive and as their elements are parsed. When it exceeds the bound,
the connection with the largest unfinished request is closed. Requests of all connections share the
turns of the event loop. With users configured, a connection has to authenticate first. A closing
server starts no more requests and answers the started ones before it ends the connections, so that
producers see the result of their batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streammeta.brokers.kafka.calls import admin_calls, record_calls, topic_calls
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol import wire
from streammeta.brokers.kafka.protocol.request_elements import ELEMENTS_MAX
from streammeta.brokers.kafka.protocol.tally import BrokerTally
from streammeta.brokers.kafka.service.authentication import (
    APIS_BEFORE,
    Authentication,
    AuthenticationFailedError,
    reject_authentication,
)
from streammeta.brokers.kafka.service.users import Users

# -- Bound on the work of requests that start in one turn of the event loop

TURN_WORK_MAX = ELEMENTS_MAX
"""Maximum work per turn: one request with the most elements, or many small ones."""


class RequestTurns:
    """Turns of the event loop, shared by connections in the order in which they ask."""

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._begun = 0

    async def wait(self, frame_bytes: int) -> None:
        """Wait until a request of this size may start. Every element has at least one byte."""
        work = min(frame_bytes, ELEMENTS_MAX)
        async with self._order:
            if self._begun + work > TURN_WORK_MAX:
                # Other connections and heartbeats run before the next request is parsed.
                await asyncio.sleep(0)
                self._begun = 0
            self._begun += work


FRAME_MAX = 32 * 1024 * 1024
"""Maximum size of a request in bytes."""
UNAUTHENTICATED_FRAME_MAX = 64 * 1024
"""Maximum size of a request before authentication, in bytes."""
AUTHENTICATION_TIMEOUT_S = 10.0
"""Time limit for authentication, in seconds."""
REJECTION_READ_TIMEOUT_S = 1.0
"""Time for a client to read an authentication error before its connection ends, in seconds."""
# A client that never reads its answers is stopped here.
PENDING_MAX = 32
"""Maximum number of requests of a connection that wait for their answers."""
REQUEST_MEMORY_MAX = 256 * 1024 * 1024
"""Maximum bytes of requests of all connections that are being read or answered."""
ELEMENT_BYTES = 256
"""Memory for an element of a request in addition to the bytes of its frame."""
FRAME_TIMEOUT_S = 60.0
"""Time limit for a request to arrive after its size, in seconds."""
LOOP_ROWS_MAX = 1000
"""Maximum elements and rows of an answer encoded on the event loop. A thread encodes larger ones.

"""
CLOSE_TIMEOUT_S = 5.0
"""Time limit for answers of started requests when the server closes, in seconds."""
# Memory is counted per piece, so a large announced size costs nothing until its bytes arrive.
_PIECE = 64 * 1024
_WAITING_APIS = frozenset((1, 11, 14))
"""Fetch, JoinGroup and SyncGroup wait for others and change nothing a client must know about."""

_log = logging.getLogger(__name__)

Call = Callable[[wire.Request], Awaitable[Any]]


class KafkaServer:
    """Server of one broker. `users` restrict it to authenticated clients. `tally` counts."""

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
        self._request_memory = 0
        self._turns = RequestTurns()
        self._unanswered: Counter[asyncio.Task[None]] = Counter()
        self._answer_written = asyncio.Event()
        self._is_closing = False

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends. Callback of `asyncio.start_server`."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._tally.connections_opened += 1
        try:
            # Before authentication only small frames and few APIs are read.
            await self._authenticate(reader, writer)
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (wire.MalformedRequestError, AuthenticationFailedError) as error:
            self._tally.connections_refused += 1
            peer = writer.get_extra_info("peername")
            _log.warning("closing a connection from %s: %s", peer and peer[0], error)
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            # Answers that were not written never will be, and close() must not wait for them.
            self._connections.discard(task)
            self._settle_answers(task, self._unanswered[task])
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def close(self) -> None:
        """Answer the started requests within a time limit, then end all connections."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._unanswered:
                    self._answer_written.clear()
                    await self._answer_written.wait()
        for connection in tuple(self._connections):
            connection.cancel()
        if self._connections:
            await asyncio.wait(tuple(self._connections))

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Return once the client is authenticated, or immediately if there are no users.

        Raises `AuthenticationFailedError`, `MalformedRequestError`, and `TimeoutError`.
        """
        if self._users is None:
            return

        authentication = Authentication(self._users)
        async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
            while authentication.user is None:
                frame = await reader.readexactly(await _size(reader, UNAUTHENTICATED_FRAME_MAX, 0))
                if authentication.expects_bare_token:
                    await authentication.verify_token(frame)
                    # An empty token, as the old handshake answers without a request around it.
                    writer.write(bytes(4))
                else:
                    request = _read_unauthenticated(frame)
                    self._tally.requests[request.api_key] += 1
                    try:
                        answer = await authentication.answer(request)
                        self._tally.count_errors(answer)
                        writer.writelines(wire.write_response(request, answer))
                    except AuthenticationFailedError as error:
                        if error.answer is not None:
                            self._tally.count_errors(error.answer)
                            writer.writelines(wire.write_response(request, error.answer))
                            await writer.drain()
                            await _wait_for_client(reader)
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
                # Closing a socket with unread bytes resets it, and answers in flight are lost.
                # So the server keeps reading.
                self._release(size)
                continue

            try:
                request = wire.read_request(frame)
                size += self._reserve(request.elements * ELEMENT_BYTES)
                self._tally.requests[request.api_key] += 1
                counts_as_unanswered = request.api_key not in _WAITING_APIS
                if counts_as_unanswered:
                    self._unanswered[connection] += 1
                answer = await self._begin(request)
            except BaseException:
                self._request_memory -= size
                raise

            task = asyncio.ensure_future(answer)
            # The default argument binds the size now: the loop changes the variable.
            task.add_done_callback(lambda _, size=size: self._release(size))  # type: ignore[misc]
            await answers.put(Answering(request, task, counts_as_unanswered=counts_as_unanswered))

    async def _send_answers(
        self,
        answers: asyncio.Queue[Answering],
        writer: asyncio.StreamWriter,
        connection: asyncio.Task[None],
    ) -> None:
        """Write answers in order until cancelled. A failure closes the connection."""
        try:
            while True:
                answering = await answers.get()
                try:
                    tree = await answering.task
                except asyncio.CancelledError:
                    answering.task.cancel()
                    raise
                if tree is not None:
                    self._tally.count_errors(tree)
                    for piece in await _write_answer(answering.request, tree):
                        writer.write(piece)
                        await writer.drain()
                self._settle_answers(connection, answering.counts_as_unanswered)
        except OSError:
            pass
        except record_calls.UnansweredRefusalError as error:
            peer = writer.get_extra_info("peername")
            _log.warning("closing a connection from %s: %s", peer and peer[0], error)
        except Exception:  # noqa: BLE001 - it is logged, and ends no more than this connection
            _log.exception("encoding an answer failed, closing its connection")

        writer.close()
        while True:  # the reader of requests ends soon, and must not wait for room until then
            (await answers.get()).task.cancel()

    def _settle_answers(self, connection: asyncio.Task[None], answers: int) -> None:
        """Record that this number of answers was written, or never will be."""
        self._unanswered[connection] -= answers
        if not self._unanswered[connection]:
            del self._unanswered[connection]
        self._answer_written.set()

    async def _read_frame(self, reader: asyncio.StreamReader, size: int) -> bytes:
        """Read a request in its turn and reserve its memory. Raises `TimeoutError`."""
        task = asyncio.current_task()
        assert task is not None
        pieces = []
        self._arriving[task] = 0
        try:
            async with asyncio.timeout(FRAME_TIMEOUT_S):
                while (left := size - self._arriving[task]) > 0:
                    piece = await reader.readexactly(min(left, _PIECE))
                    pieces.append(piece)
                    self._arriving[task] += len(piece)
                    self._request_memory += len(piece)
                    self._make_room()
                # Parsing starts in this connection's turn, and blocks the loop for a bounded time.
                await self._turns.wait(size)
        except BaseException:
            self._request_memory -= self._arriving[task]
            raise
        finally:
            del self._arriving[task]

        return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    def _make_room(self) -> None:
        """End the connection with the largest unfinished request at the memory bound."""
        if self._request_memory > REQUEST_MEMORY_MAX:
            # Only a connection whose request is still arriving can be closed without losing a
            # result.
            largest = max(self._arriving, key=self._arriving.__getitem__)
            _log.warning(
                "closing the connection with the largest unfinished request:"
                " requests exceed the memory bound"
            )
            largest.cancel()

    def _reserve(self, size: int) -> int:
        self._request_memory += size
        return size

    def _release(self, size: int) -> None:
        self._request_memory -= size

    async def _begin(self, request: wire.Request) -> Awaitable[wire.Tree | None]:
        """Do the ordered part of a request, and return an awaitable of its answer."""
        if request.api_key == wire.API_VERSIONS:
            return _return_answer(wire.api_versions(request))
        try:
            outcome = await self._calls[request.api_key](request)
        except Exception as error:
            _log.exception("API %d failed", request.api_key)
            raise wire.MalformedRequestError(f"API {request.api_key} failed: {error}") from error
        return outcome if asyncio.iscoroutine(outcome) else _return_answer(outcome)


async def _write_answer(request: wire.Request, tree: wire.Tree) -> Sequence[bytes]:
    """Return the pieces of an answer. A thread encodes a large one, so that others are served."""
    rows = sum(len(field) for field in tree.values() if isinstance(field, (list, tuple)))
    # A thread costs a switch, which only pays off for large answers.
    if request.elements + rows <= LOOP_ROWS_MAX:
        return wire.write_response(request, tree)
    return await asyncio.to_thread(wire.write_response, request, tree)


def _read_unauthenticated(frame: bytes) -> wire.Request:
    """Read a request that may contain a password. Errors do not quote its content."""
    try:
        return wire.read_request(frame, APIS_BEFORE)
    except wire.MalformedRequestError:
        raise wire.MalformedRequestError("a request before authentication is unreadable") from None


async def _wait_for_client(reader: asyncio.StreamReader) -> None:
    """Wait until a rejected client leaves or sends more bytes.

    Some clients notice the end of a connection before they read its last answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REJECTION_READ_TIMEOUT_S):
            await reader.read(1)


async def _size(reader: asyncio.StreamReader, most: int, least: int = 8) -> int:
    """Read the size of the next frame. Raises `MalformedRequestError`."""
    size = int.from_bytes(await reader.readexactly(4), "big", signed=True)
    if not least <= size <= most:
        raise wire.MalformedRequestError(f"a request has {size} bytes, expected {least} to {most}")
    return size


class Answering:
    """A started request with the task that answers it."""

    __slots__ = ("counts_as_unanswered", "request", "task")

    def __init__(
        self,
        request: wire.Request,
        task: asyncio.Future[wire.Tree | None],
        *,
        counts_as_unanswered: bool,
    ) -> None:
        self.request = request
        self.task = task
        self.counts_as_unanswered = counts_as_unanswered


async def _return_answer(tree: wire.Tree | None) -> wire.Tree | None:
    return tree


def answer_concurrently(call: Call) -> Call:
    """Return a call that starts in order but does not delay the requests after it."""

    async def begin(request: wire.Request) -> Any:
        return call(request)

    return begin


def _calls(broker: Broker, groups: Groups) -> Mapping[int, Call]:
    """Return the handlers by API key."""

    def on(call: Callable[[Broker, wire.Request], Awaitable[Any]]) -> Call:
        return lambda request: call(broker, request)

    return {
        0: on(record_calls.produce),
        1: on(record_calls.fetch),
        2: on(record_calls.list_offsets),
        3: answer_concurrently(on(topic_calls.metadata)),
        8: groups.commit,
        9: groups.fetch_offsets,
        10: groups.find_coordinator,
        11: groups.join,
        12: groups.heartbeat,
        13: groups.leave,
        14: groups.sync,
        15: groups.describe,
        16: groups.list_groups,
        wire.SASL_HANDSHAKE: reject_authentication,
        19: on(topic_calls.create_topics),
        20: on(topic_calls.delete_topics),
        21: on(record_calls.delete_records),
        22: on(topic_calls.init_producer_id),
        23: on(record_calls.offset_for_leader_epoch),
        29: on(admin_calls.describe_acls),
        32: on(admin_calls.describe_configs),
        33: on(admin_calls.alter_configs),
        35: on(admin_calls.describe_log_dirs),
        wire.SASL_AUTHENTICATE: reject_authentication,
        37: on(topic_calls.create_partitions),
        42: groups.delete,
        44: on(admin_calls.incremental_alter_configs),
        47: groups.delete_offsets,
        60: on(topic_calls.describe_cluster),
    }
