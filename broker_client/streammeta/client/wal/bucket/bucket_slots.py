"""The store of a log's slots: creating, reading, listing and deleting them from an event loop.

Owns the threads for blocking calls, and the meaning of a rejected creation: a caller that finds its
own bytes under the key has created the object, perhaps by an attempt whose answer was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streammeta.client.resources.resources import StoreThreads
from streammeta.storage.errors import ObjectExistsError, ObjectNotFoundError, StoreUnavailableError
from streammeta.storage.object_store.protocol.base import ObjectInfo, ObjectStore


class SlotStore(Protocol):
    """Storage of slots. Every call may raise `StorageError`."""

    async def create(self, key: str, pieces: Sequence[bytes]) -> bool:
        """Create an object. Return False if another one exists."""
        ...

    async def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing any existing one."""
        ...

    async def get(self, key: str) -> bytes | None:
        """Return all bytes of an object, None if it does not exist."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """Describe all objects under a prefix, by key."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing ones are ignored."""
        ...

    def close(self) -> None:
        """Start no more calls."""
        ...


class BucketSlots:
    """A `SlotStore` in a bucket, with `threads` calls at the same time."""

    def __init__(self, store: ObjectStore, threads: int) -> None:
        self._threads = StoreThreads(store, threads, "object-log")

    async def create(self, key: str, pieces: Sequence[bytes]) -> bool:
        """See `SlotStore.create`."""
        store, data = self._threads.store, b"".join(pieces)

        def work() -> bool:
            try:
                store.put(key, data, if_absent=True)
            except ObjectExistsError:
                try:
                    # An earlier attempt of this call may have created the object before its answer
                    # was lost.
                    return store.get_range(key) == data
                except ObjectNotFoundError:
                    raise StoreUnavailableError(
                        f"object {key!r} existed and was deleted meanwhile. Try again"
                    ) from None
            return True

        return await self._threads.run(work)

    async def put(self, key: str, data: bytes) -> None:
        """See `SlotStore.put`."""
        store = self._threads.store
        await self._threads.run(lambda: store.put(key, data))

    async def get(self, key: str) -> bytes | None:
        """See `SlotStore.get`."""
        store = self._threads.store

        def work() -> bytes | None:
            try:
                return store.get_range(key)
            except ObjectNotFoundError:
                return None

        return await self._threads.run(work)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """See `SlotStore.list`."""
        store = self._threads.store
        return await self._threads.run(lambda: list(store.list_objects(prefix)))

    async def delete(self, keys: Sequence[str]) -> None:
        """See `SlotStore.delete`. A failed deletion raises `StoreUnavailableError`."""
        store = self._threads.store
        result = await self._threads.run(lambda: store.delete_many(keys))
        for key, reason in result.failed.items():
            raise StoreUnavailableError(f"object {key!r} was not deleted: {reason}")

    def close(self) -> None:
        """See `SlotStore.close`."""
        self._threads.close()
