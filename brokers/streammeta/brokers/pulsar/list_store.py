"""Codec of ledger lists, and a list in memory for tests."""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.brokers.pulsar.formats import wire_fields as wire
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo


def encode_list(ledgers: Sequence[LedgerInfo]) -> bytes:
    """Return the ledgers as the peer's `ManagedLedgerInfo`."""
    return b"".join(wire.bytes_field(1, ledger.encode()) for ledger in ledgers)


def decode_list(data: bytes) -> list[LedgerInfo]:
    """Return the ledgers of a list. Raise `PayloadError` for other bytes."""
    return [LedgerInfo.decode(part) for part in wire.parts(data, 1)]
