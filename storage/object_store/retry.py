"""Repeating requests that may succeed later, without making a struggling store worse.

Owns three limits: attempts a call, a budget of retries shared by all calls of a store (each retry
spends, each success earns a little back, so that a store that is down is not hit by a multiple of
the normal load), and the number of requests at a time, which halves when the store asks for fewer
and grows back by successes. Knows no protocol: it repeats what raises `StoreUnavailableError`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StoreUnavailableError

T = TypeVar("T")

_EARNED_PER_SUCCESS = 0.1


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits: attempts a call, delays in seconds, retries in the budget, requests at a time."""

    attempts: int = 5
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    budget: int = 50
    concurrency: int = 64


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
        self._sleep = sleep
        self._random_unit = random_unit
        self._changed = threading.Condition()
        self._budget = float(policy.budget)
        self._limit = float(policy.concurrency)
        self._running = 0

    @property
    def concurrency_limit(self) -> int:
        """Requests that may run at a time right now (1..`policy.concurrency`)."""
        with self._changed:
            return int(self._limit)

    def call(self, request: Callable[[], T]) -> T:
        """Run `request`, again after a delay while it raises `StoreUnavailableError`.

        The delay is random between 0 and a bound that doubles each time. Raises the last error
        when attempts or budget are used up, and any other error at once.
        """
        attempt = 1
        while True:
            try:
                return self._run(request)
            except StoreUnavailableError:
                if attempt >= self._policy.attempts or not self._spend():
                    raise
            bound = min(self._policy.longest_delay_s, self._policy.first_delay_s * 2**attempt)
            self._sleep(bound * self._random_unit())
            attempt += 1

    def _run(self, request: Callable[[], T]) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._running < int(self._limit))
            self._running += 1
        try:
            result = request()
        except StoreUnavailableError as error:
            if error.throttled:
                with self._changed:
                    self._limit = max(1.0, self._limit / 2)
            raise
        else:
            self._earn()
            return result
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

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
