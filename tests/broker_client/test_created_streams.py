"""Streams that were to be shared are shared, or there are none: older leaders ignore the flag."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from streammeta.client import errors, parts
from streammeta.client.controllers import methods
from streammeta.v1 import common_pb2, streams_pb2
from tests.kit.fake_cluster import FakeCluster


class MixedCluster(FakeCluster):
    """Its leader makes the shared streams of `made_shared`, the others are owned."""

    def __init__(self) -> None:
        super().__init__()
        self.made_shared: set[int] = set()
        self.deletion = common_pb2.ERROR_CODE_NONE

    def _handlers(self, member: int) -> list[grpc.GenericRpcHandler]:
        own = {
            method.name: self._handler(member, method, apply)
            for method, apply in (
                (methods.DESCRIBE_STREAMS, self._describe),
                (methods.DELETE_STREAMS, self._delete),
            )
        }
        ours = grpc.method_handlers_generic_handler("streammeta.v1.StreamService", own)
        return [ours, *super()._handlers(member)]

    def _describe(self, request: Any) -> streams_pb2.DescribeStreamsResponse:
        answer = self.map.describe(request)
        for stream in answer.streams:
            stream.ClearField("epoch")  # never opened
            if stream.stream_id in self.made_shared:
                stream.state = common_pb2.STREAM_STATE_SHARED
        return answer

    def _delete(self, request: Any) -> streams_pb2.DeleteStreamsResponse:
        if self.deletion == common_pb2.ERROR_CODE_NONE:
            for stream in request.streams:
                del self.map.streams[stream.stream_id]
        return streams_pb2.DeleteStreamsResponse(errors=[self.deletion] * len(request.streams))


@asynccontextmanager
async def mixed() -> AsyncIterator[tuple[MixedCluster, parts.BrokerSession]]:
    async with (
        MixedCluster() as cluster,
        parts.ControllerClient(cluster.endpoints, rng=random.Random(7)) as client,
    ):
        yield cluster, await parts.BrokerSession.open(client, 1000, 1)


@pytest.mark.parametrize("made_shared", [set(), {0}], ids=["none", "some"])
async def test_owned_streams_in_place_of_shared_ones_are_deleted(made_shared: set[int]) -> None:
    async with mixed() as (cluster, session):
        cluster.made_shared = made_shared
        with pytest.raises(errors.SharedStreamsUnsupportedError, match="feature level 5"):
            await session.create_streams([{}, {}], shared=True)
        assert not cluster.map.streams
        assert cluster.calls["DescribeStreams"] == 1


async def test_what_can_not_be_deleted_is_named() -> None:
    async with mixed() as (cluster, session):
        cluster.deletion = common_pb2.ERROR_CODE_STREAM_FENCED
        with pytest.raises(errors.SharedStreamsUnsupportedError, match=r"\[0, 1\] can't"):
            await session.create_streams([{}, {}], shared=True)


async def test_shared_streams_stay_and_owned_ones_cost_no_look() -> None:
    async with mixed() as (cluster, session):
        cluster.made_shared = {0, 1}
        assert await session.create_streams([{}, {}], shared=True) == [0, 1]
        assert await session.create_streams([{}]) == [2]
        assert set(cluster.map.streams) == {0, 1, 2}
        assert cluster.calls["DescribeStreams"] == 1
