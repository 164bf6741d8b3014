"""Permits that the bucket grants: the lease for acknowledging changes, and the gate of object ids.

A check that finds the cluster's own marker proves that no other cluster had claimed the bucket when
the check began. The proof is valid for `LEASE_MS` from that moment, by a clock that continues while
the process is stopped or the machine suspended. A failed check extends nothing. The lifecycle
checks on every controller, so that a new leader already has a proof. The single writer requires the
lease before it decides a change and again before it acknowledges one.

The gate says how far the leader may issue object ids in its current term. The lifecycle opens it
once the ids are claimed in the bucket. The single writer checks it before it replicates a record
that issues ids.
"""

import asyncio
import contextlib
from collections.abc import Callable

from streammeta.controller import errors
from streammeta.storage.cluster_files.bucket_marker import LEASE_MS

DECIDED_WAIT_MS = 1_000
"""Maximum wait of a change for the first check of a process, in milliseconds."""


class MarkerLease:
    """Proof that the bucket belongs to this cluster. Used on the event loop only.

    Initially there is no proof.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """`now_ms` is a clock in milliseconds from any origin."""
        self.now_ms = now_ms
        self._proven_ms: int | None = None
        """Start of the newest check that found the own marker."""
        self._refused_ms: int | None = None
        self._refusal: errors.ApiError | None = None
        self._failure: str | errors.BucketRejectedError = "the marker has not been checked yet"
        self._decided = asyncio.Event()

    @property
    def left_ms(self) -> int:
        """Remaining time of the lease in milliseconds, 0 if it has expired."""
        if self._refusal is not None or self._proven_ms is None:
            return 0
        return max(0, self._proven_ms + LEASE_MS - self.now_ms())

    @property
    def is_held(self) -> bool:
        """Whether changes may be acknowledged now."""
        return self.left_ms > 0

    @property
    def refusal(self) -> errors.ApiError | None:
        """Result of the last check that excludes any lease, None if there is none."""
        return self._refusal

    @property
    def problem(self) -> str:
        """Reason why no change is acknowledged now, empty if the lease is valid."""
        return "" if self.is_held else str(self._error())

    def renew(self, began_ms: int) -> None:
        """Record that a check found the own marker.

        `began_ms` is its start by the lease's clock.
        """
        if self._refused_ms is not None and began_ms <= self._refused_ms:
            return  # a later check has found another owner
        # Checks may end in another order than they began.
        self._proven_ms = began_ms if self._proven_ms is None else max(self._proven_ms, began_ms)
        self._refusal = None
        self._failure = "no later check has ended"
        self._decided.set()

    def refuse(self, began_ms: int, refusal: errors.ApiError) -> None:
        """End the lease: a check that began then found that this cluster may not use the bucket."""
        # The time is kept, so that an earlier check that ends later cannot revive the lease.
        self._refused_ms, self._refusal = began_ms, refusal
        self._decided.set()

    def note_failure(self, failure: str | errors.BucketRejectedError) -> None:
        """Record why a check failed. The lease is neither extended nor ended.

        Callers get a `BucketRejectedError` as it is once the lease has expired: waiting does not
        help.
        """
        self._failure = failure
        self._decided.set()

    async def decided(self) -> None:
        """Wait until the first check has ended, at most `DECIDED_WAIT_MS`."""
        if self._decided.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DECIDED_WAIT_MS / 1000):
                await self._decided.wait()

    def require(self) -> None:
        """Require the lease before a change is decided. Raises the reason why there is none."""
        if not self.is_held:
            raise self._error()

    def require_for_answer(self) -> None:
        """Require the lease before a change is acknowledged.

        Raises:
            OutcomeUnknownError: the lease has expired, but the change is in this cluster's log.
        """
        if not self.is_held:
            raise errors.OutcomeUnknownError(
                "the lease on the cluster's marker in the bucket expired before the change was "
                "acknowledged, and the change may take effect: retry it with the same id"
            )

    def _error(self) -> errors.ApiError:
        if self._refusal is not None:
            return self._refusal
        # A wrong bucket does not get right by waiting, so callers should not retry.
        if isinstance(self._failure, errors.BucketRejectedError):
            return self._failure
        # The age shows operators how long the bucket has been unreachable.
        age_ms = None if self._proven_ms is None else self.now_ms() - self._proven_ms
        return errors.MarkerUnseenError(age_ms, self._failure)


def unbounded_lease() -> MarkerLease:
    """Return a lease that never ends."""
    lease = MarkerLease(lambda: 0)
    # With a clock that stands still the proof never ages.
    lease.renew(0)
    return lease


NO_BOUND = 2**63 - 1
"""Bound of a gate that is always open."""

READY_WAIT_MS = 1_000
"""Maximum wait of a request for ids at a new leader's gate, in milliseconds."""


class ObjectIdGate:
    """Bound of issuable ids, initially closed. Used on the event loop only."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        """Set when ids were rejected, or when another reason requires a new claim."""
        self._bound = 0
        self._refusal: errors.ApiError = errors.ObjectIdsNotReadyError(
            "a new leader has just been elected"
        )
        self._decided = asyncio.Event()

    @property
    def bound(self) -> int:
        """Bound below which object ids may be issued, 0 for none."""
        return self._bound

    def open(self, below: int) -> None:
        """Allow ids below the bound."""
        self._bound = below
        self._refusal = errors.ObjectIdsNotReadyError(f"all ids below {below} are issued")
        self._decided.set()

    def close(self, refusal: errors.ApiError, *, is_final: bool) -> None:
        """Allow no ids. With `is_final`, waiting requests are rejected immediately."""
        self._bound = 0
        self._refusal = refusal
        if is_final:
            self._decided.set()
        else:
            # A new leader claims soon, so requests wait a moment for it.
            self._decided.clear()

    def fail(self, why: str) -> None:
        """Record why no more ids can be claimed now. Ids already claimed can be issued."""
        refusal = errors.ObjectIdsNotReadyError(why)
        # A failing bucket must not stop ids that are already claimed there.
        if self._bound:
            self._refusal = refusal
        else:
            self.close(refusal, is_final=True)

    def check(self, end_id: int) -> None:
        """Raise the rejection unless all ids below `end_id` may be issued."""
        if end_id > self._bound:
            # Wakes the lifecycle, which claims more ids.
            self.wanted.set()
            raise self._refusal

    def problem(self, next_id: int) -> str:
        """Return why the id can't be issued, empty if it can."""
        return "" if next_id < self._bound else str(self._refusal)

    async def decided(self) -> None:
        """Wait until the gate is open or finally closed, at most `READY_WAIT_MS`."""
        if self._decided.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_MS / 1000):
                await self._decided.wait()


def open_gate() -> ObjectIdGate:
    """Return a gate that allows all ids."""
    gate = ObjectIdGate()
    gate.open(NO_BOUND)
    return gate
