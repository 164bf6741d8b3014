"""Deadlines and counters of store calls.

A deadline is a value of `time.monotonic()` in seconds, or None for no deadline. Each store has one
`Meter` that counts its calls by operation. Nothing is global.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from streammeta.storage.errors import DeadlineExceededError

CLEAN_UP_S = 10.0
"""Minimum time for aborting an unfinished upload, in seconds, regardless of the deadline."""


def check_deadline(deadline: float | None) -> None:
    """Raise `DeadlineExceededError` if the deadline has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceededError(
            "object store deadline exceeded before the request was sent. Nothing was changed."
            " Raise the deadline"
        )


def earlier(first: float | None, second: float) -> float:
    """Return the earlier of two deadlines."""
    return second if first is None else min(first, second)


def with_clean_up(deadline: float | None) -> float | None:
    """Return `deadline`, or `CLEAN_UP_S` from now if that is later."""
    return None if deadline is None else max(deadline, time.monotonic() + CLEAN_UP_S)


@dataclass(frozen=True, slots=True)
class OperationMetrics:
    """Totals over the calls of one operation. `seconds` includes retries and waiting.

    `throttled` counts responses that asked for fewer requests. Bytes are object bytes of successful
    calls.
    """

    calls: int = 0
    failures: int = 0
    retries: int = 0
    throttled: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """Requests sent to the store: calls and retries."""
        return self.calls + self.retries


@dataclass(frozen=True, slots=True)
class StoreMetrics:
    """Totals by the name of the store's method. A method that was never called is absent.

    A listing and a deletion count each page as a call. `concurrency_limit` is the current limit of
    concurrent requests, or None for no limit. `in_flight` counts the unfinished calls.
    """

    operations: Mapping[str, OperationMetrics]
    concurrency_limit: int | None = None
    in_flight: int = 0

    def of(self, operation: str) -> OperationMetrics:
        """Return the totals of one operation, zeros if it was never called."""
        return self.operations.get(operation, OperationMetrics())


@dataclass(slots=True)
class Tally:
    """Counters of a running call. Bytes count only if it succeeds."""

    retries: int = 0
    throttled: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class Meter:
    """Counts the calls of one store, from any number of threads."""

    _operations: dict[str, OperationMetrics] = field(default_factory=dict)
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self, concurrency_limit: int | None = None) -> StoreMetrics:
        """Return a copy of the totals."""
        with self._lock:
            operations = MappingProxyType(dict(self._operations))
            return StoreMetrics(operations, concurrency_limit, self._in_flight)

    @contextmanager
    def call(self, operation: str, deadline: float | None = None) -> Iterator[Tally]:
        """Count the body as one call. After `deadline` it counts but does not run."""
        tally = Tally()
        started = time.perf_counter()
        failures = 0

        with self._lock:
            self._in_flight += 1

        try:
            check_deadline(deadline)
            yield tally
        except BaseException:
            # Bytes of failed calls would inflate the throughput that operators watch.
            failures, tally.bytes_sent, tally.bytes_received = 1, 0, 0
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
                # Frozen values replaced under the lock, so a snapshot is a shallow copy.
                before = self._operations.get(operation, OperationMetrics())
                self._operations[operation] = OperationMetrics(
                    before.calls + 1,
                    before.failures + failures,
                    before.retries + tally.retries,
                    before.throttled + tally.throttled,
                    before.bytes_sent + tally.bytes_sent,
                    before.bytes_received + tally.bytes_received,
                    before.seconds + time.perf_counter() - started,
                )


def received_bytes(result: object) -> int:
    """Return the number of object bytes in the result of a call: bytes, or their count."""
    if isinstance(result, bytes):
        return len(result)
    return result if isinstance(result, int) else 0
