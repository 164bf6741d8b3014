"""Places of callers: a principal has some, all together have more, and a place comes back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.controller.errors import BusyError
from streammeta.controller.rpc.services.pipeline_core import PIPELINES_PER_PRINCIPAL
from streammeta.controller.rpc.watch.service import WATCHERS_PER_PRINCIPAL
from streammeta.controller.trust.rates import Places
from streammeta.rpc.failures import read_failure
from streammeta.v1 import metadata_pb2, objects_pb2
from tests.kit.certificates import Authority
from tests.trust.trusted_server import trusting


def refusal(places: Places, holder: str, limits: dict[str, int]) -> BusyError:
    with pytest.raises(BusyError) as refused, places.taken(holder, **limits):
        pass
    return refused.value


def test_places_are_counted_by_holder_and_in_all_and_come_back() -> None:
    places = Places("walks", 700)
    limits = {"per_holder": 1, "in_all": 2}
    with places.taken("a", **limits):
        refused = refusal(places, "a", limits)
        assert str(refused).startswith("a has 1 walks in flight")
        assert refused.retry_after_ms == 700
        with places.taken("b", **limits):
            assert str(refusal(places, "c", limits)).startswith("callers have 2")
    assert places.count == 0
    assert not places._held, "names of callers are not kept"
    with places.taken("a", **limits):
        assert places.count == 1


def test_callers_without_a_name_have_what_is_left_of_all() -> None:
    places = Places("walks", 1)
    with places.taken(None, per_holder=1, in_all=2), places.taken(None, per_holder=1, in_all=2):
        assert places.count == 2


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(call.read(), 60)
    return read_failure(raised.value).reason


async def test_a_principal_opens_so_many_pipelines_and_watches(tmp_path: Path) -> None:
    async with trusting(Authority(tmp_path, "ours")) as server:
        broker = await server.by("broker/1000")
        other = await server.by("broker/1001")
        empty = objects_pb2.CommitPipelineRequest(sequence=1).SerializeToString()
        watch = metadata_pb2.WatchRequest().SerializeToString()

        def pipeline(channel: grpc.aio.Channel) -> Any:
            # Written by a task of its own, since a call may be refused before the message is.
            open_stream: Any = channel.stream_stream("/streammeta.v1.ObjectService/CommitPipeline")
            return open_stream(messages())

        async def messages() -> AsyncIterator[bytes]:
            yield empty
            await asyncio.Event().wait()

        def watching(channel: grpc.aio.Channel) -> Any:
            start: Any = channel.unary_stream("/streammeta.v1.MetadataService/Watch")
            return start(watch)

        pipelines = [pipeline(broker.channel) for _ in range(PIPELINES_PER_PRINCIPAL)]
        watches = [watching(broker.channel) for _ in range(WATCHERS_PER_PRINCIPAL)]
        for call in (*pipelines, *watches):
            assert await call.read()
        # grpc.aio may tell of its own failed write before the status that is there.
        while not (reason := await refused(pipeline(broker.channel))):
            pass
        assert reason == "TOO_MANY_PIPELINES"
        assert await refused(watching(broker.channel)) == "BUSY"
        for call in (pipeline(other.channel), watching(other.channel)):
            assert await call.read()
