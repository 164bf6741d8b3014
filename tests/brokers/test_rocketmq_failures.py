"""Files of RocketMQ's shape when the store, the metadata or a process fails in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from streammeta.brokers.rocketmq.dispatch import Dispatcher
from streammeta.brokers.rocketmq.formats.metadata import MetadataTable, QueueMetadata, SegmentStatus
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, IndexStatus, KeyIndexService
from streammeta.brokers.rocketmq.segments.file_segment import AppendResult
from streammeta.brokers.rocketmq.segments.flat_file import FlatFile, SizeUnknownError
from tests.brokers.rocketmq_messages import DurableKeeper, Local, stored, up_to
from tests.conformance.rocketmq_files import (
    INDEX_PATH,
    NOW_MS,
    QUEUE,
    FailingSegment,
    FileWorld,
    open_index,
)
from tests.kit.memory_stores import MemorySegment, MemorySegmentStore, MemoryShelf

SIZES = IndexSizes(5, 8)


class BackendDownError(Exception):
    """The backend, or the metadata's store, is told to fail."""


@dataclass
class FailingKeeper(DurableKeeper):
    """Metadata that can be out of reach."""

    fails: bool = False

    async def save(self) -> None:
        if self.fails:
            raise BackendDownError
        await super().save()


class SegmentsThatFail(MemorySegmentStore):
    """Segments of which chosen kinds can't be deleted."""

    keeps: frozenset[SegmentType] = frozenset()

    def segment(self, path: str, kind: SegmentType, base_offset: int) -> MemorySegment:
        place = (path, kind, base_offset)
        return self.segments.setdefault(place, _Undeletable(self, kind))


class _Undeletable(FailingSegment):
    def __init__(self, store: SegmentsThatFail, kind: SegmentType) -> None:
        super().__init__()
        self._store = store
        self._kind = kind

    async def destroy(self) -> None:
        if self._kind in self._store.keeps:
            raise BackendDownError
        await super().destroy()


def a_world() -> tuple[FileWorld, FailingKeeper, SegmentsThatFail]:
    keeper, store = FailingKeeper(), SegmentsThatFail()
    return FileWorld(store=store, keeper=keeper), keeper, store


async def begin_file() -> tuple[FileWorld, FlatFile]:
    """Return a file of segments of 10 bytes, of which 4 wait for their commit."""
    world, _, _ = a_world()
    file = world.flat_file(10)
    await file.init_offset(0)
    await file.append(b"1234", 1)
    return world, file


def backend_of(file: FlatFile) -> FailingSegment:
    storage = file.writable().storage
    assert isinstance(storage, FailingSegment)
    return storage


# ---- flat files ----


async def test_a_full_segment_that_can_not_be_committed_is_followed_by_none() -> None:
    world, _, _ = a_world()
    file = world.flat_file(10)
    await file.init_offset(0)
    assert await file.append(b"12345678", 1) is AppendResult.SUCCESS
    backend_of(file).fails = True
    assert await file.append(b"abcdefgh", 2) is AppendResult.UNKNOWN_ERROR
    assert (len(file.segments), file.append_offset, file.commit_offset) == (1, 8, 0)
    backend_of(file).fails = False
    assert await file.append(b"abcdefgh", 2) is AppendResult.SUCCESS
    assert await file.commit()
    assert await file.read(0, 16) == b"12345678abcdefgh"


async def test_bytes_larger_than_any_segment_change_nothing() -> None:
    _, file = await begin_file()
    assert await file.append(b"x" * 11, 2) is AppendResult.FILE_FULL
    assert await file.append(b"x" * 10, 2) is AppendResult.SUCCESS
    assert [segment.base_offset for segment in file.segments] == [0, 4]


async def test_a_segment_takes_nothing_before_the_metadata_has_it() -> None:
    """Its bytes would be in no file after a restart."""
    world, keeper, _ = a_world()
    file = world.flat_file(10)
    keeper.fails = True
    with pytest.raises(BackendDownError):
        await file.init_offset(7)
    assert file.segments == []
    keeper.fails = False
    await file.init_offset(7)
    await file.append(b"1234", 1)
    await file.commit()
    keeper.fails = True
    with pytest.raises(BackendDownError):
        await file.roll(11)
    assert [segment.base_offset for segment in file.segments] == [7]


