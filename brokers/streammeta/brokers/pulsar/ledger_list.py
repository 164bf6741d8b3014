"""Ledgers of a managed ledger and their copies: offload in two phases, trim, deletion of sources.

The list is one versioned value: every change is saved before it is relied on, and a save that finds
another version fences this managed ledger. A uuid is saved before data is written under it, so
whatever a crash leaves is found and deleted by the next try, or with the ledger.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from streammeta.brokers.pulsar.ledger_values import LedgerInfo, LedgerMetadata, OffloadContext
from streammeta.brokers.pulsar.object_names import MANAGED_LEDGER_KEY
from streammeta.brokers.pulsar.offloader import LedgerSource, NotAppendableError

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
    _is_offloading: bool = False

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

    async def _save(self, ledgers: list[LedgerInfo]) -> None:
        if self.is_fenced:
            raise ManagedLedgerFencedError(f"{self.name} was fenced; open it again")
        try:
            self._version = await self.store.save(ledgers, self._version)
        except VersionConflictError as error:
            self.is_fenced = True
            raise ManagedLedgerFencedError(f"{self.name}: {error}") from error
        self.ledgers = ledgers

    def info(self, ledger_id: int) -> LedgerInfo | None:
        """Return a ledger, None if it is gone."""
        return next((one for one in self.ledgers if one.ledger_id == ledger_id), None)

    async def _set_context(self, ledger_id: int, context: OffloadContext) -> None:
        await self._save(
            [
                one.with_context(context) if one.ledger_id == ledger_id else one
                for one in self.ledgers
            ]
        )

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
        """Offload what a policy says; raises as `offload_prefix`."""
        await self.offload(due_ledgers(self.ledgers[:-1], policy, self.now_ms()))

    async def offload(self, ledgers: Sequence[LedgerInfo]) -> None:
        """Offload ledgers one after the other; raises as `offload_prefix`."""
        if self._is_offloading:
            raise OffloadInProgressError(f"{self.name} is being offloaded; try again later")
        if not self.copies.is_appendable:
            raise NotAppendableError
        self._is_offloading = True
        first_error: Exception | None = None
        try:
            for one in ledgers:
                try:
                    await self._offload_one(one.ledger_id)
                except ManagedLedgerFencedError:
                    raise
                except Exception as error:  # noqa: BLE001 - the first is raised when all were tried
                    if self.info(one.ledger_id) is not None:
                        first_error = first_error or error
        finally:
            self._is_offloading = False
        if first_error is not None:
            raise first_error

    async def _offload_one(self, ledger_id: int) -> None:
        uuid = await self._prepare(ledger_id)
        if uuid is None:
            return
        source = await self.sources.open(ledger_id)
        await self.copies.offload(source, uuid, {MANAGED_LEDGER_KEY: self.name})
        await self._complete(ledger_id, uuid)

    async def _prepare(self, ledger_id: int) -> str | None:
        """Save a new uuid, after what an earlier try left was deleted; None: the ledger is gone."""
        info = self.info(ledger_id)
        if info is None:
            return None
        if info.context is not None:
            await self._delete_copy(ledger_id, info.context)
        uuid = self.new_uuid()
        context = OffloadContext(
            uuid, driver=self.driver, driver_metadata=dict(self.driver_metadata)
        )
        await self._set_context(ledger_id, context)
        return uuid

    async def _complete(self, ledger_id: int, uuid: str) -> None:
        """Save that the copy is whole; a copy that no list names is deleted.

        After a failed save the outcome is not known, and the copy is kept.
        """
        info = self.info(ledger_id)
        context = None if info is None else info.context
        if context is None or context.uuid != uuid:
            await self.copies.delete(ledger_id, uuid)
            if info is not None:
                raise OffloadConflictError(f"ledger {ledger_id} has another copy than {uuid}")
            return
        done = replace(context, complete=True, timestamp_ms=self.now_ms())
        await self._set_context(ledger_id, done)

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
        if self._is_offloading:
            raise OffloadInProgressError(f"{self.name} is being offloaded; try again later")
        found = await self.copies.held()
        ledgers, _ = await self.store.load()
        named = {(one.ledger_id, one.context.uuid) for one in ledgers if one.context is not None}
        left = [one for one in found if one not in named]
        left = [one for one in left if await self.copies.is_of(self.name, *one)]
        for ledger_id, uuid in left:
            await self.copies.delete(ledger_id, uuid)
        return left

    async def trim(self, before_ledger: int) -> list[int]:
        """Delete closed ledgers below an id with their copies, whole or not; return their ids."""
        gone = [one for one in self.ledgers[:-1] if one.ledger_id < before_ledger]
        if not gone:
            return []
        await self._save([one for one in self.ledgers if one not in gone])
        for one in gone:
            if one.context is not None:
                await self._delete_copy(one.ledger_id, one.context)
            if one.context is None or not one.context.source_deleted:
                await self.sources.delete(one.ledger_id)
        return [one.ledger_id for one in gone]

    async def delete_sources(self, lag_ms: int | None) -> list[int]:
        """Delete sources whose lag has passed, noted in the list first; return their ids."""
        due = [one for one in self.ledgers if source_is_due(one.context, lag_ms, self.now_ms())]
        for one in due:
            assert one.context is not None
            await self._set_context(one.ledger_id, replace(one.context, source_deleted=True))
            await self.sources.delete(one.ledger_id)
        return [one.ledger_id for one in due]


def _segments_of(ledgers: Iterable[LedgerInfo]) -> set[str]:
    """Return the uuids of all segments that ledgers are in."""
    contexts = (one.context for one in ledgers)
    return {each.uuid for one in contexts if one is not None for each in one.segments}


def closed_metadata(info: LedgerInfo) -> LedgerMetadata:
    """Return the metadata of a closed ledger that has no bookies: native mode."""
    return LedgerMetadata(info.size, info.entries - 1, created_ms=info.timestamp_ms or 0)
