"""Ends and pauses of a broker: what it names if it can not close, what it keeps when it wakes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from streammeta.brokers.kafka.cluster import broker as module
from streammeta.brokers.kafka.cluster.cluster import Leader
from streammeta.brokers.kafka.cluster.keys import leader_key
from streammeta.client.errors import ControllerUnavailableError
from streammeta.v1 import nodes_pb2
from tests.kit.kafka_batches import plain
from tests.kit.kafka_cluster import Client, Cluster, lead_topic, node, opened

_FENCED = nodes_pb2.NODE_STATE_FENCED


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


async def test_a_silent_broker_is_gone_for_others() -> None:
    cluster = Cluster()
    await cluster.make_topic()
    first, second = await cluster.join(1), await cluster.join(2)
    await opened(first)
    cluster.controllers.nodes = [node(1, state=_FENCED), node(2)]
    await second.refresh()
    assert set(second.view.brokers) == {2}
    assert (await cluster.keys.list(leader_key("id-t", 0)))[""][0] == {"leader": 2, "epoch": 1}
    await second.abandon()
