"""A leader that supervises three brokers, driven by hand, over a log that outlives leaders."""

from typing import Any

from streammeta.controller.errors import ErrorCode
from streammeta.controller.lifecycle.failover import Failover, Heartbeats, read_nodes
from streammeta.controller.lifecycle.sessions import Sessions
from streammeta.controller.metadata import requests
from streammeta.controller.metadata.values import NodeIdentity
from tests.lifecycle.lifecycle_world import World

A, B, C = (NodeIdentity(node_id, 1) for node_id in (1001, 1002, 1003))
TIMEOUT_MS = 9_000


class Cluster:
    """A leader with its sessions, driven by hand, over a log that outlives leaders."""

    def __init__(self) -> None:
        self.world = World()
        self._supervise()

    def _supervise(self) -> None:
        world = self.world
        self.sessions = Sessions(TIMEOUT_MS)
        self.heartbeats = Heartbeats(world.controller, self.sessions, world.clock)
        self.failover = Failover(
            world.controller, self.sessions, self.heartbeats, world.clock, per_target=1
        )

    async def start(self) -> None:
        """Lead, with A owning an open stream and B and C owning nothing."""
        await self.world.start()
        for node in (B, C):
            await self.world.write(
                requests.RegisterNode(node=node, wal_config=f"wal of {node.node_id}")
            )
        (self.stream_id,) = await self.world.open_streams(1)

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

    async def beat(self, node: NodeIdentity, *, wants_shutdown: bool = False) -> Any:
        return await self.heartbeats.heartbeat(node, wants_shutdown=wants_shutdown)

    async def run_for(self, duration_ms: int, *alive: NodeIdentity) -> None:
        """Let time pass, with a heartbeat of each of `alive` and a tick a second."""
        for _ in range(duration_ms // 1_000):
            self.world.clock.advance(1_000)
            for node in alive:
                assert (await self.beat(node)).error is ErrorCode.NONE
            await self.failover.step()

    def recovered_by(self) -> dict[int, int]:
        nodes = read_nodes(self.world.controller)
        return {node.node_id: node.recovered_by for node in nodes if node.recovered_by >= 0}

    async def close(self, node: NodeIdentity) -> Any:
        request = requests.CloseStreams(
            node=node, streams=(requests.StreamToClose(self.stream_id, 0),)
        )
        return await self.world.write(request)
