"""Dispatch and reads of RocketMQ's queues: each call ends, and each message has its own offset."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.brokers.rocketmq.cluster.segment_view import render
from streammeta.brokers.rocketmq.dispatch import Dispatcher, GroupCommit
from streammeta.brokers.rocketmq.fetch import Fetcher, FetchStatus, ReadAhead
from streammeta.brokers.rocketmq.formats.key_index import TimeRange
from streammeta.brokers.rocketmq.formats.message import physical_offset_of, queue_offset_of
from streammeta.brokers.rocketmq.formats.metadata import MetadataTable, SegmentMetadata
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.message_file import FileSizes, MessageFile
from streammeta.brokers.rocketmq.segments.file_segment import SegmentReadError
from streammeta.brokers.rocketmq.tiered_view import min_offset, split_query
from tests.brokers.rocketmq_messages import MOST_READS, Local, stored
from tests.conformance.rocketmq_files import NOW_MS, QUEUE, FailingSegment, FileWorld, open_index
from tests.kit.memory_stores import MemorySegment
from tests.kit.seeds import seeds
from tests.kit.waiting import counted_turns


async def a_dispatcher(
    local: Local, file: MessageFile | None = None, groups: GroupCommit | None = None
) -> Dispatcher:
    """Return a dispatcher whose queue begins at the first local message."""
    dispatcher = await FileWorld().dispatcher(local, groups, file)
    await dispatcher.dispatch(force=True)
    return dispatcher


async def stored_offsets(file: MessageFile) -> list[int]:
    """Return the queue offsets that have a message; each is the message's own."""
    found: list[int] = []
    offset = 0
    while messages := await file.read(offset, 100):
        for message in messages:
            assert queue_offset_of(message.data) == message.queue_offset
            found.append(message.queue_offset)
        offset = found[-1] + 1
    return found


def vanish(local: Local, offset: int, found: list[int]) -> list[int]:
    """Let the local store delete messages up to 6 once it is asked for the fourth."""
    if offset >= 3:
        local.min_offset = 6
    return found[:3] if offset < 3 else [at for at in found if at >= offset and offset >= 6]


def shift(local: Local, offset: int, found: list[int]) -> list[int]:
    """Delete as `vanish`, and answer with the messages that are left."""
    if offset >= 3:
        local.min_offset = 6
    return found[:3] if offset < 3 else list(range(max(offset, 6), local.max_offset))


@pytest.mark.parametrize("answer", [vanish, shift])
async def test_messages_that_vanish_under_a_read_are_a_hole(
    answer: Callable[[Local, int, list[int]], list[int]],
) -> None:
    local = Local(10, answer=answer)
    dispatcher = await a_dispatcher(local)
    for _ in range(3):
        await dispatcher.dispatch(force=True)
    assert await stored_offsets(dispatcher.file) == [0, 1, 2, 6, 7, 8, 9]
    assert dispatcher.holes == [(3, 6)]
    assert dispatcher.context is None


@pytest.mark.parametrize(
    "answer",
    [
        lambda local, offset, found: [] if offset >= 3 else found[:3],
        lambda local, offset, found: [at for at in found if at != 3],
        lambda local, offset, found: [at for at in found if at < 3] + [2, 3, 4],
        lambda local, offset, found: [0, 1, 2],
    ],
    ids=["nothing", "a gap", "twice", "always the first ones"],
)
async def test_a_message_of_another_offset_is_not_stored(
    answer: Callable[[Local, int, list[int]], list[int]],
) -> None:
    local = Local(10, answer=answer)
    dispatcher = await a_dispatcher(local)
    while await dispatcher.dispatch(force=True):
        pass
    assert await stored_offsets(dispatcher.file) == [0, 1, 2]
    assert dispatcher.holes == []

    local.answer = lambda local, offset, found: found
    await dispatcher.dispatch(force=True)
    assert await stored_offsets(dispatcher.file) == list(range(10))


async def test_a_queue_that_returns_nothing_is_asked_again_later() -> None:
    local = Local(10, answer=lambda local, offset, found: [])
    dispatcher = await a_dispatcher(local)
    assert not await dispatcher.dispatch()
    assert not await dispatcher.dispatch(force=True)
    assert dispatcher.file.append_offset == 0