async def test_every_segment_and_its_size_are_durable_after_a_restart() -> None:
    world, keeper, store = a_world()
    file = world.flat_file(10)
    await file.init_offset(0)
    for at in range(5):
        assert await file.append(b"%d" % at * 8, at) is AppendResult.SUCCESS
        assert await file.commit()
    again = FileWorld(store=store, keeper=keeper.after_restart()).flat_file(10)
    await again.open()
    assert [segment.base_offset for segment in again.segments] == [0, 8, 16, 24, 32]
    assert [segment.closed for segment in again.segments] == [True] * 4 + [False]
    assert again.commit_offset == again.append_offset == 40
    assert await again.read(0, 40) == b"".join(b"%d" % at * 8 for at in range(5))
    assert (again.min_timestamp_ms, again.max_timestamp_ms) == (0, 4)


async def test_a_segment_of_unknown_size_is_not_taken_for_an_empty_one() -> None:
    world, file = await begin_file()
    await file.commit()
    backend_of(file).size_known = False
    with pytest.raises(SizeUnknownError):
        await world.flat_file(10).open()


async def test_a_segment_never_overlaps_the_one_before() -> None:
    _, file = await begin_file()
    with pytest.raises(ValueError, match=r"3.*4"):
        await file.roll(3)
    assert len(file.segments) == 1


async def test_a_segment_that_can_not_be_deleted_stays_in_the_metadata_and_goes_later() -> None:
    world, keeper, store = a_world()
    file = world.flat_file(10)
    await file.init_offset(0)
    for at in range(2):
        await file.append(b"%d" % at * 8, at)
        await file.commit()
    store.keeps = frozenset({SegmentType.CONSUME_QUEUE})
    with pytest.raises(BackendDownError):
        await file.expire(1)
    assert len(keeper.table.segments) == 2
    again = FileWorld(store=store, keeper=keeper.after_restart()).flat_file(10)
    await again.open()
    store.keeps = frozenset()
    assert await again.expire(1) == 1
    assert [base for _, _, base in keeper.after_restart().table.segments] == [0, 8]
    assert [segment.base_offset for segment in again.segments] == [8]
    assert not store.segments[QUEUE.path, SegmentType.CONSUME_QUEUE, 0].data


async def test_what_waits_for_a_commit_does_not_expire() -> None:
    _, file = await begin_file()
    assert await file.expire(NOW_MS) == 0
    await file.commit()
    assert await file.expire(1) == 0, "not older, but as old"
    assert await file.expire(2) == 1
    assert (file.min_offset, file.commit_offset, file.append_offset) == (4, 4, 4)
    assert await file.append(b"5678", 3) is AppendResult.SUCCESS
    assert file.writable().base_offset == 4


async def test_a_file_that_was_destroyed_begins_anew() -> None:
    world, keeper, store = a_world()
    file = world.flat_file(10)
    await file.init_offset(5)
    for at in range(3):
        await file.append(b"%d" % at * 8, at)
    await file.destroy()
    assert (file.segments, file.append_offset) == ([], 0)
    assert keeper.after_restart().table.segments == {}
    assert not any(segment.data for segment in store.segments.values())


async def test_a_sealed_segment_is_sealed_once() -> None:
    world, keeper, _ = a_world()
    file = world.flat_file(10)
    await file.init_offset(0)
    await file.append(b"1234", 1)
    await file.commit()
    (noted,) = keeper.table.segments.values()
    assert noted.status is SegmentStatus.NEW
    assert await file.seal()
    (sealed,) = keeper.after_restart().table.segments.values()
    assert (sealed.status, sealed.size, sealed.seal_ms) == (SegmentStatus.SEALED, 4, NOW_MS)


def test_the_id_of_a_deleted_topic_is_not_used_again() -> None:
    """The index would find messages of the former topic under the new one."""
    table = MetadataTable()
    ids = [table.add_topic(name).topic_id for name in ("a", "b", "a")]
    table.queues[QUEUE] = QueueMetadata(QUEUE, 0, 9)
    other = replace(QUEUE, topic="b")
    table.queues[other] = QueueMetadata(other, 0, 9)
    table.delete_topic("b")
    assert list(table.queues) == [QUEUE]
    again = MetadataTable.decode(table.encode())
    assert again == table
    assert [*ids, again.add_topic("b").topic_id, again.add_topic("c").topic_id] == [0, 1, 0, 2, 3]


# ---- messages ----


