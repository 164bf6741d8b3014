"""Log of a partition on three streams: batches, time index and the map of its state.

Offsets of the log stream are Kafka offsets. One process writes, under the leader epoch with which
all streams are opened; a later owner's opening fences it. Owns the order of writes: what a value
says is in the streams before the value is, and values that belong together are in one commit, so
a log that was not closed is recovered by reading the batches behind its last checkpoint. Batches
show to readers once they are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streammeta.brokers.partition import segments as rules
from streammeta.brokers.partition.errors import (
    InvalidTimestampError,
    OffsetOutOfRangeError,
    PartitionClosedError,
    PartitionFailedError,
)
from streammeta.brokers.partition.meta_map import (
    LEADER_EPOCHS,
    LOG,
    PARTITION,
    PRODUCER_SNAPSHOTS,
    PartitionState,
    encode_snapshots,
)
from streammeta.brokers.partition.meta_stream import MetaStream
from streammeta.brokers.partition.record_batch import (
    MAX_BATCH_BYTES,
    check_produced,
    rebased,
)
from streammeta.brokers.partition.state import LogState
from streammeta.brokers.partition.streams import Streams
from streammeta.brokers.partition.tail_cache import TAIL_BYTES, TailCache
from streammeta.brokers.partition.time_index import Entry, decode_entries, encode_entries
from streammeta.storage.inspection.kafka_batch import KafkaBatch

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Bytes of batches between two checkpoints: what a recovery reads at most, and a batch."""

TIMESTAMP_AFTER_MAX_MS = 3_600_000
"""Most that the time of a record may be ahead of its append, as in Kafka since version 4."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Bounds of a log; sizes in bytes, `timestamp_after_max_ms` of records ahead of the time."""

    max_batch_bytes: int = MAX_BATCH_BYTES
    segment: rules.SegmentLimits = field(default_factory=rules.SegmentLimits)
    retention: rules.Retention = field(default_factory=rules.Retention)
    checkpoint_bytes: int = CHECKPOINT_BYTES
    tail_bytes: int = TAIL_BYTES
    timestamp_after_max_ms: int = TIMESTAMP_AFTER_MAX_MS


@dataclass(frozen=True, slots=True)
class Appended:
    """An append: its base offset, and a future that is done when it is durable."""

    base_offset: int
    durable: asyncio.Future[None]


