"""Handlers of record APIs: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, DeleteRecords.

A handler that waits has two parts: the part that runs in the order of the connection, and a
coroutine of the answer, which later requests need not wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from streammeta.brokers.kafka.cluster.broker import Broker, Log
from streammeta.brokers.kafka.cluster.refused_batches import TOPIC_MAX
from streammeta.brokers.kafka.diskless.partition import DisklessAppend, DisklessPartition
from streammeta.brokers.kafka.protocol.codes import NO_TRANSACTIONS, Code, KafkaError, code_of
from streammeta.brokers.kafka.protocol.wire import Request, Tree
from streammeta.brokers.partition.errors import PartitionError
from streammeta.brokers.partition.log import Appended
from streammeta.brokers.partition.state import Entry
from streammeta.brokers.partition.time_search import offset_by_time
from streammeta.client.errors import BrokerClientError, StorageError
from streammeta.rpc import tracing
from streammeta.rpc.tracing import OpenSpan

FAILURES = (KafkaError, PartitionError, BrokerClientError, StorageError)
"""Errors that become the answer of an item."""

_RETRIED = frozenset(
    (
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.STORAGE_ERROR,
        Code.REQUEST_TIMED_OUT,
    )
)
"""Errors after which an idempotent producer resends the same batch."""
_LATEST, _EARLIEST = -1, -2
_TURN_ROWS_MAX = 500
"""Partitions of a Fetch that are read in one turn of the event loop."""
_FETCH_MAX_BYTES = 55 * 1024 * 1024
_NAMED_MAX = 5
UNANSWERED_WITHIN_S = 30.0
"""Minimum time to store batches with acks=0, in seconds. Their timeout concerns replicas only."""
_CONNECTION_ENDED = "the connection ended before the answer"

Answer = Coroutine[Any, Any, Tree | None]


class UnansweredRefusalError(Exception):
    """Batches without an answer (acks 0) were not stored. Their connection must be closed."""

    def __init__(self, refused: Sequence[str]) -> None:
        named = ", ".join(refused[:_NAMED_MAX])
        super().__init__(f"{len(refused)} batches with acks=0 were not stored: {named}")


async def produce(broker: Broker, request: Request) -> Answer:
    """Append batches in order. The answer comes when they are durable, and not at all for acks 0.

    With acks 0 the answer raises `UnansweredRefusalError` if a batch is rejected or lost.
    """
    body = request.body
    items = [
        _Produced(topic.name, item.index, bytes(item.records or b""))
        for topic in body.topic_data
        for item in topic.partition_data
    ]
    span = tracing.begin("streammeta.kafka.Produce")
    with span.current():
        for item in items:
            try:
                _check_acks(body)
                await _admit(broker, item)
            except FAILURES as error:
                item.refused = error

    return (
        _answer_traced(span, broker, body, items)
        if tracing.is_on()
        else _answer_produce(broker, body, items)
    )


@dataclass(slots=True)
class _Produced:
    """A batch for a partition: appended to its log, or rejected."""

    topic: str
    partition: int
    records: bytes
    log: Log | None = None
    appended: Appended | DisklessAppend | None = None
    refused: Exception | None = None


async def _admit(broker: Broker, item: _Produced) -> None:
    """Append a batch, unless it follows a rejected one that was not resent."""
    if broker.refused and broker.refused.is_overtaking(item.topic, item.partition, item.records):
        # The overtaking batch itself is rejected, so those after it must be rejected too.
        broker.refused.note(item.topic, item.partition, item.records)
        raise KafkaError(Code.NOT_LEADER_OR_FOLLOWER, "an earlier batch of the producer is missing")
    try:
        log = broker.served(item.topic, item.partition)
        item.log, item.appended = log, await log.append(item.records)
    except FAILURES as error:
        if code_of(error) in _RETRIED:
            broker.refused.note(item.topic, item.partition, item.records)
        raise
    broker.tally.produced_bytes += len(item.records)
    item.appended.durable.add_done_callback(partial(_note_failed, broker, item))


def _note_failed(broker: Broker, item: _Produced, durable: asyncio.Future[None]) -> None:
    """Record immediately that a log failed to store a batch which its producer will resend.

    The answer may come much later, because of other partitions of the request, or may have been
    sent at its timeout. By then the log may be open again and accept the following batches.
    """
    if _code_of_append(durable) in _RETRIED:
        broker.refused.note(item.topic, item.partition, item.records)


def _check_acks(body: Any) -> None:
    if body.acks not in (-1, 0, 1):
        raise KafkaError(Code.INVALID_REQUIRED_ACKS)
    if body.transactional_id is not None:
        raise KafkaError(Code.INVALID_REQUEST, NO_TRANSACTIONS)


async def _answer_produce(broker: Broker, body: Any, items: Sequence[_Produced]) -> Tree | None:
    # A rejected batch is known at once, and the connection ends without waiting for the others.
    if body.acks == 0:
        _require_stored([item for item in items if item.refused is not None])

    futures = [item.appended.durable for item in items if item.appended is not None]
    if futures:
        # Zero would make asyncio.wait return before it looks at finished futures.
        least_s = UNANSWERED_WITHIN_S if body.acks == 0 else 0.001
        await asyncio.wait(futures, timeout=max(body.timeout.total_seconds(), least_s))
    if body.acks == 0:
        _require_stored(items)
        return None

    rows = [(item.topic, _produce_row(item)) for item in items]

    return {
        "responses": [
            {"name": name, "partition_responses": [row for _, row in of_topic]}
            for name, of_topic in groupby(rows, key=lambda row: row[0])
        ]
    }


def _require_stored(items: Sequence[_Produced]) -> None:
    """Raise `UnansweredRefusalError` for batches that are not known to be stored."""
    outcomes = [(item, _outcome(item)) for item in items]
    refused = [
        f"{item.topic[:TOPIC_MAX]!r}-{item.partition} {code.name}"
        for item, code in outcomes
        if code is not Code.NONE
    ]
    if refused:
        raise UnansweredRefusalError(refused)


async def _answer_traced(
    span: OpenSpan, broker: Broker, body: Any, items: Sequence[_Produced]
) -> Tree | None:
    """Answer a Produce, and end its span with the outcomes of its batches."""
    errors = _CONNECTION_ENDED
    try:
        tree = await _answer_produce(broker, body, items)
        errors = _names(map(_outcome, items))
    finally:
        sent = sum(len(item.records) for item in items)
        span.end(errors, {"partitions": len(items), "bytes": sent})
    return tree


def _names(codes: Iterable[Code]) -> str:
    """Return the distinct names of the errors among the codes."""
    return ", ".join(code.name for code in sorted(set(codes) - {Code.NONE}))


def _outcome(item: _Produced) -> Code:
    """Return the current outcome of a batch."""
    if item.appended is None:
        assert item.refused is not None
        return code_of(item.refused)
    if not item.appended.durable.done():
        return Code.REQUEST_TIMED_OUT
    return _code_of_append(item.appended.durable)


def _code_of_append(durable: asyncio.Future[None]) -> Code:
    """Return the outcome of an append that has ended."""
    if durable.cancelled():
        return Code.NOT_LEADER_OR_FOLLOWER
    error = durable.exception()
    return Code.NONE if error is None else code_of(error)


def _produce_row(item: _Produced) -> Tree:
    code = _outcome(item)
    if item.log is None or item.appended is None:
        return {
            "index": item.partition,
            "error_code": code,
            "base_offset": -1,
            "error_message": str(item.refused),
        }
    return {
        "index": item.partition,
        "error_code": code,
        "base_offset": item.appended.base_offset if code is Code.NONE else -1,
        "log_start_offset": item.log.start_offset,
    }


async def fetch(broker: Broker, request: Request) -> Answer:
    """Read from many partitions. Wait for `min_bytes` or the timeout."""
    return _answer_fetch(broker, request.body)


async def _answer_fetch(broker: Broker, body: Any) -> Tree:
    changed = asyncio.Event()
    deadline = asyncio.get_running_loop().time() + body.max_wait.total_seconds()
    span = tracing.begin("streammeta.kafka.Fetch")
    with contextlib.ExitStack() as stack:
        stack.enter_context(span.current())
        for log, _ in _places(broker, body):
            # Watch before the first read: a record appended in between must wake this call.
            stack.enter_context(log.watched(changed.set))
        while True:
            changed.clear()
            responses, size, has_error = await _fetch_once(broker, body)
            # An error is reported immediately, as the client may need a new leader.
            if size >= body.min_bytes or has_error:
                break
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                break

    _end_fetch(span, responses, size)
    broker.tally.fetched_bytes += size

    return {"error_code": Code.NONE, "session_id": 0, "responses": responses}


def _end_fetch(span: OpenSpan, responses: Sequence[Tree], size: int) -> None:
    """End the span of a Fetch that returned records or an error. Drop an empty one."""
    if not tracing.is_on():
        return
    rows = [row for topic in responses for row in topic["partitions"]]
    errors = _names(row["error_code"] for row in rows)
    if not (size or errors):
        span.drop()
    span.end(errors, {"partitions": len(rows), "bytes": size})


def _places(broker: Broker, body: Any) -> list[tuple[Log, int]]:
    """Return what serves the partitions of a Fetch, with the offsets."""
    found = []
    for topic in body.topics:
        for item in topic.partitions:
            with contextlib.suppress(KafkaError):
                found.append((broker.served(topic.topic, item.partition), item.fetch_offset))
    return found


async def _look_up_ends(broker: Broker, body: Any) -> None:
    """Look the ends of diskless partitions up together, where a read may find nothing."""
    unknown = [
        log
        for log, offset in _places(broker, body)
        if isinstance(log, DisklessPartition) and log.may_end_at(offset)
    ]
    # A read of one partition looks its end up itself. Failures recur there too.
    if len(unknown) > 1:
        await asyncio.gather(*(log.catch_up() for log in unknown), return_exceptions=True)


async def _fetch_once(broker: Broker, body: Any) -> tuple[Sequence[Tree], int, bool]:
    # Kafka's own bound on a Fetch. A client's larger value would exhaust this broker's memory.
    left = min(body.max_bytes, _FETCH_MAX_BYTES)
    size, has_error, asked = 0, False, 0
    await _look_up_ends(broker, body)
    responses: list[Tree] = []
    for topic in body.topics:
        rows = []
        for item in topic.partitions:
            asked += 1
            if asked % _TURN_ROWS_MAX == 0:
                await asyncio.sleep(0)  # reading an unchanged partition never yields
            row = await _fetch_row(broker, topic.topic, item, left - size, is_first=size == 0)
            size += len(row["records"])
            has_error = has_error or row["error_code"] is not Code.NONE
            rows.append(row)
        responses.append({"topic": topic.topic, "partitions": rows})

    return responses, size, has_error


async def _fetch_row(broker: Broker, topic: str, item: Any, left: int, *, is_first: bool) -> Tree:
    row = {
        "partition_index": item.partition,
        "error_code": Code.NONE,
        "high_watermark": -1,
        "last_stable_offset": -1,
        "log_start_offset": -1,
        "aborted_transactions": None,
        "records": b"",
    }
    try:
        epoch = getattr(item, "current_leader_epoch", -1)
        log = broker.served(topic, item.partition, epoch)
        wanted = min(item.partition_max_bytes, left)
        data = b""
        if wanted > 0 or is_first:
            # KIP-74: the first batch is returned even if it exceeds the limit, so that a consumer
            # progresses.
            data = await log.read(item.fetch_offset, max(wanted, 1))
        elif isinstance(log, DisklessPartition) and log.high_watermark < 0:
            await log.catch_up()
        row |= {
            "high_watermark": log.high_watermark,
            # Without transactions every durable record is stable.
            "last_stable_offset": log.high_watermark,
            "log_start_offset": log.start_offset,
            "records": data if is_first or len(data) <= left else b"",
        }
    except FAILURES as error:
        row["error_code"] = code_of(error)

    return row


async def list_offsets(broker: Broker, request: Request) -> Tree:
    """Return offsets by time, or the first and the next offset of partitions."""
    topics = []
    for topic in request.body.topics:
        rows = [await _offset_row(broker, topic.name, item) for item in topic.partitions]
        topics.append({"name": topic.name, "partitions": rows})
    return {"topics": topics}


async def _offset_row(broker: Broker, topic: str, item: Any) -> Tree:
    row = {"partition_index": item.partition_index, "error_code": Code.NONE}
    try:
        epoch = getattr(item, "current_leader_epoch", -1)
        log = broker.served(topic, item.partition_index, epoch)
        await _catch_up(log)
        if item.timestamp == _LATEST:
            time, offset = -1, log.high_watermark
        elif item.timestamp == _EARLIEST:
            time, offset = -1, log.start_offset
        else:
            time, offset = await _offset_by_time(log, item.timestamp) or (-1, -1)
        return {**row, "timestamp": time, "offset": offset, "leader_epoch": log.epoch_at(offset)}
    except FAILURES as error:
        return {**row, "error_code": code_of(error), "timestamp": -1, "offset": -1}


async def _catch_up(log: Log) -> None:
    """Learn the bounds of a partition that others write too."""
    if isinstance(log, DisklessPartition):
        await log.catch_up()


async def _offset_by_time(log: Log, timestamp: int) -> Entry | None:
    if isinstance(log, DisklessPartition):
        return await log.offset_by_time(timestamp)
    return await offset_by_time(log, timestamp)


async def offset_for_leader_epoch(broker: Broker, request: Request) -> Tree:
    """Return the end offsets of leader epochs."""
    topics = []
    for topic in request.body.topics:
        rows = []
        for item in topic.partitions:
            row: dict[str, Any] = {"partition": item.partition, "error_code": Code.NONE}
            try:
                log = broker.served(topic.topic, item.partition, item.current_leader_epoch)
                await _catch_up(log)
                epoch, end = log.end_of_epoch(item.leader_epoch)
                row |= {"leader_epoch": epoch, "end_offset": end}
            except FAILURES as error:
                row |= {"error_code": code_of(error), "leader_epoch": -1, "end_offset": -1}
            rows.append(row)
        topics.append({"topic": topic.topic, "partitions": rows})
    return {"topics": topics}


async def delete_records(broker: Broker, request: Request) -> Tree:
    """Delete records below offsets. -1 stands for the high watermark."""
    topics = []
    for topic in request.body.topics:
        rows = []
        for item in topic.partitions:
            row: dict[str, Any] = {"partition_index": item.partition_index}
            try:
                log = broker.served(topic.name, item.partition_index)
                await _catch_up(log)
                start = await log.trim(log.high_watermark if item.offset == -1 else item.offset)
                row |= {"error_code": Code.NONE, "low_watermark": start}
            except FAILURES as error:
                row |= {"error_code": code_of(error), "low_watermark": -1}
            rows.append(row)
        topics.append({"name": topic.name, "partitions": rows})
    return {"topics": topics}
