"""Deletion of destroyed objects from the bucket, and then from the metadata.

The order makes it safe. An object is first marked as destroyed in the metadata. Its bytes are
deleted only after a delay, and after that mark is committed and included in the backup, if there is
one. Only then does the metadata forget it. A stop at any point loses nothing: the next leader
starts over, and a missing key counts as deleted. Only keys made of an object id and this cluster's
namespace are ever deleted.

An object that was never committed is inspected first. If it is ahead of the metadata it stays, see
`uncommitted`.

Bucket calls run in threads, a few at a time. A rejected key waits separately, an unavailable bucket
is left alone for a while, and a throttling one receives fewer requests.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import structlog

from streammeta.controller.errors import ApiError
from streammeta.controller.lifecycle import deletion_order as order
from streammeta.controller.lifecycle.tasks import in_thread
from streammeta.controller.lifecycle.uncommitted import Ahead, UncommittedObjects
from streammeta.controller.metadata.api.requests import RemoveObjects
from streammeta.controller.metadata.api.validation import TTL_MS_MAX
from streammeta.controller.metadata.decisions.maintenance import DeletionHold
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.replication.log_time import JUMP_MS
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage import errors
from streammeta.storage.backoff import Backoff
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import DeleteResult, ObjectStore

_log = structlog.get_logger(component="lifecycle")

DELETE_BATCH_MAX = 1_000
"""Maximum number of keys in one bucket request, the limit of S3's DeleteObjects."""

IN_FLIGHT_MAX = 4
"""Maximum number of bucket requests in flight."""

RETRIES_IN_FLIGHT_MAX = 2
"""Maximum number of bucket requests for keys rejected before, so that others always proceed."""

LOOKS_IN_FLIGHT_MAX = 1
"""Maximum number of batches of uncommitted objects being inspected, so that others proceed."""

REFUSED_MAX = 50_000
"""Maximum number of remembered objects that were rejected or are ahead. At this limit no others are
deleted."""

PAUSE_MS_MAX = 60_000
"""Longest pause while the bucket is unavailable, in milliseconds."""

# Half, so that neither a broken key nor a broken bucket stops the other kind for long.
_FRESH_FIRST = 0.5
"""Share of requests to a failing bucket in which keys without a rejection come first."""

BUSY_WAIT_MS = 100
"""Pause before the next step while work waits for its turn, in milliseconds."""

LONG_WAIT_MS = 60_000
"""Wait for the backup after which it is logged, in milliseconds."""

