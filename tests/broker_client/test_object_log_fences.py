"""Fences of a log in the bucket: used epochs, leases of stalled processes, sweeps, listings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from streammeta.client.errors import DamagedSlotError, LogSealedError, LogSweptError, WrongLogError
from streammeta.client.wal.bucket import ack_lease, reading, sweeping
from streammeta.client.wal.bucket.ack_lease import LEASE_S, AckLease
from streammeta.client.wal.bucket.bucket_slots import SlotStore
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.bucket.sweeping import last_to_sweep, sweep_logs
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.protocol.base import Body
from tests.broker_client.wal_tools import (
    BY,
    NODE,
    LateSlots,
    encoded,
    name_of,
    read_sealed,
    record_at,
    sequences_of,
)
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import until

pytestmark = pytest.mark.usefixtures("slots")

ONE_A_SLOT = ObjectLogConfig(linger_s=0.001, slot_bytes=84 + 53, max_bytes=40_000)
DAY_MS = 86_400_000


@dataclass
class Clock:
    """Elapsed time that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def begun(
    slots: SlotStore,
    epoch: int = 1,
    clock: Clock | None = None,
    config: ObjectLogConfig = ONE_A_SLOT,
) -> ObjectLog:
    identity = LogIdentity(NAMESPACE, NODE, epoch)
    log_id = bytes([epoch]) * 16
    return await ObjectLog.open_in(slots, identity, config, log_id, clock or Clock())


@asynccontextmanager
async def opened(
    store: MemoryObjectStore, epoch: int = 1, config: ObjectLogConfig = ONE_A_SLOT
) -> AsyncIterator[ObjectLog]:
    async with await ObjectLog.open(store, LogIdentity(NAMESPACE, NODE, epoch), config) as log:
        yield log


async def appended(log: ObjectLog, first: int, end: int) -> None:
    """Append records, one to a slot, and wait until each is acknowledged."""
    for number in range(first, end):
        await asyncio.shield(log.append(*encoded(record_at(number))))


async def first_slots_are_deleted(slots: LateSlots) -> None:
    await until(lambda: name_of().slot_key(64) not in slots.store.objects(), "deletion of slots")


@asynccontextmanager
async def settled(slots: LateSlots) -> AsyncIterator[None]:
    """Keep a log open with records 70 to 80, of whose slots the first are deleted."""
    async with opened(slots.store) as log:
        await appended(log, 0, 80)
        log.trim(70)
        await appended(log, 80, 81)
        await first_slots_are_deleted(slots)
        yield


async def sealed_records(slots: SlotStore, epoch: int = 1) -> list[int]:
    return sequences_of(await read_sealed(slots, epoch))


# -- used epochs


async def test_an_epoch_is_refused_after_its_first_slots_were_deleted(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 150)
        log.trim(140)
        await appended(log, 150, 151)
        await first_slots_are_deleted(slots)
        before = slots.store.objects()
        with pytest.raises(WrongLogError, match="epoch"):
            await ObjectLog.open(slots.store, LogIdentity(NAMESPACE, NODE, 1), ONE_A_SLOT)
        assert slots.store.objects() == before
        await appended(log, 151, 152)
    async with opened(slots.store, 2) as log:
        assert sequences_of(log.recover()) == list(range(140, 152))


@pytest.mark.parametrize("records", [0, 3])
async def test_the_epoch_of_a_closed_log_is_refused(store: MemoryObjectStore, records: int) -> None:
    for epoch in (1, 2):
        async with opened(store, epoch) as log:
            log.trim(log.recovered_end)
            await appended(log, 0, records)
            log.trim(log.end)
        before = store.objects()
        assert name_of(epoch).slot_key(0) in before
        with pytest.raises(WrongLogError):
            async with opened(store, epoch):
                pass
        assert store.objects() == before


async def test_the_epoch_of_a_recovered_log_is_refused_without_its_mark(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 3)
    await sealed_records(slots)
    await reading.discard_log(slots, name_of(), BY)
    slots.hidden = dict.fromkeys(slots.store.objects(), 100)
    with pytest.raises(WrongLogError):
        await begun(slots)


