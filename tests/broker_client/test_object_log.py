"""A write-ahead log in a bucket, over a store in memory: slots, order, bounds, damage, fences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from streammeta.client import StreamClient, StreamClientConfig, WriterConfig, errors
from streammeta.client.parts import StreamWriter
from streammeta.client.wal.bucket import reading
from streammeta.client.wal.bucket.bucket_slots import BucketSlots
from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.bucket.setting_aside import read_aside
from streammeta.client.wal.bucket.slot_queue import SlotQueue
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.storage import errors as storage_errors
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_log.slot import Sealer, SlotKind, decode_slot
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
from tests.kit.fake_broker import broker
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import until

pytestmark = pytest.mark.usefixtures("slots")

QUICK = ObjectLogConfig(linger_s=0.001, slot_bytes=1000, max_bytes=20_000)


@asynccontextmanager
async def opened(
    store: MemoryObjectStore, epoch: int = 1, config: ObjectLogConfig = QUICK
) -> AsyncIterator[ObjectLog]:
    log = await ObjectLog.open(store, LogIdentity(NAMESPACE, NODE, epoch), config)
    async with log:
        yield log


async def appended(log: ObjectLog, first: int, end: int, size: int = 20) -> None:
    """Append records and wait until each is acknowledged."""
    acks = [log.append(*encoded(record_at(number, size))) for number in range(first, end)]
    await asyncio.gather(*map(asyncio.shield, acks))


def slot_keys(store: MemoryObjectStore, epoch: int = 1) -> list[int]:
    prefix = name_of(epoch).prefix
    names = [key.removeprefix(prefix) for key in store.objects() if key.startswith(prefix)]
    return sorted(int(name, 16) for name in names if name != "recovered")


async def test_what_is_acknowledged_is_in_the_bucket_in_order(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 100)
        assert (log.end, log.trimmed, log.recovered_end) == (100, 0, 0)
        assert slot_keys(slots.store) == list(range(len(slot_keys(slots.store))))
        assert sequences_of(await read_sealed(slots)) == list(range(100))


async def test_a_record_larger_than_a_slot_has_one_of_its_own(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 1)
        await appended(log, 1, 2, size=5000)
        await appended(log, 2, 3)
        assert sequences_of(await read_sealed(slots)) == [0, 1, 2]


async def test_the_next_process_has_what_was_not_trimmed_until_it_trims(slots: LateSlots) -> None:
    config = replace(QUICK, slot_bytes=84 + 53)  # one record a slot
    async with opened(slots.store, 1, config) as log:
        await appended(log, 0, 10)
        log.trim(4)
        await appended(log, 10, 12)
    async with opened(slots.store, 2, config) as log:
        assert sequences_of(log.recover()) == list(range(4, 12))
        assert (log.recovered_end, log.end, log.used_bytes) == (8, 8, 8 * 53)
        await appended(log, 12, 14)
    async with opened(slots.store, 3, config) as log:  # nothing was trimmed: all of it, in order
        assert sequences_of(log.recover()) == list(range(4, 14))
        log.trim(log.recovered_end)
        assert list(log.recover()) == []
        await until(lambda: not slot_keys(slots.store, 1)[:-1], "deletion of the first log")
        assert (await reading.list_logs(slots, NAMESPACE, NODE))[1].is_recovered
    async with opened(slots.store, 4, config) as log:
        assert list(log.recover()) == []


async def test_a_settled_log_leaves_its_claim_and_a_seal_at_close(store: MemoryObjectStore) -> None:
    async with opened(store) as log:
        await appended(log, 0, 50)
        log.trim(50)
    claim, sequence = slot_keys(store)
    assert claim == 0
    key = name_of().slot_key(sequence)
    slot = decode_slot(store.objects()[key], key, NAMESPACE)
    assert (slot.kind, slot.sealer()) == (SlotKind.SEAL, Sealer(NODE, 1))


async def test_a_log_closes_whose_last_records_settled_without_a_slot(slots: LateSlots) -> None:
    """A commit may be faster than the log; the seal must not ask for a slot that is deleted."""
    async with opened(slots.store, 1, replace(QUICK, linger_s=3600.0)) as log:
        log.append(*encoded(record_at(0)))
        log.trim(1)
    assert await read_sealed(slots) == []
    async with opened(slots.store, 2) as log:
        assert list(log.recover()) == []


async def test_a_log_that_its_own_process_closed_needs_no_slot(slots: LateSlots) -> None:
    """Seals of older versions may ask for their last slot, which was deleted."""
    async with opened(slots.store) as log:
        await appended(log, 0, 1)
        log.trim(1)
    key = name_of().slot_key(2)
    seal = decode_slot(slots.store.objects()[key], key, NAMESPACE)
    slots.store.put(key, replace(seal, first_needed=1, durable_below=2).encode())
    assert await read_sealed(slots) == []


async def test_a_sealed_log_acknowledges_nothing_more(slots: LateSlots) -> None:
    async with opened(slots.store) as log:
        await appended(log, 0, 5)
        found = await read_sealed(slots)
        with pytest.raises(errors.LogSealedError, match="process 1 of node 8"):
            await appended(log, 5, 6)
        assert sequences_of(found) == [0, 1, 2, 3, 4]
        with pytest.raises(errors.LogSealedError):
            log.has_room(1)
        with pytest.raises(errors.LogSealedError):
            log.append(*encoded(record_at(6)))
    assert sequences_of(await read_sealed(slots)) == [0, 1, 2, 3, 4]


class _SlowStore(MemoryObjectStore):
    """Holds the creation of chosen slots until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()

    def put(self, key: str, data: Body, **options: Any) -> None:
        if key in self.held:
            raise storage_errors.StoreUnavailableError("held")
        super().put(key, data, **options)


