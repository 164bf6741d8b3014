"""A partition log: offsets, durability, recovery, fencing, segments, retention, offsets by time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streammeta.brokers.partition import errors, opening
from streammeta.brokers.partition.log import LogConfig, PartitionLog
from streammeta.brokers.partition.opening import create_meta_stream, open_log, partition_tags
from streammeta.brokers.partition.producer_state import EXPIRATION_MS
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.brokers.partition.segments import Retention, SegmentLimits
from streammeta.brokers.partition.time_search import offset_by_time
from streammeta.client.errors import StreamFencedError
from streammeta.storage.inspection.kafka_batch import decode_kafka_records
from streammeta.storage.inspection.meta_stream import decode_meta_entry
from tests.kit.kafka_batches import Rec, make_batch, plain, sequenced
from tests.kit.memory_streams import MemoryStreams

TAGS = partition_tags("topic", 11)
NOW = 1_700_000_100_000


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_ms = NOW

    def __call__(self) -> int:
        return self.now_ms


async def _open(
    streams: MemoryStreams,
    meta_id: int | None = None,
    epoch: int = 0,
    now_ms: Callable[[], int] = lambda: NOW,
    **config: object,
) -> PartitionLog:
    if meta_id is None:
        meta_id = await create_meta_stream(streams, "topic", 11)
    settings = replace(LogConfig(), **config)  # type: ignore[arg-type]
    return await open_log(streams, meta_id, epoch, TAGS, settings, now_ms)


async def _append(log: PartitionLog, payload: bytes) -> int:
    appended = await log.append(payload)
    await appended.durable
    return appended.base_offset


async def _values(log: PartitionLog, offset: int = 0) -> list[tuple[int, bytes | None]]:
    found = []
    while data := await log.read(offset, 1):
        for batch in read_batches(data):
            found += [(record.offset, record.value) for record in decode_kafka_records(batch)]
        offset = found[-1][0] + 1
    return found


@pytest.fixture
def streams() -> MemoryStreams:
    return MemoryStreams()


async def test_offsets_and_leader_epoch_are_put_into_batches() -> None:
    log = await _open(MemoryStreams(), epoch=3)
    assert await _append(log, plain("a", "b")) == 0
    assert await _append(log, plain("c")) == 2
    (batch,) = read_batches(await log.read(2, 1000))
    assert (batch.base_offset, batch.partition_leader_epoch, batch.is_intact) == (2, 3, True)
    assert await _values(log) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert await _values(log, 1) == [(0, b"a"), (1, b"b"), (2, b"c")]


async def test_streams_carry_topic_and_partition_as_tags(streams: MemoryStreams) -> None:
    await _open(streams)
    assert [id_.tags for id_ in streams.table.streams.values()] == [{"0": "topic", "1": "b"}] * 3


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", errors.InvalidBatchError),
        (plain("a")[:-1], errors.InvalidBatchError),
        (plain("a")[:-1] + b"!", errors.CorruptBatchError),
        (plain("a") + plain("b"), errors.InvalidBatchError),
        (make_batch([Rec(1)], attributes=0x20), errors.InvalidBatchError),
        (make_batch([Rec(1)], attributes=0x10), errors.UnsupportedBatchError),
        (make_batch([Rec(1)], producer_id=3), errors.InvalidBatchError),
        (plain("a" * 2000), errors.BatchTooLargeError),
    ],
    ids=["none", "cut", "checksum", "two", "control", "transaction", "no sequence", "large"],
)
async def test_bad_batch_changes_nothing(payload: bytes, error: type[Exception]) -> None:
    log = await _open(MemoryStreams(), max_batch_bytes=1000)
    with pytest.raises(error):
        await log.append(payload)
    assert await _append(log, plain("good")) == 0
    assert await _values(log) == [(0, b"good")]


async def test_batch_shows_once_it_is_durable(streams: MemoryStreams) -> None:
    log = await _open(streams)
    streams.holds_back = True
    first, second = await log.append(plain("a")), await log.append(plain("b"))
    assert log.high_watermark == 0
    assert await log.read(0, 1000) == b""
    with pytest.raises(errors.OffsetOutOfRangeError):
        await log.read(1, 1000)
    streams.settle(1)
    await first.durable
    assert (log.high_watermark, second.durable.done()) == (1, False)
    assert await _values(log) == [(0, b"a")]


async def test_nothing_is_read_before_it_is_durable(streams: MemoryStreams) -> None:
    """A reader never sees a batch that a failed upload takes back, not even from memory."""
    log = await _open(streams)
    await _append(log, plain("a"))
    streams.holds_back = True
    taken_back = await log.append(plain("b"))
    assert [batch.base_offset for batch in read_batches(await log.read(0, 1 << 20))] == [0]
    streams.pending.pop().future.set_exception(OSError("the store is gone"))
    with pytest.raises(errors.PartitionFailedError):
        await taken_back.durable
    assert await _values(log) == [(0, b"a")]


async def test_a_failed_log_takes_nothing_though_later_appends_succeed() -> None:
    streams = MemoryStreams()
    log = await _open(streams)
    streams.holds_back = True
    failed, behind = await log.append(plain("a")), await log.append(plain("b"))
    streams.pending.pop(0).future.cancel()
    streams.pending.pop().future.set_result(1)
    for appended in (failed, behind):
        with pytest.raises(errors.PartitionFailedError):
            await appended.durable
    assert not log.is_writable
    assert log.high_watermark == 0
    with pytest.raises(errors.PartitionFailedError):
        await log.append(plain("c"))


async def test_a_closed_log_is_not_writable() -> None:
    log = await _open(MemoryStreams())
    assert log.is_writable
    await log.close()
    assert not log.is_writable


async def test_watchers_hear_of_durable_batches_failures_and_the_end() -> None:
    streams = MemoryStreams()
    log = await _open(streams)
    heard: list[tuple[int, bool]] = []
    with log.watched(lambda: heard.append((log.high_watermark, log.is_writable))):
        await _append(log, plain("a"))
        assert heard == [(1, True)]
        streams.holds_back = True
        failed = await log.append(plain("b"))
        assert len(heard) == 1
        streams.pending.pop().future.set_exception(OSError("the store is gone"))
        with pytest.raises(errors.PartitionFailedError):
            await failed.durable
        assert heard == [(1, True), (1, False)]
        log.give_up()
        assert len(heard) == 3
    log.give_up()
    assert len(heard) == 3


async def test_newest_batches_are_read_from_memory(streams: MemoryStreams) -> None:
    log = await _open(streams, tail_bytes=1)
    await _append(log, plain("a", "b"))
    await _append(log, plain("c"))
    streams.fetches.clear()
    assert await _values(log, 2) == [(2, b"c")]
    assert streams.fetches == []
    assert await _values(log, 0) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert streams.fetches == [(log.stream_ids[1], 0)]


async def test_repeated_batch_is_answered_with_its_offset_once_it_is_durable() -> None:
    streams = MemoryStreams()
    log = await _open(streams)
    await _append(log, plain("before"))
    streams.holds_back = True
    first = await log.append(sequenced(7, 0, 0))
    repeated = await log.append(sequenced(7, 0, 0))
    assert (repeated.base_offset, repeated.durable.done()) == (first.base_offset, False)
    streams.settle()
    await repeated.durable
    assert log.high_watermark == 2


async def test_producer_0_is_idempotent_too() -> None:
    log = await _open(MemoryStreams())
    assert [await _append(log, sequenced(0, 0, at)) for at in (0, 0, 1)] == [0, 0, 1]
    with pytest.raises(errors.OutOfOrderSequenceError):
        await log.append(sequenced(0, 0, 5))


async def test_a_checkpoint_forgets_producers_that_were_idle_too_long() -> None:
    clock = Clock()
    log = await _open(MemoryStreams(), now_ms=clock, checkpoint_bytes=1)
    await _append(log, sequenced(7, 0, 0, time=NOW))
    clock.now_ms += EXPIRATION_MS
    await _append(log, sequenced(8, 0, 0, time=NOW))
    assert await _append(log, sequenced(7, 0, 9, time=NOW)) == 2


@pytest.mark.parametrize("time", [-1, 0, 1, NOW - 2 * EXPIRATION_MS])
async def test_a_producer_of_old_records_is_not_forgotten(time: int) -> None:
    log = await _open(MemoryStreams(), checkpoint_bytes=1)
    assert await _append(log, sequenced(7, 0, 0, time=time)) == 0
    assert await _append(log, sequenced(7, 0, 1, time=time)) == 1
    assert await _append(log, sequenced(7, 0, 0, time=time)) == 0, "a retry is recognised"


async def test_sequence_of_producer_is_checked() -> None:
    log = await _open(MemoryStreams())
    await _append(log, sequenced(7, 1, 0, 3))
    with pytest.raises(errors.OutOfOrderSequenceError, match="sequence 4"):
        await log.append(sequenced(7, 1, 4))
    with pytest.raises(errors.InvalidProducerEpochError):
        await log.append(sequenced(7, 0, 3))
    assert await _append(log, sequenced(7, 1, 3)) == 3


@pytest.mark.parametrize("is_clean", [True, False], ids=["closed", "killed"])
async def test_all_five_batches_of_a_producer_are_known_to_the_next_owner(is_clean: bool) -> None:
    streams = MemoryStreams()
    log = await _open(streams)
    for sequence in range(0, 12, 2):
        await _append(log, sequenced(7, 0, sequence, 2, time=NOW))
    if is_clean:
        await log.close()
    successor = await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=1)
    assert [await _append(successor, sequenced(7, 0, at, 2)) for at in (2, 4, 10)] == [2, 4, 10]
    with pytest.raises(errors.OutOfOrderSequenceError):
        await successor.append(sequenced(7, 0, 0, 2))
    assert await _append(successor, sequenced(7, 0, 12)) == 12


async def test_late_append_of_a_former_owner_fails_and_reaches_nobody() -> None:
    streams = MemoryStreams()
    former = await _open(streams)
    await _append(former, plain("a"))
    streams.holds_back = True
    late = await former.append(plain("late"))
    present = await _open(MemoryStreams(streams.table), former.stream_ids[0], epoch=1)
    await _append(present, plain("b"))
    streams.settle()
    with pytest.raises(errors.PartitionFailedError):
        await late.durable
    with pytest.raises(errors.PartitionFailedError):
        await former.append(plain("later"))
    assert await _values(present) == [(0, b"a"), (1, b"b")]
    assert present.end_of_epoch(0) == (0, 1)
    assert present.end_of_epoch(1) == (1, 2)
    assert present.end_of_epoch(2) == (-1, -1)


async def test_old_epoch_opens_nothing(streams: MemoryStreams) -> None:
    log = await _open(streams, epoch=5)
    with pytest.raises(StreamFencedError):
        await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=4)


async def test_recovery_reads_only_behind_the_last_checkpoint(streams: MemoryStreams) -> None:
    log = await _open(streams, checkpoint_bytes=1000)
    for number in range(40):
        await _append(log, plain(f"{number:04}" * 20))
    successor_streams = MemoryStreams(streams.table)
    successor = await _open(successor_streams, log.stream_ids[0], epoch=1)
    reads = [offset for stream, offset in successor_streams.fetches if stream == log.stream_ids[1]]
    assert reads == [] or min(reads) > 20
    assert successor.segments[-1].size == log.segments[-1].size
    assert len(await _values(successor)) == 40


async def test_recovery_reads_to_the_end_in_several_fetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "_RECOVERY_BYTES", 100)
    streams = MemoryStreams()
    log = await _open(streams)
    for number in range(9):
        await _append(log, sequenced(7, 0, number, time=NOW))
    again = await _open(streams, log.stream_ids[0], epoch=1)
    assert again.high_watermark == 9
    assert len(await _values(again)) == 9
    assert await _append(again, sequenced(7, 0, 8, time=NOW)) == 8
    assert await _append(again, sequenced(7, 0, 9, time=NOW)) == 9


async def _losing_its_batches(
    streams: MemoryStreams, segment: SegmentLimits | None = None, trimmed_to: int = 0
) -> PartitionLog:
    """Return a log whose newest batch is lost, while the checkpoint after it is not."""
    log = await _open(streams, checkpoint_bytes=1, segment=segment or SegmentLimits())
    for number in range(3):
        await _append(log, sequenced(7, 0, number, time=NOW + number))
    await log.trim(trimmed_to)
    streams.holds_back = True
    lost = await log.append(sequenced(7, 0, 3, time=NOW + 3))
    (batch,) = (write for write in streams.pending if write.stream_id == log.stream_ids[1])
    streams.pending.remove(batch)
    batch.future.set_exception(OSError("the store is gone"))
    streams.settle()
    streams.holds_back = False
    with pytest.raises(errors.PartitionFailedError):
        await lost.durable
    return log


@pytest.mark.parametrize("trimmed_to", [0, 3])
async def test_producers_are_known_though_the_newest_checkpoint_is_ahead_of_the_batches(
    trimmed_to: int,
) -> None:
    """Also of batches that are trimmed, and can't be read again."""
    streams = MemoryStreams()
    log = await _losing_its_batches(streams, trimmed_to=trimmed_to)
    again = await _open(streams, log.stream_ids[0], epoch=1)
    assert again.high_watermark == 3
    assert await _append(again, sequenced(7, 0, 1, time=NOW)) == 1
    with pytest.raises(errors.OutOfOrderSequenceError):
        await again.append(sequenced(7, 0, 4, time=NOW))
    assert await _append(again, sequenced(7, 0, 3, time=NOW + 3)) == 3


