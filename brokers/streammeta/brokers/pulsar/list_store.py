"""Ledger lists in memory, for tests, and the bytes of a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.brokers.pulsar.formats import wire_fields as wire
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo
from streammeta.brokers.pulsar.ledger_list import VersionConflictError


def encode_list(ledgers: Sequence[LedgerInfo]) -> bytes:
    """Return the ledgers as the peer's `ManagedLedgerInfo`."""
    return b"".join(wire.bytes_field(1, one.encode()) for one in ledgers)


def decode_list(data: bytes) -> list[LedgerInfo]:
    """Return the ledgers of a list; raise `PayloadError` if the bytes are none."""
    return [LedgerInfo.decode(one) for one in wire.parts(data, 1)]


@dataclass(slots=True)
class MemoryListStore:
    """A list in memory; it is kept as bytes."""

    data: bytes = b""
    version: int = field(default=0)

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers and the version."""
        return decode_list(self.data), self.version

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version."""
        if version != self.version:
            raise VersionConflictError(f"list has version {self.version}, wanted {version}")
        self.data, self.version = encode_list(ledgers), version + 1
        return self.version