async def test_a_slot_is_acknowledged_only_when_all_before_it_are_stored(
    slots: LateSlots,
) -> None:
    store = _SlowStore()
    store.held = {name_of().slot_key(2)}
    async with opened(store) as log:
        await appended(log, 0, 1)
        second = log.append(*encoded(record_at(1, 1000)))
        third = log.append(*encoded(record_at(2, 1000)))
        await until(lambda: 3 in slot_keys(store), "the third slot")
        assert not second.done()
        assert not third.done()
        store.held.clear()
        await asyncio.gather(second, third)


async def test_behind_a_seal_slots_count_for_nothing() -> None:
    store = _SlowStore()
    slots = BucketSlots(store, 2)
    store.held = {name_of().slot_key(2)}
    async with opened(store) as log:
        await appended(log, 0, 1)
        acks = [log.append(*encoded(record_at(number, 1000))) for number in (1, 2, 3)]
        await until(lambda: 4 in slot_keys(store), "slots behind the one that is held")
        store.held.clear()
        sealed = await reading.seal_log(slots, name_of(), BY)
        assert sealed is not None
        results = await asyncio.gather(*acks, return_exceptions=True)
        was_first = not isinstance(results[0], Exception)
        assert [isinstance(one, errors.LogSealedError) for one in results] == [not was_first] * 3
        expected = [0, 1, 2, 3] if was_first else [0]
        assert sequences_of(await read_sealed(slots)) == expected
        again = await reading.seal_log(slots, name_of(), Sealer(9, 1))
        assert again == sealed
    slots.close()


async def test_a_seal_in_the_place_of_a_deleted_slot_is_no_seal(store: MemoryObjectStore) -> None:
    """The process stores, trims and deletes the slot that a slow recoverer is about to create."""
    config = replace(QUICK, slot_bytes=84 + 53)

    class Late(BucketSlots):
        """Creates the first seal when the process has gone on for long."""

        async def create(self, key: str, pieces: Sequence[bytes]) -> bool:
            if not raced:
                raced.append(key)
                await appended(log, 5, 200)
                log.trim(190)
                await appended(log, 200, 201)
                await until(lambda: slot_keys(store)[1] > 10, "deletion of the slot")
            return await super().create(key, pieces)

    raced: list[str] = []
    slots = Late(store, 2)
    async with opened(store, 1, config) as log:
        await appended(log, 0, 5)
        found = sequences_of(await read_sealed(slots))
        assert raced == [name_of().slot_key(6)]
        assert found == list(range(190, 201))
        with pytest.raises(errors.LogSealedError):
            await appended(log, 201, 202)
    slots.close()


