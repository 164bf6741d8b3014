"""Ledgers of a managed ledger and their copies: offload in two phases, trim, deletion of sources.

The list is one versioned value: every change is saved before it is relied on, and a save that finds
another version fences this managed ledger. Its own changes run one after the other, each on the
list that the one before left. A uuid is saved before data is written under it, so whatever a crash
leaves is found and deleted by the next try, or with the ledger.
"""

from __future__ import annotations

import asyncio
import uuid as uuids
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from typing import Protocol

from streammeta.brokers.pulsar.formats.ledger_values import (
    LedgerInfo,
    LedgerMetadata,
    OffloadContext,
)
from streammeta.brokers.pulsar.formats.object_names import MANAGED_LEDGER_KEY, SOFTWARE_KEY
from streammeta.brokers.pulsar.offloader import LedgerSource, NotAppendableError
from streammeta.storage.installation import DISTRIBUTION

NEVER = -1
"""Threshold or lag that is never met."""


class VersionConflictError(Exception):
    """The list was saved by another since it was loaded."""


class ManagedLedgerFencedError(Exception):
    """Another owner has changed the list; this one ends."""

    code = "ManagedLedgerFenced"


class InvalidCursorPositionError(ValueError):
    """A position lies outside of the managed ledger."""

    code = "InvalidCursorPosition"


class OffloadInProgressError(Exception):
    """Another offload of this managed ledger is under way."""

    code = "OffloadInProgress"


class OffloadConflictError(Exception):
    """A ledger got another uuid while it was offloaded; that copy is the one that counts."""


class LedgerListStore(Protocol):
    """Keeps the list of a managed ledger as one versioned value."""

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers, oldest first, and the version of the list."""
        ...

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version; return the new one.

        Raises:
            VersionConflictError: it has another.
        """
        ...


class Copies(Protocol):
    """Where ledgers are offloaded to; `Offloader` and `LedgerStreams` are."""

    is_appendable: bool

    async def offload(self, ledger: LedgerSource, uuid: str, extra: Mapping[str, str]) -> None:
        """Copy a ledger under a uuid."""
        ...

    async def delete(self, ledger_id: int, uuid: str) -> None:
        """Delete a copy, whole or not; may be repeated."""
        ...

    async def held(self) -> Sequence[tuple[int, str]]:
        """List what there is of copies, whole or not, as ledger ids and uuids.

        Copies of other managed ledgers may be among them.
        """
        ...

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        """Return True for a copy from `held` whose metadata names this managed ledger."""
        ...


class SegmentCopies(Protocol):
    """Place of segments of streaming offload, such as `Segments`."""

    async def delete(self, uuid: str) -> None:
        """Delete a segment, whole or not; may be repeated."""
        ...


class Sources(Protocol):
    """The ledgers as they were written."""

    async def open(self, ledger_id: int) -> LedgerSource:
        """Return a closed ledger."""
        ...

    async def delete(self, ledger_id: int) -> None:
        """Delete a ledger; one that is gone counts as deleted."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What is offloaded by itself: bytes and age in seconds. None or negative: never.

    `deletion_lag_ms` is from the end of an offload to the deletion of its source.
    """

    threshold_bytes: int | None = None
    threshold_s: int | None = None
    deletion_lag_ms: int | None = None


def due_ledgers(
    closed: Sequence[LedgerInfo], policy: OffloadPolicy, now_ms: int
) -> list[LedgerInfo]:
    """Return the closed ledgers that a policy offloads, oldest first.

    Sizes are summed from the newest on, each ledger included: it goes when the sum is over the
    limit or its age reaches the time.
    """
    found, total = [], 0
    for one in reversed(closed):
        total += one.size
        by_size = policy.threshold_bytes is not None and total > policy.threshold_bytes >= 0
        age_ms = now_ms - (one.timestamp_ms or now_ms)
        by_age = policy.threshold_s is not None and age_ms >= policy.threshold_s * 1000 >= 0
        if (by_size or by_age) and one.size and not one.is_complete:
            found.append(one)
    return found[::-1]


def source_is_due(context: OffloadContext | None, lag_ms: int | None, now_ms: int) -> bool:
    """Whether the source of an offloaded ledger is to be deleted: once the lag has passed."""
    if context is None or not context.complete or context.source_deleted:
        return False
    return lag_ms is not None and lag_ms >= 0 and now_ms - (context.timestamp_ms or 0) > lag_ms


