"""Expiry of RocketMQ's tiered storage: reserve times of topics, clocks, crashes, and readers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

import pytest

from streammeta.brokers.rocketmq.cluster.cluster_metadata import MetadataFencedError
from streammeta.brokers.rocketmq.cluster.retention import Expiry, Retention
from streammeta.brokers.rocketmq.fetch import Fetcher, FetchStatus
from streammeta.brokers.rocketmq.formats.message import physical_offset_of
from streammeta.brokers.rocketmq.formats.metadata import (
    HOUR_MS,
    MetadataTable,
    Queue,
    SegmentMetadata,
)
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, IndexStatus
from streammeta.brokers.rocketmq.message_file import FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments.file_segment import AppendResult
from streammeta.brokers.rocketmq.segments.flat_file import FlatFilePlace
from streammeta.brokers.stamped_time import AHEAD_MS, stamped_clock
from tests.brokers.rocketmq_messages import DurableKeeper, stored
from tests.conformance.rocketmq_files import NOW_MS, QUEUE, open_index
from tests.kit.memory_stores import MemorySegment, MemorySegmentStore, MemoryShelf
from tests.kit.waiting import until

SHORT = replace(QUEUE, topic="Short")
SIZES = FileSizes(commit_log=430, consume_queue=20 * 4)


class DownError(Exception):
    """A step that is told to fail."""


@dataclass
class Steps:
    """Steps that change what is durable; the one numbered `fails_at` fails.

    With `is_done_first` it has happened before it fails; in a crash all later ones fail too.
    """

    fails_at: int = -1
    is_done_first: bool = False
    is_crash: bool = False
    taken: int = 0

    def take(self) -> tuple[bool, bool]:
        """Take a step; return whether it happens, and whether it fails."""
        at, self.taken = self.taken, self.taken + 1
        if at == self.fails_at:
            return self.is_done_first, True
        fails = self.is_crash and at > self.fails_at
        return not fails, fails


@dataclass
class SteppingKeeper(DurableKeeper):
    """Metadata whose saves are steps."""

    steps: Steps = field(default_factory=Steps)

    async def save(self) -> None:
        happens, fails = self.steps.take()
        if happens:
            await super().save()
        if fails:
            raise DownError


class Segment(MemorySegment):
    """A segment whose deletion may fail, and whose reads may wait."""

    def __init__(self, store: Segments) -> None:
        super().__init__()
        self._store = store

    async def destroy(self) -> None:
        happens, fails = self._store.steps.take()
        if happens:
            await super().destroy()
        if fails:
            raise DownError

    async def read(self, position: int, length: int) -> bytes:
        self._store.reads += 1
        if self._store.reads == self._store.gated_read:
            await self._store.gate.wait()
        return await super().read(position, length)


class Segments(MemorySegmentStore):
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.gate = asyncio.Event()
        self.reads = 0
        self.gated_read = -1

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> MemorySegment:
        return self.segments.setdefault((path, kind, base_offset), Segment(self))


@dataclass
class World:
    """A store of two queues in memory; `now_ms` is the store's own time."""

    now_ms: int = NOW_MS
    steps: Steps = field(default_factory=Steps)
    shelf: MemoryShelf = field(default_factory=MemoryShelf)
    files: dict[Queue, MessageFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keeper = SteppingKeeper(steps=self.steps)
        self.store = Segments(self.steps)

    async def file(self, queue: Queue = QUEUE) -> MessageFile:
        place = FlatFilePlace(self.store, self.keeper, lambda: self.now_ms)
        file = MessageFile(place, queue, SIZES)
        await file.open()
        self.files[queue] = file
        return file

    async def expiry(self, retention: Retention | None = None) -> Expiry:
        index = await open_index(self.store, self.shelf, IndexSizes(5, 8), lambda: self.now_ms)
        return Expiry(self.files, index, self.keeper, lambda: self.now_ms, retention or Retention())

    async def restart(self) -> None:
        self.keeper = self.keeper.after_restart()
        self.store.steps = self.keeper.steps = self.steps = Steps()
        for queue in tuple(self.files):
            await self.file(queue)


async def fill(file: MessageFile, count: int, first_ms: int, step_ms: int = HOUR_MS) -> None:
    """Append messages, one for each step of time, and commit them."""
    if not file.is_initialised:
        await file.init_offset(0)
    first = file.append_offset
    for offset in range(first, first + count):
        data = stored(offset, stored_ms=first_ms + (offset - first) * step_ms)
        assert await file.append(data, 0) is AppendResult.SUCCESS
        assert await file.commit()


async def begin_with(count: int, first_ms: int = NOW_MS) -> tuple[World, MessageFile]:
    world = World()
    file = await world.file()
    await fill(file, count, first_ms)
    return world, file


async def offsets(file: MessageFile) -> list[int]:
    found: list[int] = []
    at = await file.first_offset()
    while messages := await file.read(at, 100):
        found += [message.queue_offset for message in messages]
        at = found[-1] + 1
    return found


# ---- reserve times ----


@pytest.fixture
def world() -> World:
    return World()


def test_the_reserve_time_of_a_topic_is_in_hours_and_has_a_default() -> None:
    table = MetadataTable()
    table.add_topic("added", 5)
    table.set_reserve_time("set", 7, NOW_MS)
    table.set_reserve_time("added", 9, NOW_MS)
    topics = ("added", "set", "unknown")
    assert [table.reserve_ms(topic, 72) for topic in topics] == [
        9 * HOUR_MS,
        7 * HOUR_MS,
        72 * HOUR_MS,
    ]
    table.set_reserve_time("set", 0)
    assert table.reserve_ms("set", 72) == 72 * HOUR_MS
    assert [table.topics[topic].topic_id for topic in topics[:2]] == [0, 1]
    assert MetadataTable.decode(table.encode()) == table


async def test_each_topic_keeps_its_messages_for_its_own_time(world: World) -> None:
    world.keeper.table.set_reserve_time(SHORT.topic, 10)
    for queue in (QUEUE, SHORT):
        await fill(await world.file(queue), 40, NOW_MS)
    expiry = await world.expiry(Retention(reserved_hours=30))

    world.now_ms = NOW_MS + 40 * HOUR_MS
    assert await expiry.expire_due() > 0
    kept = {queue: (await offsets(file))[0] for queue, file in world.files.items()}
    # Messages 0 to 9 and 0 to 29 are older; a segment of the log has 4 messages.
    assert kept == {QUEUE: 8, SHORT: 28}
    assert await expiry.expire_due() == 0

    world.keeper.table.set_reserve_time(QUEUE.topic, 10)
    assert await expiry.expire_due() > 0
    assert (await offsets(world.files[QUEUE]))[0] == 28


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"reserved_hours": 0}, "reserved_hours is 0"), ({"check_interval_s": 0}, "interval_s is 0")],
)
def test_times_that_delete_all_or_never_rest_are_refused(
    given: dict[str, int], wanted: str
) -> None:
    with pytest.raises(ValueError, match=wanted):
        Retention(**given)


