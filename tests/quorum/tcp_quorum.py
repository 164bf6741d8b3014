"""Replicas of one quorum in this process: real connections on loopback, real directories."""

import asyncio
import hashlib
import json
import random
import shutil
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import pytest

from streammeta.controller.ids import ClusterId, NodeId, SnapshotId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.journal.errors import BadSnapshotError
from streammeta.controller.journal.journal import Journal
from streammeta.controller.peers.addresses import PeerAddresses
from streammeta.controller.peers.dialled import Identity
from streammeta.controller.peers.server import PeerServer
from streammeta.controller.peers.transport import TcpPeerTransport
from streammeta.controller.quorum.config import QuorumConfig, QuorumLimits, QuorumTimings
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.rpc.entrance import Entrance
from streammeta.controller.rpc.quorum_service import QuorumServicer
from streammeta.controller.rpc.services import service_handler
from streammeta.controller.runtime.checkpointer import CheckpointLimits
from streammeta.controller.runtime.clock import SystemClock
from streammeta.controller.runtime.interfaces import Endpoints, SnapshotPoint
from streammeta.controller.runtime.quorum_driver import QuorumDriver
from streammeta.controller.snapshot.checkpoint_file import Sink
from streammeta.controller.trust.door import Door
from streammeta.rpc.connections import listen, new_server
from streammeta.v1 import quorum_pb2

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
    """A state machine that remembers what it was told; its snapshots are JSON.

    It learns of payloads when they are committed, also those of a leader, whose snapshots may end
    beyond that: they are written once it has caught up.
    """

    committed: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of each payload committed."""
    high_watermark: int = 0
    calls: list[str] = field(default_factory=list)
    loaded: list[SnapshotId] = field(default_factory=list)

    def on_committed(self, batches: Sequence[Batch], high_watermark: int) -> None:
        for batch in batches:
            assert batch.base_offset == self.high_watermark, "batches must come in order"
            self.high_watermark = batch.end_offset
            if batch.kind is BatchKind.DATA:
                self.committed.extend(batch.payloads)
                self.offsets.extend(range(batch.base_offset, batch.end_offset))
        assert self.high_watermark == high_watermark

    def on_leadership_claimed(self, epoch: int) -> None:
        self.calls.append(f"claimed {epoch}")

    def on_leadership_lost(self) -> None:
        self.calls.append("lost")

    def on_writes_refused(self) -> None:
        self.calls.append("refused")

    def on_writes_held_up(self) -> None:
        self.calls.append("held up")

    @property
    def is_awaited(self) -> bool:
        return False

    def freeze(self, point: SnapshotPoint) -> Callable[[Sink], object]:
        def write(sink: Sink) -> None:
            end = point.snapshot_id.end_offset
            deadline = time.monotonic() + 10
            while self.high_watermark < end and time.monotonic() < deadline:
                time.sleep(0.001)
                sink.write(b"")  # raises once nobody wants the snapshot any more
            count = bisect_left(self.offsets, end)
            content = {
                "id": [end, point.snapshot_id.epoch],
                "voters": point.voters.to_fields(),
                "committed": [payload.decode("latin-1") for payload in self.committed[:count]],
            }
            body = json.dumps(content).encode()
            sink.write(hashlib.sha256(body).digest() + body)

        return write

    def load(self, file: BinaryIO, snapshot_id: SnapshotId) -> Callable[[], None]:
        content = read_snapshot(snapshot_id, file)

        def replace() -> None:
            self.committed = [text.encode("latin-1") for text in content["committed"]]
            self.offsets = [0] * len(self.committed)
            self.high_watermark = snapshot_id.end_offset
            self.loaded.append(snapshot_id)

        return replace


def read_snapshot(snapshot_id: SnapshotId, file: BinaryIO) -> Any:
    """Return the content of a snapshot that `Recorder` wrote; raises BadSnapshotError."""
    file.seek(0)
    digest, body = file.read(32), file.read()
    if hashlib.sha256(body).digest() != digest:
        raise BadSnapshotError("its digest does not match")
    content = json.loads(body)
    if content["id"] != [snapshot_id.end_offset, snapshot_id.epoch]:
        raise BadSnapshotError(f"it is {content['id']}")
    return content


def snapshot_voters(snapshot_id: SnapshotId, file: BinaryIO) -> VoterSet:
    """The journal's check of a snapshot: whole, and these voters."""
    return VoterSet.from_fields(read_snapshot(snapshot_id, file)["voters"])


@dataclass
class Node:
    journal: Journal
    driver: QuorumDriver
    machine: Recorder
    transport: TcpPeerTransport
    peers: PeerServer
    server: grpc.aio.Server


