"""Threads for blocking calls that do not delay the end of the process.

The interpreter joins the threads of `concurrent.futures` when it ends, and `asyncio.run` joins the
threads of `asyncio.to_thread`. A call to a store that does not answer lasts for minutes with its
retries, and the process would hang for as long. Calls in these threads end with the process. Use
them for calls that may be interrupted anywhere, such as calls to a store, and not for writes to a
local log.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

ResultT = TypeVar("ResultT")
Params = ParamSpec("Params")

_SHARED_THREADS = 32


@dataclass(slots=True)
class _Work:
    """Calls of one pool: the waiting ones, and the number of unfinished ones."""

    waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = field(
        default_factory=SimpleQueue
    )
    lock: threading.Lock = field(default_factory=threading.Lock)
    unfinished: int = 0


class DaemonThreads(Executor):
    """An executor of at most `threads` daemon threads, which are started on demand."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._work = _Work()
        self._threads: list[threading.Thread] = []
        self._is_shut_down = False

    def __del__(self) -> None:
        # A dropped pool must not leave its threads waiting for ever.
        self.shutdown(wait=False)

    def submit(
        self, fn: Callable[Params, ResultT], /, *args: Params.args, **kwargs: Params.kwargs
    ) -> Future[ResultT]:
        """See `Executor.submit`."""
        future: Future[ResultT] = Future()
        work = self._work

        with work.lock:
            if self._is_shut_down:
                raise RuntimeError(f"the threads {self._name!r} are closed and accept no calls")
            work.unfinished += 1
            work.waiting.put((future, partial(fn, *args, **kwargs)))
            if len(self._threads) < min(work.unfinished, self._most):
                name = f"{self._name}_{len(self._threads)}"
                # The thread references only the calls, so that a dropped pool can end it.
                thread = threading.Thread(target=_run_calls, args=(work,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        with self._work.lock:
            is_first, self._is_shut_down = not self._is_shut_down, True
            if cancel_futures:
                self._cancel_waiting()
            # One end for each thread, after all waiting calls.
            for _ in self._threads if is_first else ():
                self._work.waiting.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel_waiting(self) -> None:
        ends = 0
        while True:
            try:
                call = self._work.waiting.get_nowait()
            except Empty:
                break
            if call is None:
                ends += 1
            else:
                call[0].cancel()
                self._work.unfinished -= 1
        for _ in range(ends):
            self._work.waiting.put(None)


def _run_calls(work: _Work) -> None:
    """Run calls, one after the other, until the pool is shut down."""
    while (call := work.waiting.get()) is not None:
        future, do = call
        del call  # an idle thread must not keep a finished call in memory
        if future.set_running_or_notify_cancel():
            try:
                result = do()
            except BaseException as error:  # noqa: BLE001 - it is the waiting caller's to handle
                outcome = partial(future.set_exception, error)
            else:
                outcome = partial(future.set_result, result)
                del result
            del do
            with work.lock:
                work.unfinished -= 1
            outcome()
            del outcome
        else:
            with work.lock:
                work.unfinished -= 1

        del future


_shared = DaemonThreads(_SHARED_THREADS, "blocking")


def _renew_shared() -> None:
    """Replace the shared threads in a forked process, where none of them exists."""
    global _shared  # noqa: PLW0603 - one for the process
    _shared = DaemonThreads(_SHARED_THREADS, "blocking")


os.register_at_fork(after_in_child=_renew_shared)


async def run_blocking(
    work: Callable[Params, ResultT], /, *args: Params.args, **kwargs: Params.kwargs
) -> ResultT:
    """Run a blocking call in a thread that ends with the process, in a pool shared by all clients.

    A cancelled caller leaves the call to its thread. The call has the caller's context variables.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    return await loop.run_in_executor(_shared, partial(context.run, work, *args, **kwargs))
