"""A controller that holds much memory: bulk is refused first, what keeps it alive never."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.controller.rpc.calls.memory_budget import GUARD_RETRY_AFTER_MS, MemoryGuard
from streammeta.controller.runtime.load.process_memory import Pressure, ProcessMemory
from streammeta.rpc.failures import Reason, RpcFailure, read_failure
from streammeta.rpc.method_facts import MemoryClass
from streammeta.v1 import columns_pb2, common_pb2, kv_pb2, metadata_pb2, nodes_pb2, streams_pb2
from streammeta.v1.metadata_pb2_grpc import MetadataServiceStub
from tests.kit.real_cluster import STEADY, running_cluster
from tests.server.rpc_server import NODE, Rpcs, serving
from tests.trust.audited_cluster import ask

_LIMIT = 1_000
_PIPELINE = "/streammeta.v1.ObjectService/CommitPipeline"
_LARGE = bytes(8 << 10)
_MIB = 1 << 20


class Gauge:
    """Memory as the test says it is."""

    def __init__(self) -> None:
        self.bytes = 0
        self.memory = ProcessMemory(_LIMIT, lambda: self.bytes)

    def show(self, pressure: Pressure) -> None:
        self.bytes = {Pressure.NONE: 0, Pressure.HIGH: 900, Pressure.FULL: 1_000}[pressure]
        self.memory.look()


@pytest.fixture
def gauge() -> Gauge:
    return Gauge()


@pytest_asyncio.fixture
async def rpcs(gauge: Gauge) -> AsyncIterator[Rpcs]:
    async with serving(guard=MemoryGuard(gauge.memory)) as leader:
        await leader.register()
        yield leader


@pytest.mark.parametrize(
    ("pressure", "passes"),
    [
        (Pressure.NONE, {*MemoryClass}),
        (Pressure.HIGH, {MemoryClass.VITAL, MemoryClass.COMMIT, MemoryClass.ORDINARY}),
        (Pressure.FULL, {MemoryClass.VITAL}),
    ],
    ids=lambda given: given.name if isinstance(given, Pressure) else "",
)
async def test_calls_are_rejected_by_their_memory_class(
    rpcs: Rpcs, gauge: Gauge, pressure: Pressure, passes: set[MemoryClass]
) -> None:
    gauge.show(pressure)
    assert {
        memory for memory, call in _CALLS.items() if await refusal(call(rpcs)) is None
    } == passes


async def _ask(rpcs: Rpcs, request: Any) -> None:
    await rpcs.ask(request)


async def _commit(rpcs: Rpcs) -> None:
    call: Any = rpcs.channel.stream_stream(_PIPELINE)()
    await call.write(columns_pb2.PackedCommitPipelineRequest(sequence=1).SerializeToString())
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass


_CALLS: dict[MemoryClass, Any] = {
    MemoryClass.VITAL: lambda rpcs: _ask(rpcs, nodes_pb2.HeartbeatRequest(node=NODE)),
    MemoryClass.COMMIT: _commit,
    MemoryClass.ORDINARY: lambda rpcs: _ask(
        rpcs,
        streams_pb2.CreateStreamsRequest(
            request_id="one", node=NODE, streams=[streams_pb2.NewStream()]
        ),
    ),
    MemoryClass.BULK: lambda rpcs: _ask(rpcs, kv_pb2.ListKVsRequest()),
}


async def refusal(call: Any) -> RpcFailure | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return read_failure(error)
    return None


def large() -> kv_pb2.PutKVsRequest:
    return kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="k", value=_LARGE, overwrite=True)])


async def test_a_refusal_says_limit_use_and_wait(rpcs: Rpcs, gauge: Gauge) -> None:
    await rpcs.ask(large())
    gauge.show(Pressure.HIGH)
    failure = await refusal(rpcs.ask(large()))
    assert failure is not None
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.BUSY)
    assert failure.metadata == {"quota": "memory", "limit": "1000", "used": "900"}
    assert failure.retry_after_s == GUARD_RETRY_AFTER_MS / 1000
    gauge.show(Pressure.NONE)
    await rpcs.ask(large())


async def test_watches_and_snapshots_wait_for_memory_and_those_that_run_go_on(
    rpcs: Rpcs, gauge: Gauge
) -> None:
    stub: Any = MetadataServiceStub(rpcs.channel)
    running = stub.Watch(metadata_pb2.WatchRequest())
    await running.read()
    gauge.show(Pressure.HIGH)
    for call in (
        stub.Watch(metadata_pb2.WatchRequest()),
        stub.GetSnapshot(metadata_pb2.GetSnapshotRequest()),
    ):
        failure = await refusal(call.read())
        assert failure is not None
        assert failure.metadata["quota"] == "memory"
    put = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(key="small", value=b"1")])
    await rpcs.ask(put)
    while not (await running.read()).records:
        pass
    running.cancel()


async def test_an_open_pipeline_is_refused_at_the_limit_and_taken_before(
    rpcs: Rpcs, gauge: Gauge
) -> None:
    call: Any = rpcs.channel.stream_stream(_PIPELINE)()
    for sequence, pressure in enumerate((Pressure.NONE, Pressure.HIGH), 1):
        gauge.show(pressure)
        message = columns_pb2.PackedCommitPipelineRequest(sequence=sequence)
        await call.write(message.SerializeToString())
        assert await call.read() is not grpc.aio.EOF
    gauge.show(Pressure.FULL)
    await call.write(columns_pb2.PackedCommitPipelineRequest(sequence=3).SerializeToString())
    failure = await refusal(call.read())
    assert failure is not None
    assert (failure.reason, failure.metadata["sequence"]) == (Reason.BUSY, "3")
    assert failure.metadata["quota"] == "memory"


def fill(client: ControllerClient) -> None:
    """Put keys until no more are taken."""
    for number in range(512):
        item = kv_pb2.KVToPut(key=f"{number}", value=bytes(_MIB))
        ask(client, kv_pb2.PutKVsRequest(items=[item]))


@pytest.mark.process
def test_a_controller_near_its_limit_refuses_what_is_large_and_lives(tmp_path: Path) -> None:
    """Of keys, which its quotas would let take twice as much."""
    options = (*STEADY, "--memory-limit-mb", "300")
    node = common_pb2.NodeIdentity(node_id=1007, node_epoch=1)
    with (
        running_cluster(tmp_path, 1, options) as cluster,
        ControllerClient(cluster.endpoints, timeout_s=1) as client,
    ):
        ask(client, nodes_pb2.RegisterNodeRequest(node=node))
        with pytest.raises(CallError, match="memory"):
            fill(client)
        ask(client, nodes_pb2.HeartbeatRequest(node=node))
        small = kv_pb2.KVToPut(key="small", value=b"1", overwrite=True)
        ask(client, kv_pb2.PutKVsRequest(items=[small]))
        ask(client, kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(key="0")]))
        pid = cluster.children[1].pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        assert pages * 4096 < 300 * _MIB
