"""A partition on a shared stream, as one of the brokers that serve it sees it.

Offsets of the stream are Kafka offsets. A batch is stored as its producer sent it. The commit of
its object assigns the offset, which is written into the header of the batch when it is read. The
commit also checks the sequences of idempotent producers, so it does not matter which broker gets a
batch. Owns what this broker knows of the partition's bounds. Its high watermark never decreases.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streammeta.brokers.partition.errors import OffsetOutOfRangeError
from streammeta.brokers.partition.log import LogConfig
from streammeta.brokers.partition.log_clock import wall_clock_ms
from streammeta.brokers.partition.record_batch import (
    check_produced,
    check_time,
    read_batches,
    rebased,
)
from streammeta.brokers.partition.state import Entry
from streammeta.brokers.partition.time_search import first_in_batch
from streammeta.brokers.stamped_time import stamped_clock
from streammeta.client import Producer, RecordBatch, StreamClient, errors, kafka_timestamp
from streammeta.client.parts import StreamQuery
from streammeta.storage.inspection.kafka_batch import KafkaBatch

LEADER_EPOCH = 0
"""Leader epoch of every partition without a leader."""
LOOKUP_INTERVAL_S = 5.0
"""Time after which a read at the end looks the end up again, even if no change was seen, in s."""
RETENTION_INTERVAL_MS = 600_000
"""Maximum time between two trims by retention, in ms. A shorter retention is applied more often."""

_UNKNOWN = -1
_NEVER = float("-inf")
_KEPT_FOREVER = 2**63 - 1


@dataclass(slots=True)
class DisklessAppend:
    """An append: a future that is done when it is committed, and then its base offset.

    The offset is -1 before, and for a repeated batch whose offset is no longer known.
    """

    durable: asyncio.Future[None]
    base_offset: int = _UNKNOWN


class DisklessPartition:
    """One partition on the shared stream `stream_id`.

    `start_offset` and `high_watermark` are -1 until a call has learned them. `is_followed` says
    whether `note_change` is called for each change of the stream.
    """

    epoch = LEADER_EPOCH

    def __init__(self, client: StreamClient, stream_id: int, config: LogConfig) -> None:
        self._client = client
        self.stream_id = stream_id
        self.config = config
        self.start_offset = _UNKNOWN
        self.high_watermark = _UNKNOWN
        self.is_followed = False
        self._changes = 0
        self._current_as_of = (_UNKNOWN, _NEVER)
        self._watchers: set[Callable[[], None]] = set()
        self._appending = asyncio.Lock()
        # By producer id and epoch, then by first sequence and number of records.
        self._pending: dict[tuple[int, int], dict[tuple[int, int], asyncio.Future[int]]] = {}
        self._now_ms: Callable[[], int] | None = None
        self._retained_at = _NEVER

    # -- appending

    async def append(self, payload: bytes) -> DisklessAppend:
        """Append a producer's batch. A repeated batch gets its original offset.

        Raises the errors of `check_produced`, `InvalidTimestampError`, and the error of the
        producer's batch before this one if its caller does not know it yet. The returned future
        raises the errors of `SharedWriter.append`.
        """
        batch = check_produced(payload, self.config.max_batch_bytes)
        check_time(batch, wall_clock_ms() + self.config.timestamp_after_max_ms)
        # The lock keeps the order, and makes each batch known before the next is examined.
        async with self._appending:
            if batch.producer_id < 0:
                return self._follow(await self._write(batch, payload), batch.record_count)
            return await self._append_once(batch, payload)

    async def _append_once(self, batch: KafkaBatch, payload: bytes) -> DisklessAppend:
        """Append a batch of an idempotent producer, unless it is pending already."""
        pending = self._pending.get((batch.producer_id, batch.producer_epoch), {})
        for committed in pending.values():
            # The controllers would accept a later batch of a producer that is new to them.
            if (failure := _failure_of(committed)) is not None:
                raise failure
        # A commit can't contain a batch twice.
        repeated = pending.get((batch.base_sequence, batch.record_count))
        if repeated is not None:
            return self._follow(repeated, batch.record_count)
        return self._remember(batch, await self._write(batch, payload))

    async def _write(self, batch: KafkaBatch, payload: bytes) -> asyncio.Future[int]:
        producer = None
        if batch.producer_id >= 0:
            producer = Producer(batch.producer_id, batch.producer_epoch, batch.base_sequence)
        return await self._client.shared_writer.append(
            self.stream_id,
            payload,
            batch.record_count,
            producer=producer,
            timestamp_ms=batch.max_timestamp if batch.max_timestamp >= 0 else None,
        )

    def _remember(self, batch: KafkaBatch, committed: asyncio.Future[int]) -> DisklessAppend:
        """Follow an append of an idempotent producer, which is pending until its caller knows."""
        producer = batch.producer_id, batch.producer_epoch
        place = batch.base_sequence, batch.record_count
        self._pending.setdefault(producer, {})[place] = committed

        def forget(_: object) -> None:
            pending = self._pending[producer]
            del pending[place]
            if not pending:
                del self._pending[producer]

        appended = self._follow(committed, batch.record_count)
        appended.durable.add_done_callback(forget)
        return appended

    def _follow(self, committed: asyncio.Future[int], count: int) -> DisklessAppend:
        appended = DisklessAppend(asyncio.get_running_loop().create_future())

        def done(outcome: asyncio.Future[int]) -> None:
            failure = _failure_of(outcome)
            if failure is not None:
                appended.durable.set_exception(failure)
                appended.durable.exception()  # suppresses asyncio's warning if the caller has left
                return
            if outcome.exception() is None:
                appended.base_offset = outcome.result()
                self._learn(self.start_offset, appended.base_offset + count)
            appended.durable.set_result(None)

        committed.add_done_callback(done)
        return appended

    # -- bounds

    def note_change(self) -> None:
        """Note that the stream may have changed."""
        self._changes += 1
        self._notify_watchers()

    def _learn(self, start: int, end: int) -> None:
        self.start_offset = max(self.start_offset, start)
        if end > self.high_watermark:
            self.high_watermark = end
            self._notify_watchers()

    def _is_current(self) -> bool:
        """Return whether the bounds have not changed since they were looked up."""
        changes, looked_up_at = self._current_as_of
        is_recent = time.monotonic() - looked_up_at < LOOKUP_INTERVAL_S
        return self.is_followed and is_recent and changes == self._changes

    def may_end_at(self, offset: int) -> bool:
        """Return whether a read from `offset` on has to look the end up."""
        return offset >= self.high_watermark and not self._is_current()

    async def catch_up(self) -> None:
        """Learn the present bounds. Everything acknowledged before the call is below the end."""
        seen = self._changes
        query = StreamQuery(self.stream_id, max(self.high_watermark, 0), limit=1)
        (located,) = await self._client.reader.locate([query])
        if located.error is not None and not isinstance(located.error, errors.OffsetTrimmedError):
            raise located.error
        self._note_lookup(located.start_offset, located.end_offset, seen)

    def _note_lookup(self, start: int, end: int, changes: int) -> None:
        self._learn(start, end)
        self._current_as_of = (changes, time.monotonic())

    @contextlib.contextmanager
    def watched(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call `on_change` whenever records may have become readable."""
        self._watchers.add(on_change)
        try:
            yield
        finally:
            self._watchers.discard(on_change)

    def _notify_watchers(self) -> None:
        for on_change in tuple(self._watchers):
            on_change()

    # -- reading

    async def read(self, offset: int, max_bytes: int) -> bytes:
        """Return whole batches from `offset` on, at least one if a committed one exists.

        The first may begin before `offset`. Raises `OffsetOutOfRangeError`.
        """
        if 0 <= self.start_offset <= offset == self.high_watermark and self._is_current():
            return b""
        if offset < 0:
            raise OffsetOutOfRangeError(f"offset {offset} is negative")
        seen = self._changes
        try:
            fetched = await self._client.fetch(self.stream_id, offset, max(1, max_bytes))
        except errors.OffsetTrimmedError as error:
            raise OffsetOutOfRangeError(str(error)) from error
        if fetched.records:
            self._learn(fetched.start_offset, fetched.end_offset)
            return b"".join(_batch_of(record) for record in fetched.records)

        # A read without records has asked the controllers, so it knows the end.
        self._note_lookup(fetched.start_offset, fetched.end_offset, seen)
        if offset > self.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in {self.start_offset}..{self.high_watermark}"
            )
        return b""

    async def offset_by_time(self, timestamp: int) -> Entry | None:
        """Return time and offset of the first record not older than `timestamp`, None for none.

        If times do not ascend, the record before it is older, but earlier ones may not be.
        """
        found = await self._client.reader.offset_for_timestamp(
            self.stream_id, timestamp, timestamp_of=kafka_timestamp
        )
        if found.timestamp_ms is None:
            return None
        records = await self._client.read(self.stream_id, found.offset, max_bytes=1)
        for batch in read_batches(b"".join(_batch_of(record) for record in records)):
            entry = first_in_batch(batch, timestamp, found.offset)
            if entry is not None:
                return entry
        return found.timestamp_ms, found.offset

    def end_of_epoch(self, epoch: int) -> Entry:
        """Return the only leader epoch and the high watermark, (-1, -1) for another epoch."""
        if epoch != LEADER_EPOCH:
            return _UNKNOWN, _UNKNOWN
        return LEADER_EPOCH, self.high_watermark

    def epoch_at(self, _: int) -> int:
        """Return the leader epoch of every offset."""
        return LEADER_EPOCH

    # -- trimming

    async def trim(self, new_start: int) -> int:
        """Delete records below `new_start`, and return the start.

        Raises `OffsetOutOfRangeError` for an offset above the end.
        """
        await self.catch_up()
        if new_start > self.high_watermark:
            raise OffsetOutOfRangeError(
                f"records below {new_start} can't be deleted: the partition ends at"
                f" {self.high_watermark}"
            )
        if new_start > self.start_offset:
            trims = self._client.session.trim_streams(
                {self.stream_id: LEADER_EPOCH}, {self.stream_id: new_start}
            )
            self._learn((await trims).require_all()[self.stream_id], self.high_watermark)
        return self.start_offset

    async def retain(self) -> None:
        """Delete records older than the topic's `retention.ms`.

        A batch without a time is kept, with all after it.
        """
        age_ms = self.config.retention.age_ms
        interval_s = min(age_ms // 10, RETENTION_INTERVAL_MS) / 1000
        if age_ms < 0 or time.monotonic() - self._retained_at < interval_s:
            return
        await self.catch_up()
        if self.start_offset < self.high_watermark:
            now_ms = await self._clock()
            oldest_ms = now_ms() - age_ms
            kept = await self._client.reader.offset_for_timestamp(
                self.stream_id, oldest_ms, timestamp_of=_retention_time
            )
            await self.trim(kept.offset)
        self._retained_at = time.monotonic()

    async def _clock(self) -> Callable[[], int]:
        """Return the clock of retention. A broker with a wrong clock deletes nothing early."""
        if self._now_ms is None:
            newest = await self._client.read(self.stream_id, self.high_watermark - 1, max_bytes=1)
            stamps = [kafka_timestamp(record) for record in newest]
            subject = f"the partition on stream {self.stream_id}"
            self._now_ms = stamped_clock(subject, stamps, wall_clock_ms, _timer_ms)
        return self._now_ms


def _failure_of(committed: asyncio.Future[int]) -> BaseException | None:
    """Return why an append has failed, None while it is pending or if the batch is stored."""
    if not committed.done():
        return None
    if committed.cancelled():
        return errors.WriterClosedError("an append was cancelled")
    error = committed.exception()
    return None if isinstance(error, errors.OffsetsUnknownError) else error


def _batch_of(record: RecordBatch) -> bytes:
    return rebased(record.payload, record.base_offset, LEADER_EPOCH)


def _retention_time(record: RecordBatch) -> int:
    found = kafka_timestamp(record)
    return found if found >= 0 else _KEPT_FOREVER


def _timer_ms() -> int:
    return time.monotonic_ns() // 1_000_000
