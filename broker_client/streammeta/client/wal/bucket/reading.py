"""Logs of ended processes: found by listing, sealed, and read slot by slot.

A log is sealed by creating the slot that its process would create next. From then on the process
can't acknowledge anything. The acknowledged slots are those below the seal, without a gap: every
other slot is missing or after the seal. Two processes that seal at once, or one that repeats it,
find the same records. Knows nothing of streams and controllers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from streammeta.client.errors import DamagedSlotError
from streammeta.client.wal.bucket.bucket_slots import SlotStore
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import CorruptObjectError, StoreUnavailableError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_log.slot import (
    LOG_ID_SIZE,
    SEAL_SIZE,
    LogName,
    RecoveredKey,
    Sealer,
    Slot,
    SlotKey,
    SlotKind,
    SweptKey,
    decode_slot,
    node_prefix,
    parse_log_key,
    sealer_body,
)

_READ_AHEAD = 4
"""Slots to read at the same time."""

PAUSES = Backoff(0.05, 4.0, jitter=0)
"""Pauses after contradictory looks at the bucket."""

DOUBTS = 8
"""Contradictory looks that are repeated, for about ten seconds."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FoundLog:
    """A log as a listing shows it: its slots, including seals, ascending.

    Times are in ms since 1970 by the store, None for objects missing from the listing.
    """

    name: LogName
    sequences: list[int] = field(default_factory=list)
    seals: list[int] = field(default_factory=list)
    claimed_ms: int | None = None
    recovered_ms: int | None = None
    has_swept_mark: bool = False
    is_swept: bool = False

    @property
    def is_recovered(self) -> bool:
        """True if no record in the log is needed."""
        return self.is_swept or self.recovered_ms is not None

    @property
    def without_seals(self) -> list[int]:
        """The claim and the slots with records."""
        seals = set(self.seals)
        return [sequence for sequence in self.sequences if sequence not in seals]


@dataclass(frozen=True, slots=True)
class SealedLog:
    """A sealed log: the slots `[first, end)` are needed."""

    name: LogName
    first: int
    end: int


async def list_logs(slots: SlotStore, namespace: str, node_id: int) -> dict[int, FoundLog]:
    """Find the logs of a node, by the epoch of the process, ascending."""
    found: dict[int, FoundLog] = {}
    for info in await slots.list(node_prefix(namespace, node_id)):
        key = parse_log_key(info.key, namespace)
        # Set-aside objects are under the same prefix.
        if not isinstance(key, SlotKey | RecoveredKey | SweptKey):
            continue
        log = found.setdefault(key.log.node_epoch, FoundLog(key.log))
        match key:
            case SlotKey(sequence=sequence):
                log.sequences.append(sequence)
                # Seals have a size that no slot of records has, so the listing identifies them.
                if info.size == SEAL_SIZE:
                    log.seals.append(sequence)
                if sequence == 0:
                    log.claimed_ms = info.last_modified_ms
            case RecoveredKey():
                log.recovered_ms = info.last_modified_ms
            case SweptKey():
                log.has_swept_mark = True

    # A swept mark covers its log and all earlier ones.
    swept_to = max((epoch for epoch, log in found.items() if log.has_swept_mark), default=-1)
    for epoch, log in found.items():
        log.is_swept = epoch <= swept_to
    return dict(sorted(found.items()))


async def seal_log(slots: SlotStore, name: LogName, sealer: Sealer) -> SealedLog | None:
    """Stop the log's process from acknowledging. Return None if the log is already recovered.

    It may be repeated. Raises `DamagedSlotError` if slots are missing that existed,
    `StoreUnavailableError` if listings do not show an existing slot, and errors of the store.
    """
    doubts = 0
    while True:
        needed = await _find_needed(slots, name)
        if needed is None:
            return None
        if needed.seal is _Seal.LISTED:
            return SealedLog(name, needed.first, needed.end)
        if needed.problem or needed.seal is _Seal.UNLISTED:
            await _wait_in_doubt(needed, doubts)
            doubts += 1
        # The loop looks again even after a creation: since the listing the process may have stored
        # and deleted a slot in this place. Then a later slot marks it as past.
        elif await slots.create(name.slot_key(needed.end), [needed.seal_by(sealer).encode()]):
            _log.info("write-ahead log %s has a seal, slot %d", name.prefix, needed.end)


