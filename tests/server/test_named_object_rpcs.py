"""Named objects from a broker's bytes to their deletion with the owner, on real controllers."""

import asyncio
from pathlib import Path

import pytest

from streammeta.client import NamedObjects, OwnerKey, OwnerStream
from streammeta.client.controllers.methods import PUT_KVS, Method
from streammeta.client.errors import KeyConflictError, KeyNotFoundError, StreamNotFoundError
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import kv_pb2
from tests.kit.real_cluster import raise_level, running_cluster
from tests.kit.waiting import until

LEDGER = OwnerKey("7", "ledgers")


def test_named_objects_are_read_by_name_and_their_bytes_go_with_the_owner(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        raise_level(cluster, 3)
        asyncio.run(_lives(cluster.endpoints, tmp_path / "bucket"))


async def _lives(endpoints: list[str], bucket: Path) -> None:
    store = LocalObjectStore(bucket)
    async with ControllerClient(endpoints) as client:
        session = await BrokerSession.open(client, 7, 1)
        named = NamedObjects(session, store)
        item = kv_pb2.KVToPut(namespace=LEDGER.namespace, key=LEDGER.key, value=b"open")
        await client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
        (stream_id,) = await session.create_streams([{}])
        data = await named.put("7-data", b"blocks", owner=LEDGER, metadata={"role": "data"})
        index = await named.put("7-index", b"index", owner=LEDGER)
        kept = await named.put("snapshot", b"kept", owner=OwnerStream(stream_id))
        assert await named.get("7-data") == b"blocks"
        (found,) = [one async for one in named.describe(prefix="7-d")]
        assert (found.object_id, found.owner, found.metadata) == (data, LEDGER, {"role": "data"})
        await _refusals(named)
        keys = {one: key_for(one, session.namespace) for one in (data, index, kept)}
        store.put(keys[index], b"other")
        with pytest.raises(CorruptObjectError):
            await named.get("7-index")
        await named.delete(["7-index", "absent"])
        await until(lambda: _is_gone(store, keys[index]), "deletion of a deleted object", 60.0)
        await _delete_key(client)
        await until(
            lambda: _is_gone(store, keys[data]), "deletion of an object without owner", 60.0
        )
        assert [one.name async for one in named.describe()] == ["snapshot"]
        assert await named.get("snapshot") == b"kept"


async def _refusals(named: NamedObjects) -> None:
    with pytest.raises(KeyConflictError):
        await named.put("7-data", b"again", owner=LEDGER)
    with pytest.raises(StreamNotFoundError):
        await named.put("other", b"", owner=OwnerStream(99))
    with pytest.raises(KeyNotFoundError):
        await named.get("other")


async def _delete_key(client: ControllerClient) -> None:
    delete = Method(kv_pb2.DeleteKVsRequest, kv_pb2.DeleteKVsResponse)
    key = kv_pb2.KVKey(namespace=LEDGER.namespace, key=LEDGER.key)
    await client.call(delete, kv_pb2.DeleteKVsRequest(keys=[key]))


def _is_gone(store: LocalObjectStore, key: str) -> bool:
    return key not in {one.key for one in store.list_objects(key)}
