"""Calls about records: what is acknowledged, what is read, and how much, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from streammeta.brokers.kafka.calls import record_calls
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import ClusterView, Topic
from streammeta.brokers.kafka.cluster.refused_batches import TOPIC_MAX
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.kafka.protocol.wire import Request, read_request
from streammeta.brokers.partition.log import PartitionLog
from streammeta.brokers.partition.opening import create_meta_stream, open_log, partition_tags
from streammeta.client.errors import BrokerClientError
from tests.kit.kafka_batches import plain, sequenced
from tests.kit.kafka_wire import produce_tree, request_bytes
from tests.kit.memory_streams import MemoryStreams, StreamTable

_TOPIC = Topic("t", "id", 3, {})
_SHORT_MS = 1
_LONG_MS = 60_000


class World:
    """A broker that leads partitions of one topic, each on streams of its own process."""

    def __init__(self) -> None:
        nobody: Any = None
        self.broker = Broker(nobody, nobody, "c", 1, view=ClusterView(topics={"t": _TOPIC}))
        self.table = StreamTable()
        self.streams: dict[int, MemoryStreams] = {}
        self.metas: dict[int, int] = {}

    async def lead(self, partition: int, epoch: int = 0) -> PartitionLog:
        streams = self.streams[partition] = MemoryStreams(self.table)
        if partition not in self.metas:
            self.metas[partition] = await create_meta_stream(streams, "id", partition)
        tags = partition_tags("id", partition)
        log = await open_log(streams, self.metas[partition], epoch, tags)
        self.broker.logs["id", partition] = log
        return log

    async def begin(
        self,
        batches: Mapping[int, bytes],
        timeout_ms: int = _LONG_MS,
        topic: str = "t",
        acks: int = -1,
    ) -> record_calls.Answer:
        tree = produce_tree(batches, topic, acks=acks, timeout_ms=timeout_ms)
        return await record_calls.produce(self.broker, _request(0, 8, tree))

    async def produce(
        self, batches: Mapping[int, bytes], **asked: Any
    ) -> dict[int, tuple[Code, int]]:
        return _outcomes(await (await self.begin(batches, **asked)))

    async def fetch(
        self,
        *places: tuple[int, int],
        max_bytes: int = 2**20,
        min_bytes: int = 0,
        wait_ms: int = 0,
        epoch: int = -1,
    ) -> list[Any]:
        """Fetch from partitions at offsets; return their rows."""
        rows = [
            {
                "partition": partition,
                "current_leader_epoch": epoch,
                "fetch_offset": offset,
                "log_start_offset": -1,
                "partition_max_bytes": 2**20,
            }
            for partition, offset in places
        ]
        tree = {
            "replica_id": -1,
            "max_wait": wait_ms,
            "min_bytes": min_bytes,
            "max_bytes": max_bytes,
            "topics": [{"topic": "t", "partitions": rows}],
        }
        answer: Any = await (await record_calls.fetch(self.broker, _request(1, 11, tree)))
        return list(answer["responses"][0]["partitions"])

    async def delete_below(self, offset: int) -> tuple[Code, int]:
        rows = [{"partition_index": 0, "offset": offset}]
        tree = {"topics": [{"name": "t", "partitions": rows}], "timeout": _LONG_MS}
        answer: Any = await record_calls.delete_records(self.broker, _request(21, 1, tree))
        (row,) = answer["topics"][0]["partitions"]
        return row["error_code"], row["low_watermark"]

    async def offset_of(self, timestamp: int, epoch: int = -1) -> tuple[Code, int]:
        row = {"partition_index": 0, "current_leader_epoch": epoch, "timestamp": timestamp}
        topics = [{"name": "t", "partitions": [row]}]
        tree = {"replica_id": -1, "isolation_level": 0, "topics": topics}
        answer: Any = await record_calls.list_offsets(self.broker, _request(2, 5, tree))
        (found,) = answer["topics"][0]["partitions"]
        return found["error_code"], found["offset"]

    async def end_of_epoch(self, epoch: int) -> tuple[Code, int, int]:
        row = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": epoch}
        tree = {"replica_id": -1, "topics": [{"topic": "t", "partitions": [row]}]}
        answer: Any = await record_calls.offset_for_leader_epoch(self.broker, _request(23, 3, tree))
        (found,) = answer["topics"][0]["partitions"]
        return found["error_code"], found["leader_epoch"], found["end_offset"]


@pytest.fixture
async def world() -> World:
    """Return a broker that leads partition 0."""
    found = World()
    await found.lead(0)
    return found


def _request(api: int, version: int, tree: Any) -> Request:
    return read_request(request_bytes(api, version, tree))


def _outcomes(answer: Any) -> dict[int, tuple[Code, int]]:
    (topic,) = answer["responses"]
    rows = topic["partition_responses"]
    return {row["index"]: (row["error_code"], row["base_offset"]) for row in rows}


def _first(base: int) -> bytes:
    return sequenced(7, 0, base, 10)


# -- Produce


async def test_a_batch_is_acknowledged_when_it_is_durable_and_not_when_time_is_over(
    world: World,
) -> None:
    world.streams[0].holds_back = True
    late = await world.produce({0: plain("a")}, timeout_ms=_SHORT_MS)
    assert late == {0: (Code.REQUEST_TIMED_OUT, -1)}
    answering = asyncio.ensure_future(await world.begin({0: plain("b")}))
    await asyncio.sleep(0)
    assert not answering.done()
    world.streams[0].settle()
    assert _outcomes(await answering) == {0: (Code.NONE, 1)}


@pytest.mark.parametrize("acks", [1, -1])
async def test_all_acks_wait_for_the_store(world: World, acks: int) -> None:
    world.streams[0].holds_back = True
    late = await world.produce({0: plain("a")}, timeout_ms=_SHORT_MS, acks=acks)
    assert late == {0: (Code.REQUEST_TIMED_OUT, -1)}


async def test_acks_0_has_no_answer_and_other_acks_write_nothing(world: World) -> None:
    log = world.broker.logs["id", 0]
    assert await (await world.begin({0: plain("a")}, acks=0)) is None
    assert log.high_watermark == 1
    refused = await world.produce({0: plain("b")}, acks=2)
    assert refused == {0: (Code.INVALID_REQUIRED_ACKS, -1)}
    assert log.high_watermark == 1


async def test_a_refused_batch_without_an_answer_ends_its_connection(world: World) -> None:
    """Nothing else would say so: the producer takes what it has sent for stored."""
    for batches in ({1: plain("a")}, {0: plain("a"), 9: plain("b")}, {0: b"no batch"}):
        with pytest.raises(record_calls.UnansweredRefusalError, match="'t'-"):
            await (await world.begin(batches, acks=0))
    with pytest.raises(record_calls.UnansweredRefusalError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        await (await world.begin({0: plain("a")}, topic="absent", acks=0))


async def test_a_batch_without_an_answer_that_is_lost_later_ends_its_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_calls, "UNANSWERED_WITHIN_S", 0.001)
    streams = world.streams[0]
    streams.holds_back = True
    for failure in (OSError("the store is gone"), None):
        if failure is None:
            await world.lead(0, epoch=1)
            world.streams[0].holds_back = True
        timeout_ms = _LONG_MS if failure is not None else _SHORT_MS
        answering = asyncio.ensure_future(
            await world.begin({0: plain("a")}, acks=0, timeout_ms=timeout_ms)
        )
        if failure is not None:
            streams.pending.pop().future.set_exception(failure)
        with pytest.raises(record_calls.UnansweredRefusalError, match="'t'-0"):
            await answering


async def test_a_batch_without_an_answer_may_be_stored_after_its_timeout(world: World) -> None:
    """Apache Kafka overlooks the timeout with acks=0, and some clients send 0."""
    streams = world.streams[0]
    streams.holds_back = True
    answering = asyncio.ensure_future(
        await world.begin({0: plain("a")}, acks=0, timeout_ms=_SHORT_MS)
    )
    done, _ = await asyncio.wait([answering], timeout=10 * _SHORT_MS / 1000)
    assert not done
    streams.settle()
    assert await answering is None


async def test_a_refusal_names_topics_on_one_line_of_the_log() -> None:
    world = World()
    with pytest.raises(record_calls.UnansweredRefusalError, match=r"'a\\nb'-0 UNKNOWN_TOPIC"):
        await (await world.begin({0: plain("a")}, topic="a\nb", acks=0))


async def test_a_refusal_without_an_answer_does_not_wait_for_other_partitions(world: World) -> None:
    world.streams[0].holds_back = True
    with pytest.raises(record_calls.UnansweredRefusalError):
        await (await world.begin({0: plain("a"), 1: plain("b")}, acks=0))
    world.streams[0].settle()


async def test_a_batch_of_a_transaction_is_not_written(world: World) -> None:
    log = world.broker.logs["id", 0]
    tree = {**produce_tree({0: plain("a")}), "transactional_id": "x"}
    answer = await (await record_calls.produce(world.broker, _request(0, 8, tree)))
    assert _outcomes(answer) == {0: (Code.INVALID_REQUEST, -1)}
    assert log.high_watermark == 0


async def test_a_refused_partition_does_not_refuse_the_others(world: World) -> None:
    await world.lead(2)
    answer = await world.produce({0: plain("a"), 1: plain("b"), 2: plain("c", "d"), 9: plain("e")})
    assert answer == {
        0: (Code.NONE, 0),
        1: (Code.NOT_LEADER_OR_FOLLOWER, -1),
        2: (Code.NONE, 0),
        9: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1),
    }


async def test_no_batch_overtakes_one_that_failed_beside_a_slow_partition(world: World) -> None:
    """The answer to the first request waits for partition 1 while 0 is open again."""
    await world.lead(1)
    for streams in world.streams.values():
        streams.holds_back = True
    answering = asyncio.ensure_future(await world.begin({0: _first(0), 1: plain("slow")}))
    await _fail(world, 0)
    await world.lead(0, epoch=1)
    assert await world.produce({0: _first(10)}) == {0: (Code.NOT_LEADER_OR_FOLLOWER, -1)}
    world.streams[1].settle()
    assert _outcomes(await answering)[0] == (Code.NOT_LEADER_OR_FOLLOWER, -1)
    assert await world.produce({0: _first(0)}) == {0: (Code.NONE, 0)}
    assert await world.produce({0: _first(10)}) == {0: (Code.NONE, 10)}


async def test_no_batch_overtakes_one_that_fails_after_its_time_was_over(world: World) -> None:
    world.streams[0].holds_back = True
    late = await world.produce({0: _first(0)}, timeout_ms=_SHORT_MS)
    assert late == {0: (Code.REQUEST_TIMED_OUT, -1)}
    await _fail(world, 0)
    await world.lead(0, epoch=1)
    assert await world.produce({0: _first(10)}) == {0: (Code.NOT_LEADER_OR_FOLLOWER, -1)}
    assert await world.produce({0: _first(0)}) == {0: (Code.NONE, 0)}


async def test_no_batch_overtakes_one_of_a_topic_that_was_not_known_yet(world: World) -> None:
    known, world.broker.view = world.broker.view, ClusterView()
    refused = await world.produce({0: _first(0)})
    assert refused == {0: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)}
    world.broker.view = known
    assert await world.produce({0: _first(10)}) == {0: (Code.NOT_LEADER_OR_FOLLOWER, -1)}
    assert await world.produce({0: _first(0)}) == {0: (Code.NONE, 0)}


async def test_no_batch_overtakes_one_that_the_writer_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise BrokerClientError("the writer is closing")

    with monkeypatch.context() as patch:
        patch.setattr(world.streams[0], "append", refuse)
        assert await world.produce({0: _first(0)}) == {0: (Code.STORAGE_ERROR, -1)}
    assert await world.produce({0: _first(10)}) == {0: (Code.NOT_LEADER_OR_FOLLOWER, -1)}
    assert await world.produce({0: _first(0)}) == {0: (Code.NONE, 0)}


async def test_a_name_that_no_topic_has_is_not_remembered() -> None:
    world = World()
    await world.produce({0: _first(0)}, topic="x" * (TOPIC_MAX + 1))
    assert len(world.broker.refused) == 0
    await world.produce({0: _first(0)}, topic="x" * TOPIC_MAX)
    assert len(world.broker.refused) == 1


async def test_batches_without_a_producer_id_are_never_held_back() -> None:
    world = World()
    assert await world.produce({0: plain("a")}) == {0: (Code.NOT_LEADER_OR_FOLLOWER, -1)}
    assert len(world.broker.refused) == 0
    await world.lead(0)
    assert await world.produce({0: plain("b")}) == {0: (Code.NONE, 0)}


async def _fail(world: World, partition: int) -> None:
    """Fail the pending append of a partition, and let its log hear of it."""
    world.streams[partition].pending.pop().future.set_exception(OSError("the store is gone"))
    heard = asyncio.Event()
    with world.broker.logs["id", partition].watched(heard.set):
        await heard.wait()
    await asyncio.sleep(0)


# -- Fetch


async def test_nothing_above_the_high_watermark_is_told(world: World) -> None:
    await world.produce({0: plain("a", "b")})
    world.streams[0].holds_back = True
    answering = asyncio.ensure_future(await world.begin({0: plain("c")}))
    (row,) = await world.fetch((0, 0))
    assert (row["high_watermark"], row["last_stable_offset"]) == (2, 2)
    assert len(row["records"]) == len(plain("a", "b"))
    (row,) = await world.fetch((0, 2))
    assert (row["error_code"], row["records"]) == (Code.NONE, b"")
    (row,) = await world.fetch((0, 3))
    assert row["error_code"] is Code.OFFSET_OUT_OF_RANGE
    assert await world.offset_of(-1) == (Code.NONE, 2)
    assert await world.end_of_epoch(0) == (Code.NONE, 0, 2)
    world.streams[0].settle()
    await answering


async def test_an_answer_has_one_batch_at_least_and_no_more_than_is_asked_for() -> None:
    world = World()
    for partition in range(3):
        await world.lead(partition)
        await world.produce({partition: plain("x" * 1000)})
    size = len(plain("x" * 1000))
    rows = await world.fetch((0, 0), (1, 0), (2, 0), max_bytes=10)
    assert [len(row["records"]) for row in rows] == [size, 0, 0]
    rows = await world.fetch((0, 0), (1, 0), (2, 0), max_bytes=2 * size)
    assert [len(row["records"]) for row in rows] == [size, size, 0]
    rows = await world.fetch((0, 1), (1, 0), (2, 0), max_bytes=10)
    assert [len(row["records"]) for row in rows] == [0, size, 0], "an empty one is not the first"
    rows = await world.fetch((0, 0), (1, 0), (2, 0), max_bytes=2 * size - 1)
    assert [len(row["records"]) for row in rows] == [size, 0, 0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_fetch_waits_for_its_bytes_and_hears_of_them(
    world: World, order: tuple[int, int]
) -> None:
    await world.lead(1)
    asked = world.fetch((0, 0), (1, 0), min_bytes=len(plain("a")) + 1, wait_ms=_LONG_MS)
    fetching = asyncio.ensure_future(asked)
    await _others_run()
    await world.produce({order[0]: plain("a")})
    await _others_run()
    assert not fetching.done()
    await world.produce({order[1]: plain("b")})
    rows = await _at_once(fetching)
    assert all(row["records"] for row in rows)


async def test_a_fetch_that_waits_hears_that_its_broker_leads_no_more(world: World) -> None:
    log = world.broker.logs["id", 0]
    fetching = asyncio.ensure_future(world.fetch((0, 0), min_bytes=1, wait_ms=_LONG_MS))
    await _others_run()
    log.give_up()
    (row,) = await _at_once(fetching)
    assert row["error_code"] is Code.NOT_LEADER_OR_FOLLOWER


async def test_an_error_of_a_partition_is_told_at_once(world: World) -> None:
    fetching = asyncio.ensure_future(world.fetch((0, 0), (1, 0), min_bytes=1, wait_ms=_LONG_MS))
    rows = await _at_once(fetching)
    assert [row["error_code"] for row in rows] == [Code.NONE, Code.NOT_LEADER_OR_FOLLOWER]


async def _others_run() -> None:
    """Let other tasks run until they wait: nothing here waits for anything outside."""
    for _ in range(50):
        await asyncio.sleep(0)


async def _at_once(fetching: asyncio.Future[list[Any]]) -> list[Any]:
    await _others_run()
    if not fetching.done():
        fetching.cancel()
        pytest.fail("the fetch still waits")
    return await fetching


# -- leadership


@pytest.mark.parametrize(
    ("epoch", "code"),
    [
        (-1, Code.NONE),
        (4, Code.FENCED_LEADER_EPOCH),
        (5, Code.NONE),
        (6, Code.UNKNOWN_LEADER_EPOCH),
    ],
)
async def test_a_leader_answers_for_its_own_epoch_alone(epoch: int, code: Code) -> None:
    world = World()
    await world.lead(0, epoch=5)
    await world.produce({0: plain("a")})
    (row,) = await world.fetch((0, 0), epoch=epoch)
    assert row["error_code"] is code
    assert bool(row["records"]) == (code is Code.NONE)
    assert (await world.offset_of(-1, epoch))[0] is code


async def test_a_log_that_was_given_up_is_neither_read_nor_written_nor_trimmed(
    world: World,
) -> None:
    log = world.broker.logs["id", 0]
    await world.produce({0: plain("a")})
    log.give_up()
    refused = Code.NOT_LEADER_OR_FOLLOWER
    assert await world.produce({0: plain("b")}) == {0: (refused, -1)}
    (row,) = await world.fetch((0, 0))
    assert (row["error_code"], row["records"]) == (refused, b"")
    assert await world.delete_below(1) == (refused, -1)
    assert await world.offset_of(-2) == (refused, -1)
    assert await world.end_of_epoch(0) == (refused, -1, -1)


async def test_a_partition_that_the_topic_does_not_have_is_unknown(world: World) -> None:
    log = world.broker.logs["id", 0]
    for partition in (-1, 3):
        world.broker.logs["id", partition] = log
        (row,) = await world.fetch((partition, 0))
        assert row["error_code"] is Code.UNKNOWN_TOPIC_OR_PARTITION


# -- DeleteRecords, ListOffsets


async def test_records_are_deleted_up_to_the_offset_and_no_further_than_the_high_watermark(
    world: World,
) -> None:
    for value in "abc":
        await world.produce({0: plain(value)})
    assert await world.delete_below(1) == (Code.NONE, 1)
    assert await world.offset_of(-2) == (Code.NONE, 1)
    assert await world.delete_below(0) == (Code.NONE, 1), "a start never goes back"
    world.streams[0].holds_back = True
    answering = asyncio.ensure_future(await world.begin({0: plain("d")}))
    assert await world.delete_below(4) == (Code.OFFSET_OUT_OF_RANGE, -1)
    assert await world.offset_of(-2) == (Code.NONE, 1)
    (row,) = await world.fetch((0, 0))
    assert row["error_code"] is Code.OFFSET_OUT_OF_RANGE
    world.streams[0].settle()
    await answering


async def test_minus_one_deletes_all_durable_records(world: World) -> None:
    await world.produce({0: plain("a", "b")})
    assert await world.delete_below(-1) == (Code.NONE, 2)
    assert await world.offset_of(-2) == (Code.NONE, 2)


async def test_the_first_offset_of_a_time_is_found(world: World) -> None:
    for at in (1000, 2000, 3000):
        await world.produce({0: plain("a", timestamp=at)})
    assert await world.offset_of(1500) == (Code.NONE, 1)
    assert await world.offset_of(3001) == (Code.NONE, -1)
