"""Reads of a managed ledger from its copies or its sources, as the list says.

Handles of copies stay open for the next read. The least recently used ones are closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from streammeta.brokers.pulsar.formats.blocks import Entry
from streammeta.brokers.pulsar.formats.ledger_values import OffloadContext
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.brokers.pulsar.ledger_list import ManagedLedger, reads_copy

OPEN_HANDLES = 64
"""Copies that a reader keeps open. Each holds an index and a buffer of its object."""


class CopyHandle(Protocol):
    """Handle of an offloaded ledger."""

    async def read(self, first: int, last: int) -> Sequence[Entry]:
        """Return entries, both ends included."""
        ...

    def close(self) -> None:
        """Reject reads from now on."""
        ...


class CopyOpener(Protocol):
    """Opens offloaded ledgers, such as `Offloader` and `LedgerStreams`."""

    async def open(self, ledger_id: int, uuid: str) -> CopyHandle:
        """Return a handle."""
        ...


class SegmentOpener(Protocol):
    """Opens ledgers in segments of streaming offload, such as `Segments`."""

    async def open(self, ledger_id: int, uuids: Sequence[str]) -> CopyHandle:
        """Return a handle."""
        ...


class LedgerReader:
    """Reads of one managed ledger. `source_first` reads sources while they exist.

    `former` are the places that `copies` has replaced, by driver, for copies stored there.
    `segments` is the place of the list's streaming segments.
    """

    def __init__(
        self,
        managed: ManagedLedger,
        copies: CopyOpener,
        *,
        source_first: bool = False,
        former: Mapping[str, CopyOpener] | None = None,
        segments: SegmentOpener | None = None,
    ) -> None:
        self._managed = managed
        self._copies = copies
        self._former = former or {}
        self._segments = segments
        self._source_first = source_first
        self._open: OrderedDict[tuple[int, str], CopyHandle] = OrderedDict()

    @property
    def open_handles(self) -> int:
        """Number of copies that are open."""
        return len(self._open)

    async def read(self, ledger_id: int, first: int, last: int) -> Sequence[Entry]:
        """Return entries of a ledger, both ends included. Raise `NoSuchLedgerError`."""
        info = self._managed.info(ledger_id)
        if info is None:
            raise NoSuchLedgerError(f"ledger {ledger_id} is not in {self._managed.name}")
        if info.context is None or not reads_copy(info, source_first=self._source_first):
            source = await self._managed.sources.open(ledger_id)
            return await source.read(first, last)

        context = info.context
        uuids = [segment.uuid for segment in context.segments if segment.complete]
        # A repeated offload has another uuid, so its old handle is not reused.
        place = ledger_id, context.uuid or ",".join(uuids)
        if place not in self._open:
            self._keep(place, await self._open_copy(ledger_id, context, uuids))
        # Mark as the most recently used one.
        self._open.move_to_end(place)
        return await self._open[place].read(first, last)

    def _keep(self, place: tuple[int, str], handle: CopyHandle) -> None:
        """Store a handle, unless another read stored one meanwhile, and close excess handles."""
        # Opening awaits, so two reads may open the same copy.
        if place in self._open:
            handle.close()
            return
        self._open[place] = handle
        # Each handle keeps memory, so the number of them is bounded.
        while len(self._open) > OPEN_HANDLES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()

    async def _open_copy(
        self, ledger_id: int, context: OffloadContext, uuids: Sequence[str]
    ) -> CopyHandle:
        if context.uuid:
            # The context names the place in which this copy was written.
            copies = self._former.get(context.driver, self._copies)
            return await copies.open(ledger_id, context.uuid)
        if self._segments is None:
            raise NoSuchLedgerError(
                f"ledger {ledger_id} lies in segments of a streaming offload. Give the reader"
                " their place as `segments`"
            )
        return await self._segments.open(ledger_id, uuids)

    def close(self) -> None:
        """Close all handles."""
        for handle in self._open.values():
            handle.close()
        self._open.clear()
