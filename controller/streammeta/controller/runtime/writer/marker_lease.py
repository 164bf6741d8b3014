"""Lease on the cluster's marker in the bucket: how long this controller may acknowledge changes.

A look that finds the own marker proves that no other cluster had taken the bucket over when the
look began. The proof counts for `LEASE_MS` from that begin, by a clock that counts while the
process is stopped and the machine suspended. A failed look extends nothing. The lifecycle looks,
on every controller, so that a new leader has a proof already. The single writer asks here before it
decides a change and again before it acknowledges one. Knows no bucket.
"""

import asyncio
import contextlib
from collections.abc import Callable

from streammeta.controller.errors import (
    ApiError,
    BucketRefusedError,
    MarkerUnseenError,
    OutcomeUnknownError,
)
from streammeta.storage.cluster_files.bucket_marker import LEASE_MS

DECIDED_WAIT_MS = 1_000
"""Maximum wait of a change for the first look of a process, in milliseconds."""


class MarkerLease:
    """Proof that the bucket is this cluster's; there is none at first. On the event loop only."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """Take the clock, in milliseconds from any origin."""
        self.now_ms = now_ms
        self._proven_ms: int | None = None
        """Begin of the newest look that found the own marker."""
        self._refused_ms: int | None = None
        self._refusal: ApiError | None = None
        self._failure: str | BucketRefusedError = "it has not looked yet"
        self._decided = asyncio.Event()

    @property
    def left_ms(self) -> int:
        """Time that the lease holds still, in milliseconds; 0 if it is over."""
        if self._refusal is not None or self._proven_ms is None:
            return 0
        return max(0, self._proven_ms + LEASE_MS - self.now_ms())

    @property
    def proven_ms(self) -> int | None:
        """Begin of the newest look that found the own marker; None before the first."""
        return self._proven_ms

    @property
    def is_held(self) -> bool:
        """Whether changes may be acknowledged now."""
        return self.left_ms > 0

    @property
    def refusal(self) -> ApiError | None:
        """Finding of the last look that excludes any lease; None if there was none."""
        return self._refusal

    @property
    def problem(self) -> str:
        """Reason why no change is acknowledged now; empty if the lease is held."""
        return "" if self.is_held else str(self._error())

    def renew(self, began_ms: int) -> None:
        """Note that a look, begun at a time of the lease's clock, found the own marker."""
        if self._refused_ms is not None and began_ms <= self._refused_ms:
            return  # a later look has found another owner
        self._proven_ms = began_ms if self._proven_ms is None else max(self._proven_ms, began_ms)
        self._refusal = None
        self._failure = "no later look has ended"
        self._decided.set()

    def refuse(self, began_ms: int, refusal: ApiError) -> None:
        """End the lease: a look begun then found that the bucket is not this cluster's to use."""
        self._refused_ms, self._refusal = began_ms, refusal
        self._decided.set()

    def note_failure(self, failure: str | BucketRefusedError) -> None:
        """Note why a look failed; the lease is neither extended nor ended.

        An error is what callers get when the lease is over: waiting alone will not help them.
        """
        self._failure = failure
        self._decided.set()

    async def decided(self) -> None:
        """Wait until the first look has ended, at most `DECIDED_WAIT_MS`."""
        if self._decided.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DECIDED_WAIT_MS / 1000):
                await self._decided.wait()

    def require(self) -> None:
        """Require the lease before a change is decided; raises the reason why there is none."""
        if not self.is_held:
            raise self._error()

    def require_for_answer(self) -> None:
        """Require the lease before a change is acknowledged.

        Raises:
            OutcomeUnknownError: it is over; the change is in this cluster's log nevertheless.
        """
        if not self.is_held:
            raise OutcomeUnknownError(
                "the lease on the cluster's marker in the bucket ended before the change was "
                "acknowledged: it may take effect; repeat it with the same id"
            )

    def _error(self) -> ApiError:
        if self._refusal is not None:
            return self._refusal
        if isinstance(self._failure, BucketRefusedError):
            return self._failure
        age_ms = None if self._proven_ms is None else self.now_ms() - self._proven_ms
        return MarkerUnseenError(age_ms, self._failure)


def unbounded_lease() -> MarkerLease:
    """Return a lease that never ends."""
    lease = MarkerLease(lambda: 0)
    lease.renew(0)
    return lease
