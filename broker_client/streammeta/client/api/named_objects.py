"""Named objects: a broker's private objects in the cluster's bucket, found by name.

A stream or a key of the cluster owns each object and is deleted with it: an object is deleted when
its owner is. Objects are written once, read whole, and never changed. New content needs a new name,
or the deletion of the old object first. Knows nothing of the contents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.client.arguments import check_kind, check_store
from streammeta.client.controllers import methods
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.errors import rejection
from streammeta.client.model import node_message
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.resources.daemon_threads import run_blocking
from streammeta.client.writing.object_ids import ObjectIds
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.v1 import common_pb2, objects_pb2

PUT_WITHIN_S = 600.0
"""Time for upload and commit, after which a prepared object expires, in seconds."""


@dataclass(frozen=True, slots=True)
class OwnerStream:
    """A stream that owns an object."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """A key of the cluster that owns an object."""

    key: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class NamedObject:
    """A named object. `crc32c` is -1 if unknown. Times are in ms since 1970, leader's clock."""

    name: str
    object_id: int
    object_size: int
    crc32c: int
    committed_at_ms: int
    owner: OwnerStream | OwnerKey
    metadata: Mapping[str, str] = field(default_factory=dict)


class NamedObjects:
    """Named objects of a cluster, written in the name of a session's node."""

    def __init__(self, session: BrokerSession, store: ObjectStore) -> None:
        check_store(store)
        self._session = session
        self._client = session.client
        self._store = store
        self._ids = ObjectIds(session, PUT_WITHIN_S)
        self._bucket = BucketCheck(session.client, store, session.namespace)

    async def put(
        self,
        name: str,
        data: bytes,
        *,
        owner: OwnerStream | OwnerKey,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Store bytes under an unused name and return the object's id.

        Raises `KeyConflictError` if the name is in use, `StreamNotFoundError` or `KeyNotFoundError`
        if the owner does not exist, errors that fence the node, and errors of the store.
        """
        check_kind("data", data, bytes, "bytes")
        await self._bucket.require()
        # The object is uploaded before it has a name, so a crash leaves only an expiring id.
        (object_id,) = (await self._ids.take(1)).ids
        key = key_for(object_id, self._session.namespace)
        await run_blocking(self._store.put, key, data)

        item = objects_pb2.NamedObjectToCommit(
            object_id=object_id,
            name=name,
            object_size=len(data),
            # Recorded, so that every later `get` verifies the bytes.
            crc32c=ObjectChecksum.of(data).value,
            metadata=[
                common_pb2.Tag(key=tag, value=text) for tag, text in (metadata or {}).items()
            ],
        )
        _set_owner(item, owner)

        answer = await self._client.call(
            methods.COMMIT_NAMED_OBJECTS,
            objects_pb2.CommitNamedObjectsRequest(
                node=node_message(self._session.node), objects=[item]
            ),
        )
        if answer.errors[0] != common_pb2.ERROR_CODE_NONE:
            raise rejection(answer.errors[0], f"object {name!r}")
        return object_id

    async def get(self, name: str) -> bytes:
        """Return the bytes of an object.

        Raises `KeyNotFoundError` for an unknown name, and errors of the store: `CorruptObjectError`
        if the bytes differ from the stored ones.
        """
        found = [described async for described in self.describe([name])]
        if not found:
            raise rejection(common_pb2.ERROR_CODE_KEY_NOT_EXIST, f"object {name!r}")
        # Names are unique.
        (described,) = found
        key = key_for(described.object_id, self._session.namespace)
        data = await run_blocking(self._store.get_range, key)
        if described.crc32c >= 0:
            ObjectChecksum.of(data).verify(described.crc32c, source=key)
        return data

    async def describe(
        self, names: Sequence[str] = (), *, prefix: str = ""
    ) -> AsyncIterator[NamedObject]:
        """List objects in name order: these names without unknown ones, or with a prefix."""
        request = objects_pb2.DescribeNamedObjectsRequest(names=names, prefix=prefix)
        async for answer in self._client.pages(methods.DESCRIBE_NAMED_OBJECTS, request):
            for row in answer.objects:
                yield _translate(row)

    async def delete_all_of(
        self, owner: OwnerStream | OwnerKey, *, with_owner_key: bool = False
    ) -> bool:
        """Delete all objects of an owner, however many it has, in several steps.

        With `with_owner_key` the owner's key is deleted together with its last object. Returns
        whether it was: a key without objects stays. Raises errors that fence the node.
        """
        request = objects_pb2.DeleteNamedObjectsRequest(
            node=node_message(self._session.node), with_owner_key=with_owner_key
        )
        _set_owner(request, owner)
        while True:
            answer = await self._client.call(methods.DELETE_NAMED_OBJECTS, request)
            for error in answer.errors:
                raise rejection(error, f"objects of {owner}")
            if not answer.remaining:
                return answer.owner_key_deleted

    async def delete(self, names: Sequence[str], *, with_owner_key: OwnerKey | None = None) -> None:
        """Delete objects and their names. Unknown names are ignored.

        With `with_owner_key`, only objects of this key are deleted, and it is deleted together with
        its last object. Raises errors that fence the node.
        """
        if not names:
            return  # the contract would read no name as all objects of the owner
        items = [objects_pb2.NamedObjectToDelete(name=name) for name in names]
        request = objects_pb2.DeleteNamedObjectsRequest(
            node=node_message(self._session.node), objects=items
        )
        if with_owner_key is not None:
            request.with_owner_key = True
            _set_owner(request, with_owner_key)
        answer = await self._client.call(methods.DELETE_NAMED_OBJECTS, request)
        for name, error in zip(names, answer.errors, strict=True):
            if error not in (
                common_pb2.ERROR_CODE_NONE,
                common_pb2.ERROR_CODE_OBJECT_NOT_EXIST,
            ):
                raise rejection(error, f"object {name!r}")


def _set_owner(
    message: objects_pb2.NamedObjectToCommit | objects_pb2.DeleteNamedObjectsRequest,
    owner: OwnerStream | OwnerKey,
) -> None:
    if isinstance(owner, OwnerStream):
        message.owner_stream_id = owner.stream_id
    else:
        message.owner_key.key, message.owner_key.namespace = owner.key, owner.namespace


def _translate(row: objects_pb2.NamedObject) -> NamedObject:
    owner: OwnerStream | OwnerKey = OwnerKey(row.owner_key.key, row.owner_key.namespace)
    if row.HasField("owner_stream_id"):
        owner = OwnerStream(row.owner_stream_id)
    return NamedObject(
        name=row.name,
        object_id=row.object_id,
        object_size=row.object_size,
        crc32c=row.crc32c if row.HasField("crc32c") else -1,
        committed_at_ms=row.committed_at_ms,
        owner=owner,
        metadata={tag.key: tag.value for tag in row.metadata},
    )
