"""Answers while controllers are not there, and of topics that nobody leads yet."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest

from streammeta.brokers.kafka.calls import admin_calls, topic_calls
from streammeta.brokers.kafka.cluster.broker import Broker
from streammeta.brokers.kafka.cluster.cluster import Leader, Topic
from streammeta.brokers.kafka.cluster.keys import leader_key, topic_key
from streammeta.brokers.kafka.groups.group_calls import Groups
from streammeta.brokers.kafka.protocol.codes import Code
from streammeta.client.errors import ControllerUnavailableError
from tests.kit.kafka_cluster import Cluster, asked, lead_topic, opened, request_of
from tests.kit.kafka_wire import metadata_tree

_GONE = ControllerUnavailableError("ListKVs", 30.0, {})


async def _metadata(broker: Broker, *names: str, creates: bool = True) -> Any:
    tree = metadata_tree(*names, creates=creates)
    return await asked(broker, topic_calls.metadata, (3, 8), tree)


def _codes(answer: Any) -> dict[str, Code]:
    return {row["name"]: row["error_code"] for row in answer["topics"]}


async def test_names_and_ids_do_not_multiply_the_work_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    topics = [await cluster.make_topic(f"topic-{number}", 3) for number in range(4)]
    broker = await cluster.join(1)
    await opened(broker)
    ids = [uuid5(NAMESPACE_OID, topic.name) for topic in topics]
    looks = 0

    def count(topic: Topic) -> UUID:
        nonlocal looks
        looks += 1
        return uuid5(NAMESPACE_OID, topic.name)

    monkeypatch.setattr(topic_calls, "_uuid_of", count)
    rows = [
        {"topic_id": None, "name": "topic-0"},
        *({"topic_id": id_, "name": None} for id_ in ids),
    ]
    flags = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
    tree = {"topics": rows * 100, **flags}
    answer = await asked(broker, topic_calls.metadata, (3, 12), tree)
    assert [row["name"] for row in answer["topics"]] == ["topic-0", *(t.name for t in topics)]
    assert looks <= 2 * len(topics) + len(answer["topics"])

    groups = Groups(broker)
    answer = await asked(
        broker, lambda _, request: groups.describe(request), (15, 0), {"groups": ["g"] * 100}
    )
    assert len(answer["groups"]) == 1
    tree = {"groups": [{"group_id": "g", "topics": None}] * 100, "require_stable": False}
    answer = await asked(broker, lambda _, request: groups.fetch_offsets(request), (9, 8), tree)
    assert len(answer["groups"]) == 1
    resource = {"resource_type": 2, "resource_name": "topic-0", "configuration_keys": None}
    answer = await asked(
        broker, admin_calls.describe_configs, (32, 1), {"resources": [resource] * 100}
    )
    assert len(answer["results"]) == 1
    await broker.abandon()


@pytest.fixture(params=["they refuse", "they are silent"])
def outage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin an outage of a cluster's controllers."""
    monkeypatch.setattr(topic_calls, "LOOKUP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(topic_calls, "CHANGED_WITHIN_S", (0.01, 0.01))
    monkeypatch.setattr("streammeta.brokers.kafka.groups.group_calls.OFFSETS_TIMEOUT_S", 0.01)
    monkeypatch.setattr("streammeta.brokers.kafka.calls.topic_calls.PRODUCER_ID_TIMEOUT_S", 0.01)

    def begin(cluster: Cluster) -> None:
        if request.param == "they refuse":
            cluster.controllers.failure = _GONE
        else:
            cluster.controllers.held = asyncio.Event()

    return begin


async def test_metadata_is_answered_from_the_last_view_while_controllers_are_gone(
    outage: Any,
) -> None:
    cluster, _, broker = await lead_topic("known")
    outage(cluster)
    answer = await _metadata(broker, "known", "unknown")
    assert _codes(answer) == {"known": Code.NONE, "unknown": Code.LEADER_NOT_AVAILABLE}
    assert [row["node_id"] for row in answer["brokers"]] == [1]
    assert (answer["cluster_id"], answer["controller_id"]) == ("c", 1)
    assert _codes(await _metadata(broker)) == {"known": Code.NONE}
    await broker.abandon()


async def test_a_failure_of_one_new_topic_is_not_the_failure_of_another() -> None:
    cluster = Cluster()
    broker = await cluster.join(1)
    answer = await _metadata(broker, "good", "bad/name")
    assert _codes(answer) == {"good": Code.NONE, "bad/name": Code.INVALID_TOPIC}
    await opened(broker)


async def test_changes_of_topics_are_answered_while_controllers_are_gone(outage: Any) -> None:
    cluster, _, broker = await lead_topic("known")
    outage(cluster)
    new = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    bounds = {"timeout": 1000, "validate_only": False}
    calls = [
        (topic_calls.create_topics, (19, 4), {"topics": [{"name": "new", **new}], **bounds}),
        (topic_calls.delete_topics, (20, 3), {"topic_names": ["known"], "timeout": 1000}),
        (
            topic_calls.create_partitions,
            (37, 1),
            {"topics": [{"name": "known", "count": 3, "assignments": None}], **bounds},
        ),
    ]
    for call, api, tree in calls:
        answer = await asked(broker, call, api, tree)
        (rows,) = [value for value in answer.values() if isinstance(value, list)]
        assert [row["error_code"] for row in rows] == [Code.REQUEST_TIMED_OUT]
    tree = {"transactional_id": None, "transaction_timeout": 1000}
    answer = await asked(broker, topic_calls.init_producer_id, (22, 1), tree)
    assert answer["error_code"] is Code.COORDINATOR_LOAD_IN_PROGRESS
    await broker.abandon()


async def test_offsets_are_answered_while_controllers_are_gone(outage: Any) -> None:
    cluster, _, broker = await lead_topic("t")
    outage(cluster)
    groups = Groups(broker)
    item = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1}
    tree = {
        "group_id": "g",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": "t", "partitions": [{**item, "committed_metadata": None}]}],
    }
    answer = await groups.commit(request_of((8, 7), tree))
    (row,) = answer["topics"][0]["partitions"]
    assert row["error_code"] is Code.COORDINATOR_NOT_AVAILABLE
    wanted = {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}]}
    answer = await groups.fetch_offsets(request_of((9, 5), wanted))
    assert answer["error_code"] is Code.COORDINATOR_LOAD_IN_PROGRESS
    await broker.abandon()