async def test_one_of_many_processes_with_one_epoch_has_the_log(store: MemoryObjectStore) -> None:
    identity = LogIdentity(NAMESPACE, NODE, 1)
    found = await asyncio.gather(
        *(ObjectLog.open(store, identity, ONE_A_SLOT) for _ in range(4)), return_exceptions=True
    )
    (log,) = (log for log in found if isinstance(log, ObjectLog))
    assert sum(isinstance(error, WrongLogError) for error in found) == 3
    await appended(log, 0, 2)
    await log.close()


async def test_a_claim_whose_answer_was_lost_is_repeated() -> None:
    class Forgetful(MemoryObjectStore):
        def put(self, key: str, data: Body, **options: Any) -> None:
            super().put(key, data, **options)
            if not lost:
                lost.append(key)
                raise StoreUnavailableError("no answer")

    lost: list[str] = []
    async with opened(Forgetful()) as log:
        assert lost == [name_of().slot_key(0)]
        await appended(log, 0, 3)


# -- leases


def test_a_lease_counts_from_the_start_of_the_last_slot_without_a_hole_before_it() -> None:
    lease = AckLease(0.0)
    assert lease.covers(LEASE_S)
    assert not lease.covers(LEASE_S + 0.1)
    lease.start(1, 10.0)
    lease.start(1, 25.0)  # a repeat: the first attempt may have created the slot
    lease.start(3, 28.0)
    lease.renew(2)
    assert lease.covers(LEASE_S + 10)
    assert not lease.covers(LEASE_S + 10.1)
    lease.start(2, 12.0)
    lease.renew(4)
    assert lease.covers(LEASE_S + 28)
    assert not lease.covers(LEASE_S + 28.1)


async def test_only_after_the_lease_a_process_looks_for_its_claim(slots: LateSlots) -> None:
    clock = Clock()
    async with await begun(slots, clock=clock) as log:
        slots.reads.clear()
        await appended(log, 0, 5)
        clock.now += LEASE_S
        await appended(log, 5, 6)
        assert slots.reads == []
        clock.now += LEASE_S + 0.1
        await appended(log, 6, 8)
        assert slots.reads == [name_of().slot_key(0)]


async def test_a_stalled_process_with_a_swept_seal_acknowledges_nothing(slots: LateSlots) -> None:
    clock = Clock()
    async with await begun(slots, clock=clock) as log:
        await appended(log, 0, 3)
        assert await sealed_records(slots) == [0, 1, 2]
        await reading.discard_log(slots, name_of(), BY)
        for key in slots.store.objects():
            slots.store.delete_many([key])
        clock.now += LEASE_S + 0.1
        with pytest.raises(LogSweptError):
            await appended(log, 3, 4)
        with pytest.raises(LogSealedError):
            log.append(*encoded(record_at(4)))


async def test_a_claim_of_another_process_is_no_proof(slots: LateSlots) -> None:
    clock = Clock()
    async with await begun(slots, clock=clock) as log:
        await appended(log, 0, 1)
        for key in slots.store.objects():
            slots.store.delete_many([key])
        async with opened(slots.store):
            clock.now += LEASE_S + 0.1
            with pytest.raises(LogSweptError):
                await appended(log, 1, 2)


async def test_nothing_is_acknowledged_until_the_claim_is_found(slots: LateSlots) -> None:
    clock = Clock()
    async with await begun(slots, clock=clock) as log:
        clock.now += LEASE_S + 0.1
        slots.store.fail_next("get_range", StoreUnavailableError("no answer"), times=2)
        ack = log.append(*encoded(record_at(0)))
        await until(lambda: len(slots.reads) >= 2, "looks for the claim")
        assert not ack.done()
        await asyncio.shield(ack)


async def test_a_slot_that_took_longer_than_the_lease_needs_another_look(slots: LateSlots) -> None:
    class Slow(LateSlots):
        async def create(self, key: str, pieces: Sequence[bytes]) -> bool:
            is_created = await super().create(key, pieces)
            clock.now += LEASE_S + 0.1
            return is_created

    clock, slow = Clock(), Slow(slots.store)
    async with await begun(slow, clock=clock) as log:
        slow.reads.clear()
        await appended(log, 0, 1)
        assert slow.reads == [name_of().slot_key(0)]


# -- sweeps


def found_log(
    epoch: int, *, at: int | None = None, slots: Sequence[int] = (0,)
) -> reading.FoundLog:
    """Return a log with a claim of time 0; `at` is the time of its mark."""
    return reading.FoundLog(name_of(epoch), list(slots), [], 0, at)


