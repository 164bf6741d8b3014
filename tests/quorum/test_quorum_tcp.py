"""Drivers, journals, connections together: acknowledged records survive the loss of a leader."""

import asyncio

import pytest

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.quorum.config import QuorumLimits, QuorumTimings
from streammeta.controller.runtime.quorum_errors import RecordTooLargeError, UncommittedLogFullError
from streammeta.rpc.connections import client_channel
from streammeta.v1 import quorum_pb2, quorum_pb2_grpc
from tests.quorum.tcp_quorum import TcpQuorum, eventually, quorum_with


async def append_and_wait(quorum: TcpQuorum, leader: int, payloads: list[bytes]) -> int:
    node = quorum.nodes[leader]
    end = node.driver.append(payloads, required_base_offset=node.driver.next_offset)
    await eventually(lambda: node.machine.high_watermark >= end, 10, f"commit up to {end}")
    return end


async def test_acknowledged_records_survive_the_death_of_the_leader(quorum: TcpQuorum) -> None:
    first = await quorum.leader()
    await append_and_wait(quorum, first, [b"a", b"b"])
    await quorum.kill(first)
    second = await quorum.leader()
    assert second != first
    await append_and_wait(quorum, second, [b"c"])
    assert quorum.nodes[second].machine.committed == [b"a", b"b", b"c"]

    await quorum.start(first)
    for node in quorum.nodes.values():
        await eventually(
            lambda node=node: node.machine.committed == [b"a", b"b", b"c"],  # type: ignore[misc]
            10,
            "every replica has everything",
        )


async def test_graceful_stop_hands_over_quickly(quorum: TcpQuorum) -> None:
    first = await quorum.leader()
    await append_and_wait(quorum, first, [b"a"])
    machine = quorum.nodes[first].machine
    await quorum.stop(first)
    assert machine.calls[-1] == "lost"
    second = await quorum.leader()
    await append_and_wait(quorum, second, [b"b"])
    assert quorum.nodes[second].machine.committed == [b"a", b"b"]


async def test_only_the_leader_appends_and_reads(quorum: TcpQuorum) -> None:
    leader = await quorum.leader()
    end = await append_and_wait(quorum, leader, [b"a"])
    assert await quorum.nodes[leader].driver.read_barrier() >= end

    follower = quorum.nodes[(leader + 1) % 3].driver
    await eventually(lambda: follower.leader is not None, 10, "the follower knows the leader")
    with pytest.raises(NotLeaderError) as refused:
        follower.append([b"x"], required_base_offset=follower.next_offset)
    assert refused.value.leader_id == leader
    assert refused.value.leader_endpoint == quorum.client_endpoints[leader]
    with pytest.raises(NotLeaderError):
        await follower.read_barrier()


@quorum_with(size=1)
async def test_one_voter_commits_and_restarts_with_what_it_had(quorum: TcpQuorum) -> None:
    await append_and_wait(quorum, await quorum.leader(), [b"a", b"b"])
    await quorum.kill(0)
    await quorum.start(0)
    leader = await quorum.leader()
    assert quorum.nodes[leader].machine.committed == [b"a", b"b"]
    assert quorum.nodes[leader].driver.epoch == 2


@quorum_with(size=2, limits=QuorumLimits(max_batch_bytes=1000, max_uncommitted_bytes=1500))
async def test_refused_appends_change_nothing(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    driver = quorum.nodes[leader].driver
    before = driver.next_offset
    with pytest.raises(RecordTooLargeError, match="1000"):
        driver.append([b"x" * 1000], required_base_offset=before)
    assert driver.next_offset == before

    await quorum.kill(1 - leader)
    driver.append([b"x" * 900], required_base_offset=before)
    with pytest.raises(UncommittedLogFullError):
        driver.append([b"x" * 900], required_base_offset=before + 1)
    assert driver.next_offset == before + 1
    await eventually(lambda: not driver.is_leader, 10, "check-quorum deposes a lone leader")


async def test_many_appends_of_one_turn_become_one_batch(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    node = quorum.nodes[leader]
    start = node.driver.next_offset
    for index in range(100):
        node.driver.append([b"%d" % index], required_base_offset=start + index)
    await eventually(lambda: node.machine.high_watermark == start + 100, 10, "commit")
    (batch,) = node.journal.read(start, 1 << 20)  # type: ignore[arg-type]
    assert len(batch.payloads) == 100


async def test_describe_quorum_tells_each_voters_progress(quorum: TcpQuorum) -> None:
    leader = await quorum.settled_leader()
    end = await append_and_wait(quorum, leader, [b"a"])
    async with client_channel(quorum.client_endpoints[leader]) as channel:
        stub = quorum_pb2_grpc.QuorumServiceStub(channel)
        seen = await stub.DescribeQuorum(quorum_pb2.DescribeQuorumRequest())
    assert (seen.role, seen.leader_id, seen.end_offset) == ("leader", leader, end)
    assert sorted(voter.end_offset for voter in seen.voters)[1:] == [end, end]
    assert (seen.log_start_offset, seen.HasField("snapshot_id")) == (0, False)
    assert (seen.repairing, seen.disk_full, list(seen.observers)) == (False, False, [])


@quorum_with(timings=QuorumTimings())
async def test_the_largest_batch_reaches_every_follower(quorum: TcpQuorum) -> None:
    leader = await quorum.leader()
    payload = b"x" * ((8 << 20) - 100)
    end = await append_and_wait(quorum, leader, [payload])
    for node in quorum.nodes.values():
        await eventually(
            lambda node=node: node.machine.high_watermark >= end,  # type: ignore[misc]
            20,
            "every replica has the batch",
        )
        assert node.machine.committed == [payload]


@quorum_with(limits=QuorumLimits(tail_bytes=1000, max_fetch_bytes=5000))
async def test_a_follower_that_was_away_for_long_reads_old_batches_from_the_leaders_disk(
    quorum: TcpQuorum,
) -> None:
    leader = await quorum.leader()
    away = (leader + 1) % 3
    await quorum.kill(away)
    payloads = [b"%04d" % index * 50 for index in range(200)]
    for payload in payloads:
        await append_and_wait(quorum, leader, [payload])
    node = await quorum.start(away)
    await eventually(lambda: node.machine.committed == payloads, 10, "it has caught up")


@quorum_with(size=1)
async def test_a_failed_flush_ends_the_replica(
    quorum: TcpQuorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = quorum.nodes[await quorum.leader()]

    def fail() -> None:
        raise OSError(5, "disk on fire")

    monkeypatch.setattr(node.journal._segments[-1], "sync", fail)
    node.driver.append([b"a"], required_base_offset=node.driver.next_offset)
    with pytest.raises(OSError, match="on fire"):
        await asyncio.wait_for(node.driver.fatal, 10)
    assert node.machine.calls[-1] == "lost"
    assert node.machine.committed == []
    with pytest.raises(NotLeaderError):
        node.driver.append([b"b"], required_base_offset=node.driver.next_offset)
