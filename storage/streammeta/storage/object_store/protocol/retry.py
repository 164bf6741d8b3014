"""Retries of store requests under limits that protect an overloaded store.

There are four limits: attempts per call, time per call over all attempts, a retry budget shared by
all calls of a store, and concurrency. Each retry spends from the budget and each success earns a
little back, so an unavailable store does not receive a multiple of the normal load. Concurrency
halves when the store asks for fewer requests and grows by one for each round of successes (additive
increase, multiplicative decrease). Only `StoreUnavailableError` is retried.
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

# At most one retry per ten successes in the long run, so retries add 10 % load at worst.
_EARNED_PER_SUCCESS = 0.1


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits: attempts per call, delays in seconds, budget of retries, concurrent requests.

    `silence_s` limits the wait of an attempt for the server's next byte, `call_s` the duration of a
    call with all its attempts and delays.
    """

    attempts: int = 5
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    # A full budget covers a short outage of all concurrent calls.
    budget: int = 50
    concurrency: int = 64
    silence_s: float = 30.0
    call_s: float = 120.0


class Retrier:
    """Runs calls under a `RetryPolicy`. The threads of a store share one retrier."""

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
        """Current limit of concurrent requests (1..`policy.concurrency`)."""
        with self._changed:
            return int(self._limit)

    def call(
        self, request: Callable[[], T], *, deadline: float | None = None, tally: Tally | None = None
    ) -> T:
        """Run `request`, and retry it after a delay while it raises `StoreUnavailableError`.

        The delay is random between 0 and a bound that doubles each time. It is not shorter than the
        store asked for, within the bound of `patience` and half of the remaining time. `tally`
        counts the retries.

        Raises:
            StoreUnavailableError: the last failure, when attempts or budget are used up.
            DeadlineExceededError: the call would not end by `deadline` or within `policy.call_s`.
            Exception: any other error of `request`, at once.
        """
        end = time.monotonic() + self._policy.call_s
        if deadline is not None:
            end = min(end, deadline)

        counted = Tally() if tally is None else tally
        attempt = 1
        while True:
            try:
                return self._run(request, end)
            # A subclass of StoreUnavailableError, but its time is up, so a retry is pointless.
            except DeadlineExceededError:
                raise
            except StoreUnavailableError as error:
                counted.throttled += error.throttled
                if attempt >= self._policy.attempts or not self._spend():
                    raise
                delay = self._delay(attempt, error, end - time.monotonic())
                # Failing now returns the time that a sleep past the deadline would waste.
                if time.monotonic() + delay >= end:
                    raise _no_time_left(attempt, error) from error
            self._sleep(delay)
            attempt += 1
            counted.retries += 1

    def _delay(self, attempt: int, error: StoreUnavailableError, left_s: float) -> float:
        wait = self._backoff.wait(attempt, self._random_unit())
        # Half, so that one attempt remains within the deadline.
        return max(wait, min(asked_wait_s(error), left_s / 2))

    def _run(self, request: Callable[[], T], end: float) -> T:
        number = self._begin(end)
        try:
            left = end - time.monotonic()
            # A socket times out after `silence_s`. With less time left, only another thread can
            # stop the wait.
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
        """Wait for a free slot, and return the request's number."""
        with self._changed:
            # Waits count against the deadline, so callers fail instead of queueing without bound.
            if not self._changed.wait_for(
                lambda: self._running < int(self._limit), timeout=max(0.0, end - time.monotonic())
            ):
                raise DeadlineExceededError(
                    f"object store deadline exceeded while waiting for {self._running} other"
                    " requests, the current limit. Send fewer requests or raise the deadline"
                )
            self._running += 1
            self._begun += 1
            return self._begun

    def _decrease(self, number: int) -> None:
        """Halve the limit, once for all requests that began before the last decrease.

        They were sent at the old rate, so their failures say nothing about the new one.
        """
        with self._changed:
            if number > self._begun_at_decrease:
                self._limit = max(1.0, self._limit / 2)
                self._begun_at_decrease = self._begun

    def _earn(self) -> None:
        with self._changed:
            self._budget = min(float(self._policy.budget), self._budget + _EARNED_PER_SUCCESS)
            # `limit` successes raise the limit by one, as TCP's congestion avoidance.
            grown = self._limit + 1 / self._limit
            if int(grown) > int(self._limit):
                self._changed.notify()
            self._limit = min(float(self._policy.concurrency), grown)

    def _spend(self) -> bool:
        with self._changed:
            # The store fails more calls than it serves. Failing now lets it recover.
            if self._budget < 1:
                return False
            self._budget -= 1
            return True


def _no_time_left(attempt: int, error: StoreUnavailableError) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"object store deadline leaves no time for a retry, attempt {attempt} failed: {error}",
        throttled=error.throttled,
        retry_after_s=error.retry_after_s,
    )


def run_for(seconds: float, request: Callable[[], T]) -> T:
    """Run `request` in a separate thread and wait for it for at most `seconds`.

    Raises `DeadlineExceededError` if it takes longer. The request then continues until its
    connection times out, and its result is dropped.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(request())
        except BaseException as error:  # noqa: BLE001 - the waiting thread handles it
            outcome.set_exception(error)

    # A daemon thread: a request without an answer must not keep the process alive.
    threading.Thread(target=run, name="object-store-deadline", daemon=True).start()
    try:
        return outcome.result(timeout=max(0.0, seconds))
    except TimeoutError:
        if outcome.done():
            raise  # raised by the request itself, not by the wait
        raise DeadlineExceededError(
            "object store deadline exceeded before the answer. The request may still take effect."
            " Repeat it with a later deadline"
        ) from None