async def test_the_log_pushes_back_and_goes_on_after_a_trim(store: MemoryObjectStore) -> None:
    config = replace(QUICK, max_bytes=3000, max_unflushed_bytes=1500)
    async with opened(store, 1, config) as log:
        assert log.max_record_bytes == 3000 - 84
        assert log.has_room(2916)
        log.append(*encoded(record_at(0, 1400)))
        assert not log.has_room(100)  # too much that is not stored
        await log.flush()
        assert log.has_room(1300)
        log.append(*encoded(record_at(1, 1260)))
        await log.flush()
        assert not log.has_room(300)
        assert log.has_room(0)
        log.trim(1)
        assert log.has_room(300)
        with pytest.raises(ValueError, match=r"position.*3"):
            log.trim(3)


async def test_past_slots_are_deleted_and_the_others_are_found(slots: LateSlots) -> None:
    config = replace(QUICK, slot_bytes=84 + 53)
    async with opened(slots.store, 1, config) as log:
        await appended(log, 0, 150)
        log.trim(100)
        await appended(log, 150, 151)
        await until(lambda: slot_keys(slots.store)[:2] == [0, 101], "deletion of what is past")
        assert sequences_of(await read_sealed(slots)) == list(range(100, 151))


def test_no_slot_under_way_is_past_though_its_records_are_settled() -> None:
    """In its place there may be a seal, which must never be deleted."""
    queue: SlotQueue[None] = SlotQueue(name_of(), bytes(16), replace(QUICK, slot_bytes=84))
    for number in range(3):
        queue.append(encoded(record_at(number)), None)
    assert [upload.sequence for upload in queue.take_uploads()] == [1, 2, 3]
    queue.trim(2)
    queue.append(encoded(record_at(3)), None)
    queue.cut()
    (upload,) = queue.take_uploads()
    assert queue.mark_stored(upload.sequence) == []
    assert queue.past_below <= 1
    slot = decode_slot(b"".join(upload.pieces), upload.key, NAMESPACE)
    assert slot.first_needed <= slot.durable_below == 1


def test_records_that_are_settled_before_they_have_a_slot_are_kept_by_none() -> None:
    queue: SlotQueue[None] = SlotQueue(name_of(), bytes(16), QUICK)
    queue.append(encoded(record_at(0)), None)
    queue.trim(1)
    queue.cut()
    (upload,) = queue.take_uploads()
    queue.mark_stored(upload.sequence)
    assert (queue.needed_from, queue.kept_bytes) == (2, 0)


def test_no_more_slots_are_under_way_than_allowed() -> None:
    config = replace(QUICK, slot_bytes=84, parallel_uploads=3)
    queue: SlotQueue[int] = SlotQueue(name_of(), bytes(16), config)
    groups = [queue.append(encoded(record_at(number)), number) for number in range(6)]
    assert [upload.sequence for upload in queue.take_uploads()] == [1, 2, 3]
    assert queue.mark_stored(3) == []
    assert list(queue.take_uploads()) == []
    assert queue.mark_stored(1) == groups[:1]
    assert [upload.sequence for upload in queue.take_uploads()] == [4]
    assert queue.mark_stored(2) == groups[1:3]


async def test_a_lost_answer_is_no_fence(store: MemoryObjectStore) -> None:
    class Forgetful(MemoryObjectStore):
        def put(self, key: str, data: Body, **options: Any) -> None:
            super().put(key, data, **options)
            if key.endswith("3") and key not in lost:
                lost.append(key)
                raise storage_errors.StoreUnavailableError("no answer")

    lost: list[str] = []
    async with opened(Forgetful()) as log:
        await appended(log, 0, 200)
        assert lost


@pytest.mark.parametrize("damage", ["missing", "changed", "another's"])
async def test_records_before_damage_are_read_then_an_error(slots: LateSlots, damage: str) -> None:
    config = replace(QUICK, slot_bytes=84 + 53)
    async with opened(slots.store, 1, config) as log:
        await appended(log, 0, 8)
    key, held = name_of().slot_key(5), slots.store.objects()
    sealed = await reading.seal_log(slots, name_of(), BY)
    assert sealed is not None
    if damage == "missing":
        slots.store.delete_many([key])
    elif damage == "changed":
        slots.store.put(key, held[key][:-1] + b"?")
    else:
        slots.store.put(key, held[name_of().slot_key(4)])
    found: list[RecordBatch] = []

    async def read() -> None:
        async for some in reading.read_log(slots, sealed):
            found.extend(some)

    with pytest.raises(errors.DamagedSlotError, match=key):
        await read()
    assert sequences_of(found) == [0, 1, 2, 3]
    with pytest.raises(errors.DamagedSlotError, match=key):
        async with opened(slots.store, 2):
            pass