def test_a_sweep_needs_two_looks_and_the_store_s_own_times() -> None:
    own = replace(found_log(9), claimed_ms=100)
    old, young = found_log(1, at=10), found_log(2, at=95)
    found = {1: old, 2: young, 9: own}
    assert last_to_sweep(found, found, 9, 50) == 1
    assert last_to_sweep(found, found, 9, 0) == 2
    assert last_to_sweep({9: own}, found, 9, 50) is None
    assert last_to_sweep({**found, 1: found_log(1)}, found, 9, 50) is None
    assert last_to_sweep(found, {2: young, 9: own}, 9, 0) is None, "a listing left out a log"
    assert last_to_sweep(found, {1: old, 2: young}, 9, 50) is None, "a listing left out the claim"
    assert last_to_sweep(found, {**found, 9: replace(own, claimed_ms=None)}, 9, 50) is None


def test_no_log_behind_one_that_is_needed_and_not_the_newest_is_swept() -> None:
    own = replace(found_log(3, at=1), claimed_ms=100)
    needed = {1: found_log(1), 2: found_log(2, at=10), 3: own}
    assert last_to_sweep(needed, needed, 3, 50) is None
    newest = {1: found_log(1, at=10), 3: own}
    assert last_to_sweep(newest, newest, 3, 50) == 1


def test_marks_alone_are_not_swept_again() -> None:
    own = replace(found_log(3), claimed_ms=100)
    swept = replace(found_log(1, slots=()), has_swept_mark=True, is_swept=True)
    assert last_to_sweep({}, {1: swept, 3: own}, 3, 0) is None
    assert last_to_sweep({}, {1: replace(swept, sequences=[4]), 3: own}, 3, 0) == 1


async def recovered_log(store: MemoryObjectStore, slots: SlotStore, epoch: int) -> ObjectLog:
    """Leave a recovered log of a process that does not know yet."""
    clock = Clock()
    log = await begun(slots, epoch, clock)
    await appended(log, 0, 3)
    await sealed_records(slots, epoch)
    await reading.discard_log(slots, name_of(epoch), BY)
    return log


async def test_seals_stay_at_a_start_whatever_the_clocks_say() -> None:
    days = iter(range(0, 10_000, 30))
    store = MemoryObjectStore(lambda: next(days) * DAY_MS)
    slots = LateSlots(store)
    stalled = await recovered_log(store, slots, 1)
    seal = name_of().slot_key(4)
    async with await begun(slots, 2, config=replace(ONE_A_SLOT, retention_s=0)) as log:
        await appended(log, 0, 3)
        assert seal in store.objects()
        with pytest.raises(LogSealedError):
            await appended(stalled, 3, 4)
    await stalled.close()
    slots.end()


async def test_a_sweep_removes_claim_then_seal_and_leaves_a_mark(store: MemoryObjectStore) -> None:
    class Noting(LateSlots):
        async def delete(self, keys: Sequence[str]) -> None:
            deleted.append(list(keys))
            await super().delete(keys)

        async def put(self, key: str, data: bytes) -> None:
            deleted.append([key])
            await super().put(key, data)

    deleted: list[list[str]] = []
    slots = Noting(store)
    stalled = await recovered_log(store, slots, 1)
    async with await begun(slots, 2) as log:
        await appended(log, 0, 1)
        store.put(name_of().slot_key(0), b"a claim that came late")
        found = await reading.list_logs(slots, NAMESPACE, NODE)
        deleted.clear()
        await sweep_logs(slots, name_of(2), found, -DAY_MS)
        assert deleted == [
            [name_of().swept_key],
            [name_of().slot_key(0)],
            [name_of().slot_key(4)],
            [name_of().recovered_key],
        ]
        left = await reading.list_logs(slots, NAMESPACE, NODE)
        assert (left[1].sequences, left[1].is_recovered) == ([], True)
    await stalled.close()
    slots.end()


async def test_a_slot_that_comes_after_the_sweep_is_no_damage(slots: LateSlots) -> None:
    stalled = await recovered_log(slots.store, slots, 1)
    late = slots.store.objects()[name_of().slot_key(4)]
    newer = await recovered_log(slots.store, slots, 2)
    async with await begun(slots, 3) as log:
        found = await reading.list_logs(slots, NAMESPACE, NODE)
        await sweep_logs(slots, name_of(3), found, -DAY_MS)
        assert (await reading.list_logs(slots, NAMESPACE, NODE))[2].has_swept_mark
        await appended(log, 0, 2)
    slots.store.put(name_of().slot_key(4), late)
    async with opened(slots.store, 4) as log:
        assert sequences_of(log.recover()) == [0, 1]
        assert name_of().slot_key(4) in slots.store.objects()
    for process in (stalled, newer):
        await process.close()