SAMPLE = 5
"""Maximum number of stuck keys named in logs and descriptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionStatus:
    """Status of deletion: objects in flight, rejected and stuck, and objects per second.

    `unbacked` objects wait for the backup, the first of them since `unbacked_ms`. `ahead` objects
    stay because their offsets are above the ends of their streams. `unproven` ones stay because
    their bytes don't show whether a commit was forgotten. `deleted` and `failed` count attempts by
    outcome since the start of the process.
    """

    in_flight: int
    refused: int
    stuck: int
    sample: tuple[tuple[str, str], ...]
    rate: float
    unbacked: int
    unbacked_ms: int
    ahead: int = 0
    ahead_sample: tuple[tuple[str, str], ...] = ()
    unproven: int = 0
    deleted: int = 0
    failed: int = 0


class Deletion:
    """Deletes objects that are marked as destroyed, oldest first."""

    def __init__(
        self,
        controller: MetadataController,
        store: ObjectStore,
        namespace: str,
        clock: Clock,
        *,
        delay_ms: int,
        interval_ms: int,
        may_delete: Callable[[], bool],
        backed_up_end: Callable[[], int] | None = None,
        objects_per_s: float = 2_000.0,
        rng: random.Random | None = None,
    ) -> None:
        """`may_delete` says whether the bucket is known to belong to this metadata.

        `backed_up_end` returns the end of the log in the backup, as in `BackupWait`. Without a
        backup it is None, and nothing waits for it.
        """
        self._controller = controller
        self._store = store
        self._namespace = namespace
        self._clock = clock
        self._delay_ms = delay_ms
        self._interval_ms = interval_ms
        self._may_delete = may_delete
        self._rng = rng or random.Random()
        self._rate_limiter = order.RateLimiter(objects_per_s, clock.monotonic_ms())
        self._uncommitted = UncommittedObjects(controller, store, namespace)
        self._retries = order.RetryQueue(self._rng)
        self._ahead = order.RetryQueue(self._rng)
        self._inherited = order.InheritedIds()
        self._unproven: set[int] = set()
        self._backup_wait = None if backed_up_end is None else order.BackupWait(backed_up_end)
        self._waits_long = False
        self._doubted_hold = DeletionHold()
        self._hold_rest_ms = 0
        self._in_flight: set[int] = set()
        self._deleted = 0
        self._failed = 0
        self._requests = 0
        self._retry_requests = 0
        self._looks = 0
        self._reign = 0
        self._store_failures = 0
        self._resume_ms = clock.monotonic_ms()
        self._wake = asyncio.Event()
        controller.on_leadership(self._on_leadership)

    async def run(self) -> None:
        """Delete objects whose delay has passed, until cancelled."""
        async with asyncio.TaskGroup() as requests:
            while True:
                self._wake.clear()
                is_held_up = self._start_due(requests)
                pause_ms = min(BUSY_WAIT_MS, self._interval_ms) if is_held_up else self._interval_ms
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_ms / 1000):
                        await self._wake.wait()

    def describe(self) -> DeletionStatus:
        """Return the status, with a few stuck keys and their reasons."""
        stuck, wait = self._retries.stuck(), self._backup_wait
        return DeletionStatus(
            in_flight=len(self._in_flight),
            refused=len(self._retries),
            stuck=len(stuck),
            sample=self._sample(stuck),
            rate=self._rate_limiter.rate,
            unbacked=0 if wait is None else len(wait),
            unbacked_ms=0 if wait is None else wait.oldest_ms(self._clock.monotonic_ms()),
            ahead=len(self._ahead),
            ahead_sample=self._sample(self._ahead.some(SAMPLE)),
            unproven=len(self._unproven),
            deleted=self._deleted,
            failed=self._failed,
        )

    # -- choosing

    def _on_leadership(self, leads: bool) -> None:
        self._reign += 1
        # Only the metadata outlives a term. Everything remembered here may be outdated.
        self._retries.clear()
        self._ahead.clear()
        self._unproven.clear()

        if self._backup_wait is not None:
            self._backup_wait.clear()
        self._waits_long = False
        self._store_failures = 0
        if leads:
            # The marks have times of an earlier leader's clock, so wait the delay by this one's.
            self._resume_ms = self._clock.monotonic_ms() + self._delay_ms
            self._doubt_hold()
            self._inherited.note_takeover(
                self._controller.cluster_metadata, self._clock.monotonic_ms()
            )

    def _start_due(self, requests: asyncio.TaskGroup) -> bool:
        """Start requests for due objects. Returns whether more wait for their turn."""
        while True:
            now_ms = self._clock.monotonic_ms()
            if not self._controller.is_active or now_ms < self._resume_ms:
                return False
            # Asked before every batch, because ownership of the bucket may end at any time.
            if not self._may_delete():
                return False

            tokens = self._rate_limiter.available(now_ms)
            if self._requests >= self._requests_max() or tokens < self._least_batch():
                return True

            # After a failure a few keys probe the bucket, fewer each time: it may be down, or may
            # fail on one particular key.
            room = min(tokens, max(1, DELETE_BATCH_MAX >> 2 * self._store_failures))
            batch, is_retry = self._next_batch(now_ms, room)
            if not batch:
                return False

            self._rate_limiter.take(len(batch))
            # In flight before the task runs, or the next turn would choose the same objects.
            self._in_flight.update(batch)
            self._requests += 1
            self._retry_requests += is_retry
            # Objects without a commit may be the only copy of acknowledged records, so they are
            # inspected first.
            uncommitted = self._controller.cluster_metadata.uncommitted(batch)
            self._looks += bool(uncommitted)
            requests.create_task(self._delete(batch, uncommitted, is_retry=is_retry))

    def _requests_max(self) -> int:
        return 1 if self._store_failures else IN_FLIGHT_MAX

    def _least_batch(self) -> int:
        """Return the smallest batch worth a request: a few large requests cost less than many."""
        return max(1, min(DELETE_BATCH_MAX, int(self._rate_limiter.rate / 4)))

    def _next_batch(self, now_ms: int, limit: int) -> tuple[Sequence[int], bool]:
        """Return the next objects to delete, and whether they were rejected before.

        While the bucket fails the choice is random, because each object may be the cause.
        """
        if self._store_failures and self._rng.random() < _FRESH_FIRST:
            fresh = self._next_fresh(limit)
            if fresh:
                return fresh, False
        retries = self._next_retries(now_ms, limit)
        if retries:
            return retries, True
        return self._next_ahead(now_ms, limit) or self._next_fresh(limit), False

    def _next_retries(self, now_ms: int, limit: int) -> Sequence[int]:
        if self._retry_requests >= RETRIES_IN_FLIGHT_MAX:
            return ()
        return self._retries.take_due(now_ms, limit)

    def _next_ahead(self, now_ms: int, limit: int) -> Sequence[int]:
        if self._looks >= LOOKS_IN_FLIGHT_MAX:
            return ()
        return self._ahead.take_due(now_ms, limit, isolates=False)

    def _next_fresh(self, limit: int) -> Sequence[int]:
        self._release_unproven()
        # Memory is bounded. Deleting further objects would forget why earlier ones stay.
        if len(self._retries) + len(self._ahead) + len(self._unproven) >= REFUSED_MAX:
            return ()
        if self._backup_wait is None:
            # Committed objects may follow many that can't be inspected yet.
            is_looking = self._looks >= LOOKS_IN_FLIGHT_MAX
            due = self._due(order.WAITING_MAX if is_looking else DELETE_BATCH_MAX)
            return self._choose(due, limit)

        now_ms, end = (
            self._clock.monotonic_ms(),
            self._controller.cluster_metadata.applied_end_offset,
        )
        covered = self._backup_wait.release_covered(
            self._due(order.WAITING_MAX), end, now_ms, lambda due: self._choose(due, limit)
        )
        self._note_wait(self._backup_wait, now_ms)
        return covered

    def _choose(self, due: Sequence[int], limit: int) -> Sequence[int]:
        """Return at most `limit` of the due objects, either all once committed or none.

        Committed objects therefore never wait for the inspection of others.
        """
        if not due:
            return ()
        uncommitted = self._controller.cluster_metadata.uncommitted(due)
        # The oldest object decides the kind, so neither kind starves the other.
        looks = due[0] in uncommitted and self._looks < LOOKS_IN_FLIGHT_MAX
        alike = (object_id for object_id in due if (object_id in uncommitted) == looks)
        return list(islice(alike, limit))

    def _due(self, limit: int) -> Sequence[int]:
        """Return objects whose delay has passed and which are not postponed, oldest first.

        While the bucket fails their order is random, because the oldest may be the cause.
        """
        now_ms, cluster_metadata = (
            self._controller.log_time.now_ms(),
            self._controller.cluster_metadata,
        )
        known = (self._in_flight, self._retries, self._ahead, self._unproven)
        most = limit + sum(len(part) for part in known)
        due = cluster_metadata.destroyed(now_ms - self._delay_ms, most, self._hold_time_ms())
        fresh = (object_id for object_id in due if not any(object_id in part for part in known))
        found = list(islice(fresh, limit))
        if self._store_failures:
            self._rng.shuffle(found)
        return found

    def _hold_time_ms(self) -> int:
        """Return the time to compare with the end of the deletion hold."""
        log_time, hold = self._controller.log_time, self._controller.cluster_metadata.deletion_hold
        if log_time.elapsed_ms < self._hold_rest_ms and hold == self._doubted_hold:
            return min(log_time.now_ms(), hold.until_ms - 1)
        return log_time.now_ms()

    def _doubt_hold(self) -> None:
        """Continue a hold that ended only because the clock is far ahead of the metadata's times.

        Its rest, counted from the newest time in the metadata, is waited by the monotonic clock.
        """
        began_ms, cluster_metadata = (
            self._controller.log_time.began_ms,
            self._controller.cluster_metadata,
        )
        hold = self._doubted_hold = cluster_metadata.deletion_hold
        self._hold_rest_ms = 0
        if not 0 <= hold.until_ms <= began_ms:
            return
        since_ms = hold.since_ms if hold.since_ms <= began_ms else -1
        newest_ms = max(since_ms, cluster_metadata.newest_stamp_ms(began_ms))
        jump_ms = began_ms - newest_ms
        if jump_ms > JUMP_MS and newest_ms < hold.until_ms:
            self._hold_rest_ms = min(hold.until_ms - newest_ms, TTL_MS_MAX)
            _log.warning("deletion_hold_continues", jump_ms=jump_ms, rest_ms=self._hold_rest_ms)

    def _note_wait(self, wait: order.BackupWait, now_ms: int) -> None:
        """Log once that objects wait long for the backup, and once that the wait ended."""
        waited_ms = wait.oldest_ms(now_ms)
        waits_long = waited_ms >= LONG_WAIT_MS
        if waits_long and not self._waits_long:
            _log.warning("deletions_wait_for_backup", objects=len(wait), waited_ms=waited_ms)
        elif self._waits_long and not waits_long:
            _log.info("deletions_go_on")
        self._waits_long = waits_long

    # -- deleting

    async def _delete(
        self, object_ids: Sequence[int], uncommitted: Collection[int], *, is_retry: bool
    ) -> None:
        reign, left = self._reign, object_ids
        try:
            if uncommitted:
                left = await self._look_at(object_ids, uncommitted)
            await self._controller.settled()
            # During the inspection this node may have lost the right to delete.
            if self._reign == reign and self._may_delete():
                await self._delete_settled(left)
            else:
                self._postpone(left)
        except ApiError as error:
            # Leadership was lost, or no write is accepted. The metadata still lists the rest as
            # due.
            self._postpone(left)
            _log.info("deletion_postponed", objects=len(left), reason=str(error))
            self._pause()
        finally:
            self._in_flight.difference_update(object_ids)
            self._requests -= 1
            self._retry_requests -= is_retry
            self._wake.set()

    async def _look_at(
        self, object_ids: Sequence[int], uncommitted: Collection[int]
    ) -> Sequence[int]:
        """Return the objects without those that stay because they are ahead or can't be read."""
        reign = self._reign
        try:
            looks = await self._uncommitted.look_at(uncommitted)
        finally:
            self._looks -= 1
            self._wake.set()
        if self._reign != reign:
            return ()

        self._note_failed(looks.failed)
        self._note_ahead(looks.ahead)
        unproven = self._note_unproven(looks.unreadable)
        self._ahead.forget([*looks.deletable, *looks.unreadable])
        kept = looks.failed.keys() | looks.ahead.keys() | set(unproven)
        return [object_id for object_id in object_ids if object_id not in kept]

    def _note_failed(self, failed: Mapping[int, errors.StorageError]) -> None:
        """Postpone objects that could not be inspected."""
        still = {key: str(error) for key, error in failed.items() if key in self._ahead}
        self._ahead.refuse(still, self._clock.monotonic_ms())
        is_down = (errors.StoreUnavailableError, errors.BucketNotFoundError)
        others = {key: error for key, error in failed.items() if key not in still}
        down = {key: error for key, error in others.items() if isinstance(error, is_down)}
        if down:
            self._on_store_failure(list(down), next(iter(down.values())))
        self._refuse({key: str(error) for key, error in others.items() if key not in down})

    def _note_ahead(self, ahead: Mapping[int, Ahead]) -> None:
        """Postpone objects that are ahead of the metadata, and log the new ones."""
        new = {key: found for key, found in ahead.items() if key not in self._ahead}
        self._retries.forget(ahead)
        reasons = {object_id: found.reason for object_id, found in ahead.items()}
        self._ahead.refuse(reasons, self._clock.monotonic_ms())
        if not new:
            return

        object_id, found = next(iter(new.items()))
        _log.warning(
            "objects_ahead_of_map",
            count=len(new),
            object_id=object_id,
            stream_id=found.entry.stream_id,
            start_offset=found.entry.start_offset,
            end_offset=found.entry.end_offset,
            stream_end=found.stream_end,
        )

    def _note_unproven(self, unreadable: Sequence[int]) -> Sequence[int]:
        """Keep unreadable bytes under ids whose commits this process may not know."""
        if self._inherited.is_over(self._clock.monotonic_ms()):
            return ()
        unproven = [object_id for object_id in unreadable if object_id in self._inherited]
        if unproven:
            self._retries.forget(unproven)
            self._unproven.update(unproven)
            example = key_for(unproven[0], self._namespace)
            kept_ms = order.INHERITED_KEPT_MS
            _log.warning("objects_unproven", count=len(unproven), example=example, kept_ms=kept_ms)
        return unproven

    def _release_unproven(self) -> None:
        if self._unproven and self._inherited.is_over(self._clock.monotonic_ms()):
            self._unproven.clear()

    def _postpone(self, object_ids: Sequence[int]) -> None:
        """Retry objects after the interval, postponed ones through their own queue."""
        until_ms = self._clock.monotonic_ms() + self._interval_ms
        self._retries.postpone(object_ids, until_ms)
        self._ahead.postpone(object_ids, until_ms)

    async def _delete_settled(self, object_ids: Sequence[int]) -> None:
        if not object_ids:
            return
        keys = {key_for(object_id, self._namespace): object_id for object_id in object_ids}
        try:
            result = await in_thread(lambda: self._store.delete_many(tuple(keys)))
        # These concern the whole bucket, other errors only these keys.
        except (
            errors.StoreUnavailableError,
            errors.AccessDeniedError,
            errors.BucketNotFoundError,
        ) as error:
            self._on_store_failure(object_ids, error)
        except errors.StorageError as error:
            self._refuse(dict.fromkeys(object_ids, str(error)))
        else:
            self._store_failures = 0
            await self._after(result, keys)

    async def _after(self, result: DeleteResult, keys: dict[str, int]) -> None:
        now_ms = self._clock.monotonic_ms()
        if result.throttled:
            self._rate_limiter.slow_down(now_ms)
            throttled = [keys[key] for key in result.throttled]
            self._retries.postpone(throttled, now_ms + self._interval_ms)
        refused = {key: why for key, why in result.failed.items() if key not in result.throttled}
        self._refuse({keys[key]: why for key, why in refused.items()})
        deleted = [keys[key] for key in result.deleted]
        if deleted:
            self._retries.forget(deleted)
            # Only after the bytes: an object forgotten earlier would leave them forever.
            await self._controller.write(RemoveObjects(object_ids=tuple(deleted)))
            self._deleted += len(deleted)
            _log.info("objects_deleted", count=len(deleted))

    def _on_store_failure(self, object_ids: Sequence[int], error: errors.StorageError) -> None:
        now_ms = self._clock.monotonic_ms()
        _log.warning("bucket_can_not_delete", objects=len(object_ids), reason=str(error))
        is_throttled = isinstance(error, errors.StoreUnavailableError) and error.throttled
        if is_throttled:
            self._rate_limiter.slow_down(now_ms)
        elif self._store_failures == 0:
            # The previous request succeeded, so one of these keys may be the cause.
            self._store_failures = 1
            self._refuse(dict.fromkeys(object_ids, str(error)))
            return
        else:
            self._pause()
        self._failed += len(object_ids)
        self._postpone(object_ids)

    def _pause(self) -> None:
        """Pause all requests, longer each time, with jitter."""
        self._store_failures += 1
        pauses = Backoff(self._interval_ms, PAUSE_MS_MAX)
        pause_ms = int(pauses.wait(self._store_failures, self._rng.random()))
        self._resume_ms = max(self._resume_ms, self._clock.monotonic_ms() + pause_ms)

    def _refuse(self, reasons: dict[int, str]) -> None:
        if not reasons:
            return
        self._failed += len(reasons)
        stuck = self._retries.refuse(reasons, self._clock.monotonic_ms())
        object_id, reason = next(iter(reasons.items()))
        example = key_for(object_id, self._namespace)
        _log.info("objects_not_deleted", count=len(reasons), example=example, reason=reason)
        if stuck:
            _log.warning("objects_stuck", count=len(stuck), sample=self._sample(stuck))

    def _sample(self, stuck: Sequence[order.Refusal]) -> tuple[tuple[str, str], ...]:
        return tuple(
            (key_for(refusal.object_id, self._namespace), refusal.reason)
            for refusal in stuck[:SAMPLE]
        )