@pytest.mark.parametrize("seed", seeds(4, slow=8))
async def test_whatever_the_local_store_returns_offsets_stay_right(seed: int) -> None:
    rng = random.Random(seed)

    def garble(local: Local, offset: int, found: list[int]) -> list[int]:
        kind = rng.randrange(6)
        if kind == 0:
            return []
        if kind == 1:
            local.min_offset = min(
                local.max_offset, max(local.min_offset, offset + rng.randrange(3))
            )
        if kind == 2:
            return found[rng.randrange(3) :]
        if kind == 3:
            return sorted(found + found[:2])
        return found[: 1 + rng.randrange(5)]

    local = Local(60, answer=garble)
    dispatcher = await a_dispatcher(local, groups=GroupCommit(count=7))
    for _ in range(40):
        await dispatcher.dispatch(force=True)
    local.answer = lambda local, offset, found: found
    while await dispatcher.dispatch(force=True):
        pass

    lost = {at for first, end in dispatcher.holes for at in range(first, end)}
    first = dispatcher.file.min_offset
    assert await stored_offsets(dispatcher.file) == [
        at for at in range(first, 60) if at not in lost
    ]


async def test_other_tasks_run_while_a_large_group_is_moved() -> None:
    local = Local(4096)
    dispatcher = await a_dispatcher(local)
    with counted_turns() as turns:
        await dispatcher.dispatch(force=True)
    assert dispatcher.file.commit_offset == 4096
    assert len(turns) >= 4096 // 256


async def test_dispatches_at_the_same_time_move_each_message_once() -> None:
    local = Local(600)
    dispatcher = await a_dispatcher(local, groups=GroupCommit(count=200))
    await asyncio.gather(*(dispatcher.dispatch(force=True) for _ in range(5)))
    assert await stored_offsets(dispatcher.file) == list(range(600))
    assert dispatcher.file.commit_log.commit_offset == sum(len(stored(at)) for at in range(600))


@pytest.mark.parametrize("large", [0, 1, 2, 4])
async def test_a_message_larger_than_a_segment_has_one_of_its_own(large: int) -> None:
    world = FileWorld()
    sizes = FileSizes(commit_log=1000, consume_queue=20 * 100)
    file = MessageFile(world.place, QUEUE, sizes)
    local = Local(5, bodies={large: b"B" * 5000})
    dispatcher = await a_dispatcher(local, file)
    while await dispatcher.dispatch(force=True):
        pass
    assert await stored_offsets(file) == list(range(5))

    again = MessageFile(world.place, QUEUE, sizes)
    await again.open()
    assert await stored_offsets(again) == list(range(5))
    (message,) = await again.read(large, 1)
    assert message.data[-5100:].count(b"B") == 5000
    size = len(message.data)
    (own,) = [segment for segment in again.commit_log.segments if segment.commit_position >= size]
    assert own.commit_position == size
    assert own.base_offset == physical_offset_of(message.data)
    assert all(segment.commit_position for segment in again.commit_log.segments)


async def test_a_refused_message_ends_the_loop_and_is_appended_once() -> None:
    """Its item has no room, and the full segment of items can't be committed."""
    world = FileWorld()
    file = MessageFile(world.place, QUEUE, FileSizes(1 << 20, 20 * 3))
    local = Local(6)
    dispatcher = await a_dispatcher(local, file)
    items = FailingSegment()
    file.consume_queue.writable().storage = items
    items.fails = True
    for _ in range(4):
        assert not await dispatcher.dispatch(force=True)
    assert file.commit_log.append_offset == sum(len(stored(at)) for at in range(3))

    items.fails = False
    while file.commit_offset < 6:
        await dispatcher.dispatch(force=True)
    assert await stored_offsets(file) == list(range(6))
    assert file.commit_log.commit_offset == sum(len(stored(at)) for at in range(6))


