"""Ledger lists as keys of a cluster. A save is a compare-and-set by the key's version.

The key owns the named objects of its managed ledger, so deleting the key deletes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.brokers.pulsar.formats import wire_fields as wire
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import VersionConflictError
from streammeta.client import KeyValues, OwnerKey
from streammeta.client.errors import KeyConflictError
from streammeta.client.parts import ControllerClient

# -- Codec of ledger lists, and a list in memory for tests


def encode_list(ledgers: Sequence[LedgerInfo]) -> bytes:
    """Return the ledgers as the peer's `ManagedLedgerInfo`."""
    return b"".join(wire.bytes_field(1, ledger.encode()) for ledger in ledgers)


def decode_list(data: bytes) -> list[LedgerInfo]:
    """Return the ledgers of a list. Raise `PayloadError` for other bytes."""
    return [LedgerInfo.decode(part) for part in wire.parts(data, 1)]


class ClusterListStore:
    """The list of one managed ledger, under a key."""

    def __init__(self, client: ControllerClient, key: OwnerKey) -> None:
        self._kv = KeyValues(client)
        self._key = key

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers and the version: no ledgers and 0 for an absent key.

        Raises `PayloadError` if the key contains no list, and errors of the controllers.
        """
        found = await self._kv.get(self._key.key, namespace=self._key.namespace)
        return ([], 0) if found is None else (decode_list(found.value), found.version)

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version. Return the new version.

        Raises `VersionConflictError` for another version, and errors of the controllers.
        """
        key, namespace = self._key.key, self._key.namespace
        try:
            # Fails if another owner has saved the list meanwhile.
            return await self._kv.put(
                key, encode_list(ledgers), namespace=namespace, expected_version=version
            )
        except KeyConflictError as error:
            raise VersionConflictError(f"list has another version than {version}") from error