async def test_a_hole_below_what_was_stored_is_damage_and_seals_nothing(slots: LateSlots) -> None:
    async with opened(slots.store, 1, replace(QUICK, slot_bytes=84 + 53)) as log:
        for number in range(8):
            await appended(log, number, number + 1)
        slots.store.delete_many([name_of().slot_key(4)])
        before = slots.store.objects()
        with pytest.raises(errors.DamagedSlotError, match="missing"):
            await reading.seal_log(slots, name_of(), BY)
        assert slots.store.objects() == before


async def test_a_log_that_was_never_begun_is_sealed_before_its_first_slot(slots: LateSlots) -> None:
    assert await read_sealed(slots) == []
    with pytest.raises(errors.WrongLogError):
        async with opened(slots.store):
            pass


async def test_an_older_process_finds_the_newer_and_gives_up(store: MemoryObjectStore) -> None:
    async with opened(store, 5) as log:
        await appended(log, 0, 1)
        with pytest.raises(errors.WrongLogError, match="process 5"):
            async with opened(store, 4):
                pass
        with pytest.raises(errors.WrongLogError):
            async with opened(store, 5):
                pass
        await appended(log, 1, 2)


async def test_a_store_that_creates_twice_is_refused(store: MemoryObjectStore) -> None:
    class Careless(MemoryObjectStore):
        def put(self, key: str, data: Body, **options: Any) -> None:
            super().put(key, data)

    with pytest.raises(errors.UnfitStoreError, match="If-None-Match"):
        async with opened(Careless()):
            pass


async def test_a_store_that_refuses_for_good_ends_the_log(store: MemoryObjectStore) -> None:
    async with opened(store) as log:
        await appended(log, 0, 1)
        store.fail_next("put", storage_errors.BucketNotFoundError("gone"))
        with pytest.raises(errors.ObjectLogFailedError, match="'gone'"):
            await appended(log, 1, 2)
        with pytest.raises(errors.ObjectLogFailedError):
            log.has_room(1)


@pytest.mark.parametrize(
    "error",
    [
        storage_errors.AccessDeniedError("the clock of this machine is wrong"),
        storage_errors.StoreUnavailableError("slow down", throttled=True, retry_after_s=0.01),
    ],
)
async def test_a_failure_that_passes_ends_no_log(
    store: MemoryObjectStore, error: storage_errors.StorageError
) -> None:
    async with opened(store) as log:
        store.fail_next("put", error, times=4)
        await appended(log, 0, 1)
        assert store.objects()
        assert log.has_room(1)


async def test_a_log_closes_in_its_time_while_the_store_refuses(store: MemoryObjectStore) -> None:
    async with opened(store, config=replace(QUICK, close_deadline_s=0.05)) as log:
        store.fail_next("put", storage_errors.AccessDeniedError("no right to write"), times=10_000)
        ack = log.append(*encoded(record_at(0)))
        await log.close()
        with pytest.raises(errors.WriteAheadLogClosedError):
            await ack


async def test_a_closed_log_takes_no_records(store: MemoryObjectStore) -> None:
    async with opened(store) as log:
        with pytest.raises(ValueError, match="33"):
            log.append(encoded(record_at(0))[0], b"abc")
    await log.close()
    with pytest.raises(errors.WriteAheadLogClosedError):
        log.append(*encoded(record_at(0)))


async def test_records_set_aside_are_read_back_and_kept(store: MemoryObjectStore) -> None:
    records = [record_at(number) for number in range(5)]
    async with opened(store) as log:
        assert await log.set_aside([], "nothing") is None
        key = await log.set_aside(records, "the stream is gone")
        assert key is not None
        assert await log.set_aside(records, "the stream is gone") == key
    assert read_aside(store, key, NAMESPACE) == ("the stream is gone", records)


