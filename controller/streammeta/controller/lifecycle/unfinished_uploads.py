"""Drops uploads in parts that can never be committed: those begun under ids that are gone.

Who dies in the middle of such an upload leaves parts that no listing of objects shows and that cost
what objects cost. Its id expires like any other; once the map has forgotten the id, which is never
issued again, nobody can want what is begun under it. Uploads under ids that the map knows, or has
not issued, and under keys of others are left alone.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import structlog

from streammeta.controller.lifecycle.bucket_calls import in_thread
from streammeta.controller.metadata.answers import CheckObjectsAnswer
from streammeta.controller.metadata.requests import CheckObjects
from streammeta.controller.metadata.values import ObjectState
from streammeta.controller.runtime.controller import MetadataController
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.object_key import OwnKey, parse_key
from streammeta.storage.object_store.base import MultipartUpload, ObjectStore

LOOK_BATCH_MAX = 1_000
"""Uploads held against the map in one step."""

_log = structlog.get_logger(component="lifecycle")


class UploadSweep:
    """A periodic look at the bucket's unfinished uploads: one listing, as a rule of one page."""

    def __init__(
        self,
        controller: MetadataController,
        store: ObjectStore,
        namespace: str,
        interval_ms: int,
        *,
        may_delete: Callable[[], bool],
    ) -> None:
        self._controller = controller
        self._store = store
        self._namespace = namespace
        self._interval_ms = interval_ms
        self._may_delete = may_delete

    async def run(self) -> None:
        """Look every interval, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.sweep()

    async def sweep(self) -> None:
        """Look once. What the bucket refuses is logged, and left to the next time."""
        uploads = self._own_uploads()
        try:
            while self._controller.is_active and self._may_delete():
                batch = await in_thread(lambda: list(islice(uploads, LOOK_BATCH_MAX)))
                if not batch:
                    return
                if gone := self._gone(batch):
                    await in_thread(partial(self._drop, gone))
                    _log.info("unfinished_uploads_dropped", count=len(gone), example=gone[0].key)
        except StorageError as error:
            _log.warning("unfinished_uploads_not_dropped", reason=str(error))

    def _own_uploads(self) -> Iterator[tuple[int, MultipartUpload]]:
        """List the unfinished uploads of this cluster, with their object ids."""
        for upload in self._store.list_multipart_uploads():
            key = parse_key(upload.key, self._namespace)
            if isinstance(key, OwnKey):
                yield key.object_id, upload

    def _gone(self, batch: Sequence[tuple[int, MultipartUpload]]) -> list[MultipartUpload]:
        request = CheckObjects(object_ids=tuple(object_id for object_id, _ in batch))
        answer = self._controller.cluster_map.query(request)
        assert isinstance(answer, CheckObjectsAnswer)
        return [
            upload
            for (_, upload), state in zip(batch, answer.states, strict=True)
            if state is ObjectState.REMOVED
        ]

    def _drop(self, uploads: Sequence[MultipartUpload]) -> None:
        for upload in uploads:
            self._store.abort_multipart(upload)
