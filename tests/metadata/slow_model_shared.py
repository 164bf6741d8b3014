"""The slow model's shared rows: appends whose offsets the commit assigns, and their producers."""

from dataclasses import dataclass, field
from typing import Any

from streammeta.controller.errors import ErrorCode, FeatureLevelError
from streammeta.controller.metadata.api import answers as a
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables import values as v
from tests.metadata.slow_model_state import State

SHARED_LEVEL = 5
NEWEST_BATCHES = 5
SEQUENCES = 2**31


@dataclass(slots=True)
class Batch:
    """One row, and the offset that it was, or was to be, given."""

    stream: int
    count: int
    producer: int
    epoch: int
    sequence: int
    code: ErrorCode = ErrorCode.NONE
    start: int = -1


@dataclass(slots=True)
class Producer:
    """What is remembered of one producer of a stream."""

    epoch: int
    last_used_ms: int
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    """(first sequence, records, start offset) of the newest, oldest first."""


def batches_of(rows: v.SharedRowColumns) -> list[Batch]:
    count = len(rows)
    producers = [
        values.tolist() if len(values) else [-1] * count
        for values in (rows.producer_id, rows.producer_epoch, rows.first_sequence)
    ]
    columns = (rows.stream_id.tolist(), rows.record_count.tolist(), *producers)
    return [Batch(*cells) for cells in zip(*columns, strict=True)]


def results_of(batches: list[Batch], committed_at_ms: int = -1) -> a.SharedRowResults | None:
    if not batches:
        return None
    return a.SharedRowResults(
        errors=v.column([int(batch.code) for batch in batches]),
        start_offset=v.column([batch.start for batch in batches]),
        committed_at_ms=committed_at_ms,
    )


def failed_batches(batches: list[Batch], error: ErrorCode) -> a.SharedRowResults | None:
    for batch in batches:
        batch.code, batch.start = error, -1
    return results_of(batches)


def rejected_batches(batches: list[Batch]) -> a.SharedRowResults | None:
    """Return the results of batches whose commit was rejected: only duplicates have an offset."""
    for batch in batches:
        batch.start = batch.start if batch.code is ErrorCode.DUPLICATE_BATCH else -1
    return results_of(batches)


def made_batches(batches: list[Batch], now: int) -> a.SharedRowResults | None:
    """Return the results of batches whose commit was made."""
    return results_of(batches, -1 if all(batch.code for batch in batches) else now)


def leaves_out(batches: list[Batch]) -> bool:
    return any(batch.code not in (ErrorCode.NONE, ErrorCode.OFFSETS_UNKNOWN) for batch in batches)


def judge(state: State, batches: list[Batch]) -> None:
    """Set the code and offset of each batch, as if the commit were made now."""
    judge_alone(state, batches)
    bad = {batch.stream for batch in batches if batch.code}
    ends = {i: stream.end for i, stream in state.streams.items()}
    for batch in batches:
        if batch.stream in bad:
            batch.code = batch.code or ErrorCode.STREAM_ROWS_REJECTED
        else:
            batch.start = ends[batch.stream]
            ends[batch.stream] += batch.count


def judge_alone(state: State, batches: list[Batch]) -> None:
    """Set the code of each batch whatever becomes of the others, and where a duplicate began."""
    seen: dict[tuple[int, int], Producer] = {}
    lengths: dict[int, int] = {}
    for batch in batches:
        lengths[batch.stream] = lengths.get(batch.stream, 0) + batch.count
    for batch in batches:
        stream = state.streams.get(batch.stream)
        if stream is None:
            batch.code = ErrorCode.STREAM_NOT_EXIST
        elif not stream.shared:
            batch.code = ErrorCode.STREAM_KIND_MISMATCH
        elif stream.end + lengths[batch.stream] >= 2**63:
            batch.code = ErrorCode.OFFSET_NOT_MATCHED
        else:
            _judge_sequence(state, batch, seen)


