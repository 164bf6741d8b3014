"""Topics, leaders, brokers and offsets as keys of the controllers, in a namespace of the cluster.

Owns the names of keys, the JSON of their values, and conditional puts: the loser of a race reads
what the winner wrote.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from streammeta.client import ControllerClient
from streammeta.client.controllers.methods import DELETE_KVS, GET_KVS, LIST_KVS, PUT_KVS
from streammeta.storage.parsing import parse_json
from streammeta.v1 import kv_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_KEY_NOT_EXIST, ERROR_CODE_NONE

_ID = struct.Struct(">q")
_BATCH = 5_000
_PRODUCER_IDS = "producer-ids"
VIEW_PREFIXES = ("broker/", "topic/", "leader/")
"""Prefixes of the keys that a view is made of."""
PRODUCER_BLOCK = 1000
"""Producer ids that a broker reserves at once."""


def topic_key(name: str) -> str:
    """Return the key of a topic."""
    return f"topic/{name}"


def leader_key(topic_id: str, partition: int) -> str:
    """Return the key that names the leader of a partition."""
    return f"leader/{topic_id}/{partition}"


def deleted_key(topic_id: str = "") -> str:
    """Return the key that notes the deletion of a topic, or the prefix of all of them."""
    return f"deleted/{topic_id}"


def meta_key(topic_id: str, partition: int) -> str:
    """Return the key of the stream that holds a partition's map."""
    return f"{topic_id}/{partition}"


def offset_key(group: str, topic: str = "", partition: int | str = "") -> str:
    """Return the key of a committed offset, or the prefix of all of a group."""
    return f"offset/{quote(group, safe='')}/" + (f"{topic}/{partition}" if topic else "")


def fence_key(group: str) -> str:
    """Return the key that fences former coordinators of a group; no other key begins with it."""
    return f"fence/{quote(group, safe='')}/"


def _item(namespace: str, key: str, value_at: tuple[Any, int]) -> kv_pb2.KVToPut:
    value, version = value_at
    encoded = json.dumps(value, separators=(",", ":")).encode()
    return kv_pb2.KVToPut(namespace=namespace, key=key, value=encoded, expected_version=version)


class Keys:
    """The keys of one Kafka cluster."""

    def __init__(self, controllers: ControllerClient, cluster: str) -> None:
        self._controllers = controllers
        self._namespace = f"_kafka_{cluster}"

    @property
    def namespace(self) -> str:
        """Namespace of all keys."""
        return self._namespace

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        """Return the JSON values of keys with a prefix, which is cut off, and their versions."""
        found: dict[str, tuple[Any, int]] = {}
        request = kv_pb2.ListKVsRequest(namespace=self._namespace, prefix=prefix)
        async for answer in self._controllers.pages(LIST_KVS, request):
            for entry in answer.entries:
                name = entry.key.removeprefix(prefix)
                found[name] = (parse_json(entry.value), entry.version)
        return found

    async def put(self, values: Mapping[str, Any], expected: int | None = None) -> bool:
        """Put JSON values; with `expected` only at that version, 0: if absent. Say if all are."""
        items = [
            kv_pb2.KVToPut(
                namespace=self._namespace,
                key=key,
                value=json.dumps(value, separators=(",", ":")).encode(),
                overwrite=expected is None,
                expected_version=expected,
            )
            for key, value in values.items()
        ]
        results = await self._put(items)
        return all(
            one.error == ERROR_CODE_NONE or one.value == item.value
            for item, one in zip(items, results, strict=True)
        )

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        """Put JSON values, each at the version that it is given with; 0: if the key is absent.

        Returns the versions that the keys have now, None if one of them was not put.
        """
        versions: dict[str, int] = {}
        items = list(values.items())
        for at in range(0, len(items), _BATCH):
            rows = [_item(self._namespace, *one) for one in items[at : at + _BATCH]]
            for row, result in zip(rows, await self._put(rows), strict=True):
                if result.error != ERROR_CODE_NONE:
                    return None
                versions[row.key] = result.version
        return versions

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete keys; those that are absent are no error."""
        named = [kv_pb2.KVKey(namespace=self._namespace, key=key) for key in keys]
        if named:
            await self._controllers.call(DELETE_KVS, kv_pb2.DeleteKVsRequest(keys=named))

    async def delete_at(self, versions: Mapping[str, int]) -> bool:
        """Delete keys, each at a version; those that are absent are no error. Say if all are gone.

        One that has another version stays.
        """
        named = [
            kv_pb2.KVKey(namespace=self._namespace, key=key, expected_version=version)
            for key, version in versions.items()
        ]
        is_gone = True
        for at in range(0, len(named), _BATCH):
            request = kv_pb2.DeleteKVsRequest(keys=named[at : at + _BATCH])
            answer = await self._controllers.call(DELETE_KVS, request)
            errors = {result.error for result in answer.results}
            is_gone = is_gone and errors <= {ERROR_CODE_NONE, ERROR_CODE_KEY_NOT_EXIST}
        return is_gone

    async def stream_id(self, key: str) -> int | None:
        """Return the stream id that a key holds, None if it is absent."""
        named = kv_pb2.KVKey(namespace=self._namespace, key=key)
        answer = await self._controllers.call(GET_KVS, kv_pb2.GetKVsRequest(keys=[named]))
        found = answer.results[0]
        return int(_ID.unpack(found.value)[0]) if found.found else None

    async def claim_stream_id(self, key: str, stream_id: int) -> int:
        """Put a stream id unless the key holds one; return the one that it holds."""
        item = kv_pb2.KVToPut(namespace=self._namespace, key=key, value=_ID.pack(stream_id))
        (result,) = await self._put([item])
        return int(_ID.unpack(result.value)[0])

    async def reserve_producer_ids(self) -> int:
        """Reserve `PRODUCER_BLOCK` producer ids; return the first."""
        named = kv_pb2.KVKey(namespace=self._namespace, key=_PRODUCER_IDS)
        while True:
            answer = await self._controllers.call(GET_KVS, kv_pb2.GetKVsRequest(keys=[named]))
            found = answer.results[0]
            first = _ID.unpack(found.value)[0] if found.found else 0
            item = kv_pb2.KVToPut(
                namespace=self._namespace,
                key=_PRODUCER_IDS,
                value=_ID.pack(first + PRODUCER_BLOCK),
                expected_version=found.version,
            )
            (result,) = await self._put([item])
            if result.error == ERROR_CODE_NONE:
                return int(first)

    async def _put(self, items: Sequence[kv_pb2.KVToPut]) -> Sequence[kv_pb2.KVResult]:
        answer = await self._controllers.call(PUT_KVS, kv_pb2.PutKVsRequest(items=items))
        return answer.results
