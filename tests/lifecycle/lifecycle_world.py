"""A leader over a log in memory, and one that supervises three brokers, driven by hand.

The bucket knows what the committed log says of each object at the moment its bytes are deleted.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Self

from streammeta.controller.errors import ErrorCode
from streammeta.controller.lifecycle.broker_sessions import Sessions
from streammeta.controller.lifecycle.failover import Failover, Heartbeats, read_nodes
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.answers import CheckObjectsAnswer
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables import values as v
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease, ObjectIdGate
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import DeleteResult
from tests.kit.memory_log import CommittingLog
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import ManualClock

NAMESPACE = "_streammeta_test"
BROKER = v.NodeIdentity(1001, 1)
PATIENCE_S = 60.0


class RecordingStore(MemoryObjectStore):
    """Remembers each request, and refuses or delays what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, ...]] = []
        self.refuses: Callable[[str], bool] = lambda _: False
        self.is_throttling = False
        self.fails_with: Callable[[Sequence[str]], StorageError | None] = lambda _: None
        self.on_delete: Callable[[Sequence[str]], object] = lambda _: None
        self.slow_key = ""
        self.go_on = threading.Event()

    def delete_many(self, keys: Iterable[str]) -> DeleteResult:
        wanted = tuple(keys)
        self.requests.append(wanted)
        self.on_delete(wanted)
        if self.slow_key in wanted:
            self.go_on.wait(PATIENCE_S)
        failure = self.fails_with(wanted)
        if failure is not None:
            raise failure
        refused = {key: "AccessDenied: held" for key in wanted if self.refuses(key)}
        if self.is_throttling:
            refused = dict.fromkeys(wanted, "SlowDown: reduce your rate")
        done = super().delete_many(key for key in wanted if key not in refused)
        throttled = frozenset(refused) if self.is_throttling else frozenset()
        return DeleteResult(done.deleted, refused, throttled)


class World:
    """One controller that leads, and its bucket; `succeed` replaces it by another."""

    def __init__(self, gate: ObjectIdGate | None = None, *, is_leased: bool = False) -> None:
        self.clock = ManualClock(5_000, wall_ahead_ms=1_700_000_000_000)
        self.store = RecordingStore()
        lease = MarkerLease(self.clock.monotonic_ms) if is_leased else None
        self.controller = MetadataController(ClusterMetadata(), self.clock, gate, lease=lease)
        self.log = CommittingLog(self.controller)
        self.controller.bind(self.log)

    async def start(self) -> Self:
        """Lead, with one broker registered."""
        self.log.lead()
        await self.controller.write(requests.RegisterNode(node=BROKER))
        return self

    def succeed(self) -> None:
        """Go on with a new controller that knows what was committed, and nothing else."""
        committed, batches = self.log.committed, self.log.batches
        self.controller = MetadataController(ClusterMetadata(), self.clock)
        self.log = CommittingLog(self.controller)
        self.log.batches = [batch for batch in batches if batch.end_offset <= committed]
        self.log.next_offset = self.log.committed = committed
        self.controller.bind(self.log)
        self.controller.on_committed(self.log.batches, committed)
        self.log.epoch = self.log.batches[-1].epoch

    async def prepare(
        self, count: int = 1, ttl_ms: int = 60_000, node: v.NodeIdentity = BROKER
    ) -> list[int]:
        request_id = f"objects at {self.log.next_offset}"
        first: int = (
            await self.write(
                requests.PrepareObjects(
                    request_id=request_id, node=node, count=count, ttl_ms=ttl_ms
                )
            )
        ).first_object_id
        return list(range(first, first + count))

    async def open_streams(self, count: int) -> list[int]:
        """Let the broker own new streams, at epoch 0."""
        new = (requests.NewStream(),) * count
        create = requests.CreateStreams(request_id="streams", node=BROKER, streams=new)
        ids: Sequence[int] = (await self.write(create)).stream_ids
        streams = tuple(requests.StreamToOpen(stream_id, 0) for stream_id in ids)
        await self.write(requests.OpenStreams(node=BROKER, streams=streams))
        return list(ids)

    async def commit(
        self,
        rows: dict[int, tuple[int, int]],
        *,
        as_stream_object: bool = False,
        writer: v.NodeIdentity = BROKER,
        **fields: Any,
    ) -> tuple[int, ErrorCode]:
        """Commit one object with (start, end) of each stream; return its id and the outcome.

        The id is issued to `writer`; `fields` are further ones of the request.
        """
        (object_id,) = await self.prepare(node=writer)
        ranges = {
            "stream_id": v.column(list(rows)),
            "start_offset": v.column([start for start, _ in rows.values()]),
            "end_offset": v.column([end for _, end in rows.values()]),
        }
        if as_stream_object:
            ids = {"object_id": v.column([object_id]), "object_size": v.column([10])}
            fields |= {"object_id": -1, "order_id": -1, "object_size": 0}
            fields["stream_objects"] = v.StreamObjectColumns(**ids, **ranges)
        else:
            fields |= {"object_id": object_id, "order_id": object_id, "object_size": 10}
            fields["ranges"] = v.RangeColumns(**ranges)
        answer = await self.write(requests.CommitStreamSetObject(**{"node": BROKER, **fields}))
        return object_id, answer.error

    async def destroyed_objects(self, count: int) -> list[int]:
        """Put `count` objects into the bucket and mark them destroyed in the map."""
        ids = await self.prepare(count, ttl_ms=1_000)
        for object_id in ids:
            self.store.put(key_for(object_id, NAMESPACE), b"data")
        self.clock.advance(2_000)
        await self.controller.write(requests.ExpireObjects(limit=count))
        return ids

    async def removal(self, ids: Sequence[int], tick_ms: int = 20) -> None:
        """Wait, `tick_ms` at a time, until the map has forgotten objects."""
        await self.until(
            lambda: self.states(ids) == {v.ObjectState.REMOVED},
            f"removal of {len(ids)} objects",
            tick_ms,
        )

    async def until(self, condition: Callable[[], bool], what: str, tick_ms: int = 0) -> None:
        """Wait for a condition, with `tick_ms` of the clock between two looks."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while not condition():
            assert loop.time() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
            self.clock.advance(tick_ms)
            await asyncio.sleep(0.001)

    async def write(self, request: requests.WriteRequest) -> Any:
        return (await self.controller.write(request)).answer

    def states(self, ids: Sequence[int]) -> set[v.ObjectState]:
        """What this controller's map says of objects, committed or not."""
        return states(self.controller, ids)

    def committed_states(self, ids: Sequence[int]) -> set[v.ObjectState]:
        """What a replica that has replayed the committed log says of objects."""
        replica = MetadataController(ClusterMetadata(), self.clock)
        batches = [batch for batch in self.log.batches if batch.end_offset <= self.log.committed]
        replica.on_committed(batches, self.log.committed)
        return states(replica, ids)