async def test_segments_do_not_begin_behind_the_batches_that_are_left() -> None:
    streams = MemoryStreams()
    log = await _losing_its_batches(streams, segment=SegmentLimits(bytes=1))
    again = await _open(streams, log.stream_ids[0], epoch=1)
    await _append(again, sequenced(7, 0, 3, time=NOW + 30))
    assert [segment.base_offset for segment in again.segments] == [0, 1, 2, 3]
    assert [segment.end_offset for segment in again.segments] == [1, 2, 3, -1]
    assert len(await _values(again)) == 4
    assert await offset_by_time(again, NOW + 2) == (NOW + 2, 2)
    assert await offset_by_time(again, NOW + 3) == (NOW + 30, 3)


class FullStreams(MemoryStreams):
    """Streams whose writer has no room for the time index while `full` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.room = asyncio.Event()
        self.room.set()
        self.waits = asyncio.Event()

    async def append(self, stream_id: int, payload: bytes, *words: Any, **named: Any) -> Any:
        if len(payload) % 12 == 0:
            self.waits.set()
            await self.room.wait()
        return await super().append(stream_id, payload, *words, **named)


async def test_time_index_has_what_a_cancelled_checkpoint_was_to_save() -> None:
    streams = FullStreams()
    log = await _open(streams)
    for number in range(3):
        await _append(log, make_batch([Rec(NOW + number, None, bytes(5000))]))
    streams.room.clear()
    rolling = asyncio.create_task(log.roll())
    await streams.waits.wait()
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    streams.room.set()
    await log.roll()
    assert await log.time_entries(log.segments[0]) == [(NOW + at, at) for at in range(3)]


async def test_closed_log_takes_no_more_and_says_so() -> None:
    log = await _open(MemoryStreams())
    await log.close()
    for change in (log.append(plain("a")), log.roll(), log.trim(0), log.retain()):
        with pytest.raises(errors.PartitionClosedError):
            await change


async def test_a_checkpoint_is_written_once_for_its_bytes(streams: MemoryStreams) -> None:
    log = await _open(streams, checkpoint_bytes=1_000)
    meta = streams.table.streams[log.stream_ids[0]]
    before = meta.end
    for _ in range(10):
        await _append(log, plain("v" * 300))
    assert meta.end - before == 3 * 4  # four values a checkpoint, one after every third batch


async def test_a_checkpoint_saves_each_entry_of_the_time_index_once(streams: MemoryStreams) -> None:
    log = await _open(streams, checkpoint_bytes=1)
    for number in range(3):
        await _append(log, make_batch([Rec(NOW + number, None, bytes(5000))]))
    again = await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=1)
    assert await again.time_entries(again.segments[-1]) == [(NOW + at, at) for at in range(3)]
    assert streams.table.streams[log.stream_ids[2]].end == 3 * 12


async def test_unreadable_value_fails_the_opening_and_names_its_offset() -> None:
    streams = MemoryStreams()
    log = await _open(streams)
    await streams.append(log.stream_ids[0], b"\x00\x00\x00\x00\x03LOG{")
    with pytest.raises(errors.DamagedPartitionError, match="record 5"):
        await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=1)


async def test_segments_end_at_their_size_and_outlive_a_restart(streams: MemoryStreams) -> None:
    log = await _open(streams, segment=SegmentLimits(bytes=500))
    for number in range(9):
        await _append(log, plain(str(number) * 100))
    assert len(log.segments) > 2
    assert [segment.end_offset for segment in log.segments[:-1]] == [
        segment.base_offset for segment in log.segments[1:]
    ]
    successor = await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=1)
    assert [segment.base_offset for segment in successor.segments] == [
        segment.base_offset for segment in log.segments
    ]


async def test_retention_by_bytes_and_by_time(streams: MemoryStreams) -> None:
    log = await _open(
        streams, segment=SegmentLimits(bytes=500), retention=Retention(age_ms=-1, bytes=800)
    )
    for number in range(20):
        await _append(log, plain(str(number % 10) * 100, timestamp=NOW - 1000))
    start = await log.retain()
    assert 0 < start < 20
    kept = sum(segment.size for segment in log.segments)
    assert kept >= 800
    assert kept - log.segments[0].size < 800
    with pytest.raises(errors.OffsetOutOfRangeError):
        await log.read(start - 1, 100)
    log.config = replace(log.config, retention=Retention(age_ms=500))
    assert await log.retain() == 20
    assert await _append(log, plain("next")) == 20


async def test_records_from_the_future_are_refused_and_change_nothing() -> None:
    log = await _open(MemoryStreams(), timestamp_after_max_ms=1000)
    await _append(log, plain("in time", timestamp=NOW + 1000))
    late = plain("late", timestamp=NOW + 1001)
    mixed = make_batch([Rec(NOW * 1000, None, b"microseconds"), Rec(NOW, None, b"now")])
    for refused in (late, mixed):
        with pytest.raises(
            errors.InvalidTimestampError, match=r"message\.timestamp\.after\.max\.ms"
        ):
            await log.append(refused)
    assert await _values(log) == [(0, b"in time")]
    assert await _append(log, plain("next", timestamp=NOW)) == 1


HOUR = 3_600_000


@pytest.mark.parametrize("time", [NOW * 1000, NOW + 2 * HOUR, 0, -1])
@pytest.mark.parametrize("with_it", [1, 20])
async def test_a_time_that_says_nothing_neither_blocks_nor_hastens_retention(
    with_it: int, time: int
) -> None:
    clock = Clock()
    log = await _open(
        MemoryStreams(),
        now_ms=clock,
        segment=SegmentLimits(bytes=500),
        retention=Retention(age_ms=HOUR // 2),
        timestamp_after_max_ms=2**62,
    )
    for number in range(20):
        own = time if number < with_it else clock()
        await _append(log, plain(str(number % 10) * 100, timestamp=own))
    assert await log.retain() == 0, "nothing is as old as retention says"
    clock.now_ms += HOUR // 2 + 1
    assert await log.retain() == 20


async def test_a_recovered_log_does_not_believe_times_of_the_future_either() -> None:
    clock, streams = Clock(), MemoryStreams()
    given: dict[str, Any] = {
        "retention": Retention(age_ms=HOUR // 2),
        "timestamp_after_max_ms": 2**62,
    }
    log = await _open(streams, now_ms=clock, **given)
    await _append(log, plain("late", timestamp=NOW * 1000))
    successor = await _open(
        MemoryStreams(streams.table), log.stream_ids[0], epoch=1, now_ms=clock, **given
    )
    assert await successor.retain() == 0
    clock.now_ms += HOUR // 2 + 1
    assert await successor.retain() == 1


class SavingStreams(MemoryStreams):
    """Streams that say when values of a map are appended while appends wait."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = asyncio.Event()

    async def append_many(self, *words: Any, **named: Any) -> Any:
        if self.holds_back:
            self.saves.set()
        return await super().append_many(*words, **named)