async def test_no_records_set_aside_replace_others(store: MemoryObjectStore) -> None:
    """Of sets that are alike in number, begin, end or reason, each one has an object."""
    at = [record_at(number) for number in range(6)]
    changed = replace(at[0], payload=b"?" * len(at[0].payload))
    sets = [at[:2], at[:3], at[1:3], [at[0], at[2]], [changed, at[1]], [at[1], at[0]], at[:1]]
    async with opened(store) as log:
        keys = [await log.set_aside(some, "gone") for some in sets]
    async with opened(store, 2) as log:
        keys.append(await log.set_aside(at[3:], "gone"))
    for key, records in zip(keys, [*sets, at[3:]], strict=True):
        assert key is not None
        assert read_aside(store, key, NAMESPACE) == ("gone", records)


async def test_a_discarded_log_keeps_its_seals_and_fences_its_process_still() -> None:
    store = MemoryObjectStore()
    slots = BucketSlots(store, 2)
    async with opened(store) as log:
        await appended(log, 0, 3)
        await read_sealed(slots)
        await reading.discard_log(slots, name_of(), BY)
        assert await reading.seal_log(slots, name_of(), BY) is None
        with pytest.raises(errors.LogSealedError):
            await appended(log, 3, 4)
    slots.close()


async def test_the_next_start_removes_what_discarding_left_but_the_seal(slots: LateSlots) -> None:
    async with opened(slots.store, 1, replace(QUICK, slot_bytes=84 + 53)) as log:
        await appended(log, 0, 5)
    await read_sealed(slots)
    slots.store.fail_next("delete_many", storage_errors.StoreUnavailableError("down"))
    with pytest.raises(storage_errors.StoreUnavailableError):
        await reading.discard_log(slots, name_of(), BY)
    assert slot_keys(slots.store) == [0, 1, 2, 3, 4, 5, 6]
    async with opened(slots.store, 2):
        left = [key for key in slots.store.objects() if key.startswith(name_of().prefix)]
        assert set(left) == {name_of().slot_key(6), name_of().recovered_key}


async def test_a_former_log_without_records_is_discarded_at_once(store: MemoryObjectStore) -> None:
    async with opened(store, 1):
        pass
    assert name_of().recovered_key not in store.objects()
    async with opened(store, 2):
        await until(lambda: name_of().recovered_key in store.objects(), "the mark")


async def test_a_writer_on_such_a_log_recovers_what_was_not_committed() -> None:
    bounds = WriterConfig(durability="wal", linger_s=3600)
    async with broker() as b:
        (stream,) = await b.opened(1)
        identity = LogIdentity(NAMESPACE, b.session.node.node_id, 1)
        log = await ObjectLog.open(b.store, identity, QUICK)
        writer = StreamWriter(b.session, b.store, bounds, log=log)
        writer.attach([stream])
        acks = [await writer.append(stream.stream_id, b"%d" % number) for number in range(5)]
        assert await asyncio.gather(*acks) == list(range(5))
        await log.close()
        await writer.close(0)
        assert b.cluster.map.streams[stream.stream_id].end == 0
        again = tuple(await b.reopened([stream.stream_id], stream.epoch))
        session = replace(b.session, inherited=again)
        async with (
            await ObjectLog.open(b.store, replace(identity, node_epoch=2), QUICK) as log,
            StreamWriter(session, b.store, bounds, log=log) as writer,
        ):
            writer.attach(again)
            report = await writer.recover()
            assert (report.committed, report.uploaded, report.set_aside) == (0, 5, 0)
            assert b.cluster.map.streams[stream.stream_id].end == 5


async def test_two_logs_or_a_log_without_a_node_are_refused() -> None:
    with pytest.raises(ValueError, match="object_log"):
        StreamClientConfig(wal_directory="/tmp/x", object_log=ObjectLogConfig())
    with pytest.raises(ValueError, match="object_log needs a node_id"):
        await StreamClient.open(
            ["127.0.0.1:1"],
            MemoryObjectStore(),
            config=StreamClientConfig(object_log=ObjectLogConfig()),
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slot_bytes": 0}, "slot_bytes"),
        ({"parallel_uploads": 65}, "parallel_uploads"),
        ({"linger_s": -1.0}, "linger_s"),
        ({"max_bytes": 10, "slot_bytes": 11}, "max_bytes is 10, expected at least slot_bytes, 11"),
    ],
)
def test_bounds_that_can_not_be_met_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectLogConfig(**wrong)
