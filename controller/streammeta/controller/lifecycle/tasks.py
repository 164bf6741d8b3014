"""Building blocks of lifecycle tasks: periodic ones, and a leader's work in a bucket.

Bucket calls run off the event loop. Findings of a leader are only valid for one term.
"""

import abc
import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from streammeta.storage.object_store.protocol.base import ObjectStore

T = TypeVar("T")


class PeriodicTask(abc.ABC):
    """A task whose `step` runs every interval until it is cancelled."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms

    async def run(self) -> None:
        """Run a step immediately, and then every interval, until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._interval_ms / 1000)

    @abc.abstractmethod
    async def step(self) -> None:
        """Do the due work, and nothing unless this node leads."""


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a separate thread, which does not keep the process alive."""
    # Not the default executor: its threads are joined at exit, and a hanging bucket would hold up
    # the stop.
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def complete(result: T | None, error: BaseException | None) -> None:
        # The caller was cancelled while the thread worked.
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(complete, result, failure)

    threading.Thread(target=run, name="bucket", daemon=True).start()
    return future


Term = TypeVar("Term")

CALL_TIMEOUT_S = 20.0
"""Deadline of one step in a bucket, including retries, in seconds."""


class TermOverError(Exception):
    """The leader's term ended during the work for it."""


class LeaderTask(Generic[Term]):
    """A task with a bucket. `_term` is its state in the current term, None outside of one."""

    _term: Term | None = None
    _store: ObjectStore

    def _require(self, term: Term) -> None:
        """Raise `TermOverError` if the term is not the current one."""
        if self._term is not term:
            raise TermOverError

    async def _call(
        self, term: Term, call: Callable[[ObjectStore], T], timeout_s: float = CALL_TIMEOUT_S
    ) -> T:
        """Run calls of the bucket in a thread.

        `TermOverError` takes precedence over other outcomes.
        """
        store = self._store.until(time.monotonic() + timeout_s)
        try:
            # The term may end while the thread works. Its outcome is then no longer ours to use.
            result = await in_thread(lambda: call(store))
        except Exception:
            self._require(term)
            raise
        self._require(term)
        return result