async def test_records_are_not_deleted_before_they_are_durable() -> None:
    streams = SavingStreams()
    log = await _open(
        streams, segment=SegmentLimits(bytes=1), retention=Retention(age_ms=-1, bytes=0)
    )
    await _append(log, plain("a"))
    streams.holds_back = True
    await log.append(plain("b"))
    waiting = await log.append(plain("c"))
    with pytest.raises(errors.OffsetOutOfRangeError):
        await log.trim(2)
    streams.saves.clear()
    retaining = asyncio.create_task(log.retain())
    await streams.saves.wait()
    assert log.start_offset <= log.high_watermark == 1
    streams.holds_back = False
    streams.settle()
    await waiting.durable
    assert await retaining == 1  # as it began, the batches behind it were not durable


async def test_deleted_records_stay_deleted_and_producers_stay_known() -> None:
    streams = MemoryStreams()
    log = await _open(streams)
    await _append(log, sequenced(7, 0, 0, 4, time=NOW))
    assert await log.trim(3) == 3
    with pytest.raises(errors.OffsetOutOfRangeError):
        await log.trim(5)
    successor = await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=1)
    assert successor.start_offset == 3
    assert await _append(successor, sequenced(7, 0, 0, 4)) == 0
    assert successor.high_watermark == 4


