"""Requests of a compactor to the object store: few at a time, paced, behind all others.

Owns the threads they run in, how often one is repeated that the store turned away, and the count of
what was moved. A thread can't be stopped: who is cancelled waits in `settled` until what it started
has ended, so that nothing arrives after an upload was dropped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.throttle import Throttle, give_way
from streammeta.client.resources import start_in
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.base import ObjectStore

ResultT = TypeVar("ResultT")

LONGEST_WAIT_FOR_OTHERS = 1.0
"""Seconds that one request lets others go before it: it moves megabytes, so compaction goes on."""

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0


class StoreCalls:
    """Runs reads and writes of one compactor.

    `is_busy` tells whether others want the store now; without it, those are others whose calls of
    the same store are under way.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: CompactionConfig,
        is_busy: Callable[[], bool] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.store = store
        self._is_busy = is_busy or self._others_are_calling
        self._patience = config.store_patience_s
        self._rng = rng or random.Random()
        self._reads = Throttle(config.read_rate)
        self._writes = Throttle(config.write_rate)
        self._may_read = asyncio.Semaphore(config.read_threads)
        self._may_write = asyncio.Semaphore(config.write_threads)
        threads = config.read_threads + config.write_threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compaction")
        self._running: set[asyncio.Future[Any]] = set()
        self._calling = 0

    async def read(self, nbytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Run a read of `nbytes` in a thread; repeat it while the store turns it away."""
        async with self._may_read:
            return await self._repeated(self._reads, nbytes, work)

    async def write(self, nbytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Run a write of `nbytes` in a thread; repeat it while the store turns it away."""
        async with self._may_write:
            return await self._repeated(self._writes, nbytes, work)

    async def compute(self, work: Callable[[], ResultT]) -> ResultT:
        """Run in a thread what needs no store."""
        return await self._in_thread(work)

    async def drop(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a clean-up when everything that was begun has ended; it waits for nobody else."""
        await self.settled()
        return await self._in_thread(work)

    async def settled(self) -> None:
        """Wait until no call is under way."""
        while self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """Let running calls end and start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _repeated(
        self, throttle: Throttle, nbytes: int, work: Callable[[], ResultT]
    ) -> ResultT:
        await throttle.take(nbytes)
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._patience, _FIRST_PAUSE
        while True:
            await give_way(self._is_busy, LONGEST_WAIT_FOR_OTHERS)
            self._calling += 1
            try:
                return await self._in_thread(work)
            except StoreUnavailableError as error:
                wait = max(error.retry_after_s or 0.0, pause * self._rng.uniform(0.5, 1.0))
                if loop.time() + wait > until:
                    raise
            finally:
                self._calling -= 1
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        running = start_in(self._pool, work)
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # seen: who awaited it may be gone

    def _others_are_calling(self) -> bool:
        return self.store.metrics().in_flight > self._calling
