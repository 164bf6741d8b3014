"""Calls to a controller's services without gRPC: real handlers, and a network that loses answers.

A `Link` is the network of one process. What it has sent may land long after it failed, and lands
also if its process has died meanwhile. Only unary calls and `CommitPipeline` are carried; watches
find no controller.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
from grpc.aio import AioRpcError, Metadata

Trailer = Sequence[tuple[str, str | bytes]]


class _Context:
    """The call as the handler sees it."""

    def __init__(self, answer: Callable[[bytes], None] | None = None) -> None:
        self.trailer: Trailer = ()
        self._answer = answer

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> Trailer:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {"transport_security_type": [b"insecure"]}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, _: Callable[[Any], None]) -> None:
        """No answer is on its way for long."""

    def set_trailing_metadata(self, trailer: Trailer) -> None:
        self.trailer = trailer

    async def abort(self, code: grpc.StatusCode, details: str, trailer: Trailer) -> NoReturn:
        raise AioRpcError(code, Metadata(), Metadata(*trailer), details)

    async def write(self, data: bytes) -> None:
        assert self._answer is not None
        self._answer(data)


class LocalServices:
    """Handlers of a controller, called by the paths of their methods."""

    def __init__(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers = tuple(handlers)
        self._late: set[asyncio.Task[Any]] = set()

    def find(self, path: str) -> Any:
        details: Any = SimpleNamespace(method=path, invocation_metadata=())
        found = (handler.service(details) for handler in self._handlers)
        return next(handler for handler in found if handler is not None)

    async def answer(self, path: str, data: bytes) -> tuple[bytes, Trailer]:
        """Carry out a unary call in a task of its own, as a server does."""
        handler, context = self.find(path), _Context()
        answer = await asyncio.create_task(handler.unary_unary(data, context))
        return handler.response_serializer(answer), context.trailer

    async def answer_message(self, path: str, data: bytes) -> bytes:
        """Carry out one message of a pipeline."""
        answers: list[bytes] = []

        async def messages() -> AsyncIterator[bytes]:
            yield data

        context = _Context(answers.append)
        await asyncio.create_task(self.find(path).stream_stream(messages(), context))
        return answers[0]

    def carry_out_late(self, work: Callable[[], Any], delay_s: float) -> None:
        """Let a request land after its sender has given it up."""

        async def land() -> None:
            await asyncio.sleep(delay_s)
            await work()

        task = asyncio.create_task(land())
        self._late.add(task)
        task.add_done_callback(self._on_landed)

    def _on_landed(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # nobody waits for the answer


class Link:
    """The network of one process; `badness` is the share of requests that something happens to.

    `cuts_after` is the number of requests after which the process is cut off for ever; None: it is
    not. Nothing that it does then is seen by others.
    """

    def __init__(self, services: LocalServices, rng: random.Random, badness: float) -> None:
        self.badness = badness
        self.cuts_after: int | None = None
        self.is_cut = False
        self.on_cut: Callable[[], None] = lambda: None
        self._services = services
        self._rng = rng

    def cut(self) -> None:
        """Cut the process off, and call `on_cut` once."""
        if not self.is_cut:
            self.is_cut = True
            self.on_cut()

    def count(self) -> None:
        """Count a request to the controllers or to the store; cut the process off in time."""
        if self.cuts_after is not None:
            self.cuts_after -= 1
            if self.cuts_after < 0:
                self.cut()

    async def carry(self, work: Callable[[], Any]) -> Any:
        """Carry a request out, perhaps not, or late, and return its answer, unless it is lost."""
        rng = self._rng
        await asyncio.sleep(rng.uniform(0, 0.02))
        self.count()
        if self.is_cut:
            raise _unavailable("the process is cut off")
        fate = rng.random() / self.badness if self.badness else 1.0
        if fate < 0.3:
            raise _unavailable("the request was lost")
        if fate < 0.6:
            self._services.carry_out_late(work, rng.uniform(0, 5))
            raise _unavailable("no answer in time")
        answer = await work()
        await asyncio.sleep(rng.uniform(0, 0.02))
        if fate < 1.0 or self.is_cut:
            raise _unavailable("the answer was lost")
        return answer

    def channel(self, _: str) -> LocalChannel:
        return LocalChannel(self, self._services)


def _unavailable(why: str) -> AioRpcError:
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), why)


class LocalChannel:
    """Stands in for a channel of `grpc.aio`."""

    def __init__(self, link: Link, services: LocalServices) -> None:
        self._link = link
        self._services = services

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
    ) -> Callable[..., _UnaryCall]:
        def call(request: Any, timeout: float, metadata: Any) -> _UnaryCall:
            data = request_serializer(request)
            work = partial(self._services.answer, path, data)
            return _UnaryCall(self._link, work, response_deserializer)

        return call

    def stream_stream(self, path: str) -> Callable[[], _PipelineCall]:
        return lambda: _PipelineCall(self._link, partial(self._services.answer_message, path))

    def unary_stream(self, path: str, **_: Any) -> Callable[..., _NoWatch]:
        return lambda request: _NoWatch()


class _NoWatch:
    """A watch that fails at once."""

    async def read(self) -> bytes:
        raise _unavailable("watches are not carried")

    def cancel(self) -> None:
        """It has ended already."""


class _UnaryCall:
    def __init__(
        self, link: Link, work: Callable[[], Any], deserialize: Callable[[bytes], Any]
    ) -> None:
        self._link = link
        self._work = work
        self._deserialize = deserialize
        self._trailer: Trailer = ()

    def __await__(self) -> Any:
        return self._answered().__await__()

    async def trailing_metadata(self) -> Trailer:
        return self._trailer

    async def _answered(self) -> Any:
        data, self._trailer = await self._link.carry(self._work)
        return self._deserialize(data)


class _PipelineCall:
    """Messages are carried one after the other; a failure ends the stream."""

    def __init__(self, link: Link, work: Callable[[bytes], Any]) -> None:
        self._link = link
        self._work = work
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, data: bytes) -> None:
        self._messages.put_nowait(data)

    async def read(self) -> bytes:
        data = await self._messages.get()
        answer: bytes = await self._link.carry(partial(self._work, data))
        return answer

    def cancel(self) -> None:
        """The stream is of no more use."""
