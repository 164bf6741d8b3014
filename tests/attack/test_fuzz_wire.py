"""Random requests over gRPC and TLS at real controllers, by certificates of every role.

Calls that may change nothing are made first, many at once, and leave the map as it was; then those
that may. `STREAMMETA_FUZZ_CALLS_OVER_TLS=500000` makes as many calls; a failure names its seed.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.rpc.connections import client_channel
from streammeta.v1 import admin_pb2, nodes_pb2, objects_pb2
from tests.attack.direct_calls import METHODS
from tests.attack.scene import resident
from tests.attack.test_fuzz_roles import KNOWN, NODES, Fuzz, first_requests, may_change
from tests.kit.certificates import Authority
from tests.kit.warm_start import start_warm
from tests.trust.test_rules import WHO_MAY
from tests.trust.trusted_server import CLUSTER

pytestmark = pytest.mark.process

_CALLS = int(os.environ.get("STREAMMETA_FUZZ_CALLS_OVER_TLS", "1200"))
_SEED = int(os.environ.get("STREAMMETA_FUZZ_SEEDS", "1000:").partition(":")[0])
_BATCH = 400
_AT_ONCE = 16
_STRANGER = "another cluster's admin"
_QUIET = (
    *("--election-timeout-ms", "1000", "--fetch-timeout-ms", "8000"),
    # The controllers' own work would change the map between two looks at it.
    *("--lifecycle-interval-ms", "3600000", "--sweep-interval-ms", "3600000"),
    *("--session-timeout-ms", "3600000"),
)
_MOVES_LEADERSHIP = {"AddVoter", "RemoveVoter", "TransferLeadership", "UpdateFeatureLevel"}
"""An administrator may make them."""
_TIMEOUT_S, _WATCHED_S = 30.0, 0.1
"""Deadlines of calls, and of those that an allowed caller would wait in for ever, in seconds."""
_WAITS_FOR_AN_OFFSET = "StateHash"
"""The log may never reach the one that it is asked for."""
_NOT_SENT = "Internal error from Core"
"""Words of grpc.aio for a pipeline that was ended before its message was sent: its own status is
not told."""
_GROWTH_MAX, _LATER_GROWTH_MAX = 400 << 20, 64 << 20
"""Growth of the leader's memory in all, and after the first fifth of the batches, in bytes."""
_STREAMED_SHARE = 0.2
"""Calls with many answers wait; of those that are drawn, this share is made."""
_METHODS = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class _Call:
    letter: str
    method: MethodDescriptor
    payload: bytes

    @property
    def may_change(self) -> bool:
        is_known = self.letter in WHO_MAY[self.method.name]
        return is_known and may_change(self.letter, self.method, self.payload)


