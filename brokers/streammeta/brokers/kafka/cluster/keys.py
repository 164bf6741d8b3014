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

from streammeta.client import KeyValues, ValueToPut
from streammeta.client.parts import ControllerClient
from streammeta.storage.parsing import parse_json

_ID = struct.Struct(">q")
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
    """Return the key that fences former coordinators of a group, not a prefix of another key."""
    return f"fence/{quote(group, safe='')}/"


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Keys:
    """The keys of one Kafka cluster."""

    def __init__(self, controllers: ControllerClient, cluster: str) -> None:
        self._kv = KeyValues(controllers)
        self._namespace = f"_kafka_{cluster}"

    @property
    def namespace(self) -> str:
        """Namespace of all keys."""
        return self._namespace

    async def list(self, prefix: str) -> dict[str, tuple[Any, int]]:
        """Return JSON values and versions by key, for keys with a prefix, which is removed."""
        return {
            pair.key.removeprefix(prefix): (parse_json(pair.value), pair.version)
            async for pair in self._kv.list(prefix, namespace=self._namespace)
        }

    async def put(self, values: Mapping[str, Any], expected: int | None = None) -> bool:
        """Put JSON values, and return whether all keys now have them.

        `expected` puts only at that version, 0 meaning that the key is absent.
        """
        items = [self._item(key, _encode(value), expected) for key, value in values.items()]
        # A key that already has the same value counts: an earlier attempt may have succeeded
        # unnoticed.
        results = await self._kv.put_many(items)
        return all(
            not result.is_conflict or result.value == item.value
            for item, result in zip(items, results, strict=True)
        )

    async def put_at(self, values: Mapping[str, tuple[Any, int]]) -> dict[str, int] | None:
        """Put each JSON value at its version, 0 meaning that the key is absent.

        Return the new versions, None if one of the values was rejected.
        """
        items = [self._item(key, _encode(value), at) for key, (value, at) in values.items()]
        results = await self._kv.put_many(items)
        if any(result.is_conflict for result in results):
            return None
        return {item.key: result.version for item, result in zip(items, results, strict=True)}

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete keys. Absent ones are ignored."""
        await self._kv.delete_many(keys, namespace=self._namespace)

    async def delete_at(self, versions: Mapping[str, int]) -> bool:
        """Delete each key at its version, and return whether all are gone. Absent ones are ignored.

        A key with another version stays.
        """
        return not await self._kv.delete_many(versions, namespace=self._namespace)

    async def stream_id(self, key: str) -> int | None:
        """Return the stream id stored in a key, None if the key is absent."""
        found = await self._kv.get(key, namespace=self._namespace)
        return None if found is None else int(_ID.unpack(found.value)[0])

    async def claim_stream_id(self, key: str, stream_id: int) -> int:
        """Put a stream id unless the key exists, and return the stored one."""
        (result,) = await self._kv.put_many([self._item(key, _ID.pack(stream_id), 0)])
        return int(_ID.unpack(result.value)[0])

    async def reserve_producer_ids(self) -> int:
        """Reserve `PRODUCER_BLOCK` producer ids, and return the first."""
        while True:
            found = await self._kv.get(_PRODUCER_IDS, namespace=self._namespace)
            first = 0 if found is None else _ID.unpack(found.value)[0]
            following = _ID.pack(first + PRODUCER_BLOCK)
            # The version makes the reservation exclusive. The loser of a race reads the key again.
            version = 0 if found is None else found.version
            (result,) = await self._kv.put_many([self._item(_PRODUCER_IDS, following, version)])
            if not result.is_conflict:
                return int(first)

    def _item(self, key: str, value: bytes, version: int | None) -> ValueToPut:
        return ValueToPut(
            key=key,
            value=value,
            namespace=self._namespace,
            overwrite=version is None,
            expected_version=version,
        )
