"""Reads of a managed ledger from its copies or its sources, whichever the list says.

Handles of copies are kept open until they are closed together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from streammeta.brokers.pulsar.blocks import Entry
from streammeta.brokers.pulsar.ledger_list import ManagedLedger, reads_copy
from streammeta.brokers.pulsar.offloader import NoSuchLedgerError


class CopyHandle(Protocol):
    """A handle of an offloaded ledger."""

    async def read(self, first: int, last: int) -> Sequence[Entry]:
        """Return entries, both ends included."""
        ...

    def close(self) -> None:
        """Refuse reads from now on."""
        ...


class CopyOpener(Protocol):
    """Opens offloaded ledgers; `Offloader` and `LedgerStreams` do."""

    async def open(self, ledger_id: int, uuid: str) -> CopyHandle:
        """Return a handle."""
        ...


class LedgerReader:
    """Reads of one managed ledger; `source_first` reads sources while they are there.

    `former` are places that `copies` has replaced, by driver: copies there are read there.
    """

    def __init__(
        self,
        managed: ManagedLedger,
        copies: CopyOpener,
        *,
        source_first: bool = False,
        former: Mapping[str, CopyOpener] | None = None,
    ) -> None:
        self._managed = managed
        self._copies = copies
        self._former = former or {}
        self._source_first = source_first
        self._open: dict[tuple[int, str], CopyHandle] = {}

    @property
    def open_handles(self) -> int:
        """Number of copies that are open."""
        return len(self._open)

    async def read(self, ledger_id: int, first: int, last: int) -> Sequence[Entry]:
        """Return entries of a ledger, both ends included; raise `NoSuchLedgerError`."""
        info = self._managed.info(ledger_id)
        if info is None:
            raise NoSuchLedgerError(f"ledger {ledger_id} is not in {self._managed.name}")
        if info.context is None or not reads_copy(info, source_first=self._source_first):
            source = await self._managed.sources.open(ledger_id)
            return await source.read(first, last)
        place = ledger_id, info.context.uuid
        if place not in self._open:
            copies = self._former.get(info.context.driver, self._copies)
            self._open[place] = await copies.open(*place)
        return await self._open[place].read(first, last)

    def close(self) -> None:
        """Close all handles."""
        for handle in self._open.values():
            handle.close()
        self._open.clear()
