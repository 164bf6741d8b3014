"""Blobs as named objects of a cluster: found by name, owned by a key, deleted with it.

A named object is written at once, so parts of an upload stay in memory until it is completed. A
crash before that leaves nothing, and reconciliation knows every object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streammeta.brokers.pulsar.blobs.blobs import BlobError, NoSuchBlobError
from streammeta.client import NamedObject, NamedObjects, OwnerKey, OwnerStream
from streammeta.client.errors import BrokerClientError
from streammeta.client.parts import run_blocking
from streammeta.storage.errors import RangeNotSatisfiableError, StorageError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectStore


class NamedBlobs:
    """Blobs below a prefix of names, all with one owner."""

    def __init__(
        self,
        named: NamedObjects,
        store: ObjectStore,
        namespace: str,
        owner: OwnerKey | OwnerStream,
        prefix: str = "",
    ) -> None:
        self._named = named
        self._store = store
        self._namespace = namespace
        self._owner = owner
        self._prefix = prefix

    async def begin(self, name: str, metadata: Mapping[str, str]) -> NamedUpload:
        """Begin an upload in parts."""
        return NamedUpload(self, name, metadata)

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str]) -> None:
        """Store a named object. Raise `BlobError` if it is rejected or can't be uploaded."""
        try:
            await self._named.put(
                self._prefix + name, data, owner=self._owner, metadata=dict(metadata)
            )
        except (BrokerClientError, StorageError) as error:
            raise BlobError(str(error)) from error

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of a named object. Raise `NoSuchBlobError` or `BlobError`."""
        found = await self._describe(name)
        # Read directly from the store: the cluster serves only the object's place.
        key = key_for(found.object_id, self._namespace)
        try:
            return await run_blocking(self._store.get_range, key, start, start + length)
        # A read from the end on. The interface promises fewer bytes, not an error.
        except RangeNotSatisfiableError:
            return b""
        except StorageError as error:
            raise BlobError(str(error)) from error

    async def metadata(self, name: str) -> Mapping[str, str]:
        """Return the user metadata. Raise `NoSuchBlobError` or `BlobError`."""
        return (await self._describe(name)).metadata

    async def delete(self, names: Sequence[str]) -> None:
        """Delete named objects. Raise `BlobError` if the node may not."""
        try:
            await self._named.delete([self._prefix + name for name in names])
        except BrokerClientError as error:
            raise BlobError(str(error)) from error

    async def names(self) -> list[str]:
        """List the named objects below the prefix. Raise `BlobError`."""
        try:
            found = self._named.describe(prefix=self._prefix)
            return [object_.name[len(self._prefix) :] async for object_ in found]
        except BrokerClientError as error:
            raise BlobError(str(error)) from error

    async def _describe(self, name: str) -> NamedObject:
        try:
            found = [object_ async for object_ in self._named.describe([self._prefix + name])]
        except BrokerClientError as error:
            raise BlobError(str(error)) from error
        # A look-up by name returns only existing objects.
        if not found:
            raise NoSuchBlobError(name)
        return found[0]


class NamedUpload:
    """An upload in parts, held in memory until it is completed."""

    def __init__(self, blobs: NamedBlobs, name: str, metadata: Mapping[str, str]) -> None:
        self._blobs = blobs
        self._name = name
        self._metadata = metadata
        self._parts: dict[int, bytes] = {}

    async def part(self, number: int, data: bytes) -> None:
        """Store a part, replacing an earlier one of its number."""
        self._parts[number] = data

    async def complete(self) -> None:
        """Store the named object of all parts."""
        # Parts may arrive in any order.
        data = b"".join(self._parts[number] for number in sorted(self._parts))
        await self._blobs.put(self._name, data, self._metadata)

    async def abort(self) -> None:
        """Drop the parts."""
        self._parts.clear()
