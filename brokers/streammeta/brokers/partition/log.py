"""Log of a partition on three streams: batches, time index, and its state in a MetaStream.

Offsets of the log stream are Kafka offsets. A single process writes, under the leader epoch with
which all streams are opened. The next owner's opening fences it. Owns the order of writes: streams
are written before the values that refer to them, and values that belong together share a commit. So
a log that was not closed is recovered by reading the batches after its last checkpoint. Readers see
batches once they are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streammeta.brokers.partition import errors, meta_map, record_batch
from streammeta.brokers.partition import segments as rules
from streammeta.brokers.partition.meta_stream import MetaStream
from streammeta.brokers.partition.state import Entry, LogState, decode_entries, encode_entries
from streammeta.brokers.partition.streams import Streams
from streammeta.storage.inspection.kafka_batch import KafkaBatch

# -- Newest batches of a partition in memory, for consumers at the end of the log

TAIL_BYTES = 4 * 1024 * 1024


class TailCache:
    """Consecutive batches of up to `max_bytes`, and the newest in any case."""

    def __init__(self, max_bytes: int = TAIL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, int, bytes]] = deque()
        self._size = 0

    def add(self, base_offset: int, next_offset: int, batch: bytes) -> None:
        """Add the next batch."""
        self._batches.append((base_offset, next_offset, batch))
        self._size += len(batch)
        while self._size > self._max_bytes and len(self._batches) > 1:
            self._size -= len(self._batches.popleft()[2])

    def read(self, offset: int, below: int, max_bytes: int) -> list[bytes] | None:
        """Return batches from the one with `offset` on, which end at or before `below`.

        They have at most `max_bytes`, or are a single batch. None if the first is not in memory.
        """
        if not self._batches or offset < self._batches[0][0]:
            return None
        found: list[bytes] = []
        size = 0
        first = bisect_right(self._batches, offset, key=lambda one: one[0]) - 1
        for index in range(first, len(self._batches)):
            _, next_offset, batch = self._batches[index]
            size += len(batch)
            if next_offset > below or (found and size > max_bytes):
                break
            found.append(batch)
        return found


CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Bytes of batches between two checkpoints. A recovery reads at most these and one batch."""