# ---- clocks ----


async def test_a_machine_ten_years_ahead_deletes_what_a_day_ahead_would(world: World) -> None:
    file = await world.file()
    for hour in range(100):
        world.now_ms = NOW_MS + hour * HOUR_MS
        await fill(file, 1, world.now_ms)
    timer_ms, wall_ms = 0, world.now_ms + 3650 * 24 * HOUR_MS
    table = world.keeper.table
    now_ms = stamped_clock("it", table.stamps_ms, lambda: wall_ms, lambda: timer_ms)
    assert now_ms() <= world.now_ms + AHEAD_MS

    world.now_ms = now_ms()
    await (await world.expiry()).expire_due()
    assert (await offsets(file))[0] <= 100 - 72 + 24
    assert (await offsets(file))[-1] == 99

    timer_ms += 10 * HOUR_MS
    assert now_ms() == world.now_ms + 20 * HOUR_MS


def test_times_of_messages_move_no_clock() -> None:
    """They come from the machine whose clock may be wrong."""
    table = MetadataTable(noted_ms=3)
    segment = SegmentMetadata("p", SegmentType.COMMIT_LOG, 0, create_ms=1, seal_ms=2)
    table.put_segment(replace(segment, begin_ms=NOW_MS, end_ms=NOW_MS))
    assert sorted(table.stamps_ms) == [1, 2, 3]


async def test_a_new_store_has_the_machines_time() -> None:
    assert stamped_clock("it", MetadataTable().stamps_ms, lambda: NOW_MS, lambda: 0)() == NOW_MS


async def test_the_time_of_a_check_is_noted(world: World) -> None:
    """A broker that writes no segment for weeks is not taken for one that was off."""
    expiry = await world.expiry()
    world.now_ms += 100 * HOUR_MS
    await expiry.expire_due()
    assert world.keeper.durable.stamps_ms == [world.now_ms]
    world.now_ms -= HOUR_MS
    await expiry.expire_due()
    assert world.keeper.durable.noted_ms == world.now_ms + HOUR_MS


