"""Retries of store requests under limits that protect an overloaded store.

Four limits: attempts per call, time per call over all attempts, a retry budget shared by all calls
of a store (each retry spends, each success earns a little back, so a store that is down does not
get a multiple of the normal load), and concurrency. Concurrency halves when the store asks for
fewer requests and grows by one for each round of successes (additive increase, multiplicative
decrease). Knows no protocol: it retries what raises `StoreUnavailableError`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import DeadlineExceededError, StoreUnavailableError
from streammeta.storage.object_store.protocol.calls import Tally
from streammeta.storage.object_store.protocol.patience import asked_wait_s

T = TypeVar("T")

_EARNED_PER_SUCCESS = 0.1


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits: attempts a call, delays in seconds, retries in the budget, requests at a time.

    `silence_s` is how long an attempt waits for the next byte of a server, `call_s` how long a call
    may take with all its attempts and delays.
    """

    attempts: int = 5
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    budget: int = 50
    concurrency: int = 64
    silence_s: float = 30.0
    call_s: float = 120.0


class Retrier:
    """Runs calls under a `RetryPolicy`; one for each store, shared by its threads."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        sleep: Callable[[float], None] = time.sleep,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._backoff = Backoff(policy.first_delay_s, policy.longest_delay_s, jitter=1.0)
        self._sleep = sleep
        self._random_unit = random_unit
        self._changed = threading.Condition()
        self._budget = float(policy.budget)
        self._limit = float(policy.concurrency)
        self._running = 0
        self._begun = 0
        self._begun_at_decrease = 0

    @property
    def concurrency_limit(self) -> int:
        """Requests that may run at a time right now (1..`policy.concurrency`)."""
        with self._changed:
            return int(self._limit)

    def call(
        self, request: Callable[[], T], *, deadline: float | None = None, tally: Tally | None = None
    ) -> T:
        """Run `request`, again after a delay while it raises `StoreUnavailableError`.

        The delay is random between 0 and a bound that doubles each time, but not shorter than the
        store asked for, within the bound of `patience` and half of the time left.
        Raises the last error when attempts or budget are used up, any other error
        at once, and `DeadlineExceededError` when the call would not end by `deadline` or within
        `policy.call_s`. `tally` counts the retries.
        """
        end = time.monotonic() + self._policy.call_s
        if deadline is not None:
            end = min(end, deadline)

        counted = Tally() if tally is None else tally
        attempt = 1
        while True:
            try:
                return self._run(request, end)
            except DeadlineExceededError:
                raise
            except StoreUnavailableError as error:
                counted.throttled += error.throttled
                if attempt >= self._policy.attempts or not self._spend():
                    raise
                delay = self._delay(attempt, error, end - time.monotonic())
                if time.monotonic() + delay >= end:
                    raise _no_time_left(attempt, error) from error
            self._sleep(delay)
            attempt += 1
            counted.retries += 1

    def _delay(self, attempt: int, error: StoreUnavailableError, left_s: float) -> float:
        wait = self._backoff.wait(attempt, self._random_unit())
        return max(wait, min(asked_wait_s(error), left_s / 2))

    def _run(self, request: Callable[[], T], end: float) -> T:
        number = self._begin(end)
        try:
            left = end - time.monotonic()
            result = request() if left > self._policy.silence_s else run_for(left, request)
        except StoreUnavailableError as error:
            if error.throttled:
                self._decrease(number)
            raise
        else:
            self._earn()
            return result
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def _begin(self, end: float) -> int:
        """Wait for a free slot; return the number of the request."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._running < int(self._limit), timeout=max(0.0, end - time.monotonic())
            ):
                raise DeadlineExceededError(
                    f"object store deadline exceeded while waiting for {self._running} other"
                    " requests, the limit now; send fewer requests or raise the deadline"
                )
            self._running += 1
            self._begun += 1
            return self._begun

    def _decrease(self, number: int) -> None:
        """Halve the limit, once for all requests that were begun before it was halved last.

        They were sent at the old rate, so their refusals say nothing about the new one.
        """
        with self._changed:
            if number > self._begun_at_decrease:
                self._limit = max(1.0, self._limit / 2)
                self._begun_at_decrease = self._begun

    def _earn(self) -> None:
        with self._changed:
            self._budget = min(float(self._policy.budget), self._budget + _EARNED_PER_SUCCESS)
            grown = self._limit + 1 / self._limit
            if int(grown) > int(self._limit):
                self._changed.notify()
            self._limit = min(float(self._policy.concurrency), grown)

    def _spend(self) -> bool:
        with self._changed:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True


def _no_time_left(attempt: int, error: StoreUnavailableError) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"no time is left to try again after attempt {attempt}, which failed: {error}",
        throttled=error.throttled,
        retry_after_s=error.retry_after_s,
    )


def run_for(seconds: float, request: Callable[[], T]) -> T:
    """Run `request` in a thread of its own, and wait for it at most `seconds`.

    Raises `DeadlineExceededError` when it takes longer. The request then goes on until the timeouts
    of its connection, and its result is dropped.
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
            "object store deadline exceeded before the answer; the request may still take effect;"
            " repeat it with a later deadline"
        ) from None