TIMESTAMP_AFTER_MAX_MS = 3_600_000
"""Maximum time by which a record may be ahead of its append, as in Kafka since version 4."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Limits of a log in bytes. `timestamp_after_max_ms` bounds records in the future."""

    max_batch_bytes: int = record_batch.MAX_BATCH_BYTES
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
    """The log of one partition, open for its leader. `opening.open_log` creates it."""

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
        """First readable offset."""
        return self._state.start_offset

    @property
    def segments(self) -> tuple[rules.Segment, ...]:
        """The segments, the active one last."""
        return tuple(self._state.segments)

    @property
    def stream_ids(self) -> tuple[int, int, int]:
        """Ids of its streams: MetaStream, batches, time index."""
        return self._meta_id, self._state.log_id, self._state.time_id

    @property
    def end_offset(self) -> int:
        """Offset of the next batch. Batches from the high watermark on are not durable."""
        return self._state.end_offset

    @property
    def is_released(self) -> bool:
        """Whether its streams are closed, so that others may open them."""
        return self._is_released

    @property
    def is_writable(self) -> bool:
        """Whether it accepts appends: it has not failed and is not closed."""
        return self.failure is None and not self._is_closed

    # -- appending

    async def append(self, payload: bytes) -> Appended:
        """Append a producer's batch. A repeated batch returns its original offset.

        Raises the errors of `check_produced`, `OutOfOrderSequenceError`,
        `InvalidProducerEpochError`, `InvalidTimestampError`, `PartitionFailedError`,
        `PartitionClosedError`. The returned future raises `PartitionFailedError` if it is unknown
        whether the batch is in the log.
        """
        batch = record_batch.check_produced(payload, self.config.max_batch_bytes)
        async with self._appending:
            self._require_writable()
            producers = self._state.producers
            if batch.producer_id >= 0:
                repeated = producers.duplicate_of(batch)
                if repeated is not None:
                    return Appended(repeated.first_offset, self._when_settled())
                producers.check(batch.producer_id, batch.producer_epoch, batch.base_sequence)
            latest_ms = self._latest_ms(self.config.timestamp_after_max_ms)
            record_batch.check_time(batch, latest_ms)
            return await self._append(batch)

    def _latest_ms(self, after_max_ms: int) -> int:
        """Return the latest plausible time of a record. Either clock may be wrong."""
        return max(self._wall_ms(), self._now_ms()) + after_max_ms

    async def _append(self, batch: KafkaBatch) -> Appended:
        state, writer = self._state, self._streams.writer
        # The caller's lock keeps other appends away, so the offset can't change before the append.
        base = writer.next_offset(state.log_id)
        last = base + batch.last_offset_delta
        now = self._now_ms()
        active = state.segments[-1]
        if rules.must_roll(active, batch.size, last, now, self.config.segment):
            await self._roll(base)

        data = record_batch.rebased(batch.data, base, self.epoch)
        timestamp = batch.max_timestamp if batch.max_timestamp >= 0 else None
        future = await writer.append(
            state.log_id, data, batch.last_offset_delta + 1, timestamp_ms=timestamp
        )
        settled = self._follow(future, last + 1)
        # The state advances before the batch is durable, so that the next batch can be checked.
        self._tail.add(base, last + 1, data)
        state.take(batch, base, now)
        self._since_checkpoint += batch.size
        if self._since_checkpoint >= self.config.checkpoint_bytes:
            await self._checkpoint()

        return Appended(base, settled)

    def _follow(self, future: asyncio.Future[int], next_offset: int) -> asyncio.Future[None]:
        """Return a future that is done once `future` has moved the high watermark."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = settled

        def done(appended: asyncio.Future[int]) -> None:
            error = None if appended.cancelled() else appended.exception()
            if appended.cancelled() or error is not None:
                self._fail(error)
            if self.failure is not None:
                settled.set_exception(self._failure_copy())
                settled.exception()  # suppresses asyncio's warning if the caller has left
                return
            self.high_watermark = max(self.high_watermark, next_offset)
            settled.set_result(None)
            self._notify_watchers()

        future.add_done_callback(done)
        return settled

    def _when_settled(self) -> asyncio.Future[None]:
        """Return a future that is done when all previous appends are durable."""
        if self._waiting is not None:
            return self._waiting
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settled.set_result(None)
        return settled

    def _fail(self, error: BaseException | None) -> None:
        if self.failure is None:
            self.failure = errors.PartitionFailedError(
                f"an append failed, open the log again with a larger epoch: {error}"
            )
            self.failure.__cause__ = error
            _log.warning("partition log %d failed: %s", self._state.log_id, error)
            self._notify_watchers()

    def _failure_copy(self) -> errors.PartitionFailedError:
        return errors.PartitionFailedError(str(self.failure))

    def _require_writable(self) -> None:
        if self.failure is not None:
            raise self._failure_copy()
        if self._is_closed:
            raise errors.PartitionClosedError(
                "the log is closed. Ask the partition's current leader"
            )

    # -- checkpoints and segments

    async def _roll(self, offset: int) -> None:
        await self._save_times()
        state = self._state
        position = self._streams.writer.next_offset(state.time_id)
        state.roll(offset, position, self._now_ms())
        await self._checkpoint()

    async def roll(self) -> None:
        """Start a new segment at the end of the log."""
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
            self._state.unsaved_times = 0  # not earlier: a waiting append may be cancelled

    async def _checkpoint(self, *, is_clean: bool = False) -> asyncio.Future[int]:
        """Write the state for a recovery, which then reads from the current end of the log."""
        await self._save_times()
        state = self._state
        state.producers.expire(self._now_ms())
        self._since_checkpoint = 0
        end = state.end_offset
        partition = meta_map.PartitionState(state.start_offset, 0, end, is_clean)
        streams = {"log": state.log_id, "tim": state.time_id, "txn": -1}
        written = await self._meta.put(
            {
                meta_map.LOG: rules.encode_log(streams, state.segments),
                meta_map.PRODUCER_SNAPSHOTS: meta_map.encode_snapshots(self._snapshots_with(end)),
                meta_map.LEADER_EPOCHS: state.epochs.encode(),
                meta_map.PARTITION: partition.encode(),
            }
        )
        _ignore(written)

        return written

    def _snapshots_with(self, end: int) -> dict[int, bytes]:
        """Return snapshots of the producers at the end, and at the last durable end.

        The batches before this checkpoint may be lost although the checkpoint is stored, because
        the objects of one upload can fail independently.
        """
        durable = max((at for at in self._snapshots if at <= self.high_watermark), default=0)
        # Older snapshots than the last durable one are not needed: recovery starts at a durable
        # end.
        kept = {at: raw for at, raw in self._snapshots.items() if at >= durable}
        self._snapshots = {**kept, end: self._state.producers.snapshot()}
        return self._snapshots

    async def start_epoch(self) -> None:
        """Record the leader epoch at the end of the log durably, before the first append."""
        self._state.epochs.assign(self.epoch, self._state.end_offset)
        await (await self._checkpoint())

    # -- reading

    async def read(self, offset: int, max_bytes: int) -> bytes:
        """Return whole batches from `offset` on, at least one if a durable one exists.

        The first may begin before `offset`. Raises `OffsetOutOfRangeError`.
        """
        if not self.start_offset <= offset <= self.high_watermark:
            raise errors.OffsetOutOfRangeError(
                f"offset {offset} is not in {self.start_offset}..{self.high_watermark}"
            )
        # The next offset is valid but has no record yet.
        if offset == self.high_watermark:
            return b""
        found = self._tail.read(offset, self.high_watermark, max_bytes)
        if found is None:
            fetched = await self._streams.fetch(self._state.log_id, offset, max(1, max_bytes))
            found = [bytes(record.payload) for record in fetched.records]
        return b"".join(found)

    async def time_entries(self, segment: rules.Segment) -> list[Entry]:
        """Return the time index of a segment."""
        # The newest entries of the active segment are only in memory.
        if segment.end_offset == rules.OPEN_END:
            return list(self._state.times)
        at, end, rows = segment.time_start, segment.time_end, bytearray()
        while at < end:
            fetched = await self._streams.fetch(self._state.time_id, at, end - at)
            rows.extend(b"".join(record.payload for record in fetched.records))
            at = fetched.next_offset
        size = segment.time_end - segment.time_start
        entries = decode_entries(bytes(rows[:size]), segment.base_offset)
        return [entry for entry in entries if entry[1] < segment.end_offset]

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call `on_change` whenever records become readable, or the log fails or closes."""
        self._watchers.add(on_change)
        try:
            yield
        finally:
            self._watchers.discard(on_change)

    def _notify_watchers(self) -> None:
        for on_change in tuple(self._watchers):
            on_change()

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest leader epoch up to `epoch` and its end offset, -1 for none."""
        return self._state.epochs.end_of(epoch, self.high_watermark)

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the record at `offset`, -1 if unknown."""
        return self._state.epochs.at(offset)

    # -- trimming

    async def trim(self, new_start: int) -> int:
        """Delete records below `new_start`, at most up to the high watermark, and return the start.

        Raises `OffsetOutOfRangeError` for an offset above the high watermark.
        """
        async with self._appending:
            self._require_writable()
            if new_start > self.high_watermark:
                raise errors.OffsetOutOfRangeError(
                    f"records below {new_start} can't be deleted: the log ends at"
                    f" {self.high_watermark}"
                )
            await self._trim(new_start)
            return self.start_offset

    async def retain(self) -> int:
        """Delete segments that exceed retention, and return the first remaining offset."""
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
        # The checkpoint precedes the trim: recovery must never start at trimmed records.
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
        """Write a clean checkpoint, then close the streams. A failed log only closes them."""
        async with self._appending:
            if self._is_closed:
                return
            if self.failure is None:
                # Others may open the streams only after the clean checkpoint is durable.
                await (await self._checkpoint(is_clean=True))
                await self._meta.close()
            self._is_closed = True
        self._notify_watchers()
        (await self._streams.close_streams(self.stream_ids)).require_all()
        self._is_released = True

    def give_up(self) -> None:
        """Stop accepting appends: another owner has the streams."""
        self._is_closed = True
        self._notify_watchers()

    async def housekeep(self) -> None:
        """Apply retention, and compact the MetaStream if that is worthwhile."""
        await self.retain()
        await self._meta.compact()


def _ignore(written: asyncio.Future[int]) -> None:
    """Suppress asyncio's warning about a failed write: its stream accepts no later write either."""
    written.add_done_callback(lambda done: done.cancelled() or done.exception())
