"""Controllers of one cluster in this process: real drivers, journals and maps, messages in memory.

Links between nodes can be cut, disks can be filled; time is the machine's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streammeta.controller.errors import ApiError, NotLeaderError
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.journal.directory import format_directory, read_identity
from streammeta.controller.journal.errors import DirectoryNotFormattedError
from streammeta.controller.journal.journal import Journal
from streammeta.controller.metadata.api.answers import CreateStreamsAnswer
from streammeta.controller.metadata.api.requests import CreateStreams, NewStream, RegisterNode
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.quorum.config import QuorumConfig, QuorumLimits, QuorumTimings
from streammeta.controller.quorum.messages import FetchRequest, Request, Response
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import Endpoints, PeerListener
from streammeta.controller.runtime.persistence.checkpointer import CheckpointLimits
from streammeta.controller.runtime.persistence.metadata_checkpoint import snapshot_check
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from streammeta.storage.durable_files import DiskFullError, File, PosixFileSystem
from tests.kit.waiting import SkippingClock, until

CLUSTER = ClusterId("test")
BROKER = NodeIdentity(1007, 1)
TIMINGS = QuorumTimings(
    election_timeout_ms=300,
    fetch_timeout_ms=1_000,
    fetch_max_wait_ms=100,
    request_timeout_ms=1_500,
    failover_stagger_ms=20,
)
STEADY = replace(TIMINGS, fetch_timeout_ms=6_000, request_timeout_ms=6_000)
"""Leadership stays where it is, also when the machine holds all nodes up."""

PATIENCE_S = 60.0
"""How long a test waits for what must happen; CI machines can be very slow."""


class FullableFiles(PosixFileSystem):
    """A disk that is full whenever the test says so, once `spare` more bytes are written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.spare = 0
        self.full_for: Callable[[Path], bool] = lambda _: True

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file whose writes may find no room."""
        return FullableFile(super().open(path, create=create), path, self)


class FullableFile:
    """A file of such a disk."""

    def __init__(self, file: File, path: Path, disk: FullableFiles) -> None:
        self._file = file
        self._path = path
        self._disk = disk
        self.read, self.size, self.truncate = file.read, file.size, file.truncate
        self.sync, self.close = file.sync, file.close

    def write(self, position: int, data: bytes) -> None:
        """Write what fits, then raise."""
        if self._disk.is_full and self._disk.full_for(self._path):
            self._file.write(position, data[: self._disk.spare])
            raise DiskFullError(f"{self._path.name}: no space left on the disk")
        self._file.write(position, data)


class MemoryTransport:
    """Calls the other nodes' drivers."""

    def __init__(self, cluster: MemoryCluster, node_id: int) -> None:
        self._cluster = cluster
        self._node_id = node_id
        self._listener: PeerListener | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self.voters = VoterSet()

    def bind(self, listener: PeerListener) -> None:
        self._listener = listener

    def send(self, request: Request) -> None:
        call = asyncio.get_running_loop().create_task(self._call(request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, request: Request) -> None:
        assert self._listener is not None
        receiver = request.header.receiver.node_id
        try:
            if not self._cluster.is_linked(self._node_id, receiver, request):
                raise NotLeaderError
            response = await answered(self._cluster.nodes[receiver].driver, request)
            if not self._cluster.is_linked(self._node_id, receiver, request):
                raise NotLeaderError
        except (NotLeaderError, KeyError):
            await asyncio.sleep(0.01)
            self._listener.on_request_failed(receiver, request.header.request_id)
        else:
            self._listener.on_response(response)

    def set_voters(self, voters: VoterSet) -> None:
        self.voters = voters

    def endpoints(self, node_id: NodeId) -> Endpoints:
        return Endpoints(endpoint(node_id), endpoint(node_id))

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


async def answered(driver: QuorumDriver, request: Request) -> Response:
    """Return the answer to a request; raises NotLeaderError if there will be none."""
    future: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()

    def reply(response: Response | None) -> None:
        if not future.done():
            future.set_result(response)

    driver.handle(request, reply)
    try:
        response = await future
    finally:
        driver.forget(request, reply)
    if response is None:
        raise NotLeaderError
    return response


@dataclass
class Node:
    """One controller."""

    journal: Journal
    driver: QuorumDriver
    controller: MetadataController
    files: FullableFiles
    transport: MemoryTransport
    clock: SkippingClock

    @property
    def key(self) -> ReplicaKey:
        return ReplicaKey(self.journal.identity.node_id, self.journal.identity.directory_id)


@dataclass
class MemoryCluster:
    """Nodes by id; `cut` holds pairs that hear nothing of one another."""

    root: Path
    size: int = 3
    checkpoints: CheckpointLimits = field(default_factory=CheckpointLimits)
    limits: QuorumLimits = field(default_factory=QuorumLimits)
    timings: QuorumTimings = TIMINGS
    reserve_bytes: int = 10_000
    nodes: dict[int, Node] = field(default_factory=dict)
    cut: set[frozenset[int]] = field(default_factory=set)
    drops: Callable[[int, int, Request], bool] = lambda *_: False

    async def __aenter__(self) -> MemoryCluster:
        for node_id in range(self.size):
            await self.start(node_id)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node_id in list(self.nodes):
            await self.kill(node_id)

    def is_linked(self, one: int, other: int, request: Request) -> bool:
        return frozenset((one, other)) not in self.cut and not self.drops(one, other, request)

    def isolate(self, node_id: int) -> None:
        self.cut |= {frozenset((node_id, other)) for other in self.nodes if other != node_id}

    async def start(self, node_id: int) -> Node:
        """Start a node; one beyond the first `size` joins as an observer."""
        files = FullableFiles()
        directory = self.root / f"node{node_id}"
        try:
            read_identity(directory, files)
        except DirectoryNotFormattedError:
            format_directory(
                directory,
                cluster_id=CLUSTER,
                node_id=NodeId(node_id),
                bootstrap_voters=self._bootstrap() if node_id < self.size else None,
            )
        journal = Journal.open(
            directory,
            cluster_id=CLUSTER,
            node_id=NodeId(node_id),
            read_snapshot_voters=snapshot_check(CLUSTER),
            segment_bytes=1_500,
            reserve_bytes=self.reserve_bytes,
            files=files,
        )
        transport = MemoryTransport(self, node_id)
        clock = SkippingClock()
        controller = MetadataController(ClusterMetadata(), clock)
        driver = QuorumDriver(
            config=self._config(journal),
            journal=journal,
            transport=transport,
            state_machine=controller,
            clock=clock,
            rng=random.Random(node_id),
            checkpoints=self.checkpoints,
        )
        controller.bind(driver)
        self.nodes[node_id] = Node(journal, driver, controller, files, transport, clock)
        await driver.start()
        return self.nodes[node_id]

    def _bootstrap(self) -> VoterSet:
        return VoterSet(tuple(Voter(ReplicaKey(NodeId(i)), endpoint(i)) for i in range(self.size)))

    def _config(self, journal: Journal) -> QuorumConfig:
        identity = journal.identity
        return QuorumConfig(
            cluster_id=CLUSTER,
            local=ReplicaKey(identity.node_id, identity.directory_id),
            endpoint=endpoint(identity.node_id),
            bootstrap_voters=identity.bootstrap_voters,
            seeds=tuple(NodeId(i) for i in range(self.size) if i != identity.node_id),
            timings=self.timings,
            limits=self.limits,
        )

    def snapshot_files(self, node_id: int) -> list[str]:
        """Return the names of a node's snapshots, finished or not."""
        return sorted(path.name for path in self.root.glob(f"node{node_id}/*.checkpoint*"))

    async def kill(self, node_id: int) -> None:
        """Stop a node without a word to the others."""
        node = self.nodes.pop(node_id)
        node.files.is_full = False
        node.driver._fail(RuntimeError("killed by the test"))
        await node.driver.checkpointer.stopped()
        await node.driver._deliverer.stop()
        await node.driver._disk.stop()
        await node.transport.close()
        node.journal.close()

    async def stop(self, node_id: int, hurried: asyncio.Event | None = None) -> None:
        node = self.nodes[node_id]
        await node.driver.stop(hurried or asyncio.Event())
        del self.nodes[node_id]
        node.journal.close()

    async def restart(self, node_id: int) -> Node:
        await self.kill(node_id)
        return await self.start(node_id)

    async def leader(self, among: Callable[[int], bool] = lambda _: True) -> int:
        """Wait until one node leads; return its id."""

        def leaders() -> list[int]:
            return [i for i, n in self.nodes.items() if n.driver.is_leader and among(i)]

        await until(lambda: bool(leaders()), "a leader")
        return leaders()[0]

    async def follower(self) -> int:
        """Return the id of a node that does not lead."""
        leader = await self.leader()
        return next(node_id for node_id in self.nodes if node_id != leader)

    async def write(self, request: Any) -> Answered:
        """Write through whatever node leads, repeating until it is done."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            node = self.nodes[await self.leader()]
            try:
                return await node.controller.write(request)
            except ApiError:
                assert asyncio.get_running_loop().time() < deadline, f"not written: {request}"
                await asyncio.sleep(0.02)

    async def fill(self, name: str, count: int) -> Answered:
        """Register the broker, then create `count` streams, each with its own request."""
        await self.write(RegisterNode(node=BROKER))
        for index in range(count):
            answered = await self.write(create(f"{name}-{index}"))
        return answered

    async def hash_at(self, node_id: int, offset: int) -> bytes:
        """Return the hash of a node's map once it has applied everything below `offset`."""
        controller = self.nodes[node_id].controller
        await until(lambda: controller.committed_end >= offset, f"node {node_id} at {offset}")
        return (await controller.state_hash(offset)).digest

    async def agree(self, node_id: int, offset: int) -> None:
        """Require of a node the leader's map as of `offset`."""
        wanted = await self.hash_at(await self.leader(), offset)
        assert await self.hash_at(node_id, offset) == wanted


def create(request_id: str) -> CreateStreams:
    return CreateStreams(request_id=request_id, node=BROKER, streams=(NewStream(),))


def stream_ids(answered: Answered) -> tuple[int, ...]:
    assert isinstance(answered.answer, CreateStreamsAnswer)
    return answered.answer.stream_ids


def endpoint(node_id: int) -> str:
    return f"host-{node_id}:9100"


def is_fetch(request: Request) -> bool:
    return isinstance(request, FetchRequest)
