"""What the calls of a store did: counts, bytes and times for each operation.

Owns the counting, one `Meter` for each store; there is nothing global. An observer hears of every
call when it ends. Knows nothing of how a store works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from streammeta.storage.object_store.deadline import check_deadline


@dataclass(frozen=True, slots=True)
class OperationMetrics:
    """Sums over the calls of one operation; `seconds` include repetitions and waiting.

    `throttled` counts answers that asked for fewer requests. Bytes are those of the objects, of
    calls that succeeded.
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
        """Requests made of the store: each call once, and once for each repetition."""
        return self.calls + self.retries

    def with_call(self, report: CallReport) -> OperationMetrics:
        """Add one call."""
        return OperationMetrics(
            self.calls + 1,
            self.failures + (report.error is not None),
            self.retries + report.retries,
            self.throttled + report.throttled,
            self.bytes_sent + report.bytes_sent,
            self.bytes_received + report.bytes_received,
            self.seconds + report.seconds,
        )


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
        """Give the sums of one operation, zeros if it was never called."""
        return self.operations.get(operation, OperationMetrics())


@dataclass(frozen=True, slots=True)
class CallReport:
    """One call that ended; `error` is what it raised."""

    operation: str
    seconds: float
    retries: int
    throttled: int
    bytes_sent: int
    bytes_received: int
    error: BaseException | None


@dataclass(slots=True)
class Tally:
    """What a running call has done so far; bytes count only if it succeeds."""

    retries: int = 0
    throttled: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


CallObserver: TypeAlias = Callable[[CallReport], None]
"""Called in the thread of the call when it ends. It has to be quick and must not raise."""


@dataclass(slots=True)
class Meter:
    """Counts the calls of one store, from any number of threads."""

    observer: CallObserver | None = None
    _operations: dict[str, OperationMetrics] = field(default_factory=dict)
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self, concurrency_limit: int | None = None) -> StoreMetrics:
        """Copy out the sums."""
        with self._lock:
            operations = MappingProxyType(dict(self._operations))
            return StoreMetrics(operations, concurrency_limit, self._in_flight)

    @contextmanager
    def call(self, operation: str, deadline: float | None = None) -> Iterator[Tally]:
        """Measure the body as one call; it is not begun, but counted, after `deadline`."""
        tally = Tally()
        started = time.perf_counter()
        with self._lock:
            self._in_flight += 1
        try:
            check_deadline(deadline)
            yield tally
        except BaseException as error:
            self._add(operation, Tally(tally.retries, tally.throttled), started, error)
            raise
        self._add(operation, tally, started, None)

    def _add(
        self, operation: str, tally: Tally, started: float, error: BaseException | None
    ) -> None:
        report = CallReport(
            operation,
            time.perf_counter() - started,
            tally.retries,
            tally.throttled,
            tally.bytes_sent,
            tally.bytes_received,
            error,
        )
        with self._lock:
            self._in_flight -= 1
            before = self._operations.get(operation, OperationMetrics())
            self._operations[operation] = before.with_call(report)
        if self.observer is not None:
            self.observer(report)
