"""Logs of ended processes: found by listing, sealed, and read slot by slot.

A log is sealed by creating the slot that its process would create next. From then on the process
can acknowledge nothing more, and what it had acknowledged are the slots below, without a hole: all
others are missing or behind the seal. Two that seal at once, or one that does so again, find the
same records. Knows nothing of streams and controllers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from streammeta.client.object_log.bucket_slots import SlotStore
from streammeta.client.object_log.errors import DamagedSlotError
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_log.slot import (
    LOG_ID_SIZE,
    SEAL_SIZE,
    Sealer,
    Slot,
    SlotKind,
    decode_slot,
    sealer_body,
)
from streammeta.storage.object_log.slot_keys import (
    LogName,
    RecoveredKey,
    SlotKey,
    node_prefix,
    parse_log_key,
)

_READ_AHEAD = 4
"""Slots that are read at the same time."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FoundLog:
    """A log as a listing shows it: its slots, seals among them, ascending.

    `recovered_ms` is the time of its mark in ms since 1970, None if there is none.
    """

    name: LogName
    sequences: list[int] = field(default_factory=list)
    seals: list[int] = field(default_factory=list)
    recovered_ms: int | None = None

    @property
    def is_recovered(self) -> bool:
        """True if nothing in the log is needed any more."""
        return self.recovered_ms is not None

    @property
    def without_seals(self) -> list[int]:
        """The slots that hold records, or none."""
        seals = set(self.seals)
        return [sequence for sequence in self.sequences if sequence not in seals]


@dataclass(frozen=True, slots=True)
class SealedLog:
    """A sealed log: what is needed of it are the slots `[first, end)`."""

    name: LogName
    first: int
    end: int


async def list_logs(slots: SlotStore, namespace: str, node_id: int) -> dict[int, FoundLog]:
    """Find the logs of a node, by the epochs of their processes, ascending."""
    found: dict[int, FoundLog] = {}
    for info in await slots.list(node_prefix(namespace, node_id)):
        key = parse_log_key(info.key, namespace)
        if not isinstance(key, SlotKey | RecoveredKey):
            continue
        log = found.setdefault(key.log.node_epoch, FoundLog(key.log))
        if isinstance(key, SlotKey):
            log.sequences.append(key.sequence)
            if info.size == SEAL_SIZE:
                log.seals.append(key.sequence)
        else:
            log.recovered_ms = info.last_modified_ms
    return dict(sorted(found.items()))


async def seal_log(slots: SlotStore, name: LogName, sealer: Sealer) -> SealedLog | None:
    """Keep the log's process from acknowledging any more; None: the log was recovered already.

    Raises `DamagedSlotError` if slots are missing that were there, and errors of the store. It may
    be repeated.
    """
    while True:
        found = (await list_logs(slots, name.namespace, name.node_id)).get(name.node_epoch)
        if found is None:
            found = FoundLog(name)
        if found.is_recovered:
            return None
        newest = None
        if found.sequences:
            newest = await _slot(slots, name, found.sequences[-1])
            if newest is None:
                continue  # deleted meanwhile: by its process, or because it was recovered
        first, end = _needed(found, newest)
        if end in found.seals:
            return SealedLog(name, first, end)
        seal = Slot(
            name,
            bytes(LOG_ID_SIZE) if newest is None else newest.log_id,
            end,
            first,
            end,
            SlotKind.SEAL,
            body=sealer_body(sealer),
        )
        # Looked at again even if it was created: the process may have stored, and deleted, a slot
        # in that place since the listing. Then a later slot says that it is past.
        if await slots.create(name.slot_key(end), [seal.encode()]):
            _log.info("write-ahead log %s has a seal, slot %d", name.prefix, end)


def _needed(found: FoundLog, newest: Slot | None) -> tuple[int, int]:
    """Return the slots `[first, end)` that may have been acknowledged and are not past.

    They end at the first slot that is missing, or a seal. A seal below those that are needed came
    too late.
    """
    if newest is None:
        return 0, 0
    records, end = set(found.without_seals), newest.first_needed
    while end in records:
        end += 1
    seals = [sequence for sequence in found.seals if sequence >= newest.first_needed]
    known = max([newest.durable_below, *seals[:1]])
    if end < known:
        raise DamagedSlotError(
            found.name.slot_key(end), f"it is missing, though the slots below {known} were there"
        )
    return newest.first_needed, end


async def read_log(slots: SlotStore, sealed: SealedLog) -> AsyncIterator[list[RecordBatch]]:
    """Yield the records of each slot, in order.

    Ends early if the log is found to have been recovered meanwhile. Raises `DamagedSlotError` at
    the first slot that is missing or damaged; what was yielded before is good.
    """
    log_id: bytes | None = None
    reads: deque[tuple[int, asyncio.Task[Slot | None]]] = deque()
    ahead = iter(range(sealed.first, sealed.end))
    try:
        while True:
            while len(reads) < _READ_AHEAD and (sequence := next(ahead, -1)) >= 0:
                task = asyncio.create_task(_slot(slots, sealed.name, sequence))
                reads.append((sequence, task))
            if not reads:
                return
            sequence, task = reads.popleft()
            slot, key = await task, sealed.name.slot_key(sequence)
            if slot is None:
                if await slots.get(sealed.name.recovered_key) is not None:
                    return
                raise DamagedSlotError(key, "it is missing, though it was there")
            if log_id is not None and slot.log_id != log_id:
                raise DamagedSlotError(key, "another process wrote it than those before it")
            log_id = slot.log_id
            try:
                yield slot.records(key)
            except CorruptObjectError as error:
                raise DamagedSlotError(key, error.problem) from error
    finally:
        for _, task in reads:
            task.cancel()
        await asyncio.gather(*(task for _, task in reads), return_exceptions=True)


async def discard_log(slots: SlotStore, name: LogName, by: Sealer) -> None:
    """Mark a sealed log as recovered, and delete its slots but for the seal; it may be repeated.

    The mark comes first: it explains the slots that are missing. The seal stays, since the log's
    process may not know yet.
    """
    mark = Slot(name, bytes(LOG_ID_SIZE), 0, 0, 0, SlotKind.RECOVERED, body=sealer_body(by))
    await slots.put(name.recovered_key, mark.encode())
    found = (await list_logs(slots, name.namespace, name.node_id)).get(name.node_epoch)
    if found is not None:
        await delete_slots(slots, name, found.without_seals)


async def sweep_logs(
    slots: SlotStore, found: Iterable[FoundLog], now_ms: int, retention_ms: int
) -> None:
    """Delete what is left of recovered logs, seals and marks of those older than the retention."""
    for log in found:
        if log.recovered_ms is None:
            continue
        if log.recovered_ms < now_ms - retention_ms:
            await delete_slots(slots, log.name, log.sequences)
            await slots.delete([log.name.recovered_key])
        else:
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
            key, f"it is slot {slot.sequence} of node {slot.log.node_id}, under another key"
        )
    return slot
