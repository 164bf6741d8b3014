"""Writing one output object: in one request, or in parts as its bytes come.

Owns the choice between both, the numbers of parts, the bytes that wait because they do not make a
part yet, and the checksum. Parts are slices of the buffer that the blocks were read into; only what
waits for the next iteration is copied. Knows nothing of blocks and indexes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.compaction.together import together
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_store.base import MultipartUpload, UploadedPart

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object in the store that no commit names yet; `crc32c` is that of all its bytes."""

    object_id: int
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class PartRules:
    """An object of at most `put_bytes` goes in one request, others in parts of `part_size`."""

    part_size: int
    put_bytes: int


class OutputWriter:
    """Writes the object `object_id` under `key`, piece by piece; calls come one after the other.

    Memory that is handed over must not change until the writer has ended.
    """

    def __init__(
        self, calls: StoreCalls, key: str, object_id: int, rules: PartRules, figures: Figures
    ) -> None:
        self._calls = calls
        self._key = key
        self._object_id = object_id
        self._rules = rules
        self._figures = figures
        self._has_begun = False
        self._upload: MultipartUpload | None = None
        self._parts: list[UploadedPart] = []
        self._last_number = 0
        self._carried = b""
        self._checksum = ObjectChecksum()

    @property
    def carried(self) -> bytes:
        """What did not make a part yet: the bytes the next piece has to begin with."""
        return self._carried

    async def write(self, piece: memoryview) -> None:
        """Send the whole parts of `piece`, which begins with `carried`; keep the rest."""
        whole = len(piece) - len(piece) % self._rules.part_size
        await self._send(piece[:whole], piece[len(self._carried) :])
        self._carried = bytes(piece[whole:])

    async def finish(self, piece: memoryview) -> WrittenObject:
        """Send `piece`, which begins with `carried`, as the end of the object."""
        fresh = piece[len(self._carried) :]
        self._carried = b""
        if self._upload is None and len(piece) <= self._rules.put_bytes:
            await self._put(piece, fresh)
        else:
            await self._send(piece, fresh)
            await self._complete()
        return WrittenObject(self._object_id, self._checksum.size, self._checksum.value)

    async def abort(self) -> None:
        """Drop what was uploaded of an object that is not finished.

        The store is asked for the uploads of the key, as the answer to their start may be lost.
        """
        if not self._has_begun:
            return
        self._has_begun, self._upload = False, None
        store, key = self._calls.store, self._key

        def drop() -> None:
            for upload in list(store.list_multipart_uploads(key)):
                if upload.key == key:
                    store.abort_multipart(upload)

        try:
            await self._calls.drop(drop)
        except StorageError as error:
            _log.warning(
                "unfinished uploads of %r could not be dropped (%s); their parts stay in the store"
                " until a rule of the bucket drops them",
                key,
                error,
            )

    async def _put(self, data: memoryview, fresh: memoryview) -> None:
        store = self._calls.store
        await self._add_up(fresh)
        await self._calls.write(len(data), lambda: store.put(self._key, data))
        self._figures.puts += 1
        self._figures.bytes_written += len(data)

    async def _send(self, data: memoryview, fresh: memoryview) -> None:
        """Send `data` in parts, of which `fresh` was never seen before."""
        if not data:
            await self._add_up(fresh)
            return
        upload = await self._begun()
        work = [self._add_up(fresh)]
        for start in range(0, len(data), self._rules.part_size):
            self._last_number += 1
            part = data[start : start + self._rules.part_size]
            work.append(self._send_part(upload, self._last_number, part))
        await together(work)

    async def _add_up(self, fresh: memoryview) -> None:
        await self._calls.compute(lambda: self._checksum.update(fresh))

    async def _begun(self) -> MultipartUpload:
        if self._upload is None:
            store, key = self._calls.store, self._key
            self._has_begun = True
            self._upload = await self._calls.write(0, lambda: store.start_multipart(key))
            self._figures.multiparts += 1
        return self._upload

    async def _send_part(self, upload: MultipartUpload, number: int, data: memoryview) -> None:
        store = self._calls.store
        part = await self._calls.write(len(data), lambda: store.upload_part(upload, number, data))
        self._parts.append(part)
        self._figures.parts += 1
        self._figures.bytes_written += len(data)

    async def _complete(self) -> None:
        upload = await self._begun()
        parts = sorted(self._parts, key=lambda part: part.number)
        store = self._calls.store
        await self._calls.write(0, lambda: store.complete_multipart(upload, parts))
        self._has_begun, self._upload = False, None
