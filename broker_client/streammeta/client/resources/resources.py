"""Limited resources: threads for store calls, byte budgets, shared work, caches, freed memory."""

from __future__ import annotations

import asyncio
import ctypes
import warnings
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

from streammeta.client.resources.daemon_threads import DaemonThreads
from streammeta.client.resources.fork_check import check_not_forked
from streammeta.storage.object_store.protocol.base import ObjectStore

ResultT = TypeVar("ResultT")


class ClosedAtExit:
    """An async context manager that closes itself at its end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release everything. A second call does nothing."""
        raise NotImplementedError


def start_in(pool: Executor, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Run `work` in a thread, which drops its reference before the result is visible.

    A pool would drop it at the thread's next call, while the event loop already fills the next
    buffer: for a moment memory would contain one buffer more than planned.
    """
    # A list, so that the closure itself keeps no reference.
    handed_over = [work]

    def run() -> ResultT:
        return handed_over.pop()()

    return asyncio.get_running_loop().run_in_executor(pool, run)


class StoreThreads:
    """A store and the threads that may use it at the same time, at most `threads` of them."""

    def __init__(self, store: ObjectStore, threads: int, name: str) -> None:
        self.store = store
        self._pool = DaemonThreads(threads, name)

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in one of the threads. Further calls wait in order.

        Raises `ForkedProcessError` in a forked process, which has no threads.
        """
        check_not_forked("request to the object store")
        return await start_in(self._pool, work)

    def close(self) -> None:
        """Let running calls end and start no others."""
        self._pool.shutdown(wait=False, cancel_futures=True)


KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class ByteBudget:
    """Admits holders of at most `limit` bytes together, first come, first served.

    A request above the limit is admitted alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for `nbytes`, and release them at the end."""
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
        # A queue of futures is fair: a large request is not overtaken by small ones for ever.
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                # The grant and the cancellation came in the same iteration of the event loop.
                self.held -= nbytes
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            # Its owner was cancelled while it waited.
            if granted.done():
                self._waiting.popleft()
                continue
            if self.held + nbytes > self.limit:
                return
            self._waiting.popleft()
            self.held += nbytes
            granted.set_result(None)


class SharedWork(Generic[KeyT, ValueT]):
    """Tasks by key, shared by all callers of a key and cancelled when the last one has left."""

    def __init__(self) -> None:
        self._running: dict[KeyT, tuple[asyncio.Task[ValueT], list[object]]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._running

    async def run(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, ValueT]]) -> ValueT:
        """Join the running work of `key`, or start it with `work`, and await it."""
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
        """Cancel all work."""
        for task, _ in self._running.values():
            task.cancel()
        self._running.clear()

    def _forget(self, key: KeyT, task: asyncio.Task[ValueT]) -> None:
        if key in self._running and self._running[key][0] is task:
            del self._running[key]
        if not task.done():
            task.add_done_callback(ignore_failure)
            task.cancel()


class Costly(Protocol):
    """A value with an estimated memory cost."""

    @property
    def cost(self) -> int:
        """Estimated memory, in bytes."""
        ...


CostlyT = TypeVar("CostlyT", bound=Costly)


class RecentlyUsed(Generic[CostlyT]):
    """A cache of values by object id with at most `limit` bytes, least recently used dropped."""

    def __init__(self, limit: int) -> None:
        self.held_bytes = 0
        self._limit = limit
        self._held: OrderedDict[int, CostlyT] = OrderedDict()

    def get(self, object_id: int) -> CostlyT | None:
        """Return the value of an object, None if it is not cached."""
        found = self._held.get(object_id)
        if found is not None:
            self._held.move_to_end(object_id)
        return found

    def put(self, object_id: int, value: CostlyT) -> None:
        """Cache a value unless there is one, and drop the least recently used beyond the limit."""
        if object_id in self._held:
            return
        self._held[object_id] = value
        self.held_bytes += value.cost
        while self.held_bytes > self._limit and self._held:
            self.forget(next(iter(self._held)))

    def forget(self, object_id: int) -> None:
        """Drop the value of an object."""
        dropped = self._held.pop(object_id, None)
        if dropped is not None:
            self.held_bytes -= dropped.cost


async def all_of(work: Iterable[Awaitable[ValueT]]) -> list[ValueT]:
    """Await all of `work` concurrently. After all have ended, raise the first failure, if any."""
    results: list[ValueT] = []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def ignore_failure(done: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting a failure that no task awaits. A callback of futures."""
    if not done.cancelled():
        done.exception()


def warn_unclosed(owner: object, lost: str, how: str) -> None:
    """Warn, in the `__del__` of `owner`, about `lost` data and `how` to close it."""
    warnings.warn(
        f"{type(owner).__name__} was dropped without close: {lost}; {how}",
        ResourceWarning,
        stacklevel=2,
        source=owner,
    )


# glibc has it, musl and macOS do not.
_TRIM: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Return free pages of the heap to the system, if the C library can do that."""
    if _TRIM is not None:
        _TRIM(0)