def reads_copy(info: LedgerInfo, *, source_first: bool = False) -> bool:
    """Whether reads of a ledger go to its copy."""
    context = info.context
    if context is None or not context.complete:
        return False
    return bool(context.source_deleted) or not source_first


@dataclass(slots=True)
class ManagedLedger:
    """The list of one managed ledger; make it with `open`. The last ledger is the open one."""

    name: str
    store: LedgerListStore
    sources: Sources
    copies: Copies
    now_ms: Callable[[], int]
    driver: str = "streammeta"
    driver_metadata: dict[str, str] = field(default_factory=dict)
    former: Mapping[str, Copies] = field(default_factory=dict)
    """Places that `copies` has replaced, by driver: copies there are deleted there."""
    segments: SegmentCopies | None = None
    """Place of the segments of streaming offload that the list names, for their deletion."""
    new_uuid: Callable[[], str] = lambda: str(uuids.uuid4())
    ledgers: list[LedgerInfo] = field(default_factory=list)
    is_fenced: bool = False
    _version: int = 0
    _unsettled: list[LedgerInfo] | None = None
    """List of a save whose outcome is not known."""
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _offloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> None:
        """Load the list.

        Raises:
            ValueError: it names segments of a streaming offload, and `segments` is not given.
        """
        ledgers, version = await self.store.load()
        if self.segments is None and (named := sorted(_segments_of(ledgers))):
            raise ValueError(
                f"{self.name} names segment {named[0]}, wanted `segments`: the place where it lies"
            )
        self.ledgers, self._version = ledgers, version

    def info(self, ledger_id: int) -> LedgerInfo | None:
        """Return a ledger, None if it is gone."""
        return next((one for one in self.ledgers if one.ledger_id == ledger_id), None)

    # ---- changes of the list ----

    async def _change(self, change: Callable[[list[LedgerInfo]], list[LedgerInfo] | None]) -> bool:
        """Save the list that `change` makes of the present one; None: there is nothing to save.

        Changes wait for each other: between the read of a version and the save that names it this
        managed ledger makes no other save, which would look like another owner's.
        """
        async with self._changing:
            if self.is_fenced:
                raise ManagedLedgerFencedError(f"{self.name} was fenced; open it again")
            if self._unsettled is not None:
                await self._settle(self._unsettled)
            ledgers = change(self.ledgers)
            if ledgers is None:
                return False
            self._unsettled = ledgers
            try:
                self._version = await self.store.save(ledgers, self._version)
            except VersionConflictError as error:
                raise self._fence(str(error)) from error
            self.ledgers, self._unsettled = ledgers, None
            return True

    async def _settle(self, attempted: list[LedgerInfo]) -> None:
        """Learn from the store whether a save took effect whose answer is missing.

        A list with another version is this managed ledger's own if it has the attempted content.
        """
        found, version = await self.store.load()
        if version != self._version:
            if found != attempted:
                raise self._fence(f"list has version {version}, wanted {self._version}")
            self.ledgers, self._version = found, version
        self._unsettled = None

    def _fence(self, reason: str) -> ManagedLedgerFencedError:
        self.is_fenced = True
        return ManagedLedgerFencedError(f"{self.name}: {reason}")

    async def _set_context(
        self, ledger_id: int, choose: Callable[[LedgerInfo], OffloadContext | None]
    ) -> bool:
        """Save the context that `choose` returns for a ledger as the list has it now.

        Returns False, with nothing saved, if the ledger is gone or `choose` returns None.
        """

        def change(ledgers: list[LedgerInfo]) -> list[LedgerInfo] | None:
            info = self.info(ledger_id)
            context = None if info is None else choose(info)
            if info is None or context is None:
                return None
            return [info.with_context(context) if found is info else found for found in ledgers]

        return await self._change(change)

    async def roll(self, entries: int, size: int, next_ledger: int) -> None:
        """Close the open ledger, which has so many entries and bytes, and begin the next.

        A list without ledgers gets its first one. May be repeated.

        Raises:
            ValueError: the id of the next ledger is not above all others.
        """
        now_ms = self.now_ms()

        def change(ledgers: list[LedgerInfo]) -> list[LedgerInfo] | None:
            if not ledgers:
                return [LedgerInfo(next_ledger)]
            *closed, last = ledgers
            is_done = closed and (closed[-1].entries, closed[-1].size) == (entries, size)
            if is_done and last == LedgerInfo(next_ledger):
                return None
            if next_ledger <= last.ledger_id:
                raise ValueError(
                    f"next_ledger is {next_ledger}, wanted more than {last.ledger_id}, the last"
                    f" ledger of {self.name}"
                )
            ended = replace(last, entries=entries, size=size, timestamp_ms=now_ms)
            return [*closed, ended, LedgerInfo(next_ledger)]

        await self._change(change)

    # ---- offload ----

    async def offload_prefix(self, ledger_id: int, entry_id: int) -> tuple[int, int]:
        """Offload all ledgers before the one of a position; return the first position that is not.

        Raises:
            InvalidCursorPositionError: there is no such position.
            OffloadInProgressError: another offload is under way.
            Exception: the first error met; the other ledgers are offloaded.
        """
        info = self.info(ledger_id)
        is_open = info is not None and info is self.ledgers[-1]
        if info is None or not 0 <= entry_id < max(info.entries, 1 if is_open else 0):
            raise InvalidCursorPositionError(
                f"position is {ledger_id}:{entry_id}, wanted one of {self.name}"
            )
        wanted = [one for one in self.ledgers[:-1] if one.ledger_id < ledger_id and one.size]
        await self.offload([one for one in wanted if not one.is_complete])
        left = (one for one in self.ledgers[:-1] if one.size and not one.is_complete)
        first = next(left, self.ledgers[-1])
        return first.ledger_id, 0

    async def offload_due(self, policy: OffloadPolicy) -> None:
        """Offload the ledgers that a policy names, after an offload that is under way.

        Raises as `offload_prefix`, but for `OffloadInProgressError`.
        """
        async with self._offloading:
            await self._offload_all(due_ledgers(self.ledgers[:-1], policy, self.now_ms()))

    async def offload(self, ledgers: Sequence[LedgerInfo]) -> None:
        """Offload ledgers one after the other; raises as `offload_prefix`."""
        self._refuse_during_an_offload()
        async with self._offloading:
            await self._offload_all(ledgers)

    def _refuse_during_an_offload(self) -> None:
        if self._offloading.locked():
            raise OffloadInProgressError(f"{self.name} is being offloaded; try again later")

    async def _offload_all(self, ledgers: Sequence[LedgerInfo]) -> None:
        if not self.copies.is_appendable:
            raise NotAppendableError
        first_error: Exception | None = None
        for info in ledgers:
            try:
                await self._offload_one(info.ledger_id)
            except ManagedLedgerFencedError:
                raise
            except Exception as error:  # noqa: BLE001 - the first is raised when all were tried
                if self.info(info.ledger_id) is not None:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    async def _offload_one(self, ledger_id: int) -> None:
        uuid = await self._prepare(ledger_id)
        if uuid is None:
            return
        source = await self.sources.open(ledger_id)
        extra = {MANAGED_LEDGER_KEY: self.name, SOFTWARE_KEY: _software()}
        await self.copies.offload(source, uuid, extra)
        await self._complete(ledger_id, uuid)

    async def _prepare(self, ledger_id: int) -> str | None:
        """Save a new uuid, after an earlier try's copy was deleted.

        Returns None if there is nothing to offload: the ledger is gone, or offloaded already.
        """
        info = self.info(ledger_id)
        if info is not None and info.context is not None:
            # A save proves that the list is still this owner's, and that it names no whole copy.
            if not await self._set_context(ledger_id, _unless_complete):
                return None
            await self._delete_copy(ledger_id, info.context)
        uuid = self.new_uuid()
        context = OffloadContext(
            uuid, driver=self.driver, driver_metadata=dict(self.driver_metadata)
        )
        is_saved = await self._set_context(
            ledger_id, lambda info: None if info.is_complete else context
        )
        return uuid if is_saved else None

    async def _complete(self, ledger_id: int, uuid: str) -> None:
        """Save that the copy is whole; a copy that no list names is deleted.

        After a failed save the outcome is not known, and the copy is kept.
        """
        now_ms = self.now_ms()

        def choose(info: LedgerInfo) -> OffloadContext | None:
            if info.context is None or info.context.uuid != uuid:
                return None
            return replace(info.context, complete=True, timestamp_ms=now_ms)

        if await self._set_context(ledger_id, choose):
            return
        await self.copies.delete(ledger_id, uuid)
        if self.info(ledger_id) is not None:
            raise OffloadConflictError(f"ledger {ledger_id} has another copy than {uuid}")

    # ---- deletion ----

    async def _delete_copy(self, ledger_id: int, context: OffloadContext) -> None:
        """Delete a ledger's copy; of its segments those that no other ledger of the list is in."""
        if context.uuid:
            copies = self.former.get(context.driver, self.copies)
            await copies.delete(ledger_id, context.uuid)
        if self.segments is not None and context.segments:
            kept = _segments_of(one for one in self.ledgers if one.ledger_id != ledger_id)
            for segment in context.segments:
                if segment.uuid not in kept:
                    await self.segments.delete(segment.uuid)

    async def sweep(self) -> list[tuple[int, str]]:
        """Delete copies of this managed ledger that the list does not name.

        Returns their ledger ids and uuids. A copy in a place that others share, which does not say
        whose it is, stays.

        Such are left where a process ended between two steps of an offload or a deletion, or went
        on when it was replaced. The list is read after the copies were listed: a uuid is saved
        before there is anything under it, and none comes back.
        """
        self._refuse_during_an_offload()
        found = await self.copies.held()
        ledgers, _ = await self.store.load()
        named = {(one.ledger_id, one.context.uuid) for one in ledgers if one.context is not None}
        left = [one for one in found if one not in named]
        left = [one for one in left if await self.copies.is_of(self.name, *one)]
        for ledger_id, uuid in left:
            await self.copies.delete(ledger_id, uuid)
        return left

    async def trim(self, before_ledger: int) -> list[int]:
        """Delete closed ledgers below an id with their copies, whole or not; return their ids.

        Raises:
            Exception: the first error met; the other ledgers are deleted. `sweep` finds a copy that
                is left.
        """
        gone: list[LedgerInfo] = []

        def change(ledgers: list[LedgerInfo]) -> list[LedgerInfo] | None:
            gone[:] = [info for info in ledgers[:-1] if info.ledger_id < before_ledger]
            return [info for info in ledgers if info not in gone] if gone else None

        await self._change(change)
        first_error: Exception | None = None
        for info in gone:
            try:
                if info.context is not None:
                    await self._delete_copy(info.ledger_id, info.context)
                # The list may say of a source that it is deleted though a crash came before.
                await self.sources.delete(info.ledger_id)
            except Exception as error:  # noqa: BLE001 - the first is raised when all were tried
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return [info.ledger_id for info in gone]

    async def delete_sources(
        self, lag_ms: int | None, *, among: Collection[int] | None = None
    ) -> list[int]:
        """Delete sources whose lag has passed, noted in the list first; return their ids.

        With `among` only sources of these ledgers are deleted.
        """
        now_ms = self.now_ms()

        def choose(info: LedgerInfo) -> OffloadContext | None:
            is_due = source_is_due(info.context, lag_ms, now_ms)
            return replace(info.context, source_deleted=True) if info.context and is_due else None

        deleted = []
        for info in list(self.ledgers):
            if among is not None and info.ledger_id not in among:
                continue
            if choose(info) is not None and await self._set_context(info.ledger_id, choose):
                await self.sources.delete(info.ledger_id)
                deleted.append(info.ledger_id)
        return deleted


@cache
def _software() -> str:
    """Return which software makes the copies, for whoever looks into the bucket."""
    return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"


def _unless_complete(info: LedgerInfo) -> OffloadContext | None:
    """Return the context of a ledger that has no whole copy, as it is."""
    return None if info.is_complete else info.context


def _segments_of(ledgers: Iterable[LedgerInfo]) -> set[str]:
    """Return the uuids of all segments that ledgers are in."""
    contexts = (one.context for one in ledgers)
    return {each.uuid for one in contexts if one is not None for each in one.segments}


def closed_metadata(info: LedgerInfo) -> LedgerMetadata:
    """Return the metadata of a closed ledger that has no bookies: native mode."""
    return LedgerMetadata(info.size, info.entries - 1, created_ms=info.timestamp_ms or 0)