class PartitionLog:
    """The log of one partition, open for its leader. `opening.open_log` makes it."""

    def __init__(
        self,
        streams: Streams,
        meta: MetaStream,
        meta_id: int,
        state: LogState,
        epoch: int,
        config: LogConfig,
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int],
    ) -> None:
        self.epoch = epoch
        self.config = config
        self._streams = streams
        self._meta = meta
        self._meta_id = meta_id
        self._state = state
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._tail = TailCache(config.tail_bytes)
        self._appending = asyncio.Lock()
        self._watchers: set[Callable[[], None]] = set()
        self._waiting: asyncio.Future[None] | None = None
        self._since_checkpoint = 0
        self._snapshots: dict[int, bytes] = {}
        self.high_watermark = state.end_offset
        self.failure: Exception | None = None
        self._is_closed = False
        self._is_released = False

    @property
    def start_offset(self) -> int:
        """First offset that can be read."""
        return self._state.start_offset

    @property
    def segments(self) -> tuple[rules.Segment, ...]:
        """The segments, the active one last."""
        return tuple(self._state.segments)

    @property
    def stream_ids(self) -> tuple[int, int, int]:
        """Ids of its streams: the map, the batches, the time index."""
        return self._meta_id, self._state.log_id, self._state.time_id

    @property
    def end_offset(self) -> int:
        """Offset that the next batch gets; batches from the high watermark on are not durable."""
        return self._state.end_offset

    @property
    def is_released(self) -> bool:
        """Whether its streams are closed, so that others may open them."""
        return self._is_released

    @property
    def is_writable(self) -> bool:
        """Whether it takes appends: it has not failed, and is not closed."""
        return self.failure is None and not self._is_closed

    # -- appending

    async def append(self, payload: bytes) -> Appended:
        """Append a batch as a producer sent it; repeated ones are answered with their old offset.

        Raises what `check_produced` raises, `OutOfOrderSequenceError`, `InvalidProducerEpochError`,
        `InvalidTimestampError`, `PartitionFailedError`, `PartitionClosedError`; the future of the
        answer raises `PartitionFailedError`: the batch may be in the log or not.
        """
        batch = check_produced(payload, self.config.max_batch_bytes)
        async with self._appending:
            self._require_writable()
            producers = self._state.producers
            if batch.producer_id >= 0:
                repeated = producers.duplicate_of(batch)
                if repeated is not None:
                    return Appended(repeated.first_offset, self._settled())
                producers.check(batch.producer_id, batch.producer_epoch, batch.base_sequence)
            self._check_time(batch)
            return await self._append(batch)

    def _check_time(self, batch: KafkaBatch) -> None:
        """Refuse records from the future: retention would keep everything with them."""
        latest_ms = self._latest_ms(self.config.timestamp_after_max_ms)
        newest_ms = max(batch.base_timestamp, batch.max_timestamp)
        if newest_ms > latest_ms:
            raise InvalidTimestampError(
                f"the batch has records of {newest_ms} ms since 1970, wanted at most {latest_ms}:"
                " the time and message.timestamp.after.max.ms"
            )

    def _latest_ms(self, after_max_ms: int) -> int:
        """Return the latest time of a record that may be right: neither clock has to be."""
        return max(self._wall_ms(), self._now_ms()) + after_max_ms

    async def _append(self, batch: KafkaBatch) -> Appended:
        state, writer = self._state, self._streams.writer
        base = writer.next_offset(state.log_id)
        last = base + batch.last_offset_delta
        now = self._now_ms()
        active = state.segments[-1]
        if rules.must_roll(active, batch.size, last, now, self.config.segment):
            await self._roll(base)

        data = rebased(batch.data, base, self.epoch)
        timestamp = batch.max_timestamp if batch.max_timestamp >= 0 else None
        future = await writer.append(
            state.log_id, data, batch.last_offset_delta + 1, timestamp_ms=timestamp
        )
        settled = self._follow(future, last + 1)
        self._tail.add(base, last + 1, data)
        state.take(batch, base, now)
        self._since_checkpoint += batch.size
        if self._since_checkpoint >= self.config.checkpoint_bytes:
            await self._checkpoint()

        return Appended(base, settled)

    def _follow(self, future: asyncio.Future[int], next_offset: int) -> asyncio.Future[None]:
        """Move the high watermark when `future` is done; return a future of that."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = settled

        def done(appended: asyncio.Future[int]) -> None:
            error = None if appended.cancelled() else appended.exception()
            if appended.cancelled() or error is not None:
                self._fail(error)
            if self.failure is not None:
                settled.set_exception(self._failed())
                settled.exception()  # callers that are gone are not warned about
                return
            self.high_watermark = max(self.high_watermark, next_offset)
            settled.set_result(None)
            self._tell_watchers()

        future.add_done_callback(done)
        return settled

    def _settled(self) -> asyncio.Future[None]:
        """Return a future that is done when all that was appended so far is durable."""
        if self._waiting is not None:
            return self._waiting
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settled.set_result(None)
        return settled

    def _fail(self, error: BaseException | None) -> None:
        if self.failure is None:
            self.failure = PartitionFailedError(
                f"an append failed, the log must be opened again with a larger epoch: {error}"
            )
            self.failure.__cause__ = error
            _log.warning("partition log %d failed: %s", self._state.log_id, error)
            self._tell_watchers()

    def _failed(self) -> PartitionFailedError:
        return PartitionFailedError(str(self.failure))

    def _require_writable(self) -> None:
        if self.failure is not None:
            raise self._failed()
        if self._is_closed:
            raise PartitionClosedError("the log is closed; ask the partition's present leader")

    # -- checkpoints and segments

    async def _roll(self, offset: int) -> None:
        await self._save_times()
        state = self._state
        position = self._streams.writer.next_offset(state.time_id)
        state.roll(offset, position, self._now_ms())
        await self._checkpoint()

    async def roll(self) -> None:
        """Begin a new segment at the end of the log."""
        async with self._appending:
            self._require_writable()
            await self._roll(self._state.end_offset)

    async def _save_times(self) -> None:
        """Append the entries of the time index that are not in its stream yet."""
        rows = self._state.times_to_save
        if rows:
            payload = encode_entries(rows, self._state.segments[-1].base_offset)
            time_id = self._state.time_id
            _ignore(await self._streams.writer.append(time_id, payload, len(payload)))
            self._state.unsaved_times = 0  # not before: an append that waits may be given up

    async def _checkpoint(self, *, is_clean: bool = False) -> asyncio.Future[int]:
        """Write what recovery begins with; recovery reads from the present end of the log."""
        await self._save_times()
        state = self._state
        state.producers.expire(self._now_ms())
        self._since_checkpoint = 0
        end = state.end_offset
        partition = PartitionState(state.start_offset, 0, end, is_clean)
        streams = {"log": state.log_id, "tim": state.time_id, "txn": -1}
        written = await self._meta.put(
            {
                LOG: rules.encode_log(streams, state.segments),
                PRODUCER_SNAPSHOTS: encode_snapshots(self._snapshots_with(end)),
                LEADER_EPOCHS: state.epochs.encode(),
                PARTITION: partition.encode(),
            }
        )
        _ignore(written)

        return written

    def _snapshots_with(self, end: int) -> dict[int, bytes]:
        """Return snapshots of the producers at the end, and at the last end that is durable.

        The batches before this checkpoint may be lost, and the checkpoint not: objects of one
        upload fail one by one.
        """
        durable = max((at for at in self._snapshots if at <= self.high_watermark), default=0)
        kept = {at: raw for at, raw in self._snapshots.items() if at >= durable}
        self._snapshots = {**kept, end: self._state.producers.snapshot()}
        return self._snapshots

    async def start_epoch(self) -> None:
        """Note the leader epoch at the end of the log, durably, before the first append."""
        self._state.epochs.assign(self.epoch, self._state.end_offset)
        await (await self._checkpoint())

    # -- reading

    async def read(self, offset: int, max_bytes: int) -> bytes:
        """Return whole batches from `offset` on, at least one if there is any that is durable.

        The first may begin before `offset`. Raises `OffsetOutOfRangeError`.
        """
        if not self.start_offset <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in {self.start_offset}..{self.high_watermark}"
            )
        if offset == self.high_watermark:
            return b""
        found = self._tail.read(offset, self.high_watermark, max_bytes)
        if found is None:
            fetched = await self._streams.fetch(self._state.log_id, offset, max(1, max_bytes))
            found = [bytes(record.payload) for record in fetched.records]
        return b"".join(found)

    async def time_entries(self, segment: rules.Segment) -> list[Entry]:
        """Return the time index of a segment."""
        if segment.end_offset == rules.OPEN_END:
            return list(self._state.times)
        at, end, rows = segment.time_start, segment.time_end, bytearray()
        while at < end:
            fetched = await self._streams.fetch(self._state.time_id, at, end - at)
            rows.extend(b"".join(record.payload for record in fetched.records))
            at = fetched.next_offset
        size = segment.time_end - segment.time_start
        entries = decode_entries(bytes(rows[:size]), segment.base_offset)
        return [one for one in entries if one[1] < segment.end_offset]

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call `on_change` whenever there is more to read, or the log fails or closes."""
        self._watchers.add(on_change)
        try:
            yield
        finally:
            self._watchers.discard(on_change)

    def _tell_watchers(self) -> None:
        for on_change in tuple(self._watchers):
            on_change()

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest leader epoch up to `epoch` and its end offset, -1 for none."""
        return self._state.epochs.end_of(epoch, self.high_watermark)

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the record at `offset`, -1 if it is not known."""
        return self._state.epochs.at(offset)

    # -- trimming

    async def trim(self, new_start: int) -> int:
        """Delete records below `new_start`, at most up to the high watermark; return the start.

        Raises `OffsetOutOfRangeError` for an offset behind the high watermark.
        """
        async with self._appending:
            self._require_writable()
            if new_start > self.high_watermark:
                raise OffsetOutOfRangeError(
                    f"records below {new_start} can't be deleted: the log ends at"
                    f" {self.high_watermark}"
                )
            await self._trim(new_start)
            return self.start_offset

    async def retain(self) -> int:
        """Delete segments that are past retention; return the first offset that is left."""
        async with self._appending:
            self._require_writable()
            active = self._state.segments[-1]
            retention, latest_ms = self.config.retention, self._latest_ms(TIMESTAMP_AFTER_MAX_MS)
            age_ms = self._now_ms() - active.aged_from(latest_ms)
            if active.size and 0 <= retention.age_ms < age_ms:
                await self._roll(self._state.end_offset)
            kept = rules.retained_from(self._state.segments, self._now_ms(), retention, latest_ms)
            await self._trim(min(kept, self.high_watermark))
            return self.start_offset

    async def _trim(self, new_start: int) -> None:
        state = self._state
        if new_start <= state.start_offset:
            return
        state.start_offset = new_start
        state.segments = rules.without_head(state.segments, new_start)
        state.epochs.trim(new_start)
        await (await self._checkpoint())
        await self._trim_streams()

    async def _trim_streams(self) -> None:
        state = self._state
        starts = {state.log_id: state.start_offset, state.time_id: state.segments[0].time_start}
        (await self._streams.trim_streams(starts)).require_all()

    # -- ending

    async def close(self) -> None:
        """Write a clean checkpoint, then close the streams; a failed log only closes them."""
        async with self._appending:
            if self._is_closed:
                return
            if self.failure is None:
                await (await self._checkpoint(is_clean=True))
                await self._meta.close()
            self._is_closed = True
        self._tell_watchers()
        (await self._streams.close_streams(self.stream_ids)).require_all()
        self._is_released = True

    def give_up(self) -> None:
        """Take no more appends: another owner has the streams."""
        self._is_closed = True
        self._tell_watchers()

    async def housekeep(self) -> None:
        """Apply retention, and compact the map if that is worth it."""
        await self.retain()
        await self._meta.compact()


def _ignore(written: asyncio.Future[int]) -> None:
    """Let nobody be warned about a write that failed: its stream takes no later one."""
    written.add_done_callback(lambda done: done.cancelled() or done.exception())