async def test_an_unknown_local_queue_sets_no_offset() -> None:
    local = Local(-1, min_offset=-1)
    dispatcher = await a_dispatcher(local)
    assert not dispatcher.file.is_initialised
    local.min_offset, local.max_offset = 0, 4
    for _ in range(2):
        await dispatcher.dispatch(force=True)
    assert await stored_offsets(dispatcher.file) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: FileSizes(commit_log=0), "commit_log is 0"),
        (lambda: FileSizes(consume_queue=0), "consume_queue is 0, expected a multiple of 20"),
        (lambda: FileSizes(consume_queue=30), "consume_queue is 30, expected a multiple of 20"),
        (lambda: GroupCommit(count=0), "count is 0"),
        (lambda: GroupCommit(size=0), "size is 0"),
        (lambda: ReadAhead(count=0), "count is 0"),
        (lambda: ReadAhead(size=-1), "size is -1"),
    ],
)
def test_bounds_that_let_nothing_pass_are_refused(make: Callable[[], Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        make()


# ---- reads ----


async def a_fetcher(count: int, limits: ReadAhead) -> tuple[Fetcher, MessageFile]:
    world = FileWorld()
    file = world.message_file()
    await file.init_offset(0)
    for offset in range(count):
        await file.append(stored(offset), 0)
    await file.commit()
    index = await open_index(world.store)
    ticks = iter(range(NOW_MS, NOW_MS + MOST_READS))
    return Fetcher({QUEUE: file}, index, lambda: next(ticks), limits), file


async def test_a_cache_that_keeps_nothing_does_not_hold_a_read_up() -> None:
    fetcher, _ = await a_fetcher(5, ReadAhead(expire_ms=-1, cache_bytes=0))
    found = await fetcher.fetch(QUEUE, 1, 32)
    assert [message.queue_offset for message in found.messages] == [1, 2, 3, 4]
    assert found.next_offset == 5


@pytest.mark.parametrize("damaged", [range(3, 6), range(8), range(2, 8)])
async def test_damaged_messages_are_passed_over_in_one_look(damaged: range) -> None:
    fetcher, file = await a_fetcher(8, ReadAhead(count=2))
    storage = file.commit_log.writable().storage
    assert isinstance(storage, MemorySegment)
    size, reads = len(stored(0)), 0
    for offset in damaged:
        storage.data[size * offset + 4 : size * offset + 8] = bytes(4)
    wanted = [offset for offset in range(8) if offset not in damaged]
    offset, found = 0, []
    while offset < 8 and reads < 8:
        answer = await fetcher.fetch(QUEUE, offset, 32)
        found += [message.queue_offset for message in answer.messages]
        assert answer.next_offset > offset
        offset, reads = answer.next_offset, reads + 1
    assert found == wanted
    if not wanted:
        assert (answer.status, reads) == (FetchStatus.NO_MATCHED_MESSAGE, 1)


async def test_bytes_that_a_backend_lost_are_an_error() -> None:
    fetcher, file = await a_fetcher(4, ReadAhead())
    storage = file.commit_log.writable().storage
    assert isinstance(storage, MemorySegment)
    del storage.data[-10:]
    with pytest.raises(SegmentReadError):
        await fetcher.fetch(QUEUE, 0, 32)


async def test_a_view_of_a_segment_that_lost_bytes_ends_with_an_error(tmp_path: Path) -> None:
    table = MetadataTable()
    table.put_segment(SegmentMetadata(QUEUE.path, SegmentType.COMMIT_LOG, 0, size=10))

    async def compacted() -> list[Any]:
        return []

    store: Any = SimpleNamespace(
        keeper=SimpleNamespace(table=table),
        files={},
        broker="broker",
        segments=SimpleNamespace(segment=lambda *place: MemorySegment(b"abc")),
        index=SimpleNamespace(compacted=compacted),
    )
    with pytest.raises(SegmentReadError):
        await render(store, "c", tmp_path / "view")


# ---- two tiers ----


@pytest.mark.parametrize(
    ("local", "tiered", "wanted"),
    [
        (-1, 100, 100),
        (100, None, 100),
        (100, -1, 100),
        (-1, None, -1),
        (-1, -1, -1),
        (0, 100, 0),
        (100, 10, 10),
        (10, 0, 0),
    ],
)
def test_a_tier_without_messages_has_no_offset(local: int, tiered: int | None, wanted: int) -> None:
    assert min_offset(local, tiered) == wanted


def test_a_local_store_without_messages_is_not_asked_for_keys() -> None:
    times = TimeRange(5, 9)
    assert split_query(times, -1) == (times, None)
