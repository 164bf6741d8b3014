"""The calls of a failover, against a cluster in memory: uploads, refusals, closings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streammeta.client import NodeIdentity, OpenedStream
from streammeta.client.controllers import bucket_check
from streammeta.client.errors import NodeEpochExpiredError, NodeFencedError
from streammeta.client.parts import BrokerSession
from streammeta.client.wal.bucket import departed_node
from streammeta.client.wal.bucket.departed_node import DepartedNode, PendingStream
from streammeta.client.wal.disk.stored_records import StoredRecords
from streammeta.storage.cluster_files.bucket_marker import BucketMarker
from streammeta.storage.errors import AccessDeniedError, WrongBucketError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import common_pb2, streams_pb2
from tests.kit.fake_broker import Broker, broker
from tests.kit.fake_cluster import NAMESPACE, FakeMap

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
    return [RecordBatch(stream_id, 3, one, 3, b"%d.%d" % (stream_id, one)) for one in offsets]


async def test_an_upload_of_which_some_were_refused_does_not_count_as_done() -> None:
    async with departed(3) as (b, node, (first, stolen, last)):
        await b.steal(stolen.stream_id)
        wanted = {one.stream_id: records_of(one.stream_id) for one in (first, stolen, last)}
        assert await node.upload(wanted) is False
        assert b.cluster.map.streams[first.stream_id].end == 6
        assert b.cluster.map.streams[stolen.stream_id].end == 0

        rest = {one.stream_id: records_of(one.stream_id, 6) for one in (first, last)}
        assert await node.upload(rest) is True
        for one in (first, last):
            assert await b.payloads(one.stream_id) == [
                record.payload for record in records_of(one.stream_id, 0, 4)
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


async def test_what_is_another_s_by_now_counts_as_closed_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[common_pb2.ErrorCode.ValueType] = []
    asked: list[int] = []

    def close(request: streams_pb2.CloseStreamsRequest) -> streams_pb2.CloseStreamsResponse:
        asked.extend(one.stream_id for one in request.streams)
        errors = [codes.pop(0) for _ in request.streams]
        return streams_pb2.CloseStreamsResponse(errors=errors)

    monkeypatch.setattr(FakeMap, "close", lambda _, request: close(request))
    monkeypatch.setattr(departed_node, "_CLOSED_AT_ONCE", 2)
    async with departed(3) as (_, node, opened):
        streams = [PendingStream(one.stream_id, one.epoch, 0, 0) for one in opened]
        codes += [
            common_pb2.ERROR_CODE_STREAM_FENCED,
            common_pb2.ERROR_CODE_STREAM_NOT_EXIST,
            common_pb2.ERROR_CODE_STREAM_NOT_OPENED,
        ]
        await node.close(streams)
        assert asked == [one.stream_id for one in opened]
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
