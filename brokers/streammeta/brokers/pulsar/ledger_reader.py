"""Reads of a managed ledger from its copies or its sources, whichever the list says.

Handles of copies are kept open for the next read, the least recently used of many not.
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
"""Copies that a reader keeps open; each holds an index, and a buffer of its object."""


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


class SegmentOpener(Protocol):
    """Opens ledgers that lie in segments of streaming offload; `Segments` does."""

    async def open(self, ledger_id: int, uuids: Sequence[str]) -> CopyHandle:
        """Return a handle."""
        ...


class LedgerReader:
    """Reads of one managed ledger; `source_first` reads sources while they are there.

    `former` are places that `copies` has replaced, by driver: copies there are read there.
    `segments` is where segments of streaming offload lie that the list names.
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
        """Return entries of a ledger, both ends included; raise `NoSuchLedgerError`."""
        info = self._managed.info(ledger_id)
        if info is None:
            raise NoSuchLedgerError(f"ledger {ledger_id} is not in {self._managed.name}")
        if info.context is None or not reads_copy(info, source_first=self._source_first):
            source = await self._managed.sources.open(ledger_id)
            return await source.read(first, last)
        context = info.context
        uuids = [one.uuid for one in context.segments if one.complete]
        place = ledger_id, context.uuid or ",".join(uuids)
        if place not in self._open:
            self._keep(place, await self._opened(ledger_id, context, uuids))
        self._open.move_to_end(place)
        return await self._open[place].read(first, last)

    def _keep(self, place: tuple[int, str], handle: CopyHandle) -> None:
        """Keep a handle, unless another read opened one meanwhile; close the oldest of too many."""
        if place in self._open:
            handle.close()
            return
        self._open[place] = handle
        while len(self._open) > OPEN_HANDLES:
            _, oldest = self._open.popitem(last=False)
            oldest.close()

    async def _opened(
        self, ledger_id: int, context: OffloadContext, uuids: Sequence[str]
    ) -> CopyHandle:
        if context.uuid:
            copies = self._former.get(context.driver, self._copies)
            return await copies.open(ledger_id, context.uuid)
        if self._segments is None:
            raise NoSuchLedgerError(
                f"ledger {ledger_id} lies in segments of a streaming offload; give the reader the"
                " place of these as `segments`"
            )
        return await self._segments.open(ledger_id, uuids)

    def close(self) -> None:
        """Close all handles."""
        for handle in self._open.values():
            handle.close()
        self._open.clear()
