"""A broker's part in its cluster: leaders, epochs, streams of the dead and of deleted topics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streammeta.brokers.kafka.calls import topic_calls
from streammeta.brokers.kafka.cluster import broker as module
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import ClusterView, Leader, read_view
from streammeta.brokers.kafka.cluster.cluster_watch import close_streams_of
from streammeta.brokers.kafka.cluster.deleted_topics import NOTE_KEPT_MS, delete_streams_of_deleted
from streammeta.brokers.kafka.cluster.keys import deleted_key, leader_key, meta_key, topic_key
from streammeta.brokers.kafka.protocol.codes import Code, KafkaError
from streammeta.brokers.partition.errors import PartitionFailedError
from streammeta.client import NodeIdentity
from streammeta.client.errors import ControllerUnavailableError
from streammeta.client.parts import BrokerSession
from streammeta.storage.cluster_files.wal_config import NO_LOG
from streammeta.v1 import nodes_pb2, streams_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NODE_EPOCH_EXPIRED
from tests.kit.kafka_batches import plain
from tests.kit.kafka_cluster import Client, Cluster, asked, lead_topic, node, opened
from tests.kit.kafka_wire import metadata_tree
from tests.kit.memory_keys import MemoryControllers

_FENCED = nodes_pb2.NODE_STATE_FENCED


# -- keys


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_a_put_at_a_version_loses_to_another_and_knows_its_own_repeat() -> None:
    keys = Cluster().keys
    assert await keys.put({"k": 1}, expected=0)
    assert await keys.put({"k": 1}, expected=0), "a repeat after a lost answer"
    assert not await keys.put({"k": 2}, expected=0)
    assert await keys.list("") == {"k": (1, 1)}
    assert await keys.put_at({"k": (3, 1), "l": (4, 0)}) == {"k": 2, "l": 3}
    assert await keys.put_at({"k": (5, 1)}) is None
    assert await keys.put({"k": 6})
    assert await keys.list("k") == {"": (6, 4)}


async def test_the_stream_of_a_partition_is_claimed_once() -> None:
    keys = Cluster().keys
    assert await keys.stream_id("p") is None
    assert await keys.claim_stream_id("p", 7) == 7
    assert await keys.claim_stream_id("p", 8) == 7
    assert await keys.stream_id("p") == 7


async def test_no_producer_id_is_given_out_twice(cluster: Cluster) -> None:
    """Another broker reserves between the look and the put of this one."""
    here, there = await cluster.join(1), await cluster.join(2)
    taken = [await here.next_producer_id(), await there.next_producer_id()]
    here._producer_ids = range(0)

    cluster.put_before_next("producer-ids", (3000).to_bytes(8, "big"))
    taken += [await here.next_producer_id() for _ in range(3)]
    assert taken == [0, 1000, 3000, 3001, 3002]


# -- the view


async def test_only_the_process_that_gave_the_address_lives(cluster: Cluster) -> None:
    for node_id in range(1, 7):
        await cluster.join(node_id)
    cluster.controllers.nodes = [
        node(1),
        node(2, node_epoch=2),
        node(3, state=_FENCED),
        node(4, failover=True),
        node(5, departed=True),
    ]
    view = await read_view(cluster.keys, cast(Any, cluster.controllers))
    assert set(view.brokers) == {1}


async def test_a_node_with_a_log_in_the_bucket_is_not_for_this_shape_to_recover() -> None:
    cluster = Cluster()
    cluster.controllers.nodes = [
        node(4, node_epoch=3, recovered_by=1),
        node(5, recovered_by=1, wal_config="bucket"),
        node(6),
        node(7, recovered_by=2),
        node(8, recovered_by=1, wal_config=NO_LOG),
    ]
    view = await read_view(cluster.keys, cast(Any, cluster.controllers))
    without_log = [NodeIdentity(4, 3), NodeIdentity(8, 1)]
    assert view.recoveries == {1: without_log, 2: [NodeIdentity(7, 1)]}


# -- recovery of dead nodes


def _opening(*streams: tuple[int, int, int | None]) -> streams_pb2.GetOpeningStreamsResponse:
    return streams_pb2.GetOpeningStreamsResponse(
        streams=[
            streams_pb2.OpeningStream(stream_id=stream_id, epoch=epoch, upload_end_offset=owed)
            for stream_id, epoch, owed in streams
        ]
    )


async def test_streams_of_all_pages_and_nodes_are_closed_in_the_name_of_the_recoverer() -> None:
    controllers = MemoryControllers()
    controllers.opening = {
        4: [_opening((10, 2, None), (11, 3, 99)), _opening((12, 0, None))],
        5: [streams_pb2.GetOpeningStreamsResponse(error=ERROR_CODE_NODE_EPOCH_EXPIRED)],
        6: [_opening((13, 1, None))],
    }
    dead = [NodeIdentity(node_id, 8) for node_id in (4, 5, 6)]
    session = BrokerSession(cast(Any, controllers), NodeIdentity(1, 7), "")
    assert await close_streams_of(session, dead) == 3
    asked = [one for one in controllers.asked if isinstance(one, streams_pb2.CloseStreamsRequest)]
    closed = [
        (call.node.node_id, [(s.stream_id, s.stream_epoch) for s in call.streams]) for call in asked
    ]
    assert closed == [(4, [(10, 2), (12, 0)]), (6, [(13, 1)])], "11 is owed an upload, and not open"
    assert {(call.recoverer.node_id, call.recoverer.node_epoch) for call in asked} == {(1, 7)}
    looks = [
        call for call in controllers.asked if isinstance(call, streams_pb2.GetOpeningStreamsRequest)
    ]
    assert all(one.failover and one.recoverer.node_id == 1 for one in looks), "they fence the dead"


# -- leaders


async def test_a_broker_leads_what_it_is_appointed_to_and_gives_up_what_it_lost() -> None:
    cluster, topic, broker = await lead_topic()
    log = broker.log_of("t", 0)
    assert log.epoch == 0
    await cluster.keys.put({leader_key(topic.topic_id, 0): Leader(2, 1).document()})
    other = await cluster.join(2)
    await broker.refresh()
    assert not log.is_writable
    assert not broker.logs
    assert not any(cluster.table.streams[stream_id].is_open for stream_id in log.stream_ids)
    await opened(other)
    assert other.log_of("t", 0).epoch == 1


async def test_a_leader_is_replaced_by_itself_under_another_epoch() -> None:
    cluster, topic, broker = await lead_topic()
    former = broker.log_of("t", 0)
    await cluster.keys.put({leader_key(topic.topic_id, 0): Leader(1, 5).document()})
    await opened(broker)
    assert not former.is_writable
    assert broker.log_of("t", 0).epoch == 5


async def test_a_failed_log_is_opened_again_one_epoch_on_without_what_failed() -> None:
    _, _, broker = await lead_topic()
    log, client = broker.log_of("t", 0), cast(Client, broker.client)
    await (await log.append(plain("kept"))).durable
    client.holds_back = True
    appended = await log.append(plain("lost"))
    client.pending.pop().future.set_exception(OSError("the store is gone"))
    await asyncio.wait([appended.durable])
    client.holds_back = False
    for _ in range(2):
        await opened(broker)
    again = broker.log_of("t", 0)
    assert again is not log
    assert (again.epoch, again.high_watermark) == (1, 1)


async def test_an_epoch_that_was_used_is_passed(cluster: Cluster) -> None:
    topic = await cluster.make_topic()
    first, second = await cluster.join(1), await cluster.join(2)
    await opened(first)
    former = first.log_of("t", 0)
    await cluster.keys.put({leader_key(topic.topic_id, 0): Leader(2, 0).document()})
    for _ in range(2):
        await opened(second)
    assert second.log_of("t", 0).epoch == 1
    appended = await former.append(plain("late"))
    with pytest.raises(PartitionFailedError):
        await appended.durable


async def test_a_leader_that_another_broker_named_meanwhile_stays(cluster: Cluster) -> None:
    topic = await cluster.make_topic()
    broker = await cluster.join(1)
    await cluster.join(2)
    place = leader_key(topic.topic_id, 0)

    cluster.put_before_next(place, b'{"leader":2,"epoch":9}')
    await broker.refresh()
    assert broker.view.leaders[topic.topic_id, 0].node_id == 2
    assert (await cluster.keys.list(place))[""][0] == {"leader": 2, "epoch": 9}


async def test_only_one_broker_names_leaders(cluster: Cluster) -> None:
    await cluster.make_topic()
    await cluster.join(1)
    other = await cluster.join(2)
    await other.refresh()
    assert not other.view.leaders


async def test_a_replaced_broker_answers_nothing_as_leader_and_leaves_keys_and_streams() -> None:
    cluster, _, broker = await lead_topic()
    log, names = broker.log_of("t", 0), cluster.controllers.names()
    await broker.abandon()
    assert not log.is_writable
    assert cluster.controllers.names() == names, "they may be of the newer process"
    assert all(cluster.table.streams[stream_id].is_open for stream_id in log.stream_ids)


async def test_a_broker_that_closes_leaves_the_view_after_its_streams_are_closed() -> None:
    cluster, _, broker = await lead_topic()
    log = broker.log_of("t", 0)

    def look() -> None:
        assert not any(cluster.table.streams[stream_id].is_open for stream_id in log.stream_ids)

    cluster.controllers.before["DeleteKVs"] = look
    await broker.close()
    assert not cluster.controllers.before
    assert "broker/1" not in cluster.controllers.names()


# -- topics


async def _delete(broker: Broker, name: str = "t") -> Code:
    tree = {"topic_names": [name], "timeout": 1000}
    answer = await asked(broker, topic_calls.delete_topics, (20, 3), tree)
    code: Code = answer["responses"][0]["error_code"]
    return code


async def test_a_deletion_is_noted_before_the_topic_goes() -> None:
    cluster, topic, broker = await lead_topic(partitions=2)
    seen: list[bool] = []
    noted = deleted_key(topic.topic_id)
    cluster.controllers.before["DeleteKVs"] = lambda: seen.append(
        noted in cluster.controllers.names()
    )
    assert await _delete(broker) is Code.NONE
    assert seen == [True]
    assert not broker.logs
    left = cluster.controllers.names()
    assert noted in left
    assert not {topic_key("t"), leader_key(topic.topic_id, 0), leader_key(topic.topic_id, 1)} & left
    assert await _delete(broker) is Code.UNKNOWN_TOPIC_OR_PARTITION


def _stream(stream_id: int, topic_id: str, *, is_open: bool = False) -> Any:
    tags = {"0": topic_id} if topic_id else {}
    return SimpleNamespace(stream_id=stream_id, epoch=3, is_open=is_open, tags=tags)


async def test_only_closed_streams_of_deleted_topics_are_deleted(cluster: Cluster) -> None:
    client = cast(Any, Client(cluster.controllers, 1, cluster.table))
    note = {"partitions": 1, "at_ms": 0}
    await cluster.keys.put({deleted_key("gone"): note, deleted_key("half"): note})
    cluster.controllers.described = [
        _stream(1, "gone"),
        _stream(2, "gone", is_open=True),
        _stream(3, "half"),
        _stream(4, "other"),
        _stream(5, ""),
    ]
    count = await delete_streams_of_deleted(client, cluster.keys, {"half"}, NOTE_KEPT_MS)
    (asked,) = [
        request
        for request in cluster.controllers.asked
        if isinstance(request, streams_pb2.DeleteStreamsRequest)
    ]
    assert [(stream.stream_id, stream.stream_epoch) for stream in asked.streams] == [(1, 3)]
    assert count == 1
    assert deleted_key("gone") in cluster.controllers.names(), "a stream of it is left"


async def test_a_note_of_a_deletion_goes_after_the_last_stream_and_a_while() -> None:
    cluster = Cluster()
    client = cast(Any, Client(cluster.controllers, 1, cluster.table))
    note, meta = deleted_key("gone"), meta_key("gone", 1)
    await cluster.keys.put({note: {"partitions": 2, "at_ms": 1000}})
    await cluster.keys.claim_stream_id(meta, 7)
    await delete_streams_of_deleted(client, cluster.keys, (), 1000 + NOTE_KEPT_MS - 1)
    assert cluster.controllers.names() == {note, meta}
    await delete_streams_of_deleted(client, cluster.keys, (), 1000 + NOTE_KEPT_MS)
    assert not cluster.controllers.names()


async def _create(broker: Broker, name: str = "t", *, count: int = 2, only: bool = False) -> Code:
    topic = {
        "name": name,
        "num_partitions": count,
        "replication_factor": 1,
        "assignments": [],
        "configs": [],
    }
    tree = {"topics": [topic], "timeout": 1000, "validate_only": only}
    answer = await asked(broker, topic_calls.create_topics, (19, 4), tree)
    code: Code = answer["topics"][0]["error_code"]
    return code


async def test_a_topic_is_made_once_and_not_by_a_look(cluster: Cluster) -> None:
    broker = await cluster.join(1)
    assert await _create(broker, only=True) is Code.NONE
    assert topic_key("t") not in cluster.controllers.names()
    assert await _create(broker) is Code.NONE
    made = broker.view.topics["t"]
    assert await _create(broker, count=3) is Code.TOPIC_ALREADY_EXISTS
    broker.view = ClusterView()
    with pytest.raises(KafkaError, match="topic"):
        await topic_calls._create(broker, "t", 3, {})
    await broker.refresh()
    assert broker.view.topics["t"] == made
    assert await _create(broker, "bad/name") is Code.INVALID_TOPIC
    assert await _create(broker, "none", count=0) is Code.INVALID_PARTITIONS


async def _grow(broker: Broker, count: int, *, only: bool = False) -> Code:
    topic = {"name": "t", "count": count, "assignments": None}
    tree = {"topics": [topic], "timeout": 1000, "validate_only": only}
    answer = await asked(broker, topic_calls.create_partitions, (37, 1), tree)
    code: Code = answer["results"][0]["error_code"]
    return code


async def test_a_topic_only_grows_and_not_over_a_change_of_another_broker(cluster: Cluster) -> None:
    broker = await cluster.join(1)
    topic = await cluster.make_topic(partitions=2)
    assert await _grow(broker, 2) is Code.INVALID_PARTITIONS
    assert await _grow(broker, 1) is Code.INVALID_PARTITIONS
    assert await _grow(broker, 3, only=True) is Code.NONE
    assert broker.view.topics["t"].partitions == 2
    assert await _grow(broker, 3) is Code.NONE
    assert broker.view.topics["t"].partitions == 3

    await opened(broker)
    cluster.grow_before_next(topic)
    assert await _grow(broker, 4) is Code.REQUEST_TIMED_OUT
    assert broker.view.topics["t"].partitions == 9
    await opened(broker)


async def test_metadata_names_no_leader_that_is_gone(cluster: Cluster) -> None:
    topic = await cluster.make_topic()
    await cluster.keys.put({leader_key(topic.topic_id, 0): Leader(9, 4).document()})
    await cluster.join(1)
    other = await cluster.join(2)
    await other.refresh()
    tree = metadata_tree(creates=False)
    answer = await asked(other, topic_calls.metadata, (3, 8), tree)
    (row,) = answer["topics"][0]["partitions"]
    assert (row["error_code"], row["leader_id"]) == (Code.LEADER_NOT_AVAILABLE, -1)
    assert not row["isr_nodes"]
    absent = metadata_tree("absent", creates=False)
    answer = await asked(other, topic_calls.metadata, (3, 8), absent)
    assert answer["topics"][0]["error_code"] is Code.UNKNOWN_TOPIC_OR_PARTITION
    assert topic_key("absent") not in cluster.controllers.names()


# ---- ends and pauses ----


@pytest.mark.parametrize("controllers", ["refuse", "are silent"])
async def test_a_broker_ends_without_its_controllers_and_names_what_is_not_committed(
    controllers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    cluster, _, broker = await lead_topic(partitions=2)
    logs = [broker.log_of("t", partition) for partition in range(2)]
    client = cast(Client, broker.client)
    client.holds_back = True  # nothing is committed any more
    await logs[1].append(plain("a", "b"))
    if controllers == "refuse":
        cluster.controllers.failure = ControllerUnavailableError("PutKVs", 30.0, {})
    else:
        cluster.controllers.held = asyncio.Event()
    await broker.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "with 2 partitions not closed" in message
    assert "t-0, t-1 (2 uncommitted offsets)" in message
    assert not any(log.is_writable for log in logs)


async def test_a_broker_that_closes_in_good_order_names_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, _, broker = await lead_topic(partitions=3)
    await broker.close()
    assert not caplog.records
    assert "broker/1" not in cluster.controllers.names()


async def test_one_partition_that_can_not_be_closed_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.2)
    cluster, _, broker = await lead_topic(partitions=3)
    stuck, *others = (broker.log_of("t", partition) for partition in range(3))
    await stuck._appending.acquire()
    await broker.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "with 1 partitions not closed" in message
    for log in others:
        assert not any(cluster.table.streams[stream_id].is_open for stream_id in log.stream_ids)


# -- time that is lost


async def test_a_broker_that_was_silent_keeps_what_nobody_took_over() -> None:
    """It reads the view before its next heartbeat is answered: it is fenced there by time alone."""
    cluster, _, broker = await lead_topic()
    log = broker.log_of("t", 0)
    cluster.controllers.nodes = [node(1, state=_FENCED)]
    await opened(broker)
    assert broker.log_of("t", 0) is log
    assert log.is_writable
    assert (await cluster.keys.list(leader_key("id-t", 0)))[""][0] == {"leader": 1, "epoch": 0}
    await (await log.append(plain("a"))).durable


async def test_a_broker_that_was_silent_gives_up_what_others_were_appointed_to() -> None:
    cluster, topic, broker = await lead_topic()
    log = broker.log_of("t", 0)
    await cluster.join(2)
    cluster.controllers.nodes = [node(1, state=_FENCED), node(2)]
    await cluster.keys.put({leader_key(topic.topic_id, 0): Leader(2, 1).document()})
    await broker.refresh()
    assert not log.is_writable
    assert not broker.logs


@pytest.mark.parametrize(
    "said", [{"failover": True}, {"departed": True}, {"node_epoch": 2, "state": _FENCED}]
)
async def test_a_process_that_was_released_or_replaced_does_not_resume(said: Any) -> None:
    cluster, _, broker = await lead_topic()
    cluster.controllers.nodes = [node(1, **said)]
    await broker.refresh()
    assert not broker.view.brokers
    assert not broker.logs


async def test_a_silent_broker_is_gone_for_others(cluster: Cluster) -> None:
    await cluster.make_topic()
    first, second = await cluster.join(1), await cluster.join(2)
    await opened(first)
    cluster.controllers.nodes = [node(1, state=_FENCED), node(2)]
    await second.refresh()
    assert set(second.view.brokers) == {2}
    assert (await cluster.keys.list(leader_key("id-t", 0)))[""][0] == {"leader": 2, "epoch": 1}
    await second.abandon()
