"""Requests of a compactor to the object store: few at a time, rate-limited, after all others.

Owns the threads, the retries of rejected requests, the rate limiter, and groups of tasks that end
together. A thread cannot be stopped: `wait_until_idle` waits until the calls of cancelled tasks
have ended, so that nothing is written after an upload was dropped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.resources.bandwidth import Grade, Network
from streammeta.client.resources.daemon_threads import DaemonThreads
from streammeta.client.resources.resources import ignore_failure, start_in
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.storage.object_store.protocol.patience import Patience

_LOOK_AGAIN_S = 0.005


class Throttle:
    """Rate limiter of `rate` bytes per second, 0: no limit. Unused capacity is not saved."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait for the turn of a transfer of `nbytes`. Calls are served in order."""
        wait = self.reserve(nbytes, asyncio.get_running_loop().time())
        if wait > 0:
            await asyncio.sleep(wait)

    def reserve(self, nbytes: int, now: float) -> float:
        """Reserve the next turn for a transfer and return the seconds until then."""
        if not self._rate:
            return 0.0
        turn = max(now, self._free_at)
        self._free_at = turn + nbytes / self._rate
        return turn - now


async def give_way(is_busy: Callable[[], bool], longest_s: float) -> None:
    """Wait while others are busy, at most about `longest_s` seconds."""
    for _ in range(int(longest_s / _LOOK_AGAIN_S)):
        if not is_busy():
            return
        await asyncio.sleep(_LOOK_AGAIN_S)


ItemT = TypeVar("ItemT")


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of `work`. After a failure cancel the others, and raise the error once all ended.

    A cancelled caller stays cancelled, even if a task fails meanwhile.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    if not tasks:
        return
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        failed = [task for task in tasks if not task.cancelled() and task.exception() is not None]
    for task in (task for task in failed if task in ended):
        task.result()
    if any(task.cancelled() for task in ended):
        raise asyncio.CancelledError


async def run_each(
    most: int, items: Iterable[ItemT], work: Callable[[ItemT], Coroutine[Any, Any, None]]
) -> None:
    """Run `work` for each item in order, for at most `most` at once."""
    # Shared by the workers, so each item is processed once.
    left = iter(items)

    async def run_items() -> None:
        for item in left:
            await work(item)

    await run_all(run_items() for _ in range(most))


async def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even if the caller is cancelled, then raise the cancellation."""
    task = asyncio.create_task(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    task.result()


ResultT = TypeVar("ResultT")

WAIT_FOR_OTHERS_MAX_S = 1.0
"""Maximum wait of one request for others, in seconds. A request moves megabytes."""

_REJECTED = Patience(Backoff(first=0.5, longest=10.0))


class StoreCalls:
    """Runs reads and writes of one compactor.

    `is_busy` returns whether others use the store, by default whether their calls to the same store
    are in flight. Transfers have the lowest grade of `network`.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: CompactionConfig,
        is_busy: Callable[[], bool] | None = None,
        rng: random.Random | None = None,
        network: Network | None = None,
    ) -> None:
        self.store = store
        self._network = network or Network()
        self._is_busy = is_busy or self._others_are_calling
        self._patience = config.store_patience_s
        self._rng = rng or random.Random()
        self._reads = Throttle(config.read_rate)
        self._writes = Throttle(config.write_rate)
        self._may_read = asyncio.Semaphore(config.read_threads)
        self._may_write = asyncio.Semaphore(config.write_threads)
        # One pool with separate limits: reads and writes can't starve each other.
        threads = config.read_threads + config.write_threads
        self._pool = DaemonThreads(threads, "compaction")
        self._running: set[asyncio.Future[Any]] = set()
        self._calling = 0

    async def read(self, nbytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Run a read of `nbytes` in a thread. Retry it while the store rejects it temporarily."""
        async with self._may_read:
            await self._network.received.take(Grade.COMPACTION, nbytes)
            return await self._run_with_retries(self._reads, nbytes, work)

    async def write(self, nbytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Run a write of `nbytes` in a thread. Retry it while the store rejects it temporarily."""
        async with self._may_write:
            await self._network.sent.take(Grade.COMPACTION, nbytes)
            return await self._run_with_retries(self._writes, nbytes, work)

    async def compute(self, work: Callable[[], ResultT]) -> ResultT:
        """Run CPU work in a thread."""
        return await self._in_thread(work)

    async def drop(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a clean-up once all calls have ended, without waiting for others."""
        await self.wait_until_idle()
        return await self._in_thread(work)

    async def wait_until_idle(self) -> None:
        """Wait until no call is in flight."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """Let running calls end and start no others."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run_with_retries(
        self, throttle: Throttle, nbytes: int, work: Callable[[], ResultT]
    ) -> ResultT:
        await throttle.take(nbytes)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        attempt = 0

        while True:
            # Before each attempt: a retry is no more urgent than a new request.
            await give_way(self._is_busy, WAIT_FOR_OTHERS_MAX_S)
            # Own calls don't count as others in `is_busy`.
            self._calling += 1
            try:
                return await self._in_thread(work)
            except StorageError as error:
                left_s = until - loop.time()
                wait = _REJECTED.wait_s(error, attempt, left_s, self._rng.random())
                if wait is None:
                    raise
            finally:
                self._calling -= 1
            await asyncio.sleep(wait)
            attempt += 1

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        running = start_in(self._pool, work)
        self._running.add(running)
        running.add_done_callback(self._on_done)
        # A cancelled caller must not hide a call that still runs, see `wait_until_idle`.
        return await asyncio.shield(running)

    def _on_done(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        ignore_failure(running)  # the awaiting task may have been cancelled

    def _others_are_calling(self) -> bool:
        return self.store.metrics().in_flight > self._calling