class _Seal(Enum):
    """How a look found the seal at the end of a log."""

    MISSING = "missing"
    UNLISTED = "unlisted"
    LISTED = "listed"


@dataclass(frozen=True, slots=True)
class _Needed:
    """One look at a log: slots `[first, end)` may have been acknowledged and are not past.

    They end at the first missing slot, or at a seal. With a `problem` the look contradicts itself:
    the log is damaged, or the listing is stale.
    """

    name: LogName
    log_id: bytes
    first: int
    end: int
    seal: _Seal = _Seal.MISSING
    problem: str = ""

    def seal_by(self, sealer: Sealer) -> Slot:
        """Return the seal that ends the log."""
        return Slot(
            self.name,
            self.log_id,
            self.end,
            self.first,
            self.end,
            SlotKind.SEAL,
            body=sealer_body(sealer),
        )


async def _wait_in_doubt(needed: _Needed, doubts: int) -> None:
    """Wait before another look, or raise an error after enough of them.

    A listing without an existing object proves nothing: neither damage nor the end of a log.
    """
    if doubts < DOUBTS:
        await asyncio.sleep(PAUSES.wait(doubts))
        return
    key = needed.name.slot_key(needed.end)
    if needed.problem:
        raise DamagedSlotError(key, needed.problem)
    raise StoreUnavailableError(f"listings do not show the seal {key}, which exists. Try again")


async def _find_needed(slots: SlotStore, name: LogName) -> _Needed | None:
    """Look at a log. Return None if it is recovered.

    A slot is missing only if a read of its key says so. The listing shows where to look.
    """
    found = (await list_logs(slots, name.namespace, name.node_id)).get(name.node_epoch)
    if found is None:
        # A stale listing may miss the log, so its slots are read by key.
        found = FoundLog(name)
    # The mark is read by key too: without it a recovered log looks damaged.
    if found.is_recovered or await slots.get(name.recovered_key) is not None:
        return None
    # The newest slot knows most about the log: its header lists the needed and the durable slots.
    last = found.sequences[-1] if found.sequences else 0
    newest = await _slot(slots, name, last)
    if newest is None:
        problem = "it is listed, but can't be read" if found.sequences else ""
        return _Needed(name, bytes(LOG_ID_SIZE), last, last, problem=problem)
    own = Sealer(name.node_id, name.node_epoch)
    if newest.kind is SlotKind.SEAL and newest.sealer() == own:
        # The log's own process closed it and needs no slot. In seals of older versions
        # `first_needed` may be the last slot, which is deleted.
        return _Needed(name, newest.log_id, last, last, _Seal.LISTED)

    records, seals = set(found.without_seals), found.seals
    end, seal = newest.first_needed, _Seal.MISSING
    while end not in seals:
        if end not in records:
            slot = await _slot(slots, name, end)
            if slot is None:
                break
            if slot.kind is SlotKind.SEAL:
                seal = _Seal.UNLISTED
                break
            if slot.sequence > newest.sequence:
                newest = slot
        end = max(end + 1, newest.first_needed)
    else:
        seal = _Seal.LISTED

    # A seal below the first needed slot came too late to end the log.
    seals = [sequence for sequence in seals if sequence >= newest.first_needed]
    # Everything below was in the bucket once, so a gap there is damage and not the end.
    known = max([newest.durable_below, *seals[:1]])
    problem = ""
    if end < known:
        problem = f"it is missing, though the slots below {known} existed"
    return _Needed(name, newest.log_id, newest.first_needed, end, seal, problem)