async def test_messages_stored_with_a_slow_clock_are_kept_as_long() -> None:
    world, file = await begin_with(8, first_ms=1)
    expiry = await world.expiry()
    world.now_ms += 72 * HOUR_MS
    assert await expiry.expire_due() == 0
    world.now_ms += 1
    assert await expiry.expire_due() > 0
    assert await offsets(file) == []


# ---- crashes ----


@pytest.mark.parametrize("is_done_first", [False, True])
async def test_a_crash_at_any_step_loses_nothing_and_is_finished(is_done_first: bool) -> None:
    step = 0
    while True:
        world, file = await begin_with(12)
        end, log_end = file.commit_offset, file.commit_log.commit_offset
        world.now_ms += 200 * HOUR_MS
        expiry = await world.expiry()
        steps = world.steps
        steps.taken, steps.fails_at = 0, step
        steps.is_done_first, steps.is_crash = is_done_first, True
        with contextlib.suppress(DownError):
            await expiry.expire_due()
        has_failed = steps.taken > step

        await world.restart()
        file = world.files[QUEUE]
        assert file.is_initialised
        await (await world.expiry()).expire_due()
        assert world.keeper.durable.segments == {}
        assert not any(segment.data for segment in world.store.segments.values())
        assert (file.min_offset, file.commit_offset, file.append_offset) == (end, end, end)

        await world.restart()
        file = world.files[QUEUE]
        await fill(file, 1, world.now_ms)
        (message,) = await file.read(0, 9)
        assert (message.queue_offset, physical_offset_of(message.data)) == (end, log_end)
        step += 1
        if not has_failed:
            break
    assert step > 10


async def test_a_process_that_was_replaced_deletes_nothing() -> None:
    world, _ = await begin_with(8)
    world.now_ms += 200 * HOUR_MS

    async def fenced() -> None:
        raise MetadataFencedError("k")

    world.keeper.save = fenced  # type: ignore[method-assign]
    with pytest.raises(MetadataFencedError):
        await (await world.expiry()).expire_due()
    assert all(segment.data for segment in world.store.segments.values())


async def test_a_queue_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for queue in (QUEUE, SHORT):
        await fill(await world.file(queue), 8, NOW_MS)
    world.now_ms += 200 * HOUR_MS
    expiry = await world.expiry()
    world.steps.taken, world.steps.fails_at = 0, 1  # the first one notes the time
    assert await expiry.expire_due() > 0
    assert f"expiry of queue {QUEUE.path} failed" in caplog.text
    assert await offsets(world.files[SHORT]) == []
    assert (await offsets(world.files[QUEUE]))[0] == 0
    assert await expiry.expire_due() > 0
    assert await offsets(world.files[QUEUE]) == []


async def test_an_empty_segment_holds_up_no_expiry(world: World) -> None:
    file = await world.file()
    await file.init_offset(10)
    await file.skip_to(20)
    await fill(file, 8, NOW_MS)
    world.now_ms += 200 * HOUR_MS
    await (await world.expiry()).expire_due()
    assert world.keeper.table.segments == {}
    assert file.append_offset == 28


async def test_a_queue_of_an_older_version_goes_on_behind_its_last_item() -> None:
    """It noted no end of the commit log, and the log may have expired alone."""
    world, file = await begin_with(8)
    log_end = file.commit_log.commit_offset
    await file.expire(0)
    await file.commit_log.expire(NOW_MS + 100 * HOUR_MS)
    file._note_offsets()
    noted = world.keeper.table.queues[QUEUE]
    world.keeper.table.queues[QUEUE] = replace(noted, log_end=0)
    await world.keeper.save()
    await world.restart()
    await fill(world.files[QUEUE], 1, NOW_MS)
    (message,) = await world.files[QUEUE].read(8, 1)
    assert physical_offset_of(message.data) == log_end


# ---- readers and writers ----


async def test_a_deletion_waits_for_the_reads_under_way() -> None:
    world, file = await begin_with(8)
    world.store.reads, world.store.gated_read = 0, 1
    reading = asyncio.create_task(file.consume_queue.read(0, 20))
    await until(lambda: world.store.reads == 1, "the read")
    expiring = asyncio.create_task(file.expire(NOW_MS + 100 * HOUR_MS))
    await until(lambda: file.consume_queue.min_offset > 0, "the deletion")
    world.store.gate.set()
    assert len(await reading) == 20
    await expiring
    assert await offsets(file) == []


