"""Checks of the cluster's markers in the bucket, on every controller, and the lease they renew.

Followers check too, so that a new leader can acknowledge changes immediately. A check that finds
another cluster restored over this one ends the lease, and any other failure lets it expire. A
restored or recovered cluster gets its first lease once nobody can have one on an earlier
generation. The controller that has seen the new marker for `FENCE_WAIT_MS` records that in the
bucket, unless an operator's command did before.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from streammeta.controller import errors
from streammeta.controller.lifecycle.tasks import T, in_thread
from streammeta.controller.metadata.decisions.maintenance import Claim
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease
from streammeta.storage.cluster_files import bucket_marker
from streammeta.storage.errors import CorruptObjectError, StorageError, WrongBucketError
from streammeta.storage.object_store.protocol.base import ObjectStore

_log = structlog.get_logger(component="lifecycle")

RECHECK_MS = 10_000
"""Interval of checking the bucket's markers, in milliseconds."""

# Less than RECHECK_MS, so that checks never overlap.
LOOK_TIMEOUT_S = 8.0
"""Deadline of one check including retries, in seconds: a hanging one must not use up a lease."""


class MarkerWatch:
    """Periodic checks of the markers. `claim` returns the metadata's claim of the bucket."""

    def __init__(
        self,
        store: ObjectStore,
        lease: MarkerLease,
        claim: Callable[[], Claim],
        wall_ms: Callable[[], int],
        *,
        cluster_id: str,
        namespace: str,
        interval_ms: int,
        on_refusal: Callable[[], None],
    ) -> None:
        self._store = store
        self._lease = lease
        self._claim = claim
        self._wall_ms = wall_ms
        self._cluster_id = cluster_id
        self._namespace = namespace
        self._interval_ms = interval_ms
        self._on_refusal = on_refusal
        self._due_ms = 0
        self._is_wanted = asyncio.Event()
        self._seen_unfenced: tuple[int, int] | None = None
        """Newest generation whose predecessors may be alive, and the time it was first seen."""
        self._failure: type[errors.ApiError | StorageError] | None = None
        self.undecided: tuple[tuple[int, int], ...] = ()
        """Ids that the newest successful check found undecided, as (first, below)."""

    def check_soon(self) -> None:
        """Check immediately: there may be a marker now, or this controller has begun to lead."""
        # The wait for the predecessors may end any moment, and failures are repeated at the task's
        # interval.
        self._due_ms = 0
        self._is_wanted.set()

    async def run(self) -> None:
        """Check whenever it is due, until cancelled."""
        while True:
            self._is_wanted.clear()
            if self._lease.now_ms() >= self._due_ms and self._claim().cluster_uuid:
                await self._look_again()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_ms / 1000):
                    await self._is_wanted.wait()

    async def check(self) -> None:
        """Check once for the cluster's UUID in the metadata. Nothing is renewed without a marker.

        Raises:
            SupersededError: another cluster was restored over this one.
            FencePendingError: the cluster's predecessor may still acknowledge changes.
            StorageError: the bucket can't be read, or the marker is not this cluster's.
        """
        # The start counts: another cluster may claim the bucket during the check.
        began_ms = self._lease.now_ms()
        try:
            found = await self._call(
                lambda store: bucket_marker.read_ownership(store, self._namespace)
            )
            self._require_own(found)
            self.undecided = tuple(
                (ids.undecided_from, ids.undecided_below) for ids in found.undecided
            )
            if found.unfenced is not None:
                await self._fence(found.unfenced)
        except errors.ApiError as error:
            self._lease.refuse(began_ms, error)
            raise
        except (WrongBucketError, CorruptObjectError) as error:
            self._lease.note_failure(errors.BucketRejectedError(str(error)))
            raise
        except StorageError as error:
            self._lease.note_failure(str(error))
            raise

        # Without a marker there is nothing that another cluster could have replaced.
        if found.marker is not None:
            self._lease.renew(began_ms)

    async def _look_again(self) -> None:
        began_ms = self._lease.now_ms()
        # From the start of the check, so that a slow bucket does not stretch the interval.
        self._due_ms = began_ms + RECHECK_MS
        try:
            await self.check()
        except errors.FencePendingError as error:
            self._due_ms = 0
            self._log_failure(error)
        except errors.ApiError as error:
            self._on_refusal()
            self._log_failure(error)
        except StorageError as error:
            self._due_ms = 0
            self._log_failure(error)
        else:
            if self._failure is not None:
                _log.info("marker_seen", namespace=self._namespace)
            self._failure = None

    def _log_failure(self, error: errors.ApiError | StorageError) -> None:
        """Log a failure, unless the previous check failed for the same reason."""
        if self._failure is not type(error):
            _log.warning(
                "lease_not_renewed",
                namespace=self._namespace,
                left_ms=self._lease.left_ms,
                reason=str(error),
            )
        self._failure = type(error)

    def _require_own(self, found: bucket_marker.Ownership) -> None:
        """Require that the newest marker, if there is one, is this cluster's."""
        claim = self._claim()
        if found.generations:
            newest = found.generations[-1]
            if newest.cluster_uuid != claim.cluster_uuid:
                raise errors.SupersededError(newest.cluster_id)
        elif found.marker is not None or claim.issued_below:
            # Otherwise the cluster is new, and its leader is about to create the marker.
            bucket_marker.check_marker(
                found.marker,
                cluster_id=self._cluster_id,
                cluster_uuid=claim.cluster_uuid,
                namespace=self._namespace,
            )

    async def _fence(self, generation: bucket_marker.Generation) -> None:
        """Record in the bucket that earlier generations are fenced, once that is certain.

        Raises:
            FencePendingError: they may not be fenced yet.
        """
        now_ms = self._lease.now_ms()
        if self._seen_unfenced is None or self._seen_unfenced[0] != generation.number:
            # This process's own timer counts: the clock of whoever wrote the marker proves nothing.
            self._seen_unfenced = generation.number, now_ms
        left_ms = self._seen_unfenced[1] + bucket_marker.FENCE_WAIT_MS - now_ms
        if left_ms > 0:
            raise errors.FencePendingError(left_ms)
        mark = bucket_marker.Fenced(
            cluster_uuid=generation.cluster_uuid,
            number=generation.number,
            is_declared=False,
            created_ms=self._wall_ms(),
        )
        await self._call(lambda store: bucket_marker.put_fenced(store, self._namespace, mark))
        _log.info("predecessors_fenced", namespace=self._namespace, generation=generation.number)

    async def _call(self, call: Callable[[ObjectStore], T]) -> T:
        store = self._store.until(time.monotonic() + LOOK_TIMEOUT_S)
        return await in_thread(lambda: call(store))
