"""Inspection of destroyed objects that were never committed, before their bytes are deleted.

Most of them have no bytes, because their ids were fetched in advance and never used. Some were
uploaded and not committed. Metadata that was rolled back with its disks, however, has forgotten
commits and treats acknowledged records as such uploads. Offsets reveal this without any clock: an
object whose index ends above its stream's end is *ahead* of the metadata, and stays until the
stream has passed it.

Bucket calls run in threads, a few at a time.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from streammeta.controller.lifecycle.tasks import in_thread
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.adoption.last_entries import entries_ahead, read_last_entries
from streammeta.storage.errors import ObjectNotFoundError, StorageError
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectStore

READERS = 16
"""Maximum number of threads that inspect objects."""

# One thread for many: nearly all requests find nothing and return at once.
_SIZES = 25
"""Number of objects whose sizes one thread requests. Most of them have no bytes."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """An index entry that ends above its stream's end in the metadata."""

    entry: IndexEntry
    stream_end: int

    @property
    def reason(self) -> str:
        """Describe the offsets that the metadata has not reached."""
        entry = self.entry
        return (
            f"offsets {entry.start_offset} to {entry.end_offset} of stream {entry.stream_id} are"
            f" above the stream's end {self.stream_end} in the metadata"
        )


@dataclass(frozen=True, slots=True)
class Looks:
    """Results of inspections. Each object is in one of the four.

    An `unreadable` object has bytes that do not end like an object, or is relative and not ahead:
    it proves nothing.
    """

    deletable: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    ahead: dict[int, Ahead] = field(default_factory=dict)
    failed: dict[int, StorageError] = field(default_factory=dict)


class UncommittedObjects:
    """Finds uncommitted objects that are ahead of a leader's metadata."""

    def __init__(self, controller: MetadataController, store: ObjectStore, namespace: str) -> None:
        self._controller = controller
        self._store = store
        self._namespace = namespace
        self._readers = asyncio.Semaphore(READERS)

    async def look_at(self, object_ids: Collection[int]) -> Looks:
        """Read the ends of the objects, and compare them with the metadata.

        An object that is not in the bucket can be deleted. A failed inspection proves nothing.
        """
        ids, looks = list(object_ids), Looks()
        parts = [ids[start : start + _SIZES] for start in range(0, len(ids), _SIZES)]
        await asyncio.gather(*(self._look_at_part(part, looks) for part in parts))
        return looks

    async def _look_at_part(self, object_ids: Sequence[int], looks: Looks) -> None:
        async with self._readers:
            sizes = await in_thread(lambda: [self._size_of(object_id) for object_id in object_ids])
            for object_id, size in zip(object_ids, sizes, strict=True):
                if isinstance(size, StorageError):
                    looks.failed[object_id] = size
                # An empty object has no index, so it proves as little as a missing one.
                elif size:
                    await self._look(object_id, size, looks)
                else:
                    looks.deletable.append(object_id)

    def _size_of(self, object_id: int) -> int | StorageError:
        """Return the bytes of an object, 0 if it is not in the bucket, or the error."""
        try:
            return self._store.head(key_for(object_id, self._namespace)).size
        except ObjectNotFoundError:
            return 0
        except StorageError as error:
            return error

    async def _look(self, object_id: int, size: int, looks: Looks) -> None:
        key = key_for(object_id, self._namespace)
        try:
            last = await in_thread(lambda: read_last_entries(self._store, key, size))
        except StorageError as error:
            looks.failed[object_id] = error
            return
        # The bytes do not end with an index, so they prove nothing.
        if not last.entries:
            looks.unreadable.append(object_id)
            return

        # Each index is evaluated immediately, so only the readers' indexes are in memory.
        ahead = self._find_ahead(last.entries)
        if ahead is not None:
            looks.ahead[object_id] = ahead
        # The commit of a relative object assigned larger offsets, which are forgotten.
        elif last.relative:
            looks.unreadable.append(object_id)
        else:
            looks.deletable.append(object_id)

    def _find_ahead(self, last: Sequence[IndexEntry]) -> Ahead | None:
        """Return the first entry that the metadata has not reached, if there is one."""
        stream_ids = np.array([entry.stream_id for entry in last], dtype=np.int64)
        ends = self._controller.cluster_metadata.stream_ends(stream_ids)
        ahead = entries_ahead(last, ends)
        return Ahead(ahead[0], ends[ahead[0].stream_id]) if ahead else None
