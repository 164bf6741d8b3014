"""Topics, leaders, brokers and offsets as keys of the controllers, in the cluster's namespace.

Owns the names of keys, the JSON of their values, and conditional puts: the loser of a race reads
the winner's value.
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
"""Prefixes of the keys that make up a view."""
PRODUCER_BLOCK = 1000
"""Number of producer ids that a broker reserves at once."""


def topic_key(name: str) -> str:
    """Return the key of a topic."""
    return f"topic/{name}"


def leader_key(topic_id: str, partition: int) -> str:
    """Return the key of a partition's leader."""
    return f"leader/{topic_id}/{partition}"


def deleted_key(topic_id: str = "") -> str:
    """Return the key that records the deletion of a topic, or the prefix of all such keys."""
    return f"deleted/{topic_id}"


def meta_key(topic_id: str, partition: int) -> str:
    """Return the key of a partition's meta stream."""
    return f"{topic_id}/{partition}"


def offset_key(group: str, topic: str = "", partition: int | str = "") -> str:
    """Return the key of a committed offset, or the prefix of all offsets of a group."""
    return f"offset/{quote(group, safe='')}/" + (f"{topic}/{partition}" if topic else "")


def fence_key(group: str) -> str:
    """Return the key that fences former coordinators of a group. It is no other key's prefix."""
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
        """Return JSON values and versions by key, for keys with a prefix, which is removed."""
        found: dict[str, tuple[Any, int]] = {}
        request = kv_pb2.ListKVsRequest(namespace=self._namespace, prefix=prefix)
        async for answer in self._controllers.pages(LIST_KVS, request):
            for entry in answer.entries:
                name = entry.key.removeprefix(prefix)
                found[name] = (parse_json(entry.value), entry.version)
        return found

    async def put(self, values: Mapping[str, Any], expected: int | None = None) -> bool:
        """Put JSON values, and return whether all keys now have them.

        `expected` puts only at that version, 0 meaning that the key is absent.
        """
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
        # A key that already has the same value counts: an earlier attempt may have succeeded
        # unnoticed.
        results = await self._put(items)
        return all(
            result.error == ERROR_CODE_NONE or result.value == item.value
            for item, result in zip(items, results, strict=True)
        )

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        """Put each JSON value at its version, 0 meaning that the key is absent.

        Return the new versions, None if one of the values was rejected.
        """
        versions: dict[str, int] = {}
        items = list(values.items())
        # A request must stay below the message limit of the controllers.
        for at in range(0, len(items), _BATCH):
            rows = [_item(self._namespace, *entry) for entry in items[at : at + _BATCH]]
            for row, result in zip(rows, await self._put(rows), strict=True):
                if result.error != ERROR_CODE_NONE:
                    return None
                versions[row.key] = result.version
        return versions

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete keys. Absent ones are ignored."""
        named = [kv_pb2.KVKey(namespace=self._namespace, key=key) for key in keys]
        if named:
            await self._controllers.call(DELETE_KVS, kv_pb2.DeleteKVsRequest(keys=named))

    async def delete_at(self, versions: Mapping[str, int]) -> bool:
        """Delete each key at its version, and return whether all are gone. Absent ones are ignored.

        A key with another version stays.
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
            # Another process may have deleted the key, which is what the caller wants.
            is_gone = is_gone and errors <= {ERROR_CODE_NONE, ERROR_CODE_KEY_NOT_EXIST}
        return is_gone

    async def stream_id(self, key: str) -> int | None:
        """Return the stream id stored in a key, None if the key is absent."""
        named = kv_pb2.KVKey(namespace=self._namespace, key=key)
        answer = await self._controllers.call(GET_KVS, kv_pb2.GetKVsRequest(keys=[named]))
        found = answer.results[0]
        return int(_ID.unpack(found.value)[0]) if found.found else None

    async def claim_stream_id(self, key: str, stream_id: int) -> int:
        """Put a stream id unless the key exists, and return the stored one."""
        item = kv_pb2.KVToPut(namespace=self._namespace, key=key, value=_ID.pack(stream_id))
        (result,) = await self._put([item])
        return int(_ID.unpack(result.value)[0])

    async def reserve_producer_ids(self) -> int:
        """Reserve `PRODUCER_BLOCK` producer ids, and return the first."""
        named = kv_pb2.KVKey(namespace=self._namespace, key=_PRODUCER_IDS)
        while True:
            answer = await self._controllers.call(GET_KVS, kv_pb2.GetKVsRequest(keys=[named]))
            found = answer.results[0]
            first = _ID.unpack(found.value)[0] if found.found else 0
            item = kv_pb2.KVToPut(
                namespace=self._namespace,
                key=_PRODUCER_IDS,
                value=_ID.pack(first + PRODUCER_BLOCK),
                # The version makes the reservation exclusive; the loser of a race reads the key
                # again.
                expected_version=found.version,
            )
            (result,) = await self._put([item])
            if result.error == ERROR_CODE_NONE:
                return int(first)

    async def _put(self, items: Sequence[kv_pb2.KVToPut]) -> Sequence[kv_pb2.KVResult]:
        answer = await self._controllers.call(PUT_KVS, kv_pb2.PutKVsRequest(items=items))
        return answer.results
