"""Ledgers of a managed ledger and their copies: offload in two phases, trim, deletion of sources.

The list is one versioned value. Every change is saved before it is relied on, and a save that finds
another version fences this managed ledger. Its own changes run one after the other, each on the
result of the one before. A uuid is saved before data is written under it, so the next attempt, or
the deletion of the ledger, finds and deletes the remains of a crash.
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
    OffloadContext,
)
from streammeta.brokers.pulsar.formats.object_names import MANAGED_LEDGER_KEY, SOFTWARE_KEY
from streammeta.brokers.pulsar.offloader import LedgerSource, NotAppendableError
from streammeta.storage.installation import DISTRIBUTION

NEVER = -1
"""Threshold or lag that is never met."""


class VersionConflictError(Exception):
    """Another owner has saved the list since it was loaded."""


class ManagedLedgerFencedError(Exception):
    """Another owner has changed the list, so this one stops."""

    code = "ManagedLedgerFenced"


class InvalidCursorPositionError(ValueError):
    """A position lies outside of the managed ledger."""

    code = "InvalidCursorPosition"


class OffloadInProgressError(Exception):
    """Another offload of this managed ledger is under way."""

    code = "OffloadInProgress"


class OffloadConflictError(Exception):
    """A ledger got another uuid during its offload. The copy with that uuid counts."""


class LedgerListStore(Protocol):
    """Store of a managed ledger's list as one versioned value."""

    async def load(self) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers, oldest first, and the version of the list."""
        ...

    async def save(self, ledgers: Sequence[LedgerInfo], version: int) -> int:
        """Replace the list if it has this version. Return the new version.

        Raises:
            VersionConflictError: the list has another version.
        """
        ...


class Copies(Protocol):
    """Place of offloaded ledgers, such as `Offloader` and `LedgerStreams`."""

    is_appendable: bool

    async def offload(self, ledger: LedgerSource, uuid: str, extra: Mapping[str, str]) -> None:
        """Copy a ledger under a uuid."""
        ...

    async def delete(self, ledger_id: int, uuid: str) -> None:
        """Delete a copy, whole or not. May be repeated."""
        ...

    async def list_copies(self) -> Sequence[tuple[int, str]]:
        """Return ledger ids and uuids of all copies, whole or not.

        Copies of other managed ledgers may be among them.
        """
        ...

    async def is_of(self, managed_ledger: str, ledger_id: int, uuid: str) -> bool:
        """Return True for a listed copy whose metadata names this managed ledger."""
        ...


class SegmentCopies(Protocol):
    """Place of segments of streaming offload, such as `Segments`."""

    async def delete(self, uuid: str) -> None:
        """Delete a segment, whole or not. May be repeated."""
        ...


class Sources(Protocol):
    """The original ledgers."""

    async def open(self, ledger_id: int) -> LedgerSource:
        """Return a closed ledger."""
        ...

    async def delete(self, ledger_id: int) -> None:
        """Delete a ledger. A missing one counts as deleted."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Thresholds of automatic offload: bytes and age in seconds. None or negative: never.

    `deletion_lag_ms` is the time from the end of an offload to the deletion of its source.
    """

    threshold_bytes: int | None = None
    threshold_s: int | None = None
    deletion_lag_ms: int | None = None


def due_ledgers(
    closed: Sequence[LedgerInfo], policy: OffloadPolicy, now_ms: int
) -> list[LedgerInfo]:
    """Return the closed ledgers that a policy offloads, oldest first.

    Sizes are summed from the newest ledger on, each one included. A ledger is due when the sum
    exceeds the limit or its age reaches the time.
    """
    found, total = [], 0
    # From the newest on: the sum is the distance from the end of the closed ledgers.
    for info in reversed(closed):
        total += info.size
        by_size = policy.threshold_bytes is not None and total > policy.threshold_bytes >= 0
        age_ms = now_ms - (info.timestamp_ms or now_ms)
        by_age = policy.threshold_s is not None and age_ms >= policy.threshold_s * 1000 >= 0
        # Empty ledgers have nothing to offload.
        if (by_size or by_age) and info.size and not info.is_complete:
            found.append(info)

    # Oldest first, so that the offloaded ledgers form a prefix.
    return found[::-1]


def source_is_due(context: OffloadContext | None, lag_ms: int | None, now_ms: int) -> bool:
    """Whether the lag since a ledger's offload has passed, so that its source is deleted."""
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
    """The list of one managed ledger. Create it with `open`.

    The last ledger is the open one.
    """

    name: str
    store: LedgerListStore
    sources: Sources
    copies: Copies
    now_ms: Callable[[], int]
    driver: str = "streammeta"
    driver_metadata: dict[str, str] = field(default_factory=dict)
    former: Mapping[str, Copies] = field(default_factory=dict)
    """Places that `copies` has replaced, by driver, for the deletion of copies stored there."""
    segments: SegmentCopies | None = None
    """Place of the list's segments of streaming offload, for their deletion."""
    new_uuid: Callable[[], str] = lambda: str(uuids.uuid4())
    ledgers: list[LedgerInfo] = field(default_factory=list)
    is_fenced: bool = False
    _version: int = 0
    _unsettled: list[LedgerInfo] | None = None
    """List of a save without a known outcome."""
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
                f"{self.name} names segment {named[0]}, expected `segments`: the place of its"
                " segments"
            )
        # Taken together: a save must name the version of the list that it changes.
        self.ledgers, self._version = ledgers, version

    def info(self, ledger_id: int) -> LedgerInfo | None:
        """Return a ledger, None for an unknown one."""
        return next((info for info in self.ledgers if info.ledger_id == ledger_id), None)

    # ---- changes of the list ----

    async def _change(self, change: Callable[[list[LedgerInfo]], list[LedgerInfo] | None]) -> bool:
        """Save the list that `change` makes of the current one, or nothing for None.

        Changes wait for each other. Between reading a version and saving with it, this managed
        ledger makes no other save, which would look like another owner's.
        """
        async with self._changing:
            if self.is_fenced:
                raise ManagedLedgerFencedError(f"{self.name} was fenced. Open it again")

            # An unanswered save may have taken effect, so its version is read first.
            if self._unsettled is not None:
                await self._settle(self._unsettled)
            ledgers = change(self.ledgers)
            if ledgers is None:
                return False

            # Set before the save: its answer may be lost.
            self._unsettled = ledgers
            try:
                self._version = await self.store.save(ledgers, self._version)
            except VersionConflictError as error:
                raise self._fence(str(error)) from error

            self.ledgers, self._unsettled = ledgers, None
            return True

    async def _settle(self, attempted: list[LedgerInfo]) -> None:
        """Read from the store whether an unanswered save took effect.

        A list with another version is this managed ledger's own if it has the attempted content.
        """
        found, version = await self.store.load()
        if version != self._version:
            # Equal content is this owner's save. Other content is another owner's.
            if found != attempted:
                raise self._fence(f"list has version {version}, expected {self._version}")
            self.ledgers, self._version = found, version
        self._unsettled = None

    def _fence(self, reason: str) -> ManagedLedgerFencedError:
        self.is_fenced = True
        return ManagedLedgerFencedError(f"{self.name}: {reason}")

    async def _set_context(
        self, ledger_id: int, choose: Callable[[LedgerInfo], OffloadContext | None]
    ) -> bool:
        """Save the context that `choose` returns for a ledger of the current list.

        Returns False without a save if the ledger does not exist or `choose` returns None.
        """

        def change(ledgers: list[LedgerInfo]) -> list[LedgerInfo] | None:
            info = self.info(ledger_id)
            context = None if info is None else choose(info)
            if info is None or context is None:
                return None
            return [info.with_context(context) if found is info else found for found in ledgers]

        return await self._change(change)

    async def roll(self, entries: int, size: int, next_ledger: int) -> None:
        """Close the open ledger, with its numbers of entries and bytes, and begin the next.

        Begins the first ledger of an empty list. May be repeated.

        Raises:
            ValueError: the id of the next ledger is not above all others.
        """
        now_ms = self.now_ms()

        def change(ledgers: list[LedgerInfo]) -> list[LedgerInfo] | None:
            if not ledgers:
                return [LedgerInfo(next_ledger)]
            *closed, last = ledgers
            # A repeated call finds its own result.
            is_done = closed and (closed[-1].entries, closed[-1].size) == (entries, size)
            if is_done and last == LedgerInfo(next_ledger):
                return None
            if next_ledger <= last.ledger_id:
                raise ValueError(
                    f"next_ledger is {next_ledger}, expected more than {last.ledger_id}, the"
                    f" last ledger of {self.name}"
                )

            ended = replace(last, entries=entries, size=size, timestamp_ms=now_ms)
            return [*closed, ended, LedgerInfo(next_ledger)]

        await self._change(change)

    # ---- offload ----

    async def offload_prefix(self, ledger_id: int, entry_id: int) -> tuple[int, int]:
        """Offload all ledgers before a position's ledger. Return the first position not offloaded.

        Raises:
            InvalidCursorPositionError: the position does not exist.
            OffloadInProgressError: another offload is under way.
            Exception: the first error. The other ledgers are offloaded all the same.
        """
        info = self.info(ledger_id)
        # The open ledger accepts the position of its first entry even while it is empty.
        is_open = info is not None and info is self.ledgers[-1]
        if info is None or not 0 <= entry_id < max(info.entries, 1 if is_open else 0):
            raise InvalidCursorPositionError(
                f"position is {ledger_id}:{entry_id}, expected one of {self.name}"
            )

        wanted = [info for info in self.ledgers[:-1] if info.ledger_id < ledger_id and info.size]
        await self.offload([info for info in wanted if not info.is_complete])

        left = (info for info in self.ledgers[:-1] if info.size and not info.is_complete)
        first = next(left, self.ledgers[-1])
        return first.ledger_id, 0

    async def offload_due(self, policy: OffloadPolicy) -> None:
        """Offload the ledgers that a policy selects, after any offload under way.

        Raises the errors of `offload_prefix`, except `OffloadInProgressError`.
        """
        async with self._offloading:
            await self._offload_all(due_ledgers(self.ledgers[:-1], policy, self.now_ms()))

    async def offload(self, ledgers: Sequence[LedgerInfo]) -> None:
        """Offload ledgers one after the other. Raises as `offload_prefix`."""
        self._require_no_offload()
        async with self._offloading:
            await self._offload_all(ledgers)

    def _require_no_offload(self) -> None:
        if self._offloading.locked():
            raise OffloadInProgressError(f"{self.name} is being offloaded. Try again later")

    async def _offload_all(self, ledgers: Sequence[LedgerInfo]) -> None:
        if not self.copies.is_appendable:
            raise NotAppendableError

        first_error: Exception | None = None
        for info in ledgers:
            try:
                await self._offload_ledger(info.ledger_id)
            except ManagedLedgerFencedError:
                raise
            except Exception as error:  # noqa: BLE001 - the first is raised when all were tried
                # Errors do not matter if the ledger was deleted meanwhile.
                if self.info(info.ledger_id) is not None:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    async def _offload_ledger(self, ledger_id: int) -> None:
        # First phase: the uuid is in the list before data is written under it.
        uuid = await self._prepare(ledger_id)
        if uuid is None:
            return
        source = await self.sources.open(ledger_id)
        extra = {MANAGED_LEDGER_KEY: self.name, SOFTWARE_KEY: _software()}
        await self.copies.offload(source, uuid, extra)
        # Second phase: only now the copy counts as whole.
        await self._complete(ledger_id, uuid)

    async def _prepare(self, ledger_id: int) -> str | None:
        """Save a new uuid, after deleting the copy of an earlier attempt.

        Returns None if nothing is to be offloaded: the ledger is deleted or already offloaded.
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
        """Save that the copy is whole. A copy that the list does not name is deleted.

        After a failed save the outcome is unknown, and the copy stays.
        """
        now_ms = self.now_ms()

        def choose(info: LedgerInfo) -> OffloadContext | None:
            if info.context is None or info.context.uuid != uuid:
                return None
            return replace(info.context, complete=True, timestamp_ms=now_ms)

        if await self._set_context(ledger_id, choose):
            return
        # The ledger was deleted or got another copy during the offload.
        await self.copies.delete(ledger_id, uuid)
        if self.info(ledger_id) is not None:
            raise OffloadConflictError(f"ledger {ledger_id} has another copy than {uuid}")

    # ---- deletion ----

    async def _delete_copy(self, ledger_id: int, context: OffloadContext) -> None:
        """Delete a ledger's copy, and its segments without other ledgers of the list."""
        if context.uuid:
            copies = self.former.get(context.driver, self.copies)
            await copies.delete(ledger_id, context.uuid)
        if self.segments is not None and context.segments:
            # A segment may contain several ledgers.
            kept = _segments_of(info for info in self.ledgers if info.ledger_id != ledger_id)
            for segment in context.segments:
                if segment.uuid not in kept:
                    await self.segments.delete(segment.uuid)

    async def sweep(self) -> list[tuple[int, str]]:
        """Delete copies of this managed ledger that the list does not name.

        Returns their ledger ids and uuids. A copy in a shared place that does not name its managed
        ledger stays.

        Such copies are left if a process ended between two steps of an offload or a deletion, or
        continued after it was replaced. The list is read after the copies: a uuid is saved before
        data is written under it, and never reused.
        """
        self._require_no_offload()
        # Copies are listed first: a list read afterwards names every copy in progress.
        found = await self.copies.list_copies()
        ledgers, _ = await self.store.load()
        named = {
            (info.ledger_id, info.context.uuid) for info in ledgers if info.context is not None
        }
        left = [copy for copy in found if copy not in named]
        # Several managed ledgers may share a place.
        left = [copy for copy in left if await self.copies.is_of(self.name, *copy)]
        for ledger_id, uuid in left:
            await self.copies.delete(ledger_id, uuid)

        return left

    async def trim(self, before_ledger: int) -> list[int]:
        """Delete closed ledgers below an id with their copies, whole or not. Return their ids.

        Raises:
            Exception: the first error. The other ledgers are deleted, and `sweep` finds copies that
                are left.
        """
        gone: list[LedgerInfo] = []

        def change(ledgers: list[LedgerInfo]) -> list[LedgerInfo] | None:
            gone[:] = [info for info in ledgers[:-1] if info.ledger_id < before_ledger]
            return [info for info in ledgers if info not in gone] if gone else None

        # Deleted from the list first, so that no reader opens a deleted copy.
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
        """Delete sources whose lag has passed, noted in the list first. Return their ids.

        With `among`, only sources of these ledgers are deleted.
        """
        now_ms = self.now_ms()

        def choose(info: LedgerInfo) -> OffloadContext | None:
            is_due = source_is_due(info.context, lag_ms, now_ms)
            return replace(info.context, source_deleted=True) if info.context and is_due else None

        deleted = []
        # Iterate over a copy, because each save replaces the list.
        for info in list(self.ledgers):
            if among is not None and info.ledger_id not in among:
                continue
            # The list says so before the deletion, so reads already use the copy.
            if choose(info) is not None and await self._set_context(info.ledger_id, choose):
                await self.sources.delete(info.ledger_id)
                deleted.append(info.ledger_id)
        return deleted


@cache
def _software() -> str:
    """Return the software version for the copies' metadata."""
    return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"


def _unless_complete(info: LedgerInfo) -> OffloadContext | None:
    """Return the unchanged context of a ledger without a whole copy, else None."""
    return None if info.is_complete else info.context


def _segments_of(ledgers: Iterable[LedgerInfo]) -> set[str]:
    """Return the uuids of all segments of the ledgers."""
    contexts = (info.context for info in ledgers)
    return {
        segment.uuid for context in contexts if context is not None for segment in context.segments
    }