class TcpQuorum:
    """Starts, kills and restarts replicas, with two ports each that are chosen once.

    Nodes below `size` are the voters that directories are formatted with, `spare` more may join.
    """

    def __init__(
        self,
        root: Path,
        size: int,
        timings: QuorumTimings = FAST,
        spare: int = 0,
        checkpoints: CheckpointLimits | None = None,
        limits: QuorumLimits | None = None,
    ) -> None:
        self._root = root
        self._limits = limits or QuorumLimits()
        self._timings = timings
        self._checkpoints = checkpoints
        self._sockets = [_reserve_port() for _ in range(2 * (size + spare))]
        ports = [reserved.getsockname()[1] for reserved in self._sockets]
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[::2]]
        self.client_endpoints = [f"127.0.0.1:{port}" for port in ports[1::2]]
        self.voters = VoterSet(
            tuple(Voter(ReplicaKey(NodeId(index)), self.endpoints[index]) for index in range(size))
        )
        self.nodes: dict[int, Node] = {}

    async def start_all(self) -> None:
        for voter in self.voters:
            await self.start(voter.key.node_id)

    def directory(self, node_id: int) -> Path:
        return self._root / f"node{node_id}"

    def wipe(self, node_id: int) -> None:
        """Lose the disk of a replica that does not run; it starts again as one that joins."""
        shutil.rmtree(self.directory(node_id))
        self._format(node_id, VoterSet())

    async def start(self, node_id: int) -> Node:
        if not self.directory(node_id).exists():
            is_voter = self.voters.find(NodeId(node_id)) is not None
            self._format(node_id, self.voters if is_voter else VoterSet())
        journal = Journal.open(
            self.directory(node_id),
            cluster_id=CLUSTER,
            node_id=NodeId(node_id),
            read_snapshot_voters=snapshot_voters,
        )
        seeds = {
            NodeId(index): endpoint
            for index, endpoint in enumerate(self.endpoints)
            if index != node_id
        }
        config = QuorumConfig(
            cluster_id=CLUSTER,
            local=ReplicaKey(NodeId(node_id), journal.identity.directory_id),
            endpoint=self.endpoints[node_id],
            client_endpoint=self.client_endpoints[node_id],
            bootstrap_voters=journal.identity.bootstrap_voters,
            seeds=tuple(seeds),
            timings=self._timings,
            limits=self._limits,
        )
        addresses = PeerAddresses(
            NodeId(node_id), Endpoints(config.endpoint, config.client_endpoint), seeds, {}
        )
        machine = Recorder()
        identity = Identity(CLUSTER, NodeId(node_id), self.client_endpoints[node_id])
        transport = TcpPeerTransport(addresses, identity, self._timings.request_timeout_ms)
        driver = QuorumDriver(
            config=config,
            journal=journal,
            transport=transport,
            state_machine=machine,
            clock=SystemClock(),
            rng=random.Random(node_id),
            checkpoints=self._checkpoints,
        )
        server = new_server()
        service = quorum_pb2.DESCRIPTOR.services_by_name["QuorumService"]
        unary = QuorumServicer(driver, CLUSTER).unary()
        server.add_generic_rpc_handlers((service_handler(service, Entrance(Door(CLUSTER)), unary),))
        for reserved in self._sockets[2 * node_id : 2 * node_id + 2]:
            reserved.close()
        assert listen(server, self.client_endpoints[node_id])
        await server.start()
        peers = PeerServer(driver, identity, on_hello=addresses.greeted)
        await peers.start(self.endpoints[node_id])
        await driver.start()
        node = Node(journal, driver, machine, transport, peers, server)
        self.nodes[node_id] = node
        return node

    def _format(self, node_id: int, voters: VoterSet) -> None:
        format_directory(
            self.directory(node_id),
            cluster_id=CLUSTER,
            node_id=NodeId(node_id),
            bootstrap_voters=voters,
        )

    async def kill(self, node_id: int) -> None:
        """Stop a replica without a word to the others."""
        node = self.nodes.pop(node_id)
        node.driver._fail(RuntimeError("killed by the test"))
        await node.peers.stop()
        await node.server.stop(None)
        await node.transport.close()
        await node.driver._disk.stop()
        node.journal.close()

    async def stop(self, node_id: int) -> None:
        node = self.nodes.pop(node_id)
        await node.driver.stop()
        await node.peers.stop()
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

    async def settled_leader(self) -> int:
        """Wait for a leader that knows all of every voter, and has nothing left to commit."""
        leader = await self.leader()

        def is_settled() -> bool:
            seen = self.nodes[leader].driver.describe()
            return seen.high_watermark == seen.end_offset and all(
                voter.key.directory_id is not None and voter.endpoint for voter in seen.voters
            )

        await eventually(is_settled, 10, "the voters have told which disks they have")
        return leader


def quorum_with(**options: Any) -> pytest.MarkDecorator:
    """Have the fixture `quorum` made with other arguments."""
    return pytest.mark.parametrize("quorum", [options], indirect=True, ids=[""])


async def eventually(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what}: not within {timeout_s} s"
        await asyncio.sleep(0.005)


def _reserve_port() -> socket.socket:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