def _judge_sequence(state: State, batch: Batch, seen: dict[tuple[int, int], Producer]) -> None:
    if batch.producer < 0:
        return
    key = (batch.stream, batch.producer)
    known = seen.get(key) or state.producers.get(key)
    if known is not None:
        batch.code, batch.start = _sequence_code(known, batch)
    if not batch.code:
        entry = (batch.sequence, batch.count, -1)
        earlier = known.batches if known is not None and known.epoch == batch.epoch else []
        seen[key] = Producer(batch.epoch, 0, [*earlier, entry][-NEWEST_BATCHES:])


def _sequence_code(known: Producer, batch: Batch) -> tuple[ErrorCode, int]:
    if batch.epoch < known.epoch:
        return ErrorCode.PRODUCER_FENCED, -1
    if batch.epoch > known.epoch:
        starts_anew = batch.sequence == 0
        return (ErrorCode.NONE if starts_anew else ErrorCode.OUT_OF_ORDER_SEQUENCE), -1
    for sequence, count, start in known.batches:
        if (sequence, count) == (batch.sequence, batch.count):
            return ErrorCode.DUPLICATE_BATCH, start
    sequence, count, _ = known.batches[-1]
    follows = batch.sequence == (sequence + count) % SEQUENCES
    return (ErrorCode.NONE if follows else ErrorCode.OUT_OF_ORDER_SEQUENCE), -1


def append(
    state: State, batches: list[Batch], object_id: int, content: Any, now: int
) -> list[tuple[int, int, int]]:
    """Remember the producers of accepted batches, and the others; return the object's ranges."""
    spans: dict[int, tuple[int, int]] = {}
    for batch in batches:
        if batch.code:
            state.rejected.setdefault((str(content), object_id, batch.stream), batch.code)
            continue
        end = batch.start + batch.count
        spans[batch.stream] = (spans.get(batch.stream, (batch.start, 0))[0], end)
        if batch.producer >= 0:
            key = (batch.stream, batch.producer)
            known = state.producers.get(key)
            if known is None or known.epoch != batch.epoch:
                known = state.producers[key] = Producer(batch.epoch, now)
            known.last_used_ms = now
            entry = (batch.sequence, batch.count, batch.start)
            known.batches = [*known.batches, entry][-NEWEST_BATCHES:]
    return [(stream, start, end) for stream, (start, end) in spans.items()]


def repeat(
    state: State, batches: list[Batch], object_id: int, content: Any
) -> a.SharedRowResults | None:
    """Return the results of the first time, as far as they are still known."""
    judge_alone(state, batches)
    item = state.objects.get(object_id)
    is_held = item is not None and item.state is v.ObjectState.COMMITTED
    bases = {stream: start for stream, start, _ in item.held} if item and is_held else {}
    for batch in batches:
        if batch.stream in bases:
            batch.code, batch.start = ErrorCode.NONE, bases[batch.stream]
            bases[batch.stream] += batch.count
        elif not is_held and not state.rejected.get((str(content), object_id, batch.stream)):
            is_known = batch.code is ErrorCode.DUPLICATE_BATCH
            batch.code = ErrorCode.NONE if is_known else ErrorCode.OFFSETS_UNKNOWN
            batch.start = batch.start if is_known else -1
        elif not batch.code:
            batch.code = ErrorCode.STREAM_ROWS_REJECTED
    return results_of(batches, item.timestamp if item is not None and is_held else -1)


def issue(state: State, request: r.IssueProducerIds) -> a.IssueProducerIdsAnswer:
    error = state.check(request.node)
    if error:
        return a.IssueProducerIdsAnswer(error=error)
    if state.feature_level < SHARED_LEVEL:
        raise FeatureLevelError(SHARED_LEVEL, "idempotent producers")
    first, state.next_producer = state.next_producer, state.next_producer + request.count
    return a.IssueProducerIdsAnswer(error=error, first_producer_id=first)


def expire(state: State, request: r.ExpireProducers, now: int) -> a.ExpireProducersAnswer:
    """Oldest first."""
    idle = sorted(
        (producer.last_used_ms, *key)
        for key, producer in state.producers.items()
        if request.since_ms <= producer.last_used_ms + request.idle_ms < now
    )
    for _, stream_id, producer_id in idle[: request.limit]:
        del state.producers[(stream_id, producer_id)]
    return a.ExpireProducersAnswer(expired=len(idle[: request.limit]))
