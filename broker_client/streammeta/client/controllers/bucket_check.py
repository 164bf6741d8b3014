"""Bucket check: compares the marker of a store with the cluster before the first read or write.

The marker in the bucket must name the cluster that the controllers describe. A new leader may not
have generated the cluster's UUID or put the marker yet, so the check waits for both. A check that
passed is not repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import ControllerUnavailableError
from streammeta.client.model import ClusterDescription
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.client.resources.resources import ignore_failure
from streammeta.storage.backoff import Backoff
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, check_marker, read_marker
from streammeta.storage.errors import BucketNotFoundError, StorageError, WrongBucketError
from streammeta.storage.object_store.protocol.base import ObjectStore

MARKER_WAIT = 5.0
"""Maximum wait for a missing marker, in seconds."""

READ_TIMEOUT = 10.0
"""Maximum time of one read of the marker, retries included, in seconds."""

LOOK_TIMEOUT = 3.0
"""The same when a client is opened, which must not wait for a slow store."""

_log = logging.getLogger(__name__)
_PAUSES = Backoff(0.02, 0.2, jitter=0)


class BucketCheck:
    """Check of one store and namespace. Several tasks may await `require` at a time."""

    def __init__(self, client: ControllerClient, store: ObjectStore, namespace: str) -> None:
        self._client = client
        self._store = store
        self._namespace = namespace
        self._is_passed = False
        self._checking: asyncio.Task[None] | None = None

    async def require(self) -> None:
        """Return once the bucket is known to belong to the cluster.

        Raises:
            WrongBucketError: the bucket belongs to another cluster or to none, or the cluster has
                another namespace.
            ControllerUnavailableError: no controller answered, or none knows the UUID.
            StorageError: the marker can't be read.
        """
        if self._is_passed:
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
            self._checking.add_done_callback(ignore_failure)
        # One check for all callers: a cancelled caller must not end the check of the others.
        await asyncio.shield(self._checking)

    async def look_once(self) -> None:
        """Reject a missing bucket or another cluster's bucket, without waiting.

        A missing marker, and a store that does not answer, are left to `require`.

        Raises:
            BucketNotFoundError: the bucket or directory does not exist.
            WrongBucketError: the bucket belongs to another cluster.
        """
        try:
            found = await self._marker(LOOK_TIMEOUT)
        except (BucketNotFoundError, WrongBucketError):
            raise
        except StorageError as error:
            _log.warning("bucket not checked yet, trying again at its first use: %s", error)
            return
        seen = await self._client.describe_cluster()
        # Without either there is nothing to compare yet.
        if found is not None and seen.cluster_uuid:
            self._compare(found, seen)

    def _compare(self, found: BucketMarker | None, seen: ClusterDescription) -> None:
        check_marker(
            found,
            cluster_id=seen.cluster_id,
            cluster_uuid=seen.cluster_uuid,
            namespace=self._namespace,
        )

    async def _check(self) -> None:
        seen = await self._describe_cluster()
        started, attempt = time.monotonic(), 0

        found = await self._marker()
        while found is None and time.monotonic() - started < MARKER_WAIT:
            await asyncio.sleep(_PAUSES.wait(attempt))
            attempt += 1
            found = await self._marker()
        self._compare(found, seen)
        self._is_passed = True

    async def _describe_cluster(self) -> ClusterDescription:
        """Ask until a controller knows the UUID, or the client's deadline passes."""
        started, attempt = time.monotonic(), 0
        while True:
            seen = await self._client.describe_cluster()
            # A wrong namespace never becomes right, so it is not retried.
            if seen.object_namespace != self._namespace:
                raise WrongBucketError(
                    self._namespace,
                    f"the controllers keep their objects under {seen.object_namespace!r}",
                    f"cluster {seen.cluster_id!r}",
                )
            if seen.cluster_uuid:
                return seen
            if time.monotonic() - started >= self._client.deadline_s:
                said = f"controller {seen.answered_by} knows no UUID of the cluster yet"

                raise ControllerUnavailableError(
                    "DescribeCluster", self._client.deadline_s, {"answered": said}, is_read=True
                )
            await asyncio.sleep(_PAUSES.wait(attempt))
            attempt += 1

    async def _marker(self, timeout_s: float = READ_TIMEOUT) -> BucketMarker | None:
        store = self._store.until(time.monotonic() + timeout_s)
        return await run_blocking(read_marker, store, self._namespace)