async def test_metadata_waits_for_the_leader_of_a_topic_that_it_creates() -> None:
    """Some clients take a topic without leader for missing, and do not ask again for minutes."""
    cluster = Cluster()
    await cluster.join(1)
    broker = await cluster.join(2)  # not the one that names leaders
    await broker.refresh()
    answering = asyncio.create_task(_metadata(broker, "new"))
    await broker.until(lambda: "new" in broker.view.topics, 60)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not answering.done()
    topic_id = broker.view.topics["new"].topic_id
    await cluster.keys.put({leader_key(topic_id, 0): Leader(1, 0).document()})
    await broker.refresh()
    (row,) = (await answering)["topics"]
    assert row["error_code"] is Code.NONE
    assert [part["leader_id"] for part in row["partitions"]] == [1]


async def test_metadata_does_not_wait_for_a_leader_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_calls, "LEADER_WAIT_S", 0.01)
    cluster = Cluster()
    await cluster.join(1)
    broker = await cluster.join(2)
    answer = await _metadata(broker, "new")
    (part,) = answer["topics"][0]["partitions"]
    assert part["error_code"] is Code.LEADER_NOT_AVAILABLE
    again = await _metadata(broker, "new")
    assert _codes(again) == {"new": Code.NONE}, "it exists"


async def test_a_topic_that_another_broker_makes_meanwhile_is_found() -> None:
    cluster = Cluster()
    broker = await cluster.join(1)
    await broker.refresh()

    cluster.put_before_next(topic_key("t"), b'{"id":"x","partitions":3,"configs":{}}')
    (row,) = (await _metadata(broker, "t"))["topics"]
    assert row["error_code"] is Code.NONE
    assert len(row["partitions"]) == 3
    await opened(broker)


async def test_callers_share_a_reading_that_has_not_begun() -> None:
    """Requests during an outage would pile up readings of 30 s each."""
    cluster = Cluster()
    broker = await cluster.join(1)
    cluster.controllers.held = asyncio.Event()
    first = asyncio.create_task(broker.refresh())
    await asyncio.sleep(0)
    others = [asyncio.create_task(broker.refresh()) for _ in range(50)]
    await asyncio.sleep(0)
    assert len(broker._refreshes) <= 2
    cluster.controllers.held.set()
    await asyncio.gather(first, *others)
    assert not broker._refreshes


async def test_a_caller_that_gives_up_does_not_stop_the_reading() -> None:
    """A stop in the middle would drop logs from the map of open ones, and leave them open."""
    cluster, topic, broker = await lead_topic("t")
    log = broker.log_of("t", 0)
    await cluster.keys.put({leader_key(topic.topic_id, 0): Leader(2, 1).document()})
    await cluster.join(2)
    cluster.controllers.held = asyncio.Event()
    asking = asyncio.create_task(broker.refresh())
    await asyncio.sleep(0)
    asking.cancel()
    cluster.controllers.held.set()
    await broker.refresh()
    assert not any(cluster.table.streams[stream_id].is_open for stream_id in log.stream_ids)