async def test_an_item_is_appended_only_if_its_message_was() -> None:
    world, _, _ = a_world()
    file = world.message_file()
    await file.init_offset(0)
    file.commit_log.writable().max_buffers = 1
    assert await file.append(stored(0), 0) is AppendResult.SUCCESS
    assert await file.append(stored(1), 0) is AppendResult.BUFFER_FULL
    assert (file.append_offset, file.consume_queue.append_offset) == (1, 20)
    await file.commit()
    assert await file.append(stored(1), 0) is AppendResult.SUCCESS
    await file.commit()
    assert [message.queue_offset for message in await file.read(0, 9)] == [0, 1]


async def test_no_hole_is_made_over_messages_that_wait() -> None:
    world, _, _ = a_world()
    file = world.message_file()
    await file.init_offset(0)
    await file.append(stored(0), 0)
    backend_of(file.commit_log).fails = True
    with pytest.raises(ValueError, match="committed"):
        await file.skip_to(5)
    assert file.append_offset == 1
    backend_of(file.commit_log).fails = False
    await file.skip_to(5)
    await file.append(stored(5), 0)
    await file.commit()
    assert [message.queue_offset for message in await file.read(0, 9)] == [0]
    assert [message.queue_offset for message in await file.read(1, 9)] == [5]


async def test_items_expire_before_the_messages_that_they_point_at() -> None:
    world, _, store = a_world()
    file = world.message_file()
    await file.init_offset(0)
    await file.append(stored(0), 0)
    await file.commit()
    store.keeps = frozenset({SegmentType.CONSUME_QUEUE})
    with pytest.raises(BackendDownError):
        await file.expire(NOW_MS + 1)
    assert store.segments[QUEUE.path, SegmentType.COMMIT_LOG, 0].data
    kinds = {kind for _, kind, _ in world.keeper.table.segments}
    assert SegmentType.COMMIT_LOG in kinds
    assert world.keeper.table.queues[QUEUE].max_offset == 1


# ---- dispatch ----


async def indexed(dispatcher: Dispatcher, count: int) -> list[int]:
    found = [await dispatcher.index.query(QUEUE.topic, f"k{at}", 9) for at in range(count)]
    return [len(items) for items in found]


async def test_nothing_above_the_dispatchable_end_is_moved() -> None:
    world, _, _ = a_world()
    local = Local(2, answer=up_to(4))
    one = await world.dispatcher(local)
    for _ in range(3):
        await one.dispatch(force=True)
    assert (one.file.append_offset, one.file.commit_offset) == (2, 2)
    local.max_offset = 3
    await one.dispatch(force=True)
    assert one.file.commit_offset == 3
    assert [message.queue_offset for message in await one.file.read(0, 9)] == [0, 1, 2]


async def test_keys_wait_for_the_commit_of_their_messages_and_are_indexed_once() -> None:
    world, _, _ = a_world()
    one = await world.dispatcher(Local(2, has_keys=True, answer=up_to(3)))
    await one.dispatch(force=True)
    backend_of(one.file.commit_log).fails = True
    for _ in range(3):
        assert not await one.dispatch(force=True)
    assert await indexed(one, 3) == [0, 0, 0]
    assert one.file.append_offset == 2, "nothing further is moved meanwhile"
    backend_of(one.file.commit_log).fails = False
    for _ in range(3):
        await one.dispatch(force=True)
    assert await indexed(one, 3) == [1, 1, 0]
    assert one.file.commit_offset == 2


async def test_keys_wait_for_their_items_too() -> None:
    world, _, _ = a_world()
    one = await world.dispatcher(Local(2, has_keys=True))
    await one.dispatch(force=True)
    backend_of(one.file.consume_queue).fails = True
    await one.dispatch(force=True)
    assert not one.file.commit_log_waits
    assert await indexed(one, 2) == [0, 0]
    backend_of(one.file.consume_queue).fails = False
    await one.dispatch(force=True)
    assert await indexed(one, 2) == [1, 1]


async def test_a_new_queue_begins_between_the_ends_of_the_local_one() -> None:
    for wanted, (first, end, at) in {3: (3, 9, 0), 9: (3, 9, 20), 5: (3, 9, 5)}.items():
        world, _, _ = a_world()
        local = Local(end, first)
        local.offset_at = lambda timestamp_ms, at=at: at  # type: ignore[method-assign,misc]
        one = await world.dispatcher(local)
        assert not await one.dispatch(force=True)
        assert (one.file.min_offset, one.file.append_offset) == (wanted, wanted)


async def test_a_topic_that_stays_local_leaves_nothing_in_the_store() -> None:
    world, keeper, store = a_world()
    one = await world.dispatcher(Local(1))
    for _ in range(2):
        await one.dispatch(force=True)
    assert any(segment.data for segment in store.segments.values())
    one.is_filtered = lambda topic: topic == QUEUE.topic
    assert not await one.dispatch(force=True)
    assert not any(segment.data for segment in store.segments.values())
    assert keeper.after_restart().table.segments == {}


