"""Deletes the bytes of destroyed objects from the bucket, then forgets the objects.

The order is the safety: an object is marked destroyed in the map, its bytes go only after a delay
and after that mark is committed, and only then does the map forget it. A deletion that fails is
tried again with a growing pause; it never holds up expiry, commits or reads. Bucket calls run in a
thread.
"""

import asyncio
from collections.abc import Sequence

import structlog

from controller.errors import ApiError
from controller.loop.clock import Clock
from controller.loop.controller import MetadataController
from controller.metadata.requests import RemoveObjects
from storage.errors import StorageError
from storage.object_format.object_key import key_for
from storage.object_store.base import ObjectStore

DELETE_BATCH_MAX = 1_000
"""Keys in one bucket request; the limit of S3's DeleteObjects."""

BACKOFF_MS_MAX = 60_000
"""Longest pause after failures of the bucket."""

_log = structlog.get_logger(component="lifecycle")


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
    ) -> None:
        self._controller = controller
        self._store = store
        self._namespace = namespace
        self._clock = clock
        self._delay_ms = delay_ms
        self._interval_ms = interval_ms
        self._failures = 0

    async def run(self) -> None:
        """Delete what is due, every interval, until cancelled."""
        while True:
            await self._delete_due()
            pause = min(self._interval_ms * 2**self._failures, BACKOFF_MS_MAX)
            await asyncio.sleep(max(pause, self._interval_ms) / 1000)

    async def _delete_due(self) -> None:
        while object_ids := self._due():
            try:
                await self._controller.settled()
                deleted = await self._delete_bytes(object_ids)
                if deleted:
                    await self._controller.write(RemoveObjects(object_ids=tuple(deleted)))
            except (ApiError, StorageError) as error:
                self._failures = min(self._failures + 1, 10)
                _log.warning("deletion_postponed", objects=len(object_ids), reason=str(error))
                return
            if len(deleted) < len(object_ids):
                self._failures = min(self._failures + 1, 10)
                return
            self._failures = 0

    def _due(self) -> Sequence[int]:
        if not self._controller.is_active:
            return ()
        marked_before_ms = self._clock.wall_ms() - self._delay_ms
        return self._controller.cluster_map.destroyed(marked_before_ms, DELETE_BATCH_MAX)

    async def _delete_bytes(self, object_ids: Sequence[int]) -> list[int]:
        keys = {key_for(object_id, self._namespace): object_id for object_id in object_ids}
        result = await asyncio.to_thread(self._store.delete_many, tuple(keys))
        for key, reason in result.failed.items():
            _log.warning("object_not_deleted", key=key, reason=reason)
        _log.info("objects_deleted", count=len(result.deleted))
        return [keys[key] for key in result.deleted]