@dataclass
class _Wire:
    """The leader of three controllers, and a connection of each caller."""

    cluster: LocalCluster
    leader: int
    channels: dict[str, Any]

    async def ask(self, letter: str, name: str, request: Message) -> bytes:
        """Make a call that must succeed; return its answer."""
        method = _METHODS[name]
        path = f"/{method.containing_service.full_name}/{name}"
        answer = await self.channels[letter].unary_unary(path)(
            request.SerializeToString(), timeout=_TIMEOUT_S
        )
        assert isinstance(answer, bytes)
        return answer

    async def state_hash(self) -> bytes:
        answer = await self.ask("a", "StateHash", admin_pb2.StateHashRequest())
        return admin_pb2.StateHashResponse.FromString(answer).hash

    async def issued_below(self) -> int:
        """Return the bound of object ids, which the leader raises by itself behind a snapshot."""
        request = objects_pb2.CheckObjectsRequest(object_ids=[0])
        answer = await self.ask("a", "CheckObjects", request)
        return objects_pb2.CheckObjectsResponse.FromString(answer).issued_below

    async def office(self) -> tuple[int, int]:
        """Return the leader and its epoch."""
        answer = await self.ask("a", "DescribeCluster", admin_pb2.DescribeClusterRequest())
        seen = admin_pb2.DescribeClusterResponse.FromString(answer)
        return seen.leader_id, seen.epoch

    async def leads(self) -> bool:
        """Whether it leads, and serves."""
        try:
            await self.ask("a", "GetNodes", nodes_pb2.GetNodesRequest())
        except grpc.aio.AioRpcError:
            return False
        return True

    def memory(self) -> int:
        return resident(self.cluster.children[self.leader].pid)

    async def make(self, calls: Iterable[_Call], fuzz: Fuzz) -> None:
        """Make calls, some at once, and judge each by its status."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(call: _Call) -> None:
            async with room:
                code = await self._code(call)
            fuzz.judge(call.letter, call.method, call.payload, code, changed=False)

        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(one(call))

    async def _code(self, call: _Call) -> str:
        """Return the name of a call's status; a stream's is that of its first answer."""
        path = f"/{call.method.containing_service.full_name}/{call.method.name}"
        channel = self.channels[call.letter]
        lasts = call.method.server_streaming or call.method.name == _WAITS_FOR_AN_OFFSET
        waits = lasts and call.letter in WHO_MAY[call.method.name]
        timeout = _WATCHED_S if waits and not call.method.client_streaming else _TIMEOUT_S
        try:
            if call.method.client_streaming:
                pipeline = channel.stream_stream(path)(iter([call.payload]), timeout=timeout)
                while await pipeline.read() is not grpc.aio.EOF:
                    pass  # what is left of its message may still change the map
            elif call.method.server_streaming:
                await channel.unary_stream(path)(call.payload, timeout=timeout).read()
            else:
                await channel.unary_unary(path)(call.payload, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if str(error.details()).startswith(_NOT_SENT):
                return await self._code(call)
            has_waited = waits and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return "OK" if has_waited else error.code().name
        return "OK"


def drawn(fuzz: Fuzz) -> Iterable[_Call]:
    """Yield calls without end."""
    while True:
        letter, method, payload = fuzz.draw()
        if letter not in (*KNOWN, _STRANGER):
            continue
        if letter == "a" and method.name in _MOVES_LEADERSHIP:
            continue
        if method.server_streaming and fuzz.rng.random() > _STREAMED_SHARE:
            continue
        yield _Call(letter, method, payload)


@asynccontextmanager
async def wired(root: Path, authority: Authority) -> AsyncIterator[_Wire]:
    """Start three controllers, and connect each caller to their leader."""
    (root / "bucket").mkdir()
    cluster = LocalCluster(
        *(root, CLUSTER, f"file://{root}/bucket", free_ports(3), _QUIET), starter=start_warm
    )
    cluster.tls = {node: authority.issue(f"controller/{node}") for node in cluster.node_ids}
    files = {letter: authority.issue(str(who)) for letter, who in KNOWN.items()}
    files[_STRANGER] = authority.issue("admin/eve", cluster_id="other")
    files |= {str(node): authority.issue(f"broker/{node}") for node in NODES}
    try:
        await asyncio.to_thread(cluster.start_all)
        async with AsyncExitStack() as stack:
            wires: list[_Wire] = []
            for leader, endpoint in enumerate(cluster.endpoints, 1):
                channels: dict[str, Any] = {}
                for letter, tls in files.items():
                    channels[letter] = client_channel(endpoint, tls)
                    await stack.enter_async_context(channels[letter])
                wires.append(_Wire(cluster, leader, channels))

            async with asyncio.timeout(60):
                while not (leading := [wire for wire in wires if await wire.leads()]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield leading[0]
    finally:
        await asyncio.to_thread(cluster.stop_all)


@pytest.mark.timeout(120 + _CALLS // 200)
async def test_no_certificate_at_real_controllers_does_what_its_role_may_not(
    authority: Authority, tmp_path: Path
) -> None:
    fuzz = Fuzz(_SEED)
    async with wired(tmp_path, authority) as wire:
        for node_id in NODES:
            for name, request in first_requests(node_id):
                await wire.ask(str(node_id), name, request)
        office, memory = await wire.office(), [wire.memory()]
        calls = drawn(fuzz)
        batches, unchanged = max(1, _CALLS // _BATCH), 0
        for batch in range(batches):
            made = list(itertools.islice(calls, _BATCH))
            bound, before = await wire.issued_below(), await wire.state_hash()
            await wire.make((call for call in made if not call.may_change), fuzz)
            is_same = await wire.state_hash() == before
            unchanged += is_same
            has_claimed = await wire.issued_below() != bound
            assert is_same or has_claimed, f"seed {_SEED}, batch {batch}: it changed"
            await wire.make((call for call in made if call.may_change), fuzz)
            memory.append(wire.memory())
        assert unchanged > batches // 2, f"claims of ids hid {batches - unchanged} batches"
        assert await wire.office() == office, "leadership moved"
        assert await wire.state_hash() != before or _CALLS > _BATCH
        print(*(f"{size >> 20} MiB" for size in memory[:: max(1, batches // 10)]))
        assert max(memory) - memory[0] < _GROWTH_MAX, f"{max(memory) >> 20} MiB at most"
        later = max(memory) - memory[batches // 5 + 1]
        assert later < _LATER_GROWTH_MAX, f"{later >> 20} MiB more after a fifth of the calls"
        assert all(child.is_running for child in wire.cluster.children.values())
    assert fuzz.denied["m"] > 0
    assert fuzz.denied[_STRANGER] > 0
