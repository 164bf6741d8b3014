"""Opening of a partition log: creation, replay of its MetaStream, and recovery of the tail.

The streams of a partition are opened at the leader epoch before anything is read from them. That
fences every earlier owner.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from streammeta.brokers.partition.errors import DamagedPartitionError
from streammeta.brokers.partition.log import LogConfig, PartitionLog
from streammeta.brokers.partition.log_clock import log_clock, wall_clock_ms
from streammeta.brokers.partition.meta_map import LEADER_EPOCHS, LOG, PARTITION, PRODUCER_SNAPSHOTS
from streammeta.brokers.partition.meta_stream import MetaStream
from streammeta.brokers.partition.producer_state import ProducerStates
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.brokers.partition.segments import Segment, cut, decode_log, encode_log
from streammeta.brokers.partition.state import Entry, LeaderEpochs, LogState, decode_entries
from streammeta.brokers.partition.streams import Streams
from streammeta.client import OpenedStream
from streammeta.storage.inspection.kafka_batch import KafkaBatch
from streammeta.storage.inspection.meta_stream import LeaderEpochs as EpochsValue

_RECOVERY_BYTES = 8 * 1024 * 1024


async def create_meta_stream(streams: Streams, topic_id: str, partition: int) -> int:
    """Create the MetaStream of a new partition, and return its id."""
    (stream_id,) = await streams.create_streams([partition_tags(topic_id, partition)])
    return stream_id


def partition_tags(topic_id: str, partition: int) -> Mapping[str, str]:
    """Return the tags of a partition's streams: topic id, and partition in hex."""
    return {"0": topic_id, "1": f"{partition:x}"}


async def open_log(
    streams: Streams,
    meta_id: int,
    epoch: int,
    tags: Mapping[str, str],
    config: LogConfig | None = None,
    now_ms: Callable[[], int] | None = None,
) -> PartitionLog:
    """Open the partition with the MetaStream `meta_id`, at a leader epoch of this process.

    The first opening creates its other streams with `tags`. Without `now_ms` the log uses a
    `log_clock`. Raises the errors of opening a stream, such as `StreamFencedError` for an outdated
    epoch, and `DamagedPartitionError`.
    """
    config = LogConfig() if config is None else config
    opened = (await streams.open_streams({meta_id: epoch})).require_all()[meta_id]
    meta = await MetaStream.replay(streams, meta_id, opened.start_offset, opened.next_offset)
    wall_ms = now_ms or wall_clock_ms
    names, segments = await _read_or_create_layout(streams, meta, tags, wall_ms)
    now_ms = now_ms or log_clock(segments)
    ids = [names["log"], names["tim"]]
    # Opening fences the former owner, so the offsets read below can no longer change.
    both = (await streams.open_streams(dict.fromkeys(ids, epoch))).require_all()
    state = await _recover(streams, meta, both[ids[0]], both[ids[1]], segments, now_ms())
    log = PartitionLog(streams, meta, meta_id, state, epoch, config, now_ms, wall_ms)
    await log.start_epoch()
    return log


async def _read_or_create_layout(
    streams: Streams, meta: MetaStream, tags: Mapping[str, str], now_ms: Callable[[], int]
) -> tuple[Mapping[str, int], list[Segment]]:
    """Return the streams by name and the segments. Missing ones are created durably."""
    value = _value(meta, LOG)
    if value is not None:
        try:
            return decode_log(value)
        except (KeyError, TypeError) as error:
            raise DamagedPartitionError(f"the value LOG has no field {error!r}") from error
    log_id, time_id = await streams.create_streams([tags, tags])
    names = {"log": log_id, "tim": time_id, "txn": -1}
    segments = [Segment(base_offset=0, created_ms=now_ms())]
    # Durable before use: otherwise a crash would lose the ids of streams that contain batches.
    await (await meta.put({LOG: encode_log(names, segments)}))
    return names, segments


def _value(meta: MetaStream, key: str) -> Any:
    entry = meta.entry(key)
    return None if entry is None else entry.value


async def _recover(
    streams: Streams,
    meta: MetaStream,
    log: OpenedStream,
    times: OpenedStream,
    segments: list[Segment],
    now_ms: int,
) -> LogState:
    epochs: EpochsValue | None = _value(meta, LEADER_EPOCHS)
    partition = _value(meta, PARTITION) or {"s": 0, "r": 0}
    is_ahead = partition["r"] > log.next_offset
    if is_ahead:  # batches before the checkpoint were not committed
        segments = cut(segments, log.next_offset, times.next_offset, now_ms)

    state = LogState(
        log_id=log.stream_id,
        time_id=times.stream_id,
        start_offset=max(log.start_offset, partition["s"]),
        end_offset=log.next_offset,
        segments=segments,
        times=await _saved_times(streams, times, segments[-1]),
        producers=_newest_snapshot(meta, log.next_offset),
        epochs=LeaderEpochs(() if epochs is None else epochs.entries),
    )
    if is_ahead:
        offset = max(state.producers.map_end, log.start_offset)
        await _read_producers(streams, state, offset, now_ms)
    else:
        await _read_tail(streams, state, max(partition["r"], log.start_offset), now_ms)

    return state


def _newest_snapshot(meta: MetaStream, end: int) -> ProducerStates:
    snapshots = _value(meta, PRODUCER_SNAPSHOTS) or ()
    # A checkpoint may be newer than the data, see `_snapshots_with`.
    fitting = [snapshot for snapshot in snapshots if snapshot.offset <= end]
    if not fitting:
        return ProducerStates()
    newest = max(fitting, key=lambda one: one.offset)
    return ProducerStates.of_snapshot(newest.offset, newest.producers)


async def _saved_times(streams: Streams, opened: OpenedStream, active: Segment) -> list[Entry]:
    rows = bytearray()
    at = max(active.time_start, opened.start_offset)
    while at < opened.next_offset:
        fetched = await streams.fetch(opened.stream_id, at, _RECOVERY_BYTES)
        rows.extend(b"".join(record.payload for record in fetched.records))
        at = fetched.next_offset
    return decode_entries(bytes(rows), active.base_offset)


async def _read_tail(streams: Streams, state: LogState, offset: int, now_ms: int) -> None:
    """Apply the batches from `offset` on to the state, as their appends did.

    The times of the appends are unknown, so plausible times of the records replace them.
    """
    async for batch in _batches(streams, state, offset):
        # A time after now would keep the segment forever, and 0 means that there is none.
        time_ms = batch.max_timestamp if 0 < batch.max_timestamp < now_ms else now_ms
        state.take(batch, batch.base_offset, time_ms)
        state.epochs.assign(batch.partition_leader_epoch, batch.base_offset)


async def _read_producers(streams: Streams, state: LogState, offset: int, now_ms: int) -> None:
    """Apply the batches from `offset` on to the state of the producers alone."""
    async for batch in _batches(streams, state, offset):
        state.producers.record(batch, batch.base_offset, now_ms)


async def _batches(streams: Streams, state: LogState, offset: int) -> AsyncIterator[KafkaBatch]:
    end = state.end_offset  # state.end_offset moves with every batch
    while offset < end:
        fetched = await streams.fetch(state.log_id, offset, _RECOVERY_BYTES)
        for record in fetched.records:
            for batch in read_batches(record.payload):
                yield batch
        offset = fetched.next_offset
