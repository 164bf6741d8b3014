"""Building blocks of lifecycle tasks: the periodic task, and bucket calls off the event loop."""

import abc
import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

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
