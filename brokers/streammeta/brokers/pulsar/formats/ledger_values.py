"""Values about ledgers as in Pulsar and BookKeeper: metadata, ledger infos, contexts.

Field numbers come from `MLDataFormats.proto` and BookKeeper's `LedgerMetadataFormat`.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from streammeta.brokers.pulsar.formats import wire_fields as wire

_CLOSED = 3
# Protobuf's halves are signed, a uuid's are not.
_MASK = (1 << 64) - 1


def _uuid_fields(uuid: str) -> bytes:
    """Return both halves of a uuid, or nothing without one."""
    if not uuid:
        return b""
    value = uuids.UUID(uuid).int
    return wire.number_field(1, value >> 64) + wire.number_field(2, value & _MASK)


def _uuid_of(numbers: Mapping[int, int]) -> str:
    if 1 not in numbers and 2 not in numbers:
        return ""
    # The most significant half comes first, as in Java's UUID.
    value = (numbers.get(1, 0) & _MASK) << 64 | numbers.get(2, 0) & _MASK
    return str(uuids.UUID(int=value))


def _driver_field(number: int, driver: str, metadata: dict[str, str]) -> bytes:
    return wire.bytes_field(number, wire.bytes_field(1, driver) + wire.pair_fields(2, metadata))


class Digest(IntEnum):
    """Checksums of entries, with BookKeeper's numbers."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """Closed ledger.

    `length` is the size of all entries in bytes. `ensembles` contains bookies by first entry.
    """

    length: int
    last_entry: int
    ensemble: int = 1
    write_quorum: int = 1
    ack_quorum: int = 1
    digest: Digest = Digest.CRC32C
    ensembles: dict[int, tuple[str, ...]] = field(default_factory=dict)
    custom: dict[str, str] = field(default_factory=dict)
    created_ms: int | None = 0
    state: int = _CLOSED

    def encode(self) -> bytes:
        """Return the bytes of `LedgerMetadataFormat`."""
        return b"".join(
            (
                wire.number_field(1, self.write_quorum),
                wire.number_field(2, self.ensemble),
                wire.number_field(3, self.length),
                wire.number_field(4, self.last_entry),
                wire.number_field(5, self.state),
                *(
                    wire.bytes_field(
                        6,
                        b"".join(wire.bytes_field(1, bookie) for bookie in bookies)
                        + wire.number_field(2, first),
                    )
                    for first, bookies in self.ensembles.items()
                ),
                wire.number_field(7, self.digest),
                wire.number_field(9, self.ack_quorum),
                wire.number_field(10, self.created_ms),
                wire.pair_fields(11, self.custom),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> LedgerMetadata:
        """Return the value. Raise `PayloadError` for other bytes."""
        numbers = wire.numbers(data)
        ensembles = {
            wire.numbers(ensemble).get(2, 0): tuple(
                bookie.decode() for bookie in wire.parts(ensemble, 1)
            )
            for ensemble in wire.parts(data, 6)
        }

        return cls(
            numbers.get(3, 0),
            numbers.get(4, -1),
            numbers.get(2, 0),
            numbers.get(1, 0),
            numbers.get(9, 0),
            Digest(numbers.get(7, Digest.CRC32)),
            ensembles,
            wire.pairs(wire.parts(data, 11)),
            numbers.get(10),
            numbers.get(5, _CLOSED),
        )


@dataclass(frozen=True, slots=True)
class OffloadSegment:
    """Segment of streaming offload with entries of a ledger. Times are ms since 1970.

    `end_entry` is the last entry of the ledger in the segment.
    """

    uuid: str
    complete: bool = False
    assigned_ms: int | None = None
    offloaded_ms: int | None = None
    end_entry: int | None = None
    driver: str = ""
    driver_metadata: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of `OffloadSegment`."""
        return b"".join(
            (
                _uuid_fields(self.uuid),
                wire.number_field(3, 1 if self.complete else None),
                wire.number_field(4, self.assigned_ms),
                wire.number_field(5, self.offloaded_ms),
                wire.number_field(6, self.end_entry),
                _driver_field(7, self.driver, self.driver_metadata),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> OffloadSegment:
        """Return the value. Raise `PayloadError` for other bytes."""
        numbers = wire.numbers(data)
        driver = (wire.parts(data, 7) or [b""])[-1]
        return cls(
            _uuid_of(numbers),
            bool(numbers.get(3, 0)),
            numbers.get(4),
            numbers.get(5),
            numbers.get(6),
            wire.text(driver, 1),
            wire.pairs(wire.parts(driver, 2)),
        )


@dataclass(frozen=True, slots=True)
class OffloadContext:
    """Place and state of a ledger's copy. Times are ms since 1970.

    An unfinished copy has no field `complete`, as in the peer. A ledger offloaded as a stream is in
    `segments` and its context has no uuid.
    """

    uuid: str
    complete: bool = False
    source_deleted: bool | None = None
    timestamp_ms: int | None = None
    driver: str = ""
    driver_metadata: dict[str, str] = field(default_factory=dict)
    segments: tuple[OffloadSegment, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes of `OffloadContext`."""
        deleted = None if self.source_deleted is None else int(self.source_deleted)
        return b"".join(
            (
                _uuid_fields(self.uuid),
                # The peer leaves the field out instead of writing false.
                wire.number_field(3, 1 if self.complete else None),
                wire.number_field(4, deleted),
                wire.number_field(5, self.timestamp_ms),
                b""
                if self.segments and not self.uuid
                else _driver_field(6, self.driver, self.driver_metadata),
                *(wire.bytes_field(7, segment.encode()) for segment in self.segments),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> OffloadContext:
        """Return the value. Raise `PayloadError` for other bytes."""
        numbers = wire.numbers(data)
        driver = (wire.parts(data, 6) or [b""])[-1]
        return cls(
            _uuid_of(numbers),
            bool(numbers.get(3, 0)),
            bool(numbers[4]) if 4 in numbers else None,
            numbers.get(5),
            wire.text(driver, 1),
            wire.pairs(wire.parts(driver, 2)),
            tuple(OffloadSegment.decode(segment) for segment in wire.parts(data, 7)),
        )


@dataclass(frozen=True, slots=True)
class LedgerInfo:
    """Ledger of a managed ledger. `timestamp_ms` is its closing, None or 0 if it is open."""

    ledger_id: int
    entries: int = 0
    size: int = 0
    timestamp_ms: int | None = None
    context: OffloadContext | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the ledger is offloaded."""
        return self.context is not None and self.context.complete

    def with_context(self, context: OffloadContext | None) -> LedgerInfo:
        """Return a copy with another context."""
        return replace(self, context=context)

    def encode(self) -> bytes:
        """Return the bytes of `LedgerInfo`."""
        context = None if self.context is None else self.context.encode()
        return b"".join(
            (
                wire.number_field(1, self.ledger_id),
                wire.number_field(2, self.entries or None),
                wire.number_field(3, self.size or None),
                wire.number_field(4, self.timestamp_ms),
                wire.bytes_field(5, context),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> LedgerInfo:
        """Return the value. Raise `PayloadError` for other bytes."""
        numbers = wire.numbers(data)
        # In protobuf the last value of a repeated singular field counts.
        contexts = wire.parts(data, 5)
        context = OffloadContext.decode(contexts[-1]) if contexts else None
        return cls(numbers.get(1, 0), numbers.get(2, 0), numbers.get(3, 0), numbers.get(4), context)