async def test_a_process_watches_then_sweeps(
    slots: LateSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = await recovered_log(slots.store, slots, 1)
    monkeypatch.setattr(sweeping, "WATCH_S", 0.0)
    async with await begun(slots, 2, config=replace(ONE_A_SLOT, retention_s=0)):
        await asyncio.sleep(0.002)
    async with await begun(slots, 3, config=replace(ONE_A_SLOT, retention_s=0)):
        await until(lambda: name_of().slot_key(4) not in slots.store.objects(), "sweep of the seal")
    await stalled.close()


def test_a_seal_stays_for_many_leases() -> None:
    assert sweeping.WATCH_S >= 10 * ack_lease.LEASE_S


# -- listings that leave out what exists


async def test_a_slot_missing_in_a_listing_is_neither_damage_nor_the_end(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 8)
        slots.hidden = {name_of().slot_key(at): 100 for at in (4, 7, 8)}
        assert await sealed_records(slots) == list(range(8))
        with pytest.raises(LogSealedError):
            await appended(log, 8, 9)


async def test_a_log_that_no_listing_shows_is_read_all_the_same(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 3)
        slots.hidden = dict.fromkeys(slots.store.objects(), 1)
        assert await sealed_records(slots) == [0, 1, 2]


async def test_a_mark_that_a_listing_leaves_out_is_found(slots: LateSlots) -> None:
    stalled = await recovered_log(slots.store, slots, 1)
    slots.hidden = {name_of().recovered_key: 100}
    assert await reading.seal_log(slots, name_of(), BY) is None
    await stalled.close()


async def test_a_seal_counts_when_a_listing_shows_it(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 3)
        slots.hidden = {name_of().slot_key(4): 3}
        assert await sealed_records(slots) == [0, 1, 2]
        assert slots.hidden == {}
        slots.hidden = {name_of().slot_key(4): 100}
        with pytest.raises(StoreUnavailableError, match="seal"):
            await reading.seal_log(slots, name_of(), BY)


async def test_a_hole_in_an_old_listing_is_looked_at_again(slots: LateSlots) -> None:
    """The slots of the hole are settled; the listing leaves out the slot that says so."""
    async with settled(slots):
        slots.hidden = {name_of().slot_key(81): 3}
        assert await sealed_records(slots) == list(range(70, 81))


async def test_a_seal_in_the_place_of_a_deleted_slot_ends_no_reading(slots: LateSlots) -> None:
    """Its process went on for long after the listing that showed the place of the seal."""
    async with settled(slots):
        early = reading.SealedLog(name_of(), 1, 5)
        with pytest.raises(StoreUnavailableError, match="late"):
            _ = [some async for some in reading.read_log(slots, early)]
        assert await sealed_records(slots) == list(range(70, 81))


async def test_slots_that_were_settled_before_they_are_read_are_skipped(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 80)
        sealed = await reading.seal_log(slots, name_of(), BY)
        assert sealed is not None
        await log.close()
    early = replace(sealed, first=1)
    slots.store.delete_many([name_of().slot_key(at) for at in range(1, 10)])
    with pytest.raises(DamagedSlotError, match="missing"):
        _ = [some async for some in reading.read_log(slots, early)]
    await reading.discard_log(slots, name_of(), BY)
    assert [some async for some in reading.read_log(slots, early)] == []


async def test_a_listing_without_the_own_claim_is_repeated(slots: LateSlots) -> None:
    """Such a listing is older than the claim, so it may leave out earlier logs as well."""
    async with opened(slots.store) as log:
        await appended(log, 0, 3)
    slots.hidden = dict.fromkeys([*slots.store.objects(), name_of(2).slot_key(0)], 2)
    async with await begun(slots, 2) as log:
        assert sequences_of(log.recover()) == [0, 1, 2]
    slots.hidden = {name_of(3).slot_key(0): 100}
    with pytest.raises(StoreUnavailableError, match="claim"):
        await begun(slots, 3)
