"""One gRPC call: the task of its handler, and everything that `call_core` decides, carried out.

Implements the part of `grpc.aio.ServicerContext` that this product and gRPC's own services use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import grpc
import structlog

from streammeta.controller.grpc_server.call_core import OK, CallCore, CallRefusedError
from streammeta.controller.grpc_server.frames import ErrorCode
from streammeta.controller.grpc_server.headers import ANSWER_HEAD, Head, Metadata, metadata_block
from streammeta.controller.grpc_server.http2_connection import Session
from streammeta.controller.grpc_server.limits import Limits
from streammeta.controller.grpc_server.messages import MESSAGES_A_UNIT, framed
from streammeta.controller.grpc_server.method import Method
from streammeta.controller.grpc_server.refusals import busy, defect
from streammeta.controller.grpc_server.shares import Budget, Share
from streammeta.controller.grpc_server.stream import Stream

_log = structlog.get_logger(component="rpc")


class Turns(Protocol):
    """The server's turns of the event loop, as a call needs them."""

    budget: Budget

    def enqueue(self, call: Call, share: Share) -> None:
        """Begin a call now, in a later turn, or never."""

    def note_turn(self) -> None:
        """Begin another turn with the next one of the event loop."""


class CallConnection(Protocol):
    """The connection of a call, as the call needs it."""

    limits: Limits
    loop: asyncio.AbstractEventLoop
    session: Session
    share: Share
    peer: str
    proven: Mapping[str, Iterable[bytes]]

    @property
    def server(self) -> Turns:
        """The server's turns."""

    def hold(self, more: int) -> bool:
        """Count held bytes of requests. Return whether they are within the bounds."""

    def grant(self, stream: Stream, size: int) -> None:
        """Let the client send so many bytes more."""

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a call at once, without a status."""

    def flush(self) -> None:
        """Write pending output to the transport."""


class Call(grpc.aio.ServicerContext[Any, Any]):
    """A call under way, and the context of its handler."""

    def __init__(
        self, connection: CallConnection, stream: Stream, head: Head, method: Method
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._head = head
        self.method = method
        self._limits = connection.limits
        self._core = CallCore(self._limits, head.encoding, method.request_streaming)
        self._task: asyncio.Task[None] | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._departure: asyncio.Future[None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

        if head.timeout_s is not None:
            loop = connection.loop
            self._deadline = loop.time() + head.timeout_s
            self._timer = loop.call_at(self._deadline, self._expire)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes or goes."""
        return self._core.is_over

    # -- input

    def take(self, data: bytes) -> None:
        """Take bytes of the request.

        Raises:
            Http2Error: the client breaks calls off too often.
        """
        core = self._core
        if core.has_status:
            return
        was_begun = core.is_begun
        try:
            self._read(data)
        except CallRefusedError as refusal:
            self.refuse(*refusal.args)
        if was_begun and core.has_status:
            # Its handler has worked for nothing, as if the client had reset the stream.
            self._connection.session.count_broken()

    def _read(self, data: bytes) -> None:
        core, is_ended = self._core, self._stream.is_ended_there
        count = core.receive(data) if data else 0
        if self.method.request_streaming:
            self._connection.session.spent += count // MESSAGES_A_UNIT
            arrival = self._arrival
            if (count or is_ended) and arrival is not None and not arrival.done():
                arrival.set_result(None)

        if not is_ended:
            self._account()
            return
        core.end_request()
        if not self.method.request_streaming:
            self.begin()

    def _account(self) -> None:
        """Count held bytes, and grant the client as many as it may send."""
        core, connection = self._core, self._connection
        if (more := core.count_held()) and not connection.hold(more):
            self.refuse(*busy("too many requests are not complete"))
        elif granted := core.grant(self._stream.granted):
            connection.grant(self._stream, granted)

    def __aiter__(self) -> Call:
        """Return the messages of the caller."""
        return self

    async def __anext__(self) -> Any:
        """Return the next message of the caller."""
        data = await self._next()
        if data is None:
            raise StopAsyncIteration
        deserialize = self.method.deserialize
        return data if deserialize is None else deserialize(data)

    async def _next(self) -> bytes | None:
        core = self._core
        while not core.messages:
            if self._stream.is_ended_there or core.is_over:
                return None
            self._arrival = self._connection.loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None

        server = self._connection.server
        if server.budget.is_spent:
            # So that a handler that never waits leaves others their turn. It takes one message
            # then, which is not charged: many such handlers would use up turns before they begin.
            server.note_turn()
            await asyncio.sleep(0)
        else:
            server.budget.units -= 1

        # None if the call has ended meanwhile.
        message = core.take_message()
        if message is not None and not core.has_ended:
            self._account()
        return message

    # -- its handler

    def begin(self) -> None:
        """Let the handler run when it is this call's turn."""
        self._core.begin()
        self._connection.server.enqueue(self, self._connection.share)

    def start(self) -> None:
        """Let the handler run."""
        if not self._core.is_over:
            if self._core.held and not self.method.request_streaming:
                self._connection.hold(-self._core.release())
            self._task = self._connection.loop.create_task(self._run())

    async def _run(self) -> None:
        method = self.method
        try:
            request: Any = self if method.request_streaming else self._core.take_message()
            if method.deserialize is not None and not method.request_streaming:
                request = method.deserialize(request)

            outcome = method.behavior(request, self)
            if not method.response_streaming:
                self._answer(await outcome)
                return

            if hasattr(outcome, "__aiter__"):
                async for message in outcome:
                    await self.write(message)
            else:
                await outcome

            self._end()
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self.refuse(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - the one place that answers for every defect
            self._end_broken(error)
        finally:
            self._connection.flush()
            if not self._core.is_over and method.response_streaming:
                self._connection.loop.call_later(self._limits.unread_s, self._drop_unread)

    def _end_broken(self, error: Exception) -> None:
        """Answer for a handler that raised an error."""
        code, details = self._core.code, self._core.details
        is_missing = code is grpc.StatusCode.UNIMPLEMENTED
        if is_missing and isinstance(error, NotImplementedError):  # so says gRPC's generated code
            self.refuse(code, details)
            return
        _log.error("request_failed", path=self._head.path, exc_info=error)
        self.refuse(grpc.StatusCode.UNKNOWN, f"defect in the controller ({type(error).__name__})")

    def _answer(self, answer: Any) -> None:
        serialize = self.method.serialize
        data: bytes = answer if serialize is None else serialize(answer)
        core = self._core
        if core.code is OK and not core.has_ended:
            if len(data) > self._limits.answer_bytes:
                self._refuse_answer(len(data))
                return
            self._send(data)
        self._end()

    def _send(self, message: bytes) -> bool:
        """Send a message. Return whether all of it is on its way."""
        session = self._connection.session
        if head := self._core.open_answer():
            session.send_head(self._stream, head)
        return session.send(self._stream, framed(message))

    def _refuse_answer(self, size: int) -> None:
        """End a call whose handler answers more than clients accept, which no handler should."""
        most = self._limits.answer_bytes
        details = f"defect in the controller: an answer of {size} bytes exceeds the limit of {most}"
        _log.error("answer_too_large", path=self._head.path, bytes=size, most=most)
        self.refuse(*defect(details))

    def _drop_unread(self) -> None:
        """Reset a call whose caller does not read the rest of its answer."""
        if not self._core.is_over:
            self._connection.reset(self._stream, ErrorCode.CANCEL)

    def _expire(self) -> None:
        self.refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed")

    # -- its end

    def refuse(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        """End the call with a status, and its handler if it runs."""
        if self._core.has_status:
            return
        self._finish(code, details, trailing)
        self._cancel()
        self._connection.flush()

    def drop(self) -> None:
        """Reject the call unread, at almost no cost. Its client may retry it here or elsewhere."""
        if not self._core.is_over:
            self._core.drop()
            self._connection.reset(self._stream, ErrorCode.REFUSED_STREAM)

    def closed(self, *, by_client: bool) -> None:
        """Take note that nothing more comes or goes."""
        if held := self._core.close(by_client=by_client):
            self._connection.hold(-held)
        if self._timer is not None:
            self._timer.cancel()

        for waiter in (self._arrival, self._departure):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

        if not self._core.has_status:
            self._cancel()
        for callback in self._callbacks:
            callback(self)

        self._callbacks.clear()

    def sent(self) -> None:
        """Take note that all that was written is on its way."""
        if self._departure is not None and not self._departure.done():
            self._departure.set_result(None)

    def _cancel(self) -> None:
        task = self._task
        if task is not None and not task.done() and task is not _running():
            task.cancel()

    def _end(self) -> None:
        """End the call with the status that its handler has set, unless it has ended."""
        core = self._core
        self._finish(core.code, core.details, core.trailing)

    def _finish(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        if not self._core.has_ended:
            block = self._core.finish(code, details, trailing)
            self._connection.session.end(self._stream, block)

    async def _departed(self) -> None:
        """Wait until nothing is unsent, or the call is over."""
        while not self._core.is_over and self._stream.unsent:
            self._departure = self._connection.loop.create_future()
            try:
                await self._departure
            finally:
                self._departure = None

    # -- context of the handler

    async def read(self) -> Any:
        """Return the caller's next message, or `grpc.aio.EOF` after the last one."""
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Send a message. Return when all of it is on its way to the caller."""
        if self._core.has_ended:
            raise grpc.aio.UsageError("the call has ended")

        serialize = self.method.serialize
        data: bytes = message if serialize is None else serialize(message)
        if len(data) > self._limits.answer_bytes:
            self._refuse_answer(len(data))
            raise grpc.aio.AbortError("the message is too large")

        is_sent = self._send(data)
        self._connection.flush()
        if not is_sent:
            await self._departed()

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Send metadata before the first message."""
        if head := self._core.open_answer(ANSWER_HEAD + metadata_block(initial_metadata)):
            self._connection.session.send_head(self._stream, head)
            self._connection.flush()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call with a status. Raises AbortError when the status is on its way."""
        if not self._core.has_status:
            self._finish(code, details, tuple(trailing_metadata or self._core.trailing))
            self._connection.flush()
            await self._departed()
        raise grpc.aio.AbortError(details)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Set the metadata that is sent with the status."""
        self._core.trailing = tuple(trailing_metadata)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status, like `abort`."""
        await self.abort(status.code, status.details, status.trailing_metadata)

    def invocation_metadata(self) -> Any:
        """Return the metadata of the request."""
        return self._head.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status by which the call ends."""
        self._core.code = code

    def set_details(self, details: str) -> None:
        """Set the text of the status."""
        self._core.details = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Ignore the setting: nothing is compressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: nothing is compressed."""

    def peer(self) -> str:
        """Return the caller's address and port, such as `ipv4:127.0.0.1:5`."""
        return self._connection.peer

    def peer_identities(self) -> Iterable[bytes] | None:
        """Return the names in the caller's certificate."""
        return [*self.auth_context().get("peer_uri", ())] or None

    def peer_identity_key(self) -> str | None:
        """Return the name under which `auth_context` has them."""
        return None if self.peer_identities() is None else "peer_uri"

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return what the connection's handshake has proven."""
        return self._connection.proven

    def time_remaining(self) -> Any:
        """Return the time until the caller's deadline in seconds, None without a deadline."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self._connection.loop.time())

    def trailing_metadata(self) -> Any:
        """Return the metadata that is sent with the status."""
        return self._core.trailing

    def code(self) -> grpc.StatusCode:
        """Return the status by which the call ends."""
        return self._core.code

    def details(self) -> str:
        """Return the text of the status."""
        return self._core.details

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have `callback` called when all of the answer is sent, or the caller is gone."""
        if self._core.is_over:
            callback(self)
        else:
            self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the caller has given the call up."""
        return self._core.is_given_up

    def done(self) -> bool:
        """Whether the call is over."""
        return self._core.is_over


def _running() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
