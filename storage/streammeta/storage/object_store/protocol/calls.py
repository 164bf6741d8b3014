"""Deadlines and counters of the calls of a store.

A deadline is a moment of `time.monotonic()` in seconds; None is never. Each store has one `Meter`
that counts its calls by operation; nothing is global. Knows nothing of how a store works.
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
"""Minimum time for dropping an unfinished upload, in seconds, whatever the deadline."""


def check_deadline(deadline: float | None) -> None:
    """Raise `DeadlineExceededError` when the moment has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceededError(
            "object store deadline exceeded before the request was sent; nothing was changed; raise"
            " the deadline"
        )


def earlier(one: float | None, other: float) -> float:
    """Return the earlier of two deadlines."""
    return other if one is None else min(one, other)


def with_clean_up(deadline: float | None) -> float | None:
    """Return `deadline`, or `CLEAN_UP_S` from now if that is later."""
    return None if deadline is None else max(deadline, time.monotonic() + CLEAN_UP_S)


@dataclass(frozen=True, slots=True)
class OperationMetrics:
    """Sums over the calls of one operation; `seconds` include retries and waiting.

    `throttled` counts answers that asked for fewer requests. Bytes are object bytes of successful
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
    """Sums by the name of the store's method; one that was never called is not in it.

    A listing and a deletion count each page as a call. `concurrency_limit` is how many requests may
    run at a time just now; None: no limit. `in_flight` counts the calls that have not ended yet.
    """

    operations: Mapping[str, OperationMetrics]
    concurrency_limit: int | None = None
    in_flight: int = 0

    def of(self, operation: str) -> OperationMetrics:
        """Return the sums of one operation, zeros if it was never called."""
        return self.operations.get(operation, OperationMetrics())


@dataclass(slots=True)
class Tally:
    """Counters of a running call; bytes count only if it succeeds."""

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
        """Return a copy of the sums."""
        with self._lock:
            operations = MappingProxyType(dict(self._operations))
            return StoreMetrics(operations, concurrency_limit, self._in_flight)

    @contextmanager
    def call(self, operation: str, deadline: float | None = None) -> Iterator[Tally]:
        """Count the body as one call; after `deadline` it is counted but not run."""
        tally = Tally()
        started = time.perf_counter()
        failures = 0

        with self._lock:
            self._in_flight += 1

        try:
            check_deadline(deadline)
            yield tally
        except BaseException:
            failures, tally.bytes_sent, tally.bytes_received = 1, 0, 0
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
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
    """Count the bytes of an object in the result of a call: themselves, or how many there were."""
    if isinstance(result, bytes):
        return len(result)
    return result if isinstance(result, int) else 0
