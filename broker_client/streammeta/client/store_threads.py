"""Blocking object store calls, run in a bounded number of threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from streammeta.storage.object_store.base import ObjectStore

ResultT = TypeVar("ResultT")


def start_in(pool: ThreadPoolExecutor, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
    """Run `work` in a thread, which lets go of it, and of all it looks at, before it tells the end.

    Left to the pool, the thread would do so at its next turn, while the event loop already fills
    the next buffer: for a moment there would be one more than memory was planned for.
    """
    handed_over = [work]

    def carry_out() -> ResultT:
        return handed_over.pop()()

    return asyncio.get_running_loop().run_in_executor(pool, carry_out)


class StoreThreads:
    """A store and the threads that may use it at the same time, at most `threads` of them."""

    def __init__(self, store: ObjectStore, threads: int, name: str) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in one of the threads; more work than threads waits in order."""
        return await start_in(self._pool, work)

    def close(self) -> None:
        """Let running work end and start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
