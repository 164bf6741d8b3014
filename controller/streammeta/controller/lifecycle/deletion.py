"""Deletes the bytes of destroyed objects from the bucket, then forgets the objects.

The order is the safety: an object is marked destroyed in the map, its bytes go only after a delay
and after that mark is committed, and only then does the map forget it. Stopping anywhere in between
loses nothing: the next leader starts over, and a key that is gone already counts as deleted. Only
keys made of an object id and this cluster's namespace are ever named.

Bucket calls run in threads, a few at a time. A key that is refused waits by itself; a bucket that
can't serve is left alone for a while; one that asks for fewer requests is asked more slowly.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from streammeta.controller.errors import ApiError
from streammeta.controller.lifecycle.bucket_calls import in_thread
from streammeta.controller.lifecycle.pace import Pace
from streammeta.controller.lifecycle.retries import Refusal, Retries
from streammeta.controller.metadata.requests import RemoveObjects
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.controller import MetadataController
from streammeta.storage.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.base import DeleteResult, ObjectStore

DELETE_BATCH_MAX = 1_000
"""Keys in one bucket request; the limit of S3's DeleteObjects."""

IN_FLIGHT_MAX = 4
"""Bucket requests at a time."""

RETRIES_IN_FLIGHT_MAX = 2
"""How many of them may be for keys refused before: fresh ones always get through."""

REFUSED_MAX = 50_000
"""Refused keys remembered; beyond, the oldest destroyed objects have to be cleared up first."""

PAUSE_MS_MAX = 60_000
"""Longest pause while the bucket can't serve."""

BUSY_WAIT_MS = 100
"""How soon to look again while work waits for its turn."""

SAMPLE = 5
"""Stuck keys named in logs and descriptions."""

_log = structlog.get_logger(component="lifecycle")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionStatus:
    """What deletion is about: objects in requests under way, refused, stuck; objects per second."""

    in_flight: int
    refused: int
    stuck: int
    sample: tuple[tuple[str, str], ...]
    rate: float


