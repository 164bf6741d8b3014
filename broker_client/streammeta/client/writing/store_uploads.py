"""Uploads of a session's objects: ids, puts into the store, and their retries.

Owns how long a failure is retried, and the order in which uploads get ids. Knows neither the
contents of objects nor their commits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streammeta.client.config import WriterConfig
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.errors import ControllerUnavailableError, UploadFailedError
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.resources.bandwidth import Grade
from streammeta.client.resources.resources import StoreThreads
from streammeta.client.resources.tally import UPLOAD
from streammeta.client.writing.object_ids import ObjectIds, TakenIds
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.patience import Patience

_PATIENCE = Patience(Backoff(0.5, 10.0))
_RETRY_S = 10.0
_ID_PAUSES = Backoff(0.5, 10.0)
"""Waits between attempts to prepare ids, in seconds."""

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class StoreUploads:
    """Prepares ids and puts objects for one session.

    Failures that may pass are retried for `config.commit_deadline_s`, and without a limit with
    `is_persistent`.
    """

    def __init__(
        self,
        session: BrokerSession,
        store: StoreThreads,
        config: WriterConfig,
        *,
        is_persistent: bool = False,
    ) -> None:
        self._tally = session.client.tally
        self._network = session.client.network
        self._namespace = session.namespace
        self._store = store
        self._bucket = BucketCheck(session.client, store.store, session.namespace)
        self._deadline_s = config.commit_deadline_s
        self._is_persistent = is_persistent
        self._ids = ObjectIds(session, config.ttl_s, config.commit_deadline_s)
        self._preparing = asyncio.Lock()

    async def prepare(self, count: int) -> TakenIds:
        """Return `count` ids, larger than the ids of all calls before.

        Raises the error of the bucket's check or of the call.
        """
        # One call at a time: later ones must have larger ids.
        async with self._preparing:
            # Before ids are prepared: objects in another cluster's bucket can never be read.
            await self._retry("check of the bucket", self._bucket.require)
            return await self._retry("preparation of objects", lambda: self._ids.take(count))

    def discard_ids(self) -> None:
        """Drop the stock of ids after one of its age has expired."""
        self._ids.discard()

    async def put(self, object_id: int, data: memoryview | bytes) -> UploadFailedError | None:
        """Put an object into the store. Return why it can't be put, or None."""
        key = key_for(object_id, self._namespace)
        store = self._store.store

        async def put() -> None:
            await self._network.sent.take(Grade.UPLOAD, len(data))
            began = time.monotonic()
            try:
                await self._store.run(lambda: store.put(key, data))
            except StorageError:
                self._tally.count_failed_upload()
                raise
            self._tally.count_upload(len(data), time.monotonic() - began)

        while True:
            try:
                await self._retry(f"upload of object {object_id}", put)
                return None
            except StorageError as error:
                failed = UploadFailedError(key, object_id, str(error))
                failed.__cause__ = error
            if not self._is_persistent:
                return failed
            # The log still has the records, and an operator may correct the store.
            _log.error("the store rejects a logged batch, retrying in %g s: %s", _RETRY_S, failed)
            await asyncio.sleep(_RETRY_S)

    async def _retry(self, subject: str, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Await `work`, retrying failures that may pass until the deadline, if there is one."""
        loop = asyncio.get_running_loop()
        limit_s = math.inf if self._is_persistent else self._deadline_s
        ends_at = loop.time() + limit_s

        for attempt in itertools.count():
            try:
                return await work()
            except (ControllerUnavailableError, StorageError) as error:
                wait = self._wait_after(error, attempt, ends_at - loop.time())
                if wait is None:
                    raise
                self._tally.retries[UPLOAD] += 1
                _log.warning("%s failed, retrying in %.3g s: %s", subject, wait, error)
            await asyncio.sleep(wait)
        raise AssertionError("attempts without end have ended")

    def _wait_after(self, error: Exception, attempt: int, left_s: float) -> float | None:
        """Return the wait before the next attempt, None to stop retrying."""
        # Drawn in both cases, so that brokers do not retry in step after an outage.
        unit = random.random()
        if isinstance(error, StorageError):
            return _PATIENCE.wait_s(error, attempt, left_s, unit)
        return _ID_PAUSES.wait(attempt, unit) if self._is_persistent else None
