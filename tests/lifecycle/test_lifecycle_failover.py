"""A leader that misses brokers: heartbeats over a real map, fencing, assignments, their end."""

import asyncio
from typing import Any

import pytest

from controller.errors import ErrorCode, NotLeaderError
from controller.lifecycle.failover import Failover
from controller.lifecycle.heartbeats import Heartbeats, read_nodes
from controller.lifecycle.sessions import NodeState, Sessions
from controller.metadata.requests import (
    CloseStreams,
    CommitStreamSetObject,
    CreateStreams,
    GetOpeningStreams,
    NewStream,
    OpenStreams,
    PrepareObjects,
    RegisterNode,
    StreamToClose,
    StreamToOpen,
    UnregisterNode,
)
from controller.metadata.values import NodeIdentity, RangeColumns, column
from tests.lifecycle.lifecycle_world import World, run

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
            await self.world.write(RegisterNode(node=node, wal_config=f"wal of {node.node_id}"))
        create = CreateStreams(request_id="a", node=A, streams=(NewStream(),))
        (self.stream_id,) = (await self.world.write(create)).stream_ids
        await self.world.write(OpenStreams(node=A, streams=(StreamToOpen(self.stream_id, 0),)))

    async def commit_set_object(self) -> None:
        """Let A upload ten offsets of its stream."""
        prepare = PrepareObjects(request_id="p", node=A, count=1, ttl_ms=60_000)
        object_id = (await self.world.write(prepare)).first_object_id
        rows = RangeColumns(
            stream_id=column([self.stream_id]),
            start_offset=column([0]),
            end_offset=column([10]),
        )
        commit = CommitStreamSetObject(
            node=A, object_id=object_id, order_id=object_id, object_size=1, ranges=rows
        )
        assert (await self.world.write(commit)).error is ErrorCode.NONE

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
            await self.failover.tick()

    def recovered_by(self) -> dict[int, int]:
        nodes = read_nodes(self.world.controller)
        return {node.node_id: node.recovered_by for node in nodes if node.recovered_by >= 0}

    async def close(self, node: NodeIdentity) -> Any:
        request = CloseStreams(node=node, streams=(StreamToClose(self.stream_id, 0),))
        return await self.world.write(request)


def test_a_silent_node_with_open_streams_is_recovered_by_another_until_nothing_is_left() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(5_000, A, B)
        await cluster.run_for(10_000, B)
        assert cluster.sessions.state(1001) is NodeState.FENCED
        assert cluster.recovered_by() == {1001: 1002}
        (recovery,) = (await cluster.beat(B)).recoveries
        assert (recovery.node_id, recovery.node_epoch) == (1001, 1)
        assert (await cluster.beat(C)).recoveries == ()

        await cluster.world.write(GetOpeningStreams(node=A, failover=True))
        assert (await cluster.beat(A)).error is ErrorCode.NODE_FENCED
        await cluster.close(A)
        await cluster.run_for(1_000, B)

        assert cluster.recovered_by() == {}
        assert (await cluster.beat(B)).recoveries == ()

    run(scenario())


def test_an_assignment_is_written_once_and_nothing_is_written_without_change() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(20_000, B)
        assert cluster.recovered_by() == {}, "A was never supervised"
        await cluster.run_for(1_000, A, B)
        await cluster.run_for(15_000, B)
        assert cluster.recovered_by() == {1001: 1002}
        end = cluster.world.log.next_offset
        await cluster.run_for(30_000, B)
        assert cluster.world.log.next_offset == end

    run(scenario())


def test_a_broker_without_heartbeats_loses_nothing() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(600_000, B, C)
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN
        assert cluster.recovered_by() == {}
        assert (await cluster.close(A)).errors == (ErrorCode.NONE,)

    run(scenario())


def test_a_node_that_dies_with_the_leader_is_missed_by_the_next() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(3_000, A, B)
        await cluster.change_leader()
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN
        await cluster.run_for(TIMEOUT_MS, B)
        assert cluster.recovered_by() == {}
        await cluster.run_for(2_000, B)
        assert cluster.recovered_by() == {1001: 1002}

        await cluster.change_leader()
        await cluster.run_for(3_000, B)

        assert cluster.recovered_by() == {1001: 1002}
        assert [one.node_id for one in (await cluster.beat(B)).recoveries] == [1001]

    run(scenario())


def test_a_target_that_falls_silent_is_replaced() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(2_000, A, B, C)
        await cluster.run_for(11_000, B, C)
        assert cluster.recovered_by() == {1001: 1002}
        await cluster.run_for(11_000, C)
        assert cluster.recovered_by() == {1001: 1003}

    run(scenario())


def test_a_newer_process_ends_the_recovery_and_the_fence() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(2_000, A, B)
        await cluster.run_for(11_000, B)
        await cluster.world.write(GetOpeningStreams(node=A, failover=True))
        newer = NodeIdentity(1001, 2)

        await cluster.world.write(RegisterNode(node=newer))
        await cluster.world.write(GetOpeningStreams(node=newer))
        await cluster.run_for(3_000, B, newer)

        assert cluster.recovered_by() == {}
        assert cluster.sessions.state(1001) is NodeState.ACTIVE
        assert (await cluster.beat(A)).error is ErrorCode.NODE_EPOCH_EXPIRED

    run(scenario())


def test_a_leaving_node_may_end_once_it_owes_nothing() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.run_for(2_000, A, B)
        assert not (await cluster.beat(A)).may_shutdown
        assert not (await cluster.beat(A, wants_shutdown=True)).may_shutdown
        assert cluster.sessions.state(1001) is NodeState.CONTROLLED_SHUTDOWN
        await cluster.close(A)
        answer = await cluster.beat(A, wants_shutdown=True)
        assert answer.may_shutdown
        assert answer.session_timeout_ms == TIMEOUT_MS
        await cluster.world.write(UnregisterNode(node=A))
        await cluster.run_for(1_000, B)
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN

    run(scenario())


def test_a_node_that_has_departed_has_no_session_even_while_it_holds_objects() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.commit_set_object()
        await cluster.run_for(2_000, A, B)
        await cluster.close(A)
        await cluster.world.write(UnregisterNode(node=A))
        assert [node.departed for node in read_nodes(cluster.world.controller, (1001,))] == [True]
        await cluster.run_for(1_000, B)
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN
        assert (await cluster.beat(A)).error is ErrorCode.NODE_FENCED
        await cluster.run_for(1_000, B)
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN

    run(scenario())


def test_it_may_end_only_when_its_last_close_is_committed() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        await cluster.beat(A)
        cluster.world.log.is_held = True
        closing = asyncio.create_task(cluster.close(A))
        leaving = asyncio.create_task(cluster.beat(A, wants_shutdown=True))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not leaving.done()
        cluster.world.log.release()
        assert (await leaving).may_shutdown
        await closing

    run(scenario())


def test_heartbeats_are_checked_and_answered_by_the_leader_alone() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        await cluster.start()
        unknown = await cluster.beat(NodeIdentity(1099, 1))
        assert unknown.error is ErrorCode.NODE_EPOCH_NOT_EXIST
        assert (await cluster.beat(NodeIdentity(1001, 0))).error is ErrorCode.NODE_EPOCH_EXPIRED
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN
        await cluster.beat(A)
        assert cluster.sessions.state(1001) is NodeState.ACTIVE
        cluster.world.log.lose_leadership(truncate=False)
        with pytest.raises(NotLeaderError):
            await cluster.beat(A)
        assert cluster.sessions.state(1001) is NodeState.UNKNOWN

    run(scenario())
