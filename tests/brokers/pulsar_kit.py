"""A managed ledger whose calls yield to others a seeded number of times, for interleavings."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.brokers.pulsar.cluster_lists import decode_list, encode_list
from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo, LedgerMetadata
from streammeta.brokers.pulsar.ledger_list import ManagedLedger, VersionConflictError
from streammeta.brokers.pulsar.offloader import LedgerSource

NOW_MS = 1_000_000


@dataclass
class Pauses:
    """Lets other tasks run between the steps of a call."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)


@dataclass
class KeyStore(Pauses):
    """A list under a key, kept as bytes. `lost_answers` of the next saves take effect unheard."""

    data: bytes = b""
    version: int = 0
    conflicts: int = 0
    lost_answers: int = 0
    saved: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self) -> tuple[list[LedgerInfo], int]:
        await self.pause()
        return decode_list(self.data), self.version

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        await self.pause()
        if version != self.version:
            self.conflicts += 1
            raise VersionConflictError(f"list has version {self.version}, expected {version}")
        self.data, self.version = encode_list(ledgers), version + 1
        self.saved.set()
        await self.pause()
        if self.lost_answers:
            self.lost_answers -= 1
            raise ConnectionError("the answer was lost")
        return self.version


@dataclass
class Ledger(Pauses):
    """A closed ledger of entries of 10 bytes."""

    ledger_id: int = 0
    entries: int = 3
    is_closed: bool = True

    @property
    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(10 * self.entries, self.entries - 1)

    async def read(self, first: int, last: int) -> list[Entry]:
        await self.pause()
        return [Entry(entry_id, b"x" * 10) for entry_id in range(first, last + 1)]


@dataclass
class Ledgers(Pauses):
    """Sources by ledger id; a deletion of a source in `failing` raises."""

    kept: dict[int, Ledger] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)

    async def open(self, ledger_id: int) -> Ledger:
        await self.pause()
        return self.kept[ledger_id]

    async def delete(self, ledger_id: int) -> None:
        await self.pause()
        if ledger_id in self.failing:
            raise ConnectionError(f"source {ledger_id} is out of reach")
        self.kept.pop(ledger_id, None)


@dataclass
class KeptCopies(Pauses):
    """Copies by ledger id and uuid; `blocked` holds offloads up until it is set."""

    is_appendable: bool = True
    kept: set[tuple[int, str]] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    blocked: asyncio.Event | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def offload(self, ledger: LedgerSource, uuid: str, extra: Mapping[str, str]) -> None:
        self.begun.set()
        if self.blocked is not None:
            await self.blocked.wait()
        await ledger.read(0, ledger.metadata.last_entry)
        self.order.append(ledger.ledger_id)
        self.kept.add((ledger.ledger_id, uuid))
        await self.pause()

    async def delete(self, ledger_id: int, uuid: str) -> None:
        await self.pause()
        self.kept.discard((ledger_id, uuid))

    async def list_copies(self) -> list[tuple[int, str]]:
        await self.pause()
        return sorted(self.kept)

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        return True


@dataclass
class Topic:
    """Managed ledger `ml`: ledgers 0 to `closed - 1` are closed, the one after them is open."""

    closed: int = 6
    seed: int = 0
    now_ms: int = NOW_MS
    copies: KeptCopies = field(init=False)
    sources: Ledgers = field(init=False)
    store: KeyStore = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        infos = [LedgerInfo(at, 3, 30, 1) for at in range(self.closed)]
        data = encode_list([*infos, LedgerInfo(self.closed)])
        self.store = KeyStore(rng, data, version=1)
        self.sources = Ledgers(rng, {at: Ledger(rng, at) for at in range(self.closed)})
        self.copies = KeptCopies(rng)

    async def offloaded(self, count: int) -> None:
        """Wait until the stored list has so many whole copies."""
        async with asyncio.timeout(60):
            while sum(info.is_complete for info in decode_list(self.store.data)) < count:
                self.store.saved.clear()
                await self.store.saved.wait()

    def ledger(self, ledger_id: int) -> Ledger:
        """Return a closed source that is not among the sources yet."""
        return Ledger(ledger_id=ledger_id)

    async def open(self) -> ManagedLedger:
        managed = ManagedLedger("ml", self.store, self.sources, self.copies, lambda: self.now_ms)
        await managed.open()
        return managed
