"""Keeping work within bounds: bytes held for a while, work that is shared, work side by side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class ByteBudget:
    """At most `limit` bytes held at the same time; who wants more waits, first come, first served.

    Who wants more than the limit gets it when nobody else holds anything.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for `nbytes`, and give them back at the end."""
        wanted = min(nbytes, self.limit)
        await self._take(wanted)
        try:
            yield
        finally:
            self.held -= wanted
            self._grant()

    async def _take(self, nbytes: int) -> None:
        if not self._waiting and self.held + nbytes <= self.limit:
            self.held += nbytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.held -= nbytes  # granted in the turn in which its owner was cancelled
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if granted.done():
                self._waiting.popleft()
                continue
            if self.held + nbytes > self.limit:
                return
            self._waiting.popleft()
            self.held += nbytes
            granted.set_result(None)


class SharedWork(Generic[KeyT, ValueT]):
    """Work under way by key: who asks for the same joins it; it is cancelled when all have left."""

    def __init__(self) -> None:
        self._running: dict[KeyT, tuple[asyncio.Task[ValueT], list[object]]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._running

    async def run(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, ValueT]]) -> ValueT:
        """Join the work of `key`, started with `work` unless it is running, and await it."""
        if key not in self._running:
            self._running[key] = (asyncio.create_task(work()), [])
        task, waiting = self._running[key]
        me = object()
        waiting.append(me)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.remove(me)
            if task.done() or not waiting:
                self._forget(key, task)

    def close(self) -> None:
        """Cancel all of it."""
        for task, _ in self._running.values():
            task.cancel()
        self._running.clear()

    def _forget(self, key: KeyT, task: asyncio.Task[ValueT]) -> None:
        if key in self._running and self._running[key][0] is task:
            del self._running[key]
        if not task.done():
            task.add_done_callback(_ignore_failure)
            task.cancel()


async def all_of(work: Iterable[Awaitable[ValueT]]) -> list[ValueT]:
    """Await all of `work` side by side; when all has ended, raise the first failure if any."""
    results: list[ValueT] = []
    for one in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results


def _ignore_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
