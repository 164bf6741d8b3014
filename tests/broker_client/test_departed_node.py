"""Failovers against a cluster in memory: their calls, and the worker that chooses the nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.client import NodeIdentity, OpenedStream
from streammeta.client.controllers import bucket_check
from streammeta.client.errors import NodeEpochExpiredError, NodeFencedError
from streammeta.client.parts import BrokerSession, FailoverWorker, Recovery
from streammeta.client.wal.bucket import departed_node, failover
from streammeta.client.wal.bucket.config import WAL_CONFIG, ObjectLogConfig
from streammeta.client.wal.bucket.departed_node import DepartedNode, PendingStream
from streammeta.client.wal.bucket.failover import LEFT_ALONE_S
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.recovery import StoredRecords
from streammeta.storage.cluster_files.bucket_marker import BucketMarker
from streammeta.storage.errors import AccessDeniedError, WrongBucketError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2, streams_pb2
from tests.broker_client.wal_tools import encoded
from tests.kit.fake_broker import Broker, broker
from tests.kit.fake_cluster import NAMESPACE, FakeMap
from tests.kit.waiting import until

DEAD = NodeIdentity(1000, 1)


@asynccontextmanager
async def departed(streams: int) -> AsyncIterator[tuple[Broker, DepartedNode, list[OpenedStream]]]:
    """Yield a cluster, and a dead node with open streams for which another process speaks."""
    async with broker() as b:
        opened = await b.opened(streams, epoch=3)
        session = await BrokerSession.open(b.client, 1001, 1)
        async with StoredRecords(b.client, b.store, NAMESPACE) as stored:
            yield b, DepartedNode(session, DEAD, b.store, stored), opened


def records_of(stream_id: int, begin: int = 0, count: int = 2) -> list[RecordBatch]:
    offsets = range(begin, begin + 3 * count, 3)
    return [RecordBatch(stream_id, 3, at, 3, b"%d.%d" % (stream_id, at)) for at in offsets]


async def test_an_upload_of_which_some_were_refused_does_not_count_as_done() -> None:
    async with departed(3) as (b, node, (first, stolen, last)):
        await b.steal(stolen.stream_id)
        wanted = {id_.stream_id: records_of(id_.stream_id) for id_ in (first, stolen, last)}
        assert await node.upload(wanted) is False
        assert b.cluster.map.streams[first.stream_id].end == 6
        assert b.cluster.map.streams[stolen.stream_id].end == 0

        rest = {stream.stream_id: records_of(stream.stream_id, 6) for stream in (first, last)}
        assert await node.upload(rest) is True
        for stream in (first, last):
            assert await b.payloads(stream.stream_id) == [
                record.payload for record in records_of(stream.stream_id, 0, 4)
            ]


async def test_an_upload_that_was_refused_as_a_whole_does_not_count_as_done() -> None:
    async with departed(1) as (b, node, (stream,)):
        await b.steal(stream.stream_id)
        assert await node.upload({stream.stream_id: records_of(stream.stream_id)}) is False


async def test_objects_are_in_the_bucket_before_the_map_names_them() -> None:
    async with departed(1) as (b, node, (stream,)):
        b.store.fail_next("put", AccessDeniedError("no right to write"))
        with pytest.raises(AccessDeniedError):
            await node.upload({stream.stream_id: records_of(stream.stream_id)})
        assert b.cluster.map.streams[stream.stream_id].end == 0


async def test_a_newer_process_of_the_node_ends_the_recovery_and_not_an_attempt() -> None:
    async with departed(1) as (b, node, (stream,)):
        b.cluster.map.nodes[DEAD.node_id] = DEAD.node_epoch + 1
        with pytest.raises(NodeEpochExpiredError):
            await node.upload({stream.stream_id: records_of(stream.stream_id)})


async def test_only_a_stream_of_another_counts_as_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[common_pb2.ErrorCode.ValueType] = []
    asked: list[int] = []

    def close(request: streams_pb2.CloseStreamsRequest) -> streams_pb2.CloseStreamsResponse:
        asked.extend(stream.stream_id for stream in request.streams)
        errors = [codes.pop(0) for _ in request.streams]
        return streams_pb2.CloseStreamsResponse(errors=errors)

    monkeypatch.setattr(FakeMap, "close", lambda _, request: close(request))
    monkeypatch.setattr(departed_node, "_CLOSED_AT_ONCE", 2)
    async with departed(3) as (_, node, opened):
        streams = [PendingStream(stream.stream_id, stream.epoch, 0, 0) for stream in opened]
        codes += [
            common_pb2.ERROR_CODE_STREAM_FENCED,
            common_pb2.ERROR_CODE_STREAM_NOT_EXIST,
            common_pb2.ERROR_CODE_STREAM_NOT_OPENED,
        ]
        await node.close(streams)
        assert asked == [stream.stream_id for stream in opened]
        codes += [common_pb2.ERROR_CODE_NONE, common_pb2.ERROR_CODE_NODE_FENCED]
        with pytest.raises(NodeFencedError):
            await node.close(streams)


async def test_a_bucket_of_another_cluster_fences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = BucketMarker(
        cluster_id="other", cluster_uuid="other", namespace=NAMESPACE, created_ms=0
    )
    monkeypatch.setattr(bucket_check, "read_marker", lambda store, namespace: foreign)
    async with departed(1) as (b, node, _):
        before = b.cluster.calls["GetOpeningStreams"]
        with pytest.raises(WrongBucketError):
            await node.list_pending()
        assert b.cluster.calls["GetOpeningStreams"] == before


async def test_every_call_names_the_departed_node_and_who_speaks_for_it() -> None:
    async with departed(1) as (b, node, (stream,)):
        assert await node.list_pending() == [PendingStream(stream.stream_id, 3, 0, 0, None)]
        await node.upload({stream.stream_id: records_of(stream.stream_id)})
        await node.close([PendingStream(stream.stream_id, 3, 0, 6)])
        for method in ("GetOpeningStreams", "CommitStreamSetObject", "CloseStreams"):
            request = b.cluster.requests[method][-1]
            assert (request.node.node_id, request.node.node_epoch) == (1000, 1), method
            assert (request.recoverer.node_id, request.recoverer.node_epoch) == (1001, 1), method
        assert b.cluster.requests["GetOpeningStreams"][-1].failover
        assert b.cluster.requests["CommitStreamSetObject"][-1].failover


LOGLESS = Recovery(node_id=7, node_epoch=1, wal_config="")


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


async def test_an_unrecovered_node_without_log_is_named(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    beats: Any = Beats()
    async with broker() as b:
        worker = FailoverWorker(b.session, b.store, beats, lambda: now)
        with caplog.at_level(logging.WARNING):
            await beats.name(LOGLESS)
            now += LEFT_ALONE_S - 1
            await beats.name(LOGLESS)
            assert not caplog.records
            now += 1
            for _ in range(2):
                await beats.name(LOGLESS)
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
        assert [report.node.node_id for report in worker.reports] == [8, 7]


async def test_a_node_without_a_log_in_the_bucket_is_left_alone() -> None:
    """Its log is elsewhere, so closing its streams would drop records that it acknowledged."""
    beats: Any = Beats()
    async with broker() as b:
        stream_id = await left_log(b, 7)
        before = b.store.objects()
        worker = FailoverWorker(b.session, b.store, beats)
        await beats.name(LOGLESS)
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
