"""Files of RocketMQ's shape: what crashes, refusals, holes and old segments leave behind."""

from __future__ import annotations

import pytest

from streammeta.brokers.rocketmq.dispatch import GroupCommit
from streammeta.brokers.rocketmq.fetch import Fetcher, FetchStatus, ReadAhead
from streammeta.brokers.rocketmq.formats.consume_queue import decode_items
from streammeta.brokers.rocketmq.formats.key_index import LocalIndex, TimeRange, key_hash
from streammeta.brokers.rocketmq.formats.message import (
    BORN_HOST_V6,
    Magic,
    Message,
    decode_message,
    encode_message,
    store_timestamp_of,
)
from streammeta.brokers.rocketmq.formats.metadata import MetadataTable
from streammeta.brokers.rocketmq.message_file import MessageFile
from streammeta.brokers.rocketmq.segments.chunked_segment import ChunkedSegment
from streammeta.storage.errors import PayloadError, StoreUnavailableError
from tests.brokers.rocketmq_messages import Local, stored
from tests.conformance.rocketmq_files import NOW_MS, QUEUE, FailingSegment, FileWorld, open_index
from tests.kit.memory_store import MemoryObjectStore


@pytest.fixture
def world() -> FileWorld:
    return FileWorld()


@pytest.mark.parametrize("magic", Magic)
def test_messages_with_long_hosts_are_read_back_with_their_times(magic: Magic) -> None:
    message = Message(
        topic="t",
        body=b"body",
        sys_flag=BORN_HOST_V6,
        born_host=bytes(range(20)),
        store_timestamp_ms=77,
        properties={"TAGS": "a", "KEYS": "k1 k2", "UNIQ_KEY": "u"},
        magic=magic,
    )
    data = encode_message(message)
    found = decode_message(data)
    assert store_timestamp_of(data) == found.store_timestamp_ms == 77
    assert found.born_host == message.born_host
    assert found.keys == {"k1", "k2", "u"}
    assert found.tags_code == 97


def test_a_message_that_is_cut_anywhere_is_refused_with_its_place() -> None:
    data = stored(3, b"body", key="k")
    for size in range(len(data)):
        with pytest.raises(PayloadError):
            decode_message(data[:size])
    with pytest.raises(PayloadError, match="magic"):
        decode_message(data[:4] + bytes(4) + data[8:])


def test_fields_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="born_host"):
        encode_message(Message(topic="t", sys_flag=BORN_HOST_V6))
    with pytest.raises(ValueError, match="128"):
        encode_message(Message(topic="t" * 128, magic=Magic.V1))
    with pytest.raises(ValueError, match="'a'"):
        encode_message(Message(topic="t", properties={"a": "b\x01"}))


def test_metadata_that_is_no_file_of_theirs_is_refused() -> None:
    for text in ("", "[]", '{"topicMetadataTable":{"t":{"topic":"t"}}}'):
        with pytest.raises(ValueError, match="metadata"):
            MetadataTable.decode(text)


async def test_a_message_larger_than_a_group_is_dispatched_by_itself(world: FileWorld) -> None:
    groups = GroupCommit(size=500)
    one = await world.dispatcher(Local(3, bodies={0: b"a" * 1000}), groups)
    await one.dispatch(force=True)
    ends = []
    for _ in range(2):
        await one.dispatch(force=True)
        ends.append(one.file.commit_offset)
    assert ends == [1, 3]


async def test_a_group_waits_until_it_is_old_or_large(world: FileWorld) -> None:
    one = await world.dispatcher(Local(1), GroupCommit(timeout_ms=1000))
    await one.dispatch()
    assert not await one.dispatch()
    assert one.file.commit_offset == 0
    world.clock.advance(1001)
    await one.dispatch()
    assert one.file.commit_offset == 1


async def test_what_the_local_store_lost_is_a_hole_and_the_rest_stays(world: FileWorld) -> None:
    one = await world.dispatcher(Local(2))
    for _ in range(2):
        await one.dispatch(force=True)
    one.local = Local(7, 5)
    for _ in range(2):
        await one.dispatch(force=True)
    assert one.holes == [(2, 5)]
    assert (one.file.min_offset, one.file.commit_offset) == (0, 7)
    fetcher = Fetcher({QUEUE: one.file}, one.index, lambda: NOW_MS)
    found = await fetcher.fetch(QUEUE, 0, 32)
    assert [message.queue_offset for message in found.messages] == [0, 1, 5, 6]
    assert found.next_offset == 7
    assert (await fetcher.fetch(QUEUE, 3, 32)).next_offset == 7
    assert await one.file.offset_at(0) == 0


async def test_items_are_never_committed_before_their_messages(world: FileWorld) -> None:
    file = world.message_file()
    await file.init_offset(0)
    segment = FailingSegment()
    file.commit_log.writable().storage = segment
    segment.fails = True
    await file.append(stored(0), 0)
    assert not await file.commit()
    assert (file.commit_offset, file.append_offset) == (0, 1)
    segment.fails = False
    assert await file.commit()
    (item,) = decode_items(await file.consume_queue.read(0, 20))
    assert (item.commit_log_offset, item.message_size) == (0, len(stored(0)))


