"""Worker of failovers: which nodes it recovers, and which it names to the operator."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.client.parts import BrokerSession, FailoverWorker, Recovery
from streammeta.client.wal.bucket import failover
from streammeta.client.wal.bucket.config import WAL_CONFIG, ObjectLogConfig
from streammeta.client.wal.bucket.failover import LEFT_ALONE_S
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.storage.errors import AccessDeniedError
from streammeta.storage.object_format.record import RecordBatch
from tests.broker_client.wal_tools import encoded
from tests.kit.fake_broker import Broker, broker
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.waiting import until

DEAD = Recovery(node_id=7, node_epoch=1, wal_config="")


@dataclass
class Beats:
    """A heartbeat that names what it is told to."""

    recoveries: tuple[Recovery, ...] = ()
    assigned: asyncio.Event = field(default_factory=asyncio.Event)

    async def name(self, *recoveries: Recovery) -> None:
        self.recoveries = recoveries
        self.assigned.set()
        await until(lambda: not self.assigned.is_set(), "look at the heartbeat")
        await asyncio.sleep(0)


async def test_a_node_without_a_log_is_told_of_once_when_nobody_recovers_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    beats: Any = Beats()
    async with broker() as b:
        worker = FailoverWorker(b.session, b.store, beats, lambda: now)
        with caplog.at_level(logging.WARNING):
            await beats.name(DEAD)
            now += LEFT_ALONE_S - 1
            await beats.name(DEAD)
            assert not caplog.records
            now += 1
            for _ in range(2):
                await beats.name(DEAD)
        await worker.close()
    (told,) = caplog.messages
    assert "node 7 has been assigned to this broker for 30 s" in told


async def left_log(b: Broker, node_id: int) -> int:
    """Let a node die with an open stream and one record that only its log has."""
    session = await BrokerSession.open(b.client, node_id, 1)
    (stream_id,) = await session.create_streams([{}])
    (await session.open_streams({stream_id: 0})).require_all()
    config = ObjectLogConfig(linger_s=0.001)
    async with await ObjectLog.open(b.store, LogIdentity(NAMESPACE, node_id, 1), config) as log:
        lost = RecordBatch(stream_id, 0, 0, 1, b"of node %d" % node_id)
        await asyncio.shield(log.append(*encoded(lost)))
    return stream_id


def in_bucket(node_id: int) -> Recovery:
    return Recovery(node_id=node_id, node_epoch=1, wal_config=WAL_CONFIG)


@pytest.mark.parametrize("error", [AccessDeniedError("for now"), RuntimeError("a defect")])
async def test_a_node_that_can_not_be_recovered_holds_up_no_other_and_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover, failing = failover.recover_node, {7}

    async def recover_or_fail(slots: Any, namespace: str, departed: Any, *rest: Any) -> Any:
        if departed.node.node_id in failing:
            raise error
        return await recover(slots, namespace, departed, *rest)

    monkeypatch.setattr(failover, "recover_node", recover_or_fail)
    beats: Any = Beats()
    async with broker() as b:
        streams = {node_id: await left_log(b, node_id) for node_id in (7, 8)}
        worker = FailoverWorker(b.session, b.store, beats)
        await beats.name(in_bucket(7), in_bucket(8))
        await until(lambda: len(worker.reports) == 1, "report of node 8")
        assert await b.payloads(streams[7]) == []
        assert await b.payloads(streams[8]) == [b"of node 8"]

        failing.clear()
        await beats.name(in_bucket(7))
        await until(lambda: len(worker.reports) == 2, "report of node 7")
        assert await b.payloads(streams[7]) == [b"of node 7"]
        await worker.close()
        assert [one.node.node_id for one in worker.reports] == [8, 7]


async def test_a_node_without_a_log_in_the_bucket_is_left_alone() -> None:
    """Its log is elsewhere, so closing its streams would drop records that it acknowledged."""
    beats: Any = Beats()
    async with broker() as b:
        stream_id = await left_log(b, 7)
        before = b.store.objects()
        worker = FailoverWorker(b.session, b.store, beats)
        await beats.name(DEAD)
        await beats.name()  # its turn comes after the failover
        assert worker.reports == []
        assert b.store.objects() == before
        assert b.cluster.map.streams[stream_id].opened
        await worker.close()


async def test_a_failover_that_found_nothing_is_not_reported() -> None:
    beats: Any = Beats()
    async with broker() as b:
        await left_log(b, 7)
        worker = FailoverWorker(b.session, b.store, beats)
        for count in (1, 1):
            await beats.name(in_bucket(7))
            await beats.name()  # its turn comes after the failover
            assert len(worker.reports) == count
        await worker.close()
