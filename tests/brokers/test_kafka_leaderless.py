"""Topics without leaders: any broker takes each call for each partition, with the same outcome."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from streammeta.brokers.kafka.calls import admin_calls, record_calls, topic_calls
from streammeta.brokers.kafka.cluster.broker import SHARED_PRODUCERS_FROM, Broker
from streammeta.brokers.kafka.cluster.keys import topic_key
from streammeta.brokers.kafka.cluster.shared_streams import chosen_places
from streammeta.brokers.kafka.diskless.placement import choose_broker
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.brokers.partition.record_batch import read_batches
from streammeta.client import errors
from tests.kit.kafka_batches import Rec, make_batch, plain, sequenced
from tests.kit.kafka_cluster import asked, node, opened, request_of
from tests.kit.kafka_shared import SharedCluster, two_brokers
from tests.kit.kafka_wire import metadata_tree, produce_tree

_LONG_MS = 60_000
_NOT_STORED = errors.BrokerClientError("the store failed")
_SEQUENCE = 7, 0
"""Id and epoch of a producer."""


async def _begin(broker: Broker, batch: bytes, **more: Any) -> Any:
    return await record_calls.produce(broker, request_of((0, 8), produce_tree({0: batch}, **more)))


async def _produce(broker: Broker, batch: bytes, **more: Any) -> tuple[Code, int]:
    return _outcome(await (await _begin(broker, batch, **more)))


def _outcome(answer: Any) -> tuple[Code, int]:
    (row,) = answer["responses"][0]["partition_responses"]
    return row["error_code"], row["base_offset"]


async def _fetch(broker: Broker, offset: int, *, wait_ms: int = 0, epoch: int = -1) -> Any:
    item = {
        "partition": 0,
        "current_leader_epoch": epoch,
        "fetch_offset": offset,
        "log_start_offset": -1,
        "partition_max_bytes": 2**20,
    }
    tree = {
        "replica_id": -1,
        "max_wait": wait_ms,
        "min_bytes": 1,
        "max_bytes": 2**20,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": "t", "partitions": [item]}],
        "forgotten_topics_data": (),
        "rack_id": "",
    }
    answer: Any = await (await record_calls.fetch(broker, request_of((1, 11), tree)))
    (row,) = answer["responses"][0]["partitions"]
    return row


async def _offset_of(broker: Broker, timestamp: int) -> tuple[Code, int]:
    item = {"partition_index": 0, "current_leader_epoch": 0, "timestamp": timestamp}
    tree = {
        "replica_id": -1,
        "isolation_level": 0,
        "topics": [{"name": "t", "partitions": [item]}],
    }
    answer = await asked(broker, record_calls.list_offsets, (2, 5), tree)
    (row,) = answer["topics"][0]["partitions"]
    return row["error_code"], row["offset"]


async def _delete_below(broker: Broker, offset: int) -> tuple[Code, int]:
    item = {"partition_index": 0, "offset": offset}
    tree = {"topics": [{"name": "t", "partitions": [item]}], "timeout": 1000}
    answer = await asked(broker, record_calls.delete_records, (21, 1), tree)
    (row,) = answer["topics"][0]["partitions"]
    return row["error_code"], row["low_watermark"]


# -- Produce and Fetch


async def test_any_broker_takes_a_batch_and_every_broker_reads_it_as_it_came() -> None:
    """Only the base offset and the leader epoch of its header change."""
    _, _, first, second = await two_brokers()
    sent = [plain("a", "b"), plain("c"), plain("d", "e", "f")]
    for broker, batch, base in zip((first, second, first), sent, (0, 2, 3), strict=True):
        assert await _produce(broker, batch) == (Code.NONE, base)
    for broker in (first, second):
        row = await _fetch(broker, 0, epoch=0)
        assert (row["error_code"], row["high_watermark"]) == (Code.NONE, 6)
        batches = read_batches(row["records"])
        assert [batch.base_offset for batch in batches] == [0, 2, 3]
        for read, original in zip(batches, sent, strict=True):
            assert read.is_intact
            assert read.partition_leader_epoch == 0
            data = bytes(read.data)
            assert (data[8:12], data[16:]) == (original[8:12], original[16:])
    row = await _fetch(second, 4)
    assert [batch.base_offset for batch in read_batches(row["records"])] == [3]


async def test_batch_that_another_broker_has_taken_gets_its_offset_again() -> None:
    _, _, first, second = await two_brokers()
    assert await _produce(first, plain("a")) == (Code.NONE, 0)
    for broker in (first, second, second):
        assert await _produce(broker, sequenced(*_SEQUENCE, 0, 3)) == (Code.NONE, 1)
    assert await _offset_of(first, -1) == (Code.NONE, 4)


_FAILURES: Mapping[Code, errors.BrokerClientError] = {
    Code.OUT_OF_ORDER_SEQUENCE_NUMBER: errors.OutOfOrderSequenceError("append"),
    Code.INVALID_PRODUCER_EPOCH: errors.ProducerFencedError("append"),
    Code.REQUEST_TIMED_OUT: errors.OutcomeUnknownError("append", OSError()),
    Code.UNKNOWN_TOPIC_OR_PARTITION: errors.StreamNotFoundError("append"),
    Code.NOT_LEADER_OR_FOLLOWER: errors.NodeFencedError("append"),
    Code.STORAGE_ERROR: _NOT_STORED,
}


@pytest.mark.parametrize("code", list(_FAILURES))
async def test_failed_append_is_answered_by_its_reason(code: Code) -> None:
    cluster, _, broker, _ = await two_brokers()
    writer = cluster.clients[1].shared_writer
    writer.holds_back = True
    answering = await _begin(broker, sequenced(*_SEQUENCE, 0))
    writer.settle(_FAILURES[code])
    assert _outcome(await answering) == (code, -1)


async def test_batch_that_is_stored_somewhere_counts_as_stored() -> None:
    cluster, _, broker, _ = await two_brokers()
    writer = cluster.clients[1].shared_writer
    writer.holds_back = True
    answering = await _begin(broker, sequenced(*_SEQUENCE, 0))
    writer.settle(errors.OffsetsUnknownError("append"))
    assert _outcome(await answering) == (Code.NONE, -1)


async def test_batch_that_is_sent_again_while_it_is_pending_is_written_once() -> None:
    cluster, _, broker, _ = await two_brokers()
    writer = cluster.clients[1].shared_writer
    writer.holds_back = True
    batches = [sequenced(*_SEQUENCE, first, 2) for first in (0, 2, 0, 2)]
    answers = [await _begin(broker, batch) for batch in batches]
    assert len(writer.pending) == 2
    writer.settle()
    outcomes = [_outcome(await answer) for answer in answers]
    assert outcomes == [(Code.NONE, offset) for offset in (0, 2, 0, 2)]
    writer.holds_back = False
    assert await _produce(broker, batches[1]) == (Code.NONE, 2)


async def test_append_without_an_outcome_times_out_and_acks_0_ends_the_connection() -> None:
    cluster, _, broker, _ = await two_brokers()
    writer = cluster.clients[1].shared_writer
    writer.holds_back = True
    assert await _produce(broker, plain("a"), timeout_ms=1) == (Code.REQUEST_TIMED_OUT, -1)
    writer.settle()
    answering = await _begin(broker, plain("b"), acks=0)
    writer.settle(_NOT_STORED)
    with pytest.raises(record_calls.UnansweredRefusalError, match="STORAGE_ERROR"):
        await answering


@pytest.mark.parametrize("turns", range(5))
async def test_no_batch_follows_a_failed_one_of_its_producer(turns: int) -> None:
    """Whenever it arrives after the failure, until the producer sends the failed one again."""
    cluster, _, broker, _ = await two_brokers()
    writer = cluster.clients[1].shared_writer
    writer.holds_back = True
    answering = asyncio.ensure_future(await _begin(broker, sequenced(*_SEQUENCE, 0)))
    writer.settle(_NOT_STORED)
    writer.holds_back = False
    for _ in range(turns):
        await asyncio.sleep(0)
    code, _ = await _produce(broker, sequenced(*_SEQUENCE, 1))
    assert code in (Code.STORAGE_ERROR, Code.NOT_LEADER_OR_FOLLOWER)
    assert _outcome(await answering) == (Code.STORAGE_ERROR, -1)
    assert await _produce(broker, sequenced(*_SEQUENCE, 0)) == (Code.NONE, 0)
    assert await _produce(broker, sequenced(*_SEQUENCE, 1)) == (Code.NONE, 1)


async def test_batches_that_no_topic_may_have_are_rejected() -> None:
    _, _, broker, _ = await two_brokers()
    late = time.time_ns() // 1_000_000 + 7_200_000
    assert await _produce(broker, plain("a", timestamp=late)) == (Code.INVALID_TIMESTAMP, -1)
    assert await _produce(broker, plain("a")[:-1]) == (Code.INVALID_RECORD, -1)
    assert await _offset_of(broker, -1) == (Code.NONE, 0)


@pytest.fixture
async def followed() -> AsyncIterator[tuple[SharedCluster, Broker, Broker]]:
    """Two brokers that watch their streams."""
    cluster, _, first, second = await two_brokers()
    tasks = [
        asyncio.create_task(broker.diskless.follow())
        for broker in (first, second)
        if broker.diskless is not None
    ]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(cluster.commits.watchers) == len(tasks)
    yield cluster, first, second
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_fetch_at_the_end_waits_for_a_batch_of_another_broker(
    followed: tuple[SharedCluster, Broker, Broker],
) -> None:
    _, first, second = followed
    fetching = asyncio.create_task(_fetch(second, 0, wait_ms=_LONG_MS))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not fetching.done()
    assert await _produce(first, plain("a")) == (Code.NONE, 0)
    row = await fetching
    assert (row["high_watermark"], len(read_batches(row["records"]))) == (1, 1)


async def test_reads_at_an_unchanged_end_ask_no_controller(
    followed: tuple[SharedCluster, Broker, Broker],
) -> None:
    cluster, first, second = followed
    assert await _produce(first, plain("a")) == (Code.NONE, 0)
    await _fetch(second, 1)
    asked_so_far = len(cluster.clients[2].fetches)
    for _ in range(3):
        assert (await _fetch(second, 1))["high_watermark"] == 1
    assert len(cluster.clients[2].fetches) == asked_so_far


async def test_offset_that_another_broker_has_committed_is_never_out_of_range() -> None:
    _, _, first, second = await two_brokers()
    assert (await _fetch(second, 0))["high_watermark"] == 0
    for _ in range(3):
        await _produce(first, plain("a"))
    row = await _fetch(second, 3)
    assert (row["error_code"], row["high_watermark"]) == (Code.NONE, 3)
    for offset in (4, -1):
        assert (await _fetch(second, offset))["error_code"] is Code.OFFSET_OUT_OF_RANGE


async def test_leader_epoch_is_always_0() -> None:
    _, _, broker, _ = await two_brokers()
    await _produce(broker, plain("a", "b"))
    assert (await _fetch(broker, 0, epoch=1))["error_code"] is Code.UNKNOWN_LEADER_EPOCH
    for epoch, expected in ((0, (0, 2)), (1, (-1, -1))):
        item = {"partition": 0, "current_leader_epoch": 0, "leader_epoch": epoch}
        tree = {"replica_id": -1, "topics": [{"topic": "t", "partitions": [item]}]}
        answer = await asked(broker, record_calls.offset_for_leader_epoch, (23, 3), tree)
        (row,) = answer["topics"][0]["partitions"]
        assert (row["leader_epoch"], row["end_offset"]) == expected


# -- ListOffsets, DeleteRecords, retention


async def test_every_broker_knows_the_bounds_that_another_has_changed() -> None:
    _, _, first, second = await two_brokers()
    for number in range(4):
        batch = plain("a", "b", timestamp=1000 + number)
        assert await _produce(first, batch) == (Code.NONE, 2 * number)
    assert await _offset_of(second, -1) == (Code.NONE, 8)
    assert await _offset_of(second, 1002) == (Code.NONE, 4)
    assert await _offset_of(second, 2000) == (Code.NONE, -1)
    assert await _delete_below(second, 3) == (Code.NONE, 3)
    assert await _offset_of(first, -2) == (Code.NONE, 3)
    assert await _offset_of(first, 0) == (Code.NONE, 3)
    assert (await _fetch(first, 2))["error_code"] is Code.OFFSET_OUT_OF_RANGE
    assert await _delete_below(first, 9) == (Code.OFFSET_OUT_OF_RANGE, -1)
    assert await _delete_below(first, -1) == (Code.NONE, 8)


async def _retained(configs: Mapping[str, str], *ages_ms: int) -> tuple[Code, int]:
    """Return the start of a partition with batches of these ages, -1 for none, after retention."""
    cluster, topic, broker, _ = await two_brokers(configs=configs)
    now_ms = time.time_ns() // 1_000_000
    for age_ms in ages_ms:
        timestamp = -1 if age_ms < 0 else now_ms - age_ms
        await _produce(broker, make_batch([Rec(timestamp, None, b"a")]))
    assert broker.diskless is not None
    await broker.diskless.retain([(topic.topic_id, 0)])
    assert len(cluster.table.streams) == 1
    return await _offset_of(broker, -2)


_HOUR_MS = 3_600_000


async def test_retention_deletes_batches_that_are_too_old() -> None:
    hour = {"retention.ms": str(_HOUR_MS)}
    assert await _retained(hour, 3 * _HOUR_MS, 2 * _HOUR_MS, 0) == (Code.NONE, 2)
    assert await _retained(hour, 3 * _HOUR_MS, 2 * _HOUR_MS) == (Code.NONE, 2)
    assert await _retained({"retention.ms": "-1"}, 3 * _HOUR_MS) == (Code.NONE, 0)
    assert await _retained(hour) == (Code.NONE, 0)


async def test_retention_keeps_a_batch_without_a_time() -> None:
    assert await _retained({"retention.ms": "1"}, 10, -1, 10) == (Code.NONE, 1)


async def test_retention_deletes_nothing_when_the_clock_is_far_ahead_of_the_records() -> None:
    year_ms = 365 * 24 * _HOUR_MS
    days = {"retention.ms": str(2 * 24 * _HOUR_MS)}
    assert await _retained(days, year_ms + 1, year_ms) == (Code.NONE, 0)


async def test_one_broker_applies_retention_to_each_partition() -> None:
    _, topic, first, second = await two_brokers(8)
    chosen = [
        place for broker in (first, second) for place in chosen_places(broker.view, broker.node_id)
    ]
    assert sorted(chosen) == [(topic.topic_id, partition) for partition in range(8)]


# -- Metadata


async def _leaders(broker: Broker) -> list[int]:
    answer = await asked(broker, topic_calls.metadata, (3, 8), metadata_tree("t"))
    rows = answer["topics"][0]["partitions"]
    for row in rows:
        assert row["error_code"] is Code.NONE
        assert row["leader_epoch"] == 0
        assert tuple(row["replica_nodes"]) == tuple(row["isr_nodes"]) == (row["leader_id"],)
    return [row["leader_id"] for row in rows]


async def test_every_broker_names_the_same_leaders_and_load_spreads() -> None:
    _, _, first, second = await two_brokers(40)
    assert await _leaders(first) == await _leaders(second)
    assert min(Counter(await _leaders(first)).values()) >= 10


async def test_leaders_are_in_the_rack_of_the_broker_that_answers() -> None:
    cluster = SharedCluster()
    await cluster.make_diskless(10)
    racks = {1: "a", 2: "b", 3: "b", 4: None}
    brokers = {node_id: await cluster.share(node_id, rack) for node_id, rack in racks.items()}
    expected = {1: {1}, 2: {2, 3}, 3: {2, 3}, 4: {1, 2, 3, 4}}
    for node_id, broker in brokers.items():
        await broker.refresh()
        assert set(await _leaders(broker)) == expected[node_id]
    answer = await asked(brokers[1], topic_calls.metadata, (3, 8), metadata_tree("t"))
    assert [row["rack"] for row in answer["brokers"]] == ["a", "b", "b", None]


async def test_only_partitions_of_a_dead_broker_get_another_name() -> None:
    nodes = (1, 2, 3)
    before = [choose_broker(nodes, "id", partition) for partition in range(60)]
    after = [choose_broker((1, 3), "id", partition) for partition in range(60)]
    assert all(old in (2, new) for old, new in zip(before, after, strict=True))
    assert choose_broker((), "id", 0) == -1


async def test_broker_that_is_not_named_serves_all_the_same() -> None:
    cluster, _, first, second = await two_brokers()
    (named,) = await _leaders(first)
    other = second if named == 1 else first
    assert await _produce(other, plain("a")) == (Code.NONE, 0)
    # The named one dies.
    cluster.controllers.nodes[:] = [node(other.node_id)]
    await other.refresh()
    assert await _leaders(other) == [other.node_id]
    assert await _produce(other, plain("b")) == (Code.NONE, 1)


async def test_broker_without_shared_streams_names_others_and_serves_nothing() -> None:
    cluster, topic, _, _ = await two_brokers()
    plain_broker = await cluster.join(3)
    await plain_broker.refresh()
    assert set(await _leaders(plain_broker)) <= {1, 2}
    assert await _produce(plain_broker, plain("a")) == (Code.NOT_LEADER_OR_FOLLOWER, -1)
    assert not plain_broker.view.leaders
    assert not [key for key in cluster.controllers.names() if key.startswith("leader/")], topic


# -- Creation, growth, settings, producer ids


async def _create(broker: Broker, configs: Mapping[str, str]) -> tuple[Code, str]:
    item = {
        "name": "new",
        "num_partitions": 2,
        "replication_factor": 1,
        "assignments": (),
        "configs": [{"name": name, "value": value} for name, value in configs.items()],
    }
    tree = {"topics": [item], "timeout": 1000, "validate_only": False}
    answer = await asked(broker, topic_calls.create_topics, (19, 4), tree)
    (row,) = answer["topics"]
    return row["error_code"], row["error_message"] or ""


async def test_created_and_added_partitions_have_tagged_streams() -> None:
    cluster = SharedCluster()
    broker = await cluster.share(1)
    await broker.refresh()
    assert await _create(broker, {"diskless.enable": "True"}) == (Code.NONE, "")
    tree = {
        "topics": [{"name": "new", "count": 5, "assignments": None}],
        "timeout": 1000,
        "validate_only": False,
    }
    await asked(broker, topic_calls.create_partitions, (37, 1), tree)
    topic = broker.view.topics["new"]
    assert len(base64.urlsafe_b64decode(topic.topic_id + "==")) == 16
    tags = [cluster.table.streams[stream_id].tags for stream_id in topic.stream_ids]
    assert tags == [{"0": topic.topic_id, "1": f"{partition}"} for partition in range(5)]
    assert len(cluster.table.streams) == 5
    assert all(broker.served("new", partition).epoch == 0 for partition in range(5))
    assert broker.view.leaders == {}
    assert broker.unavailable == 0


async def test_streams_of_a_topic_that_another_has_changed_are_deleted_again() -> None:
    cluster = SharedCluster()
    topic = await cluster.make_diskless(2)
    broker = await cluster.share(1)
    cluster.put_before_next(
        topic_key("t"),
        b'{"id":"id-t","partitions":2,"configs":{"diskless.enable":"true"},"streams":[[7,2]]}',
    )
    await broker.refresh()
    assert list(broker.view.topics["t"].stream_ids) == [7, 8], topic
    assert cluster.table.streams == {}


async def test_diskless_topic_needs_a_broker_with_shared_streams() -> None:
    cluster = SharedCluster()
    broker = await cluster.join(1)
    code, message = await _create(broker, {"diskless.enable": "true"})
    assert code is Code.INVALID_CONFIG
    assert "--shared" in message
    assert await _create(broker, {"diskless.enable": "false"}) == (Code.NONE, "")
    assert not broker.view.topics["new"].is_diskless


@pytest.mark.parametrize(
    "configs", [{"diskless.enable": "yes"}, {"diskless.enable": "true", "retention.bytes": "9"}]
)
async def test_settings_without_a_meaning_are_rejected(configs: Mapping[str, str]) -> None:
    broker = await SharedCluster().share(1)
    code, _ = await _create(broker, configs)
    assert code is Code.INVALID_CONFIG


async def test_kind_of_a_topic_never_changes() -> None:
    _, _, broker, _ = await two_brokers()

    async def alter(name: str, value: str) -> Any:
        row = {"name": name, "value": value}
        resource = {"resource_type": 2, "resource_name": "t", "configs": [row]}
        tree = {"resources": [resource], "validate_only": False}
        answer = await asked(broker, admin_calls.alter_configs, (33, 1), tree)
        return answer["responses"][0]["error_code"]

    assert await alter("diskless.enable", "false") is Code.INVALID_CONFIG
    assert await alter("retention.ms", "1000") is Code.NONE
    topic = broker.view.topics["t"]
    assert topic.is_diskless
    assert topic.provided == 1
    assert broker.served("t", 0).config.retention.age_ms == 1000


async def test_producer_ids_of_both_kinds_of_brokers_are_distinct() -> None:
    cluster = SharedCluster()
    owning = await cluster.join(1)
    shared = [await cluster.share(node_id) for node_id in (2, 3)]
    ids = [await broker.next_producer_id() for broker in (owning, *shared) for _ in range(1001)]
    assert len(set(ids)) == len(ids)
    assert sum(producer_id >= SHARED_PRODUCERS_FROM for producer_id in ids) == 2002


async def test_led_topics_go_on_beside_diskless_ones() -> None:
    cluster, _, first, _ = await two_brokers()
    led = await cluster.make_topic("led")
    await opened(first)
    assert {place: leader.epoch for place, leader in first.view.leaders.items()} == {
        (led.topic_id, 0): 0
    }