class Deletion:
    """Works off what the map has marked destroyed, oldest first."""

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
        objects_per_s: float = 2_000.0,
        rng: random.Random | None = None,
    ) -> None:
        """`may_delete` says whether the bucket is known to be the one the map speaks of."""
        self._controller = controller
        self._store = store
        self._namespace = namespace
        self._clock = clock
        self._delay_ms = delay_ms
        self._interval_ms = interval_ms
        self._may_delete = may_delete
        self._rng = rng or random.Random()
        self._pace = Pace(objects_per_s, clock.monotonic_ms())
        self._retries = Retries(self._rng)
        self._in_flight: set[int] = set()
        self._requests = 0
        self._retry_requests = 0
        self._store_failures = 0
        self._resume_ms = clock.monotonic_ms()
        self._wake = asyncio.Event()
        controller.on_leadership(self._on_leadership)

    async def run(self) -> None:
        """Delete what is due, until cancelled."""
        async with asyncio.TaskGroup() as requests:
            while True:
                self._wake.clear()
                is_held_up = self._start_due(requests)
                pause_ms = min(BUSY_WAIT_MS, self._interval_ms) if is_held_up else self._interval_ms
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_ms / 1000):
                        await self._wake.wait()

    def describe(self) -> DeletionStatus:
        """Say what is under way and what is stuck, with a few examples (key, reason)."""
        stuck = self._retries.stuck()
        return DeletionStatus(
            in_flight=len(self._in_flight),
            refused=len(self._retries),
            stuck=len(stuck),
            sample=self._sample(stuck),
            rate=self._pace.rate,
        )

    # -- choosing

    def _on_leadership(self, leads: bool) -> None:
        self._retries.clear()
        self._store_failures = 0
        if leads:
            # The marks bear the time of an earlier leader's clock: wait the delay by this one's.
            self._resume_ms = self._clock.monotonic_ms() + self._delay_ms

    def _start_due(self, requests: asyncio.TaskGroup) -> bool:
        """Start requests for what is due; return whether more waits for its turn."""
        while True:
            now_ms = self._clock.monotonic_ms()
            if not self._controller.is_active or now_ms < self._resume_ms:
                return False
            if not self._may_delete():
                return False
            tokens = self._pace.available(now_ms)
            if self._requests >= self._requests_max() or tokens < self._least_batch():
                return True
            # After a failure of the bucket a few keys try it out, fewer each time: it may be down,
            # or stumble over one key in particular.
            room = min(tokens, max(1, DELETE_BATCH_MAX >> 2 * self._store_failures))
            batch, is_retry = self._next_retries(now_ms, room), True
            if not batch:
                batch, is_retry = self._next_fresh(room), False
            if not batch:
                return False
            self._pace.take(len(batch))
            self._in_flight.update(batch)
            self._requests += 1
            self._retry_requests += is_retry
            requests.create_task(self._delete(batch, is_retry=is_retry))

    def _requests_max(self) -> int:
        return 1 if self._store_failures else IN_FLIGHT_MAX

    def _least_batch(self) -> int:
        """How many objects must be allowed at once: a few large requests cost less than many."""
        return max(1, min(DELETE_BATCH_MAX, int(self._pace.rate / 4)))

    def _next_retries(self, now_ms: int, limit: int) -> Sequence[int]:
        if self._retry_requests >= RETRIES_IN_FLIGHT_MAX:
            return ()
        return self._retries.take_due(now_ms, limit)

    def _next_fresh(self, limit: int) -> Sequence[int]:
        if len(self._retries) >= REFUSED_MAX:
            return ()
        now_ms = self._clock.wall_ms()
        known = len(self._in_flight) + len(self._retries)
        due = self._controller.cluster_map.destroyed(now_ms - self._delay_ms, limit + known, now_ms)
        fresh = (one for one in due if one not in self._in_flight and one not in self._retries)
        return [object_id for object_id, _ in zip(fresh, range(limit), strict=False)]

    # -- deleting

    async def _delete(self, object_ids: Sequence[int], *, is_retry: bool) -> None:
        try:
            await self._controller.settled()
            await self._delete_settled(object_ids)
        except ApiError as error:
            # Leadership is lost, or no write is taken: what is left is due again by the map.
            self._retries.postpone(object_ids, self._clock.monotonic_ms() + self._interval_ms)
            _log.info("deletion_postponed", objects=len(object_ids), reason=str(error))
            self._pause()
        finally:
            self._in_flight.difference_update(object_ids)
            self._requests -= 1
            self._retry_requests -= is_retry
            self._wake.set()

    async def _delete_settled(self, object_ids: Sequence[int]) -> None:
        keys = {key_for(object_id, self._namespace): object_id for object_id in object_ids}
        try:
            result = await in_thread(lambda: self._store.delete_many(tuple(keys)))
        except (StoreUnavailableError, AccessDeniedError, BucketNotFoundError) as error:
            self._on_store_failure(object_ids, error)
        except StorageError as error:
            self._refuse(dict.fromkeys(object_ids, str(error)))
        else:
            self._store_failures = 0
            await self._after(result, keys)

    async def _after(self, result: DeleteResult, keys: dict[str, int]) -> None:
        now_ms = self._clock.monotonic_ms()
        if result.throttled:
            self._pace.slow_down(now_ms)
            throttled = [keys[key] for key in result.throttled]
            self._retries.postpone(throttled, now_ms + self._interval_ms)
        refused = {key: why for key, why in result.failed.items() if key not in result.throttled}
        self._refuse({keys[key]: why for key, why in refused.items()})
        deleted = [keys[key] for key in result.deleted]
        if deleted:
            self._retries.forget(deleted)
            await self._controller.write(RemoveObjects(object_ids=tuple(deleted)))
            _log.info("objects_deleted", count=len(deleted))

    def _on_store_failure(self, object_ids: Sequence[int], error: StorageError) -> None:
        now_ms = self._clock.monotonic_ms()
        _log.warning("bucket_can_not_delete", objects=len(object_ids), reason=str(error))
        is_throttled = isinstance(error, StoreUnavailableError) and error.throttled
        if is_throttled:
            self._pace.slow_down(now_ms)
        elif self._store_failures == 0:
            # It served others just now: it may be one of these keys that it stumbles over.
            self._store_failures = 1
            self._refuse(dict.fromkeys(object_ids, str(error)))
            return
        else:
            self._pause()
        self._retries.postpone(object_ids, now_ms + self._interval_ms)

    def _pause(self) -> None:
        """Leave bucket and log alone for a while, longer each time; with jitter."""
        self._store_failures += 1
        bound = min(PAUSE_MS_MAX, self._interval_ms * 2 ** min(self._store_failures, 16))
        pause_ms = int(bound * (0.5 + 0.5 * self._rng.random()))
        self._resume_ms = max(self._resume_ms, self._clock.monotonic_ms() + pause_ms)

    def _refuse(self, reasons: dict[int, str]) -> None:
        if not reasons:
            return
        stuck = self._retries.refuse(reasons, self._clock.monotonic_ms())
        object_id, reason = next(iter(reasons.items()))
        example = key_for(object_id, self._namespace)
        _log.info("objects_not_deleted", count=len(reasons), example=example, reason=reason)
        if stuck:
            _log.warning("objects_stuck", count=len(stuck), sample=self._sample(stuck))

    def _sample(self, stuck: Sequence[Refusal]) -> tuple[tuple[str, str], ...]:
        return tuple(
            (key_for(refusal.object_id, self._namespace), refusal.reason)
            for refusal in stuck[:SAMPLE]
        )