# ---- key index ----


@dataclass(slots=True)
class FailingShelf(MemoryShelf):
    """A shelf of which chosen calls fail."""

    fails: set[str] = field(default_factory=set)

    async def remove(self, begin_ms: int) -> None:
        if "remove" in self.fails:
            raise BackendDownError
        await MemoryShelf.remove(self, begin_ms)

    async def note_uploaded(self, begin_ms: int) -> None:
        if "note" in self.fails:
            raise BackendDownError
        await MemoryShelf.note_uploaded(self, begin_ms)


async def an_index(
    shelf: MemoryShelf, store: MemorySegmentStore, now_ms: int = NOW_MS
) -> KeyIndexService:
    return await open_index(store, shelf, SIZES, lambda: now_ms)


def fill(index: KeyIndexService, count: int, first: int = 0) -> None:
    for at in range(first, first + count):
        index.put(QUEUE.topic, 1, 0, [f"k{at}"], at, 10, NOW_MS)


async def begin_index() -> tuple[MemoryShelf, MemorySegmentStore, KeyIndexService]:
    shelf, store = MemoryShelf(), MemorySegmentStore()
    index = await an_index(shelf, store)
    fill(index, 9)
    return shelf, store, index


async def found_in(index: KeyIndexService, count: int) -> list[int]:
    return [len(await index.query(QUEUE.topic, f"k{at}", 9)) for at in range(count)]


@pytest.mark.parametrize("failing", ["note", "remove"])
async def test_an_index_file_is_found_wherever_its_upload_ends(failing: str) -> None:
    shelf, store = FailingShelf(), MemorySegmentStore()
    index = await an_index(shelf, store)
    fill(index, 9)
    await index.flush()
    shelf.fails = {failing}
    with pytest.raises(BackendDownError):
        await index.compact_oldest()
    shelf.fails = set()
    again = await an_index(shelf, store)
    assert await found_in(again, 9) == [1] * 9
    while await again.compact_oldest():
        pass
    assert again.statuses == [IndexStatus.UPLOAD, IndexStatus.UPLOAD, IndexStatus.UNSEALED]
    assert await found_in(again, 9) == [1] * 9
    assert await found_in(await an_index(shelf, store), 9) == [1] * 9


async def test_an_index_file_whose_upload_fails_stays_local_and_goes_later() -> None:
    shelf, store, index = await begin_index()
    await index.flush()
    (oldest, *_) = index.begins_ms
    backend = FailingSegment()
    backend.fails = True
    store.segments[INDEX_PATH, SegmentType.INDEX, oldest] = backend
    assert not await index.compact_oldest()
    assert shelf.done == []
    assert oldest in shelf.local
    assert await found_in(index, 9) == [1] * 9
    backend.fails = False
    assert await index.compact_oldest()
    assert shelf.done == [oldest]
    assert await found_in(index, 9) == [1] * 9


async def test_index_files_begin_apart_though_the_clock_is_set_back() -> None:
    shelf, store, index = await begin_index()
    await index.flush()
    again = await an_index(shelf, store, NOW_MS - 1000)
    fill(again, 9, first=9)
    assert len(set(again.begins_ms)) == len(again.begins_ms) == 4
    assert again.begins_ms[-1] > max(index.begins_ms)
    assert await found_in(again, 18) == [1] * 18


async def test_remains_of_a_killed_upload_are_not_a_part_of_the_next() -> None:
    shelf, store, index = await begin_index()
    (oldest, *_) = index.begins_ms
    store.segments[INDEX_PATH, SegmentType.INDEX, oldest] = MemorySegment(b"half of an upload")
    assert await index.compact_oldest()
    assert await found_in(await an_index(shelf, store), 4) == [1] * 4
    assert await found_in(index, 9) == [1] * 9


async def test_puts_during_an_upload_are_not_lost() -> None:
    _, store, index = await begin_index()
    backend = FailingSegment()
    backend.waits = asyncio.Event()
    store.segments[INDEX_PATH, SegmentType.INDEX, index.begins_ms[0]] = backend
    compacting = asyncio.create_task(index.compact_oldest())
    await backend.began.wait()
    fill(index, 9, first=9)
    backend.waits.set()
    assert await compacting
    assert await found_in(index, 18) == [1] * 18
