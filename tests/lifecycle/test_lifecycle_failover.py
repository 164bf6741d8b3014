"""A leader that misses brokers: heartbeats over a real map, fencing, assignments, their end."""

import asyncio
from dataclasses import replace

import pytest

from streammeta.controller.errors import ErrorCode, NotLeaderError
from streammeta.controller.lifecycle.broker_sessions import NodeState
from streammeta.controller.lifecycle.failover import STALLED_MS, read_nodes
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.storage.cluster_files.wal_config import NO_LOG
from tests.lifecycle.lifecycle_world import TIMEOUT_MS, A, B, C, Cluster


@pytest.fixture
async def cluster() -> Cluster:
    return await Cluster().start()


async def test_a_silent_node_with_open_streams_is_recovered_by_another(cluster: Cluster) -> None:
    await cluster.run_for(5_000, A, B)
    await cluster.run_for(10_000, B)
    assert cluster.sessions.state(1001) is NodeState.FENCED
    assert cluster.recovered_by() == {1001: 1002}
    (recovery,) = (await cluster.beat(B)).recoveries
    assert (recovery.node_id, recovery.node_epoch) == (1001, 1)
    assert (await cluster.beat(C)).recoveries == ()

    await cluster.world.write(r.GetOpeningStreams(node=A, failover=True))
    assert (await cluster.beat(A)).error is ErrorCode.NODE_FENCED
    await cluster.close(A)
    await cluster.run_for(1_000, B)

    assert cluster.recovered_by() == {}
    assert (await cluster.beat(B)).recoveries == ()


async def test_an_assignment_is_written_once_and_nothing_without_change(cluster: Cluster) -> None:
    await cluster.run_for(20_000, B)
    assert cluster.recovered_by() == {}, "A was never supervised"
    await cluster.run_for(1_000, A, B)
    await cluster.run_for(15_000, B)
    assert cluster.recovered_by() == {1001: 1002}
    end = cluster.world.log.next_offset
    await cluster.run_for(30_000, B)
    assert cluster.world.log.next_offset == end


async def test_a_broker_without_heartbeats_loses_nothing(cluster: Cluster) -> None:
    await cluster.run_for(600_000, B, C)
    assert cluster.sessions.state(1001) is NodeState.UNKNOWN
    assert cluster.recovered_by() == {}
    assert (await cluster.close(A)).errors == (ErrorCode.NONE,)


async def test_a_node_that_dies_with_the_leader_is_missed_by_the_next(cluster: Cluster) -> None:
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
    assert [recovery.node_id for recovery in (await cluster.beat(B)).recoveries] == [1001]


async def test_a_target_that_falls_silent_is_replaced(cluster: Cluster) -> None:
    await cluster.run_for(2_000, A, B, C)
    await cluster.run_for(11_000, B, C)
    assert cluster.recovered_by() == {1001: 1002}
    await cluster.run_for(11_000, C)
    assert cluster.recovered_by() == {1001: 1003}


async def test_a_former_leader_names_no_work(cluster: Cluster) -> None:
    await cluster.run_for(2_000, A, B)
    await cluster.run_for(11_000, B)
    assert cluster.heartbeats.assigned_recoveries == 1
    cluster.world.log.lose_leadership(truncate=False)
    assert cluster.heartbeats.assigned_recoveries == 0
    assert cluster.sessions.state(1001) is NodeState.UNKNOWN
    end = cluster.world.log.next_offset
    await cluster.failover.step()
    assert cluster.world.log.next_offset == end

    cluster.world.log.lead()
    await cluster.run_for(1_000, B)
    assert cluster.heartbeats.assigned_recoveries == 1, "the map has kept the assignment"


async def test_node_0_gets_work_like_any_other(cluster: Cluster) -> None:
    (node, *_) = read_nodes(cluster.world.controller, (1001,))
    recovered = replace(node, recovered_by=0)
    cluster.heartbeats.set_recoveries([recovered, replace(node, node_id=5, recovered_by=-1)])
    assert cluster.heartbeats.assigned_recoveries == 1
    cluster.heartbeats.set_compactions([node], {1001: 0})
    assert cluster.heartbeats.compacted_by(1001) == 0
    zero = NodeIdentity(0, 1)
    await cluster.world.write(r.RegisterNode(node=zero))
    answer = await cluster.beat(zero)
    assert [recovery.node_id for recovery in answer.recoveries] == [1001]
    assert answer.compactions == (NodeIdentity(1001, 1),)


async def test_a_newer_process_ends_the_recovery_and_the_fence(cluster: Cluster) -> None:
    await cluster.run_for(2_000, A, B)
    await cluster.run_for(11_000, B)
    await cluster.world.write(r.GetOpeningStreams(node=A, failover=True))
    newer = NodeIdentity(1001, 2)

    await cluster.world.write(r.RegisterNode(node=newer))
    await cluster.world.write(r.GetOpeningStreams(node=newer))
    await cluster.run_for(3_000, B, newer)

    assert cluster.recovered_by() == {}
    assert cluster.sessions.state(1001) is NodeState.ACTIVE
    assert (await cluster.beat(A)).error is ErrorCode.NODE_EPOCH_EXPIRED


