"""Moments by which calls have to end, in `time.monotonic()` seconds; None is never.

Owns what happens to a request that is still running then: its caller goes on without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from streammeta.storage.errors import DeadlineExceededError

T = TypeVar("T")

CLEAN_UP_S = 10.0
"""Time that dropping an unfinished upload is given even if no time is left for anything else."""


def check_deadline(deadline: float | None) -> None:
    """Raise `DeadlineExceededError` when the moment has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceededError(
            "the time for calls of the object store was up before this one began; nothing was"
            " asked of the store; give it more time"
        )


def earlier(one: float | None, other: float) -> float:
    """Give the earlier of two deadlines."""
    return other if one is None else min(one, other)


def with_clean_up(deadline: float | None) -> float | None:
    """Give `deadline`, or `CLEAN_UP_S` from now if that is later."""
    return None if deadline is None else max(deadline, time.monotonic() + CLEAN_UP_S)


def run_for(seconds: float, request: Callable[[], T]) -> T:
    """Run `request` in a thread of its own, and wait for it no longer than `seconds`.

    A request that takes longer is left behind: it ends by the timeouts of its connection, and what
    it brings is dropped. Raises `DeadlineExceededError` then.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(request())
        except BaseException as error:  # noqa: BLE001 - it is the waiting thread's to handle
            outcome.set_exception(error)

    threading.Thread(target=run, name="object-store-deadline", daemon=True).start()
    try:
        return outcome.result(timeout=max(0.0, seconds))
    except TimeoutError:
        if outcome.done():
            raise  # it is the request's own
        raise DeadlineExceededError(
            "the object store did not answer before the time for the call was up; what it asked"
            " for may still happen; repeat it with more time"
        ) from None
