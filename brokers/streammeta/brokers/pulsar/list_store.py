"""Codec of ledger lists, and a list in memory for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.brokers.pulsar.formats import wire_fields as wire
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import VersionConflictError


def encode_list(ledgers: Sequence[LedgerInfo]) -> bytes:
    """Return the ledgers as the peer's `ManagedLedgerInfo`."""
    return b"".join(wire.bytes_field(1, ledger.encode()) for ledger in ledgers)


def decode_list(data: bytes) -> list[LedgerInfo]:
    """Return the ledgers of a list. Raise `PayloadError` for other bytes."""
    return [LedgerInfo.decode(part) for part in wire.parts(data, 1)]


@dataclass(slots=True)
class MemoryListStore:
    """List in memory, stored as bytes."""

    data: bytes = b""
    version: int = field(default=0)

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers and the version."""
        return decode_list(self.data), self.version

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version."""
        # The same rule as in the cluster, so that tests see real conflicts.
        if version != self.version:
            raise VersionConflictError(f"list has version {self.version}, expected {version}")
        self.data, self.version = encode_list(ledgers), version + 1
        return self.version