@pytest.mark.parametrize("gated_read", range(1, 9))
async def test_a_read_that_an_expiry_overtakes_ends_well(gated_read: int) -> None:
    world, file = await begin_with(16)
    fetcher = Fetcher({QUEUE: file}, (await world.expiry())._index, lambda: NOW_MS)
    world.store.reads, world.store.gated_read = 0, gated_read
    fetching = asyncio.create_task(fetcher.fetch(QUEUE, 0, 32))
    await until(lambda: world.store.reads == gated_read or fetching.done(), "the read")
    expiring = asyncio.create_task(file.expire(NOW_MS + 10 * HOUR_MS))
    for _ in range(50):
        await asyncio.sleep(0)
    world.store.gate.set()
    found = await fetching
    await expiring
    first = await file.first_offset()
    assert first > 0
    if found.status is FetchStatus.FOUND:
        own = [message.queue_offset for message in found.messages]
        assert own == list(range(own[0], 16))
        assert own[0] in (0, first)
    else:
        assert found.status is FetchStatus.OFFSET_TOO_SMALL
        assert 0 < found.next_offset <= first
    assert (await fetcher.fetch(QUEUE, 0, 32)).status is FetchStatus.OFFSET_TOO_SMALL


async def test_what_is_appended_while_the_last_segment_goes_is_kept() -> None:
    world, file = await begin_with(2)
    world.now_ms += 200 * HOUR_MS
    appended = False
    save = world.keeper.save

    async def save_and_append() -> None:
        nonlocal appended
        await save()
        if not appended:
            appended = True
            await fill(file, 3, world.now_ms)

    world.keeper.save = save_and_append  # type: ignore[method-assign]
    expiry = await world.expiry()
    await expiry.expire_due()
    await expiry.expire_due()
    assert (await offsets(file))[-3:] == [2, 3, 4]
    await world.restart()
    assert (await offsets(world.files[QUEUE]))[-3:] == [2, 3, 4]


# ---- key index ----


async def test_index_files_go_once_no_topic_reserves_their_messages(world: World) -> None:
    world.keeper.table.set_reserve_time(SHORT.topic, 10)
    expiry = await world.expiry(Retention(reserved_hours=30))
    index = expiry._index
    for number in range(30):
        index.put("t", 1, 0, [f"k{number}"], number, 1, NOW_MS + number)
    while await index.compact_oldest():
        pass
    count = len(index.statuses)
    assert index.statuses[:2] == [IndexStatus.UPLOAD] * 2

    world.now_ms += 20 * HOUR_MS
    assert await expiry.expire_due() == 0
    world.now_ms += 20 * HOUR_MS
    assert await expiry.expire_due() == count - 1
    assert (world.shelf.done, world.shelf.marked) == ([], [])
    assert await index.query("t", "k0", 9) == []
    assert not any(segment.data for segment in world.store.segments.values())


async def test_an_index_file_whose_deletion_fails_goes_later(world: World) -> None:
    expiry = await world.expiry()
    for number in range(10):
        expiry._index.put("t", 1, 0, [f"k{number}"], number, 1, NOW_MS + number)
    assert await expiry._index.compact_oldest()
    world.now_ms += 200 * HOUR_MS
    world.steps.taken, world.steps.fails_at = 0, 1  # the first one notes the time
    assert await expiry.expire_due() == 0
    assert len(world.shelf.marked) == 1

    again = await world.expiry()
    assert await again.expire_due() == 1
    assert not any(segment.data for segment in world.store.segments.values())


# ---- the loop ----


async def test_the_loop_checks_at_once_and_again_until_it_is_stopped(world: World) -> None:
    expiry = await world.expiry(Retention(check_interval_s=0.001))
    world.steps.fails_at = world.steps.taken
    expiry.start()
    await until(lambda: world.steps.taken > 5, "further checks after one that failed")
    await expiry.stop()
    taken = world.steps.taken
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.steps.taken == taken
    await expiry.stop()


async def test_without_an_interval_nothing_is_checked(world: World) -> None:
    expiry = await world.expiry(Retention(check_interval_s=None))
    expiry.start()
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.steps.taken == 0
    await expiry.stop()


async def test_the_loop_ends_when_the_process_was_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    expiry = await world.expiry(Retention(check_interval_s=0.001))
    checks = 0

    async def fenced() -> None:
        nonlocal checks
        checks += 1
        raise MetadataFencedError("k")

    world.keeper.save = fenced  # type: ignore[method-assign]
    expiry.start()
    await until(lambda: "expiry of tiered storage stops" in caplog.text, "the end")
    for _ in range(20):
        await asyncio.sleep(0)
    assert checks == 1
    await expiry.stop()
