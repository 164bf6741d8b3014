"""Replicas of one quorum in this process, joined by real gRPC on loopback and real directories."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from controller.ids import ClusterId, NodeId
from controller.journal.journal import Journal
from controller.loop.clock import SystemClock
from controller.loop.quorum_driver import QuorumDriver
from controller.quorum.config import QuorumConfig, QuorumTimings
from controller.quorum.messages import Batch, BatchKind
from controller.quorum.voters import ReplicaKey, Voter, VoterSet
from controller.rpc.quorum_peers import GrpcPeerTransport
from controller.rpc.quorum_service import QuorumServicer
from controller.rpc.quorum_wire import MESSAGE_OPTIONS
from proto import quorum_pb2_grpc

CLUSTER = ClusterId("test")
FAST = QuorumTimings(
    election_timeout_ms=150,
    fetch_timeout_ms=400,
    fetch_max_wait_ms=100,
    request_timeout_ms=500,
    failover_stagger_ms=20,
)


@dataclass
class Recorder:
    """A state machine that remembers what it was told."""

    committed: list[bytes] = field(default_factory=list)
    high_watermark: int = 0
    calls: list[str] = field(default_factory=list)

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        for batch in batches:
            assert batch.base_offset == self.high_watermark, "batches must come in order"
            self.high_watermark = batch.end_offset
            if batch.kind is BatchKind.DATA:
                self.committed.extend(batch.payloads)
        assert self.high_watermark == high_watermark

    def on_leadership_claimed(self, epoch: int) -> None:
        self.calls.append(f"claimed {epoch}")

    def on_leadership_lost(self) -> None:
        self.calls.append("lost")


@dataclass
class Node:
    """One running replica."""

    journal: Journal
    driver: QuorumDriver
    machine: Recorder
    transport: GrpcPeerTransport
    server: grpc.aio.Server


class GrpcQuorum:
    """Starts, kills and restarts replicas; ports are chosen once."""

    def __init__(self, root: Path, size: int, timings: QuorumTimings = FAST) -> None:
        self._root = root
        self._timings = timings
        self._sockets = [_reserve_port() for _ in range(size)]
        self.voters = VoterSet(
            tuple(
                Voter(ReplicaKey(NodeId(index)), f"127.0.0.1:{reserved.getsockname()[1]}")
                for index, reserved in enumerate(self._sockets)
            )
        )
        self.nodes: dict[int, Node] = {}

    async def start_all(self) -> None:
        for voter in self.voters:
            await self.start(voter.key.node_id)

    async def start(self, node_id: int, **overrides: object) -> Node:
        journal = Journal.open(
            self._root / f"node{node_id}",
            cluster_id=CLUSTER,
            node_id=NodeId(node_id),
            format_if_empty=True,
        )
        config = QuorumConfig(
            cluster_id=CLUSTER,
            local=ReplicaKey(NodeId(node_id), journal.identity.directory_id),
            voters=self.voters,
            timings=self._timings,
            **overrides,  # type: ignore[arg-type]
        )
        machine, transport = Recorder(), GrpcPeerTransport(config)
        driver = QuorumDriver(
            config=config,
            journal=journal,
            transport=transport,
            state_machine=machine,
            clock=SystemClock(),
            rng=random.Random(node_id),
        )
        server = grpc.aio.server(options=MESSAGE_OPTIONS)
        quorum_pb2_grpc.add_QuorumServiceServicer_to_server(QuorumServicer(driver, CLUSTER), server)
        self._sockets[node_id].close()
        assert server.add_insecure_port(self.voters.voters[node_id].endpoint)
        await server.start()
        await driver.start()
        node = Node(journal, driver, machine, transport, server)
        self.nodes[node_id] = node
        return node

    async def kill(self, node_id: int) -> None:
        """Stop a replica without a word to the others."""
        node = self.nodes.pop(node_id)
        node.driver._fail(RuntimeError("killed by the test"))
        await node.server.stop(None)
        await node.transport.close()
        await node.driver._disk.stop()
        node.journal.close()

    async def stop(self, node_id: int) -> None:
        node = self.nodes.pop(node_id)
        await node.driver.stop()
        await node.server.stop(None)
        node.journal.close()

    async def stop_all(self) -> None:
        for node_id in list(self.nodes):
            await self.stop(node_id)

    async def leader(self, timeout_s: float = 10) -> int:
        """Wait until one replica has claimed leadership; return its id."""

        def claimed() -> list[int]:
            return [i for i, node in self.nodes.items() if node.driver.is_leader]

        await eventually(lambda: bool(claimed()), timeout_s, "a leader")
        return claimed()[0]


async def eventually(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until `condition` holds, with a deadline."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(0.005)


def _reserve_port() -> socket.socket:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
