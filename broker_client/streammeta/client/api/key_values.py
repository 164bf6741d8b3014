"""Small values that brokers share: namespaced keys with versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from streammeta.client.arguments import as_payload, check_client
from streammeta.client.commits.effects import PutResult, ValueToPut, put_message
from streammeta.client.controllers import methods
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import rejection
from streammeta.v1 import common_pb2, kv_pb2

_KEYS_PER_CALL = 5_000
# Less than the contract's limit of 3.75 MiB, because keys count too.
_BYTES_PER_CALL = 3 * 1024 * 1024
_NONE, _CONFLICT = common_pb2.ERROR_CODE_NONE, common_pb2.ERROR_CODE_KEY_EXIST


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A value of a key. Each put of the key gives it a larger `version`, never 0."""

    key: str
    value: bytes
    version: int


class KeyValues:
    """The keys of a cluster. `namespace` is the default namespace if empty.

    A key has at most 1024 bytes, a value at most 1 MiB. Reads are linearizable. Several keys of one
    call are put or deleted each on its own condition, not together.
    """

    def __init__(self, controllers: ControllerClient) -> None:
        check_client(controllers)
        self._controllers = controllers

    async def get(self, key: str, *, namespace: str = "") -> KeyValue | None:
        """Return the value of a key, None if the key is absent."""
        return (await self.get_many([key], namespace=namespace)).get(key)

    async def get_many(self, keys: Iterable[str], *, namespace: str = "") -> dict[str, KeyValue]:
        """Return the values of keys, by key. Absent keys are left out."""
        found: dict[str, KeyValue] = {}
        wanted = list(dict.fromkeys(keys))
        while wanted:
            # A large answer may end early, at least one key is answered.
            request = kv_pb2.GetKVsRequest(
                keys=[
                    kv_pb2.KVKey(namespace=namespace, key=key) for key in wanted[:_KEYS_PER_CALL]
                ],
                may_stop=True,
            )
            results = (await self._controllers.call(methods.GET_KVS, request)).results
            for key, result in zip(wanted, results, strict=False):
                if result.found:
                    found[key] = KeyValue(key, result.value, result.version)
            wanted = wanted[max(1, len(results)) :]
        return found

    async def put(
        self, key: str, value: bytes, *, namespace: str = "", expected_version: int | None = None
    ) -> int:
        """Put a value and return its version.

        With an `expected_version` only if the key is at that version, 0 for an absent key. Raises
        `KeyConflictError` for another version, unless the value there is equal: it may be from
        an earlier attempt of this call.
        """
        data = as_payload("value", value)
        item = ValueToPut(
            key=key,
            value=data,
            namespace=namespace,
            overwrite=expected_version is None,
            expected_version=expected_version,
        )
        (result,) = await self.put_many([item])
        if result.is_conflict and result.value != data:
            raise rejection(result.error, f"key {key!r}")
        return result.version

    async def put_many(self, items: Iterable[ValueToPut]) -> Sequence[PutResult]:
        """Put values. The results are in the same order, each a version or a conflict.

        Raises the error of a call. Its values and those after it may be stored or not.
        """
        results: list[PutResult] = []
        for batch in _batches(items):
            request = kv_pb2.PutKVsRequest(items=map(put_message, batch))
            answer = await self._controllers.call(methods.PUT_KVS, request)
            for item, result in zip(batch, answer.results, strict=True):
                if result.error not in (_NONE, _CONFLICT):
                    raise rejection(result.error, f"key {item.key!r}")
                results.append(PutResult(result.error, result.version, result.value))
        return results

    async def delete(
        self, key: str, *, namespace: str = "", expected_version: int | None = None
    ) -> None:
        """Delete a key, if there is one.

        With an `expected_version` only at that version. Raises `KeyConflictError` for another one.
        """
        if await self.delete_many({key: expected_version}, namespace=namespace):
            raise rejection(_CONFLICT, f"key {key!r}")

    async def delete_many(
        self, keys: Collection[str] | Mapping[str, int | None], *, namespace: str = ""
    ) -> set[str]:
        """Delete keys, or keys at their expected versions, None for any. Absent ones are ignored.

        Return the keys that stay, because they have another version.
        """
        versions = keys if isinstance(keys, Mapping) else dict.fromkeys(keys)
        named = [
            kv_pb2.KVKey(namespace=namespace, key=key, expected_version=version)
            for key, version in versions.items()
        ]
        staying: set[str] = set()
        for at in range(0, len(named), _KEYS_PER_CALL):
            batch = named[at : at + _KEYS_PER_CALL]
            request = kv_pb2.DeleteKVsRequest(keys=batch)
            answer = await self._controllers.call(methods.DELETE_KVS, request)
            for key, result in zip(batch, answer.results, strict=True):
                if result.error == _CONFLICT:
                    staying.add(key.key)
                elif result.error not in (_NONE, common_pb2.ERROR_CODE_KEY_NOT_EXIST):
                    raise rejection(result.error, f"key {key.key!r}")
        return staying

    async def list(self, prefix: str = "", *, namespace: str = "") -> AsyncIterator[KeyValue]:
        """List keys with a prefix, and their values, in key order."""
        request = kv_pb2.ListKVsRequest(namespace=namespace, prefix=prefix)
        async for answer in self._controllers.pages(methods.LIST_KVS, request):
            for entry in answer.entries:
                yield KeyValue(entry.key, entry.value, entry.version)


def _batches(items: Iterable[ValueToPut]) -> Iterator[Sequence[ValueToPut]]:
    """Split values into calls within the limits of the contract."""
    batch: list[ValueToPut] = []
    size = 0
    for item in items:
        # A value above the limit is sent alone, and the controller rejects it.
        if batch and (len(batch) == _KEYS_PER_CALL or size + len(item.value) > _BYTES_PER_CALL):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item.value)
    if batch:
        yield batch