async def test_messages_without_items_after_a_crash_do_no_harm(world: FileWorld) -> None:
    file = world.message_file()
    await file.init_offset(0)
    await file.append(stored(0), 0)
    await file.commit()
    await file.append(stored(1), 0)
    await file.commit_log.commit()
    again = world.message_file()
    await again.open()
    assert again.commit_offset == 1
    await again.append(stored(1), 0)
    await again.commit()
    assert [message.queue_offset for message in await again.read(0, 9)] == [0, 1]


async def test_a_queue_whose_segments_all_expired_goes_on_at_its_end(world: FileWorld) -> None:
    file = world.message_file()
    await file.init_offset(7)
    await file.append(stored(7, stored_ms=2), 0)
    await file.commit()
    await file.expire(1)
    assert [message.queue_offset for message in await file.read(7, 1)] == [7]
    await file.expire(3)
    assert not file.consume_queue.segments
    assert (await file.first_offset(), file.commit_offset) == (8, 8)
    again = world.message_file()
    await again.open()
    for queue_file in (file, again):
        assert queue_file.append_offset == 8
        assert queue_file.is_initialised


async def test_times_that_were_never_noted_keep_a_segment(world: FileWorld) -> None:
    file = world.message_file()
    await file.init_offset(0)
    await file.append(stored(0, stored_ms=2), 0)
    segment = file.commit_log.writable()
    await segment.commit()  # and dies before the metadata has the size
    again = world.message_file()
    await again.open()
    await again.commit_log.expire(NOW_MS)
    assert len(again.commit_log.segments) == 1


async def test_keys_are_found_by_content_and_time_over_files_and_collisions() -> None:
    world = FileWorld()
    file: MessageFile = world.message_file()
    index = await open_index(world.store)
    await file.init_offset(0)
    for offset, key in enumerate(("Aa", "BB", "Aa")):
        data = stored(offset, key=key, stored_ms=NOW_MS + 5000 * offset)
        place = file.commit_log.append_offset
        await file.append(data, 0)
        index.put(QUEUE.topic, 1, 0, [key], place, len(data), NOW_MS + 5000 * offset)
    await file.commit()
    assert key_hash("t#Aa") == key_hash("t#BB")
    fetcher = Fetcher({QUEUE: file}, index, lambda: NOW_MS)
    found = await fetcher.query(QUEUE.topic, "Aa", 9)
    assert [decode_message(data).queue_offset for data in found] == [2, 0]
    late = TimeRange(NOW_MS + 1000, NOW_MS + 20_000)
    found = await fetcher.query(QUEUE.topic, "Aa", 9, late)
    assert [decode_message(data).queue_offset for data in found] == [2]


def test_the_hash_without_a_positive_counterpart_has_a_slot() -> None:
    text = "polygenelubricants"  # a word whose Java hash is the smallest number
    assert key_hash(text) == 0


def test_an_index_file_with_a_chain_that_runs_forward_is_refused() -> None:
    index = LocalIndex(0, 1, 4)
    index.put("t", 1, 1, ["k"], 1, 1, 1)
    data = bytearray(index.encode())
    data[36 + 32 + 28 : 36 + 64] = (1).to_bytes(4, "big")
    with pytest.raises(PayloadError, match="previous"):
        LocalIndex.decode(bytes(data), 1, 4)


async def test_read_ahead_keeps_its_bound_and_forgets_what_is_not_used(world: FileWorld) -> None:
    file = world.message_file()
    await file.init_offset(0)
    for offset in range(50):
        await file.append(stored(offset, b"x" * 100), 0)
    await file.commit()
    limits = ReadAhead(cache_bytes=2000)
    fetcher = Fetcher(
        {QUEUE: file}, await open_index(world.store), lambda: world.clock.now_ms, limits
    )
    for _ in range(2):
        found = await fetcher.fetch(QUEUE, 0, 50)
        assert found.status is FetchStatus.FOUND
        assert [message.queue_offset for message in found.messages] == list(range(50))
        assert fetcher.cached_bytes <= 2000
        world.clock.advance(limits.expire_ms + 1)


async def test_small_chunks_are_merged_into_one_object_and_a_crash_is_finished() -> None:
    store = MemoryObjectStore()
    segment = await ChunkedSegment.open(store, "s")
    wanted = b""
    for size in (10, 6 << 20, 3, 5 << 20, 7):
        data = bytes([size % 251]) * size
        await segment.write(len(wanted), data, (1, 1))
        wanted += data
    assert await segment.read(5, 20) == wanted[5:25]
    store.fail_next("delete_many", StoreUnavailableError("told to fail"))
    with pytest.raises(StoreUnavailableError):
        await segment.seal()
    again = await ChunkedSegment.open(store, "s")
    assert [object_.key for object_ in store.list_objects("s/")] == ["s/segment/segment-0"]
    assert await again.read(0, len(wanted)) == wanted


async def test_a_merge_that_fails_leaves_the_chunks_and_no_upload() -> None:
    store = MemoryObjectStore()
    segment = await ChunkedSegment.open(store, "s")
    await segment.write(0, b"abc", (1, 1))
    store.fail_next("complete_multipart", StoreUnavailableError("told to fail"))
    with pytest.raises(StoreUnavailableError):
        await segment.seal()
    assert not list(store.list_multipart_uploads("s/"))
    await segment.seal()
    assert await segment.read(0, 3) == b"abc"