def states(controller: MetadataController, ids: Sequence[int]) -> set[v.ObjectState]:
    answer = controller.cluster_metadata.query(requests.CheckObjects(object_ids=tuple(ids)))
    assert isinstance(answer, CheckObjectsAnswer)
    return {v.ObjectState(state) for state in answer.states}


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a task of the controller's meanwhile; it ends by itself on no account."""
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task])


A, B, C = (v.NodeIdentity(node_id, 1) for node_id in (1001, 1002, 1003))
TIMEOUT_MS = 9_000


class Cluster:
    """A leader with its sessions, driven by hand, over a log that outlives leaders."""

    def __init__(self, *, is_leased: bool = False) -> None:
        self.world = World(is_leased=is_leased)
        self.world.controller.lease.renew(self.world.clock.monotonic_ms())
        self._supervise()

    def _supervise(self) -> None:
        world = self.world
        self.sessions = Sessions(TIMEOUT_MS)
        self.heartbeats = Heartbeats(world.controller, self.sessions, world.clock)
        self.failover = Failover(
            world.controller, self.sessions, self.heartbeats, world.clock, per_target=1
        )

    async def start(self) -> Self:
        """Lead, with A owning an open stream and B and C owning nothing."""
        await self.world.start()
        for node in (B, C):
            await self.world.write(
                requests.RegisterNode(node=node, wal_config=f"wal of {node.node_id}")
            )
        (self.stream_id,) = await self.world.open_streams(1)
        return self

    async def commit_set_object(self) -> int:
        """Let A upload the first ten offsets of its stream; return the object's id."""
        object_id, error = await self.world.commit({self.stream_id: (0, 10)})
        assert error is ErrorCode.NONE
        return object_id

    async def change_leader(self) -> None:
        """Replace the leader by one that knows the committed log alone."""
        self.world.succeed()
        self._supervise()
        self.world.log.lead()

    async def beat(self, node: v.NodeIdentity, *, wants_shutdown: bool = False) -> Any:
        return await self.heartbeats.heartbeat(node, wants_shutdown=wants_shutdown)

    async def run_for(self, duration_ms: int, *alive: v.NodeIdentity) -> None:
        """Let time pass, with a heartbeat of each of `alive` and a tick a second."""
        for _ in range(duration_ms // 1_000):
            self.world.clock.advance(1_000)
            for node in alive:
                assert (await self.beat(node)).error is ErrorCode.NONE
            await self.failover.step()

    def recovered_by(self) -> dict[int, int]:
        nodes = read_nodes(self.world.controller)
        return {node.node_id: node.recovered_by for node in nodes if node.recovered_by >= 0}

    async def close(self, node: v.NodeIdentity) -> Any:
        request = requests.CloseStreams(
            node=node, streams=(requests.StreamToClose(self.stream_id, 0),)
        )
        return await self.world.write(request)
