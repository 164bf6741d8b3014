"""Ledger lists as keys of a cluster. A save is a compare-and-set by the key's version.

The key owns the named objects of its managed ledger, so deleting the key deletes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import VersionConflictError
from streammeta.brokers.pulsar.list_store import decode_list, encode_list
from streammeta.client import ControllerClient, OwnerKey
from streammeta.client.controllers.methods import GET_KVS, PUT_KVS
from streammeta.client.errors import refusal
from streammeta.v1 import common_pb2, kv_pb2


class ClusterListStore:
    """The list of one managed ledger, under a key."""

    def __init__(self, client: ControllerClient, key: OwnerKey) -> None:
        self._client = client
        self._key = key

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers and the version: no ledgers and 0 for an absent key.

        Raises `PayloadError` if the key contains no list, and errors of the controllers.
        """
        place = kv_pb2.KVKey(key=self._key.key, namespace=self._key.namespace)
        answer = await self._client.call(GET_KVS, kv_pb2.GetKVsRequest(keys=[place]))
        (found,) = answer.results
        return (decode_list(found.value), found.version) if found.found else ([], 0)

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version. Return the new version.

        Raises `VersionConflictError` for another version, and errors of the controllers.
        """
        item = kv_pb2.KVToPut(
            key=self._key.key,
            namespace=self._key.namespace,
            value=encode_list(ledgers),
            # Fails if another owner has saved the list meanwhile.
            expected_version=version,
        )
        answer = await self._client.call(PUT_KVS, kv_pb2.PutKVsRequest(items=[item]))
        (result,) = answer.results
        if result.error == common_pb2.ERROR_CODE_KEY_EXIST and result.value == item.value:
            # The answer to an earlier attempt of this call was lost.
            return result.version
        if result.error == common_pb2.ERROR_CODE_KEY_EXIST:
            raise VersionConflictError(f"list has version {result.version}, expected {version}")
        if result.error != common_pb2.ERROR_CODE_NONE:
            raise refusal(result.error, f"list {self._key.key!r}")

        return result.version