async def test_offset_by_time_finds_the_first_record_that_is_not_older() -> None:
    streams = MemoryStreams()
    log = await _open(streams, segment=SegmentLimits(bytes=10_000))
    times = [100 * at if at % 7 else 100 * at - 350 for at in range(400)]
    for at in range(0, 400, 4):
        records = [Rec(time, None, b"v" * 200) for time in times[at : at + 4]]
        await _append(log, make_batch(records, attributes=at % 8 == 0))
    assert len(log.segments) > 3
    successor = await _open(MemoryStreams(streams.table), log.stream_ids[0], epoch=1)
    for asked in (0, 1, 5_050, 14_000, 27_777, 39_899, 39_900, 39_901, 50_000):
        wanted = next(((time, at) for at, time in enumerate(times) if time >= asked), None)
        assert await offset_by_time(log, asked) == wanted
        assert await offset_by_time(successor, asked) == wanted


async def test_map_of_a_partition_stays_small(streams: MemoryStreams) -> None:
    log = await _open(streams, checkpoint_bytes=1)
    for number in range(100):
        await _append(log, plain(str(number)))
    await log.housekeep()
    meta = streams.table.streams[log.stream_ids[0]]
    assert meta.end - meta.start <= 8
    keys = {decode_meta_entry(record.payload).key for record in meta.records}
    assert keys == {"LOG", "PARTITION", "PRODUCER_SNAPSHOTS", "LEADER_EPOCH_CHECKPOINT"}