async def read_log(slots: SlotStore, sealed: SealedLog) -> AsyncIterator[list[RecordBatch]]:
    """Yield the records of each slot, in order.

    Ends early if another process recovers the log meanwhile, and skips slots that the log's process
    had settled. Raises `DamagedSlotError` at the first missing or damaged slot. The records yielded
    before are valid. Raises `StoreUnavailableError` if the log continues after the seal, because a
    stale listing had hidden slots.
    """
    log_id: bytes | None = None
    reads: deque[tuple[int, asyncio.Task[Slot | None]]] = deque()
    ahead = iter(range(sealed.first, sealed.end))
    past_below = sealed.first
    try:
        while True:
            # Several reads hide the latency of the store, and few limit the memory.
            while len(reads) < _READ_AHEAD and (sequence := next(ahead, -1)) >= 0:
                task = asyncio.create_task(_slot(slots, sealed.name, sequence))
                reads.append((sequence, task))
            if not reads:
                return
            sequence, task = reads.popleft()

            slot, key = await task, sealed.name.slot_key(sequence)
            if slot is None and sequence >= past_below:
                needed = await _look_for(slots, sealed.name, sequence)
                if needed is None:
                    return
                # Slots appeared after the seal: a stale listing had hidden them when it was
                # created.
                if needed.end != sealed.end:
                    raise StoreUnavailableError(
                        f"the seal {sealed.name.slot_key(sealed.end)} was created too late."
                        " seal the log again"
                    )
                past_below = needed.first
                slot = await _slot(slots, sealed.name, sequence)
            if slot is None:
                continue

            if log_id is not None and slot.log_id != log_id:
                raise DamagedSlotError(key, "another process wrote it than the slots before it")
            log_id = slot.log_id
            try:
                yield slot.records(key)
            except CorruptObjectError as error:
                raise DamagedSlotError(key, error.problem) from error
    finally:
        for _, task in reads:
            task.cancel()
        await asyncio.gather(*(task for _, task in reads), return_exceptions=True)


async def _look_for(slots: SlotStore, name: LogName, sequence: int) -> _Needed | None:
    """Return the needed slots after a slot was not found, None if the log is recovered.

    Raises `DamagedSlotError` if that slot is needed and stays missing.
    """
    for doubts in range(DOUBTS + 1):
        needed = await _find_needed(slots, name)
        if needed is None:
            return None
        if needed.first > sequence or await _slot(slots, name, sequence) is not None:
            return needed
        missing = replace(needed, end=sequence, problem="it is missing, though it existed")
        await _wait_in_doubt(missing, doubts)
    raise AssertionError("the last doubt raises an error")


async def discard_log(slots: SlotStore, name: LogName, by: Sealer) -> None:
    """Mark a sealed log as recovered, and delete its slots except the seal. It may be repeated.

    The mark comes first: it explains the missing slots and reserves the epoch, as the claim did.
    The seal stays, because the log's process may not have noticed it yet.
    """
    mark = Slot(name, bytes(LOG_ID_SIZE), 0, 0, 0, SlotKind.RECOVERED, body=sealer_body(by))
    await slots.put(name.recovered_key, mark.encode())
    found = (await list_logs(slots, name.namespace, name.node_id)).get(name.node_epoch)
    if found is not None:
        await delete_slots(slots, name, found.without_seals)


async def delete_leftovers(slots: SlotStore, found: Iterable[FoundLog]) -> None:
    """Delete slots of recovered logs that an interrupted discard left. Seals stay."""
    for log in found:
        if log.is_recovered:
            await delete_slots(slots, log.name, log.without_seals)


async def delete_slots(slots: SlotStore, name: LogName, sequences: Iterable[int]) -> None:
    """Delete slots of a log."""
    keys = [name.slot_key(sequence) for sequence in sequences]
    if keys:
        await slots.delete(keys)


async def _slot(slots: SlotStore, name: LogName, sequence: int) -> Slot | None:
    key = name.slot_key(sequence)
    data = await slots.get(key)
    if data is None:
        return None
    try:
        slot = decode_slot(data, key, name.namespace)
    except CorruptObjectError as error:
        raise DamagedSlotError(key, error.problem) from error
    if (slot.log, slot.sequence) != (name, sequence):
        raise DamagedSlotError(
            key, f"it is slot {slot.sequence} of node {slot.log.node_id} under a wrong key"
        )
    return slot