async def test_a_leaving_node_may_end_once_it_owes_nothing(cluster: Cluster) -> None:
    await cluster.run_for(2_000, A, B)
    assert not (await cluster.beat(A)).may_shutdown
    assert not (await cluster.beat(A, wants_shutdown=True)).may_shutdown
    assert cluster.sessions.state(1001) is NodeState.CONTROLLED_SHUTDOWN
    await cluster.close(A)
    answer = await cluster.beat(A, wants_shutdown=True)
    assert answer.may_shutdown
    assert answer.session_timeout_ms == TIMEOUT_MS
    await cluster.world.write(r.UnregisterNode(node=A))
    await cluster.run_for(1_000, B)
    assert cluster.sessions.state(1001) is NodeState.UNKNOWN


async def test_a_departed_node_has_no_session_even_while_it_holds_objects(cluster: Cluster) -> None:
    await cluster.commit_set_object()
    await cluster.run_for(2_000, A, B)
    await cluster.close(A)
    await cluster.world.write(r.UnregisterNode(node=A))
    assert [node.departed for node in read_nodes(cluster.world.controller, (1001,))] == [True]
    await cluster.run_for(1_000, B)
    assert cluster.sessions.state(1001) is NodeState.UNKNOWN
    assert (await cluster.beat(A)).error is ErrorCode.NODE_FENCED
    await cluster.run_for(1_000, B)
    assert cluster.sessions.state(1001) is NodeState.UNKNOWN


async def test_it_may_end_only_when_its_last_close_is_committed(cluster: Cluster) -> None:
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


async def test_heartbeats_are_checked_and_answered_by_the_leader_alone(cluster: Cluster) -> None:
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


async def test_the_streams_of_a_node_without_a_log_are_closed_and_nobody_recovers_it(
    cluster: Cluster,
) -> None:
    await cluster.world.write(r.RegisterNode(node=A, wal_config=NO_LOG))
    await cluster.run_for(5_000, A, B)
    await cluster.run_for(10_000, B)
    assert cluster.recovered_by() == {}
    (described,) = read_nodes(cluster.world.controller, (1001,))
    assert (described.has_opening_streams, described.failover) == (False, True)
    assert (await cluster.beat(A)).error is ErrorCode.NODE_FENCED
    taken = r.OpenStreams(node=B, streams=(r.StreamToOpen(cluster.stream_id, 1),))
    assert (await cluster.world.write(taken)).streams[0].error is ErrorCode.NONE


async def test_a_node_keeps_its_streams_while_nobody_could_open_them(cluster: Cluster) -> None:
    """It only lost time: when it is heard again it goes on under the same epochs."""
    await cluster.world.write(r.RegisterNode(node=A, wal_config=NO_LOG))
    await cluster.run_for(5_000, A, B, C)
    await cluster.run_for(10 * TIMEOUT_MS)
    states = [cluster.sessions.state(node.node_id) for node in (A, B, C)]
    assert states == [NodeState.FENCED] * 3
    (described,) = read_nodes(cluster.world.controller, (1001,))
    assert (described.has_opening_streams, described.failover) == (True, False)
    assert (await cluster.beat(A)).error is ErrorCode.NONE
    await cluster.run_for(3_000, A)
    assert cluster.sessions.state(1001) is NodeState.ACTIVE
    (described,) = read_nodes(cluster.world.controller, (1001,))
    assert (described.has_opening_streams, described.failover) == (True, False)


async def test_a_fenced_node_loses_its_streams_once_another_could_open_them(
    cluster: Cluster,
) -> None:
    await cluster.world.write(r.RegisterNode(node=A, wal_config=NO_LOG))
    await cluster.run_for(5_000, A, B, C)
    await cluster.run_for(10 * TIMEOUT_MS)
    await cluster.run_for(1_000, B)
    (described,) = read_nodes(cluster.world.controller, (1001,))
    assert (described.has_opening_streams, described.failover) == (False, True)
    assert (await cluster.beat(A)).error is ErrorCode.NODE_FENCED, "another may have taken over"


async def test_a_node_without_a_log_that_owes_uploads_is_not_released(cluster: Cluster) -> None:
    created = r.CreateStreams(request_id="c", node=A, streams=(r.NewStream(),))
    (other,) = (await cluster.world.write(created)).stream_ids
    await cluster.world.write(r.OpenStreams(node=A, streams=(r.StreamToOpen(other, 0),)))
    await cluster.world.write(r.RegisterNode(node=A, wal_config=NO_LOG))
    closed = (r.StreamToClose(other, 0, end_offset=7),)
    await cluster.world.write(r.CloseStreams(node=A, streams=closed))
    await cluster.run_for(5_000, A, B)
    await cluster.run_for(10_000, B)
    assert cluster.recovered_by() == {1001: 1002}
    (described,) = read_nodes(cluster.world.controller, (1001,))
    assert described.has_opening_streams


async def test_a_recovery_that_never_ends_does_not_hold_up_others(cluster: Cluster) -> None:
    await cluster.run_for(5_000, A, B, C)
    created = r.CreateStreams(request_id="c", node=C, streams=(r.NewStream(),))
    (stream_id,) = (await cluster.world.write(created)).stream_ids
    await cluster.world.write(r.OpenStreams(node=C, streams=(r.StreamToOpen(stream_id, 1),)))
    await cluster.run_for(12_000, B)
    assert cluster.recovered_by() == {1001: 1002}, "one at a time"
    await cluster.run_for(STALLED_MS, B)
    assert cluster.recovered_by() == {1001: 1002, 1003: 1002}
