"""Limits of principals: request and row rates by their policy, and places for long calls.

Each principal has a token bucket of `BURST_S` seconds. A request passes while the bucket is not
empty, however large it is, and the next one waits for the excess. A holder of places is a
principal's name. Callers in plain text have none: an address proves nothing, and many programs may
share one, so only the sum of their calls is bounded. Pure: times are arguments.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from streammeta.controller.errors import BusyError, RateExceededError
from streammeta.controller.trust.authenticator import Caller

BURST_S = 10.0
"""Time for which a principal that was silent may ask at once, in seconds."""

BYTES_A_ROW = 32
"""Size of a row in a request."""

ROWS_A_REQUEST = 300
"""Cost of a request in addition to its rows, in rows."""

_BUCKETS_MAX = 10_000
_WAIT_MS_MIN = 10


def rows_of(size: int) -> int:
    """Return what a request of `size` bytes costs, in rows."""
    return ROWS_A_REQUEST + size // BYTES_A_ROW


@dataclass(slots=True)
class TokenBucket:
    """Tokens at a rate. Their number may become negative."""

    rate: int
    tokens: float
    filled_at_s: float

    def wait_s(self, now_s: float) -> float:
        """Return how long it is empty yet, in seconds."""
        gained = (now_s - self.filled_at_s) * self.rate
        self.tokens = min(self.tokens + max(0.0, gained), self.rate * BURST_S)
        self.filled_at_s = now_s
        # One token above zero is enough, so that a request larger than the bucket passes at some
        # time.
        return 0.0 if self.tokens > 0 else (1 - self.tokens) / self.rate


class Rates:
    """Buckets of all principals whose policy limits them."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def take(self, caller: Caller, size: int, now_s: float) -> None:
        """Charge a request of `size` bytes.

        Raises:
            RateExceededError: its caller has asked too much of late; nothing was taken.
        """
        if caller.principal is None or not caller.policy.quotas:
            return

        quota, holder = caller.policy.quota_of(caller.principal), str(caller.principal)
        costs = []
        for name, rate, cost in (
            ("requests_per_s", quota.requests_per_s, 1),
            ("rows_per_s", quota.rows_per_s, rows_of(size)),
        ):
            if rate is None:
                continue
            bucket = self._bucket(holder, name, rate, now_s)
            wait_s = bucket.wait_s(now_s)
            if wait_s > 0:
                raise RateExceededError(holder, name, rate, max(_WAIT_MS_MIN, int(wait_s * 1000)))
            # Charged after all limits passed: a rejected request costs nothing.
            costs.append((bucket, cost))

        for bucket, cost in costs:
            bucket.tokens -= cost

    def _bucket(self, holder: str, name: str, rate: int, now_s: float) -> TokenBucket:
        bucket = self._buckets.get((holder, name))
        # A changed quota begins with a full bucket. Old tokens have no meaning at another rate.
        if bucket is None or bucket.rate != rate:
            if len(self._buckets) >= _BUCKETS_MAX:
                self._buckets.clear()
            bucket = self._buckets[holder, name] = TokenBucket(rate, rate * BURST_S, now_s)
        return bucket


class Places:
    """Places for one kind of long calls."""

    def __init__(self, what: str, retry_after_ms: int) -> None:
        self._what = what
        self._retry_after_ms = retry_after_ms
        self._held: Counter[str] = Counter()
        self._count = 0

    @property
    def count(self) -> int:
        """Places that are taken."""
        return self._count

    @contextlib.contextmanager
    def taken(self, holder: str | None, *, per_holder: int, in_all: int) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises:
            BusyError: the holder has `per_holder` places already, or all together have `in_all`.
        """
        if holder is not None and self._held[holder] >= per_holder:
            raise self._refusal(f"{holder} has", self._held[holder])
        # After the own limit: a caller at its limit learns that, and does not wait for others.
        if self._count >= in_all:
            raise self._refusal("callers have", self._count)
        key = holder or ""
        self._held[key] += 1
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._held[key] -= 1
            if not self._held[key]:
                # Names of holders come from callers. Zero counts must not pile up.
                del self._held[key]

    def _refusal(self, who: str, count: int) -> BusyError:
        return BusyError(
            f"{who} {count} {self._what} in flight, the maximum. Retry after one has ended, "
            "or ask another controller",
            self._retry_after_ms,
        )
