"""Uploads of outputs, and a journal of finished outputs without a commit.

Owns the choice between one request and parts, part numbers, the checksum, and the clean-up of
unfinished uploads. Parts are slices of the buffer that the blocks were read into. Only the bytes
carried to the next iteration are copied. Knows nothing of blocks and indexes.

A later attempt may use finished outputs: an output consists of certain bytes of certain objects,
which never change, and is valid until its id expires. The journal is in memory. After a crash the
ids expire and the controllers delete the objects.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable

from streammeta.client.compaction.commit import WrittenObject
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.store_calls import StoreCalls, run_all
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_store.protocol.base import Body, MultipartUpload, UploadedPart

_log = logging.getLogger(__name__)


class ObjectUpload:
    """An upload under `key`, in one request or in parts, which are sent concurrently."""

    def __init__(self, calls: StoreCalls, key: str, figures: Figures) -> None:
        self._calls = calls
        self._key = key
        self._figures = figures
        self._upload: MultipartUpload | None = None
        self._parts: list[UploadedPart] = []
        self.has_begun = False

    async def put(self, data: Body) -> None:
        """Store the object in one request."""
        store, nbytes = self._calls.store, len(data)
        await self._calls.write(nbytes, lambda: store.put(self._key, data))
        self._figures.puts += 1
        self._figures.bytes_written += nbytes

    async def begin(self) -> MultipartUpload:
        """Start an upload in parts unless it has been started."""
        if self._upload is None:
            store, key = self._calls.store, self._key
            # Before the call: its answer may be lost, and `abort` must then look for the upload.
            self.has_begun = True
            self._upload = await self._calls.write(0, lambda: store.start_multipart(key))
            self._figures.multiparts += 1
        return self._upload

    async def send(self, number: int, data: memoryview) -> None:
        """Send a part."""
        store, upload = self._calls.store, await self.begin()
        part = await self._calls.write(len(data), lambda: store.upload_part(upload, number, data))
        self._parts.append(part)
        self._figures.parts += 1
        self._figures.bytes_written += len(data)

    async def copy(self, number: int, source_key: str, start: int, end: int) -> None:
        """Have the store copy bytes `[start, end)` of another object as a part."""
        store, upload = self._calls.store, await self.begin()
        part = await self._calls.write(
            0, lambda: store.copy_part(upload, number, source_key, start, end)
        )
        self._parts.append(part)
        self._figures.copies += 1
        self._figures.bytes_copied += end - start

    async def complete(self) -> None:
        """Assemble the object from all parts."""
        store, upload = self._calls.store, await self.begin()
        # Parts are sent concurrently, and stores require ascending numbers.
        parts = sorted(self._parts, key=lambda part: part.number)
        await self._calls.write(0, lambda: store.complete_multipart(upload, parts))
        self.has_begun, self._upload = False, None

    async def abort(self) -> None:
        """Drop the parts of an unfinished upload.

        The store is asked for the key's uploads, because the answer to their start may be lost.
        """
        if not self.has_begun:
            return
        self.has_begun, self._upload = False, None
        store, key = self._calls.store, self._key

        def drop() -> None:
            for upload in list(store.list_multipart_uploads(key)):
                # The listing is by prefix.
                if upload.key == key:
                    store.abort_multipart(upload)

        try:
            await self._calls.drop(drop)
        except StorageError as error:
            _log.warning(
                "unfinished uploads of %r could not be dropped (%s), their parts stay in the store"
                " until a rule of the bucket drops them",
                key,
                error,
            )


class OutputWriter:
    """Writes the object `object_id` under `key`, piece by piece, one call at a time.

    An object of at most `put_bytes` is sent in one request, others in parts of `part_size`. Memory
    passed to the writer must not change until the writer has finished.
    """

    def __init__(
        self,
        calls: StoreCalls,
        key: str,
        object_id: int,
        config: CompactionConfig,
        figures: Figures,
    ) -> None:
        self._calls = calls
        self._object_id = object_id
        self._part_size = config.part_size
        self._put_bytes = config.put_bytes
        self._upload = ObjectUpload(calls, key, figures)
        self._last_number = 0
        self._carried = b""
        self._checksum = ObjectChecksum()

    @property
    def carried(self) -> bytes:
        """Bytes of an unfinished part. The next piece must begin with them."""
        return self._carried

    async def write(self, piece: memoryview) -> None:
        """Send the whole parts of `piece`, which begins with `carried`. Carry the rest."""
        whole = len(piece) - len(piece) % self._part_size
        await self._send(piece[:whole], piece[len(self._carried) :])
        # A copy, as the buffer of the piece is reused.
        self._carried = bytes(piece[whole:])

    async def finish(self, piece: memoryview) -> WrittenObject:
        """Send `piece`, which begins with `carried`, as the end of the object."""
        fresh = piece[len(self._carried) :]
        self._carried = b""
        # One request is cheaper than start, part and completion.
        if not self._upload.has_begun and len(piece) <= self._put_bytes:
            await self._update_checksum(fresh)
            await self._upload.put(piece)
        else:
            await self._send(piece, fresh)
            await self._upload.complete()
        return WrittenObject(self._object_id, self._checksum.size, self._checksum.value)

    async def abort(self) -> None:
        """Drop the parts of an unfinished object."""
        await self._upload.abort()

    async def _send(self, data: memoryview, fresh: memoryview) -> None:
        """Send `data` in parts. `fresh` is its end that is not in the checksum yet."""
        if not data:
            await self._update_checksum(fresh)
            return
        await self._upload.begin()
        work = [self._update_checksum(fresh)]
        for start in range(0, len(data), self._part_size):
            self._last_number += 1
            part = data[start : start + self._part_size]
            work.append(self._upload.send(self._last_number, part))
        await run_all(work)

    async def _update_checksum(self, fresh: memoryview) -> None:
        await self._calls.compute(lambda: self._checksum.update(fresh))


class OutputJournal:
    """Finished outputs by their sources. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[bytes, tuple[WrittenObject, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, sources: EntryTable) -> WrittenObject | None:
        """Return the output of these blocks of the sources, if there is one."""
        kept = self._kept.get(_recipe(sources)) if self._kept else None
        return kept[0] if kept is not None and self._clock() < kept[1] else None

    def keep(self, sources: EntryTable, written: WrittenObject, valid_s: float) -> None:
        """Keep an output for the next `valid_s` seconds."""
        self._kept[_recipe(sources)] = written, self._clock() + valid_s

    def drop(self, object_ids: Iterable[int]) -> None:
        """Drop outputs that were committed, rejected or have expired."""
        dropped, now = set(object_ids), self._clock()
        self._kept = {
            recipe: (written, until)
            for recipe, (written, until) in self._kept.items()
            if written.object_id not in dropped and now < until
        }


def _recipe(sources: EntryTable) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for column in (sources.object_id, sources.position, sources.size):
        digest.update(column.tobytes())
    return digest.digest()
