"""Operators add and remove voters and hand leadership over; sessions read anywhere."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streammeta.controller.errors import NotLeaderError, OutcomeUnknownError
from streammeta.controller.ids import DirectoryId, NodeId
from streammeta.controller.metadata.api.requests import DescribeStreams
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.quorum.messages import EndQuorumEpochRequest, QuorumError, Request
from streammeta.controller.quorum.roles import Leader
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.runtime import quorum_errors
from streammeta.controller.runtime.replication import delivery, quorum_driver, waiters
from streammeta.controller.runtime.replication.operations import QuorumDescription
from tests.kit.memory_cluster import MemoryCluster, Node, create, endpoint, is_fetch, stream_ids
from tests.kit.waiting import PATIENCE_S, until

SOON_MS = 60_000


def voters_of(cluster: MemoryCluster, node_id: int) -> set[int]:
    described = cluster.nodes[node_id].driver.describe()
    return {voter.key.node_id for voter in described.voters}


async def settled(cluster: MemoryCluster) -> None:
    """Wait until the voters have reported their disks, so that no change of them is under way."""
    leader = cluster.nodes[await cluster.leader()].driver

    def is_settled() -> bool:
        seen = leader.describe()
        is_committed = seen.high_watermark == seen.end_offset
        return is_committed and all(voter.key.directory_id for voter in seen.voters)

    await until(is_settled, "the voters to report their disks")


async def test_an_observer_becomes_a_voter_and_a_voter_leaves(cluster: MemoryCluster) -> None:
    last = await cluster.fill("a", 5)
    await settled(cluster)
    joined = await cluster.start(3)
    await cluster.hash_at(3, last.offset)
    leader = cluster.nodes[await cluster.leader()]
    observers = leader.driver.describe().observers
    assert [observer.key for observer in observers] == [joined.key]
    with pytest.raises(NotLeaderError):
        await joined.driver.add_voter(Voter(joined.key, endpoint(3)), SOON_MS)

    added = await leader.driver.add_voter(Voter(joined.key, endpoint(3)), SOON_MS)

    assert leader.driver.high_watermark >= added
    assert voters_of(cluster, leader.key.node_id) == {0, 1, 2, 3}
    await until(lambda: voters_of(cluster, 3) == {0, 1, 2, 3}, "the new voter knows")
    assert joined.transport.voters.find(NodeId(3)) == Voter(joined.key, endpoint(3))

    gone = next(n for n in cluster.nodes.values() if n.key not in (leader.key, joined.key))
    await leader.driver.remove_voter(gone.key, SOON_MS)
    assert voters_of(cluster, leader.key.node_id) == {0, 1, 2, 3} - {gone.key.node_id}
    await cluster.kill(gone.key.node_id)
    assert stream_ids(await cluster.write(create("after"))) == (5,)


async def test_changes_that_make_no_sense_are_refused_with_the_reason(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 1)
    await settled(cluster)
    node = cluster.nodes[await cluster.leader()]
    other_disk = ReplicaKey(node.key.node_id, DirectoryId("of another machine"))
    with pytest.raises(quorum_errors.VoterChangeError, match="directory") as unknown:
        await node.driver.remove_voter(other_disk, SOON_MS)
    assert unknown.value.error is QuorumError.VOTER_NOT_FOUND
    with pytest.raises(quorum_errors.VoterChangeError) as twice:
        await node.driver.add_voter(Voter(other_disk, "elsewhere:1"), SOON_MS)
    assert twice.value.error is QuorumError.DUPLICATE_VOTER
    with pytest.raises(quorum_errors.VoterChangeError, match="fetch"):
        await node.driver.add_voter(Voter(ReplicaKey(NodeId(9)), "h:1"), SOON_MS)
    assert voters_of(cluster, node.key.node_id) == {0, 1, 2}


async def test_a_repeated_change_is_answered_as_the_first_was(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    await settled(cluster)
    leader = cluster.nodes[await cluster.leader()]
    gone = next(node for node in cluster.nodes.values() if node.key != leader.key)
    removed = await leader.driver.remove_voter(gone.key, SOON_MS)
    assert await leader.driver.remove_voter(gone.key, SOON_MS) == removed
    assert await leader.driver.add_voter(Voter(leader.key, "here:1"), SOON_MS) == removed
    assert voters_of(cluster, leader.key.node_id) == {0, 1, 2} - {gone.key.node_id}


async def test_a_change_that_is_not_committed_in_time_may_still_be(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    await settled(cluster)
    leader = await cluster.leader()
    node = cluster.nodes[leader]
    gone = next(n for n in cluster.nodes.values() if n is not node)
    cluster.drops = lambda sender, other, request: is_fetch(request)

    with pytest.raises(quorum_errors.VoterChangeError, match="50 ms") as late:
        await node.driver.remove_voter(gone.key, 50)

    assert late.value.error is QuorumError.REQUEST_TIMED_OUT


async def test_a_leader_that_removes_itself_leads_until_that_is_committed(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 2)
    await settled(cluster)
    old = await cluster.leader()
    await cluster.nodes[old].driver.remove_voter(cluster.nodes[old].key, SOON_MS)
    new = await cluster.leader(among=lambda i: i != old)
    assert voters_of(cluster, new) == {0, 1, 2} - {old}
    await until(lambda: not cluster.nodes[old].driver.is_leader, "it resigned")
    assert stream_ids(await cluster.write(create("after"))) == (2,)


async def test_leadership_is_handed_over_and_nothing_is_lost(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 5)
    old = await cluster.leader()
    to = next(i for i in cluster.nodes if i != old)
    preferred = []

    def note(_: int, __: int, request: Request) -> bool:
        if isinstance(request, EndQuorumEpochRequest):
            preferred.append(request.preferred_successors[0].node_id)
        return False

    cluster.drops = note
    under_way = asyncio.create_task(cluster.write(create("under-way")))
    await asyncio.sleep(0)

    await cluster.nodes[old].driver.transfer_leadership(NodeId(to), SOON_MS)

    assert not cluster.nodes[old].driver.is_leader
    await until(lambda: bool(preferred), "the others to be told")
    assert set(preferred) == {to}
    assert await cluster.leader(among=lambda i: i != old) != old
    assert stream_ids(await under_way) == (5,)
    with pytest.raises(NotLeaderError):
        await cluster.nodes[old].driver.transfer_leadership(None, SOON_MS)


async def test_appends_are_refused_while_leadership_is_handed_over(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 2)
    old = await cluster.leader()
    to = next(i for i in cluster.nodes if i != old)
    node = cluster.nodes[old]
    cluster.drops = lambda sender, other, request: sender == to and is_fetch(request)
    await cluster.nodes[old].controller.write(create("b"))
    handing = asyncio.create_task(node.driver.transfer_leadership(NodeId(to), SOON_MS))
    await until(lambda: node.driver.describe().is_transferring, "a transfer")
    before = node.driver.next_offset
    with pytest.raises(NotLeaderError):
        await node.controller.write(create("refused"))
    with pytest.raises(quorum_errors.TransferRefusedError, match="already"):
        await node.driver.transfer_leadership(None, SOON_MS)
    assert node.driver.next_offset == before

    cluster.drops = lambda *_: False

    await asyncio.gather(handing, return_exceptions=True)
    assert stream_ids(await cluster.write(create("refused"))) == (3,)


async def test_a_transfer_to_a_stranger_is_refused_and_leadership_stays(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 1)
    node = cluster.nodes[await cluster.leader()]
    with pytest.raises(quorum_errors.TransferRefusedError, match="9"):
        await node.driver.transfer_leadership(NodeId(9), SOON_MS)
    assert node.driver.is_leader
    assert stream_ids(await node.controller.write(create("after"))) == (1,)


async def test_a_transfer_to_the_leader_itself_has_nothing_to_do(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    leader = await cluster.leader()
    node = cluster.nodes[leader]
    epoch = node.driver.epoch
    await node.driver.transfer_leadership(NodeId(leader), SOON_MS)
    assert (node.driver.is_leader, node.driver.epoch) == (True, epoch)
    assert stream_ids(await node.controller.write(create("after"))) == (1,)


async def test_the_end_of_every_leadership_is_logged_with_its_reason(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 1)
    leader = await cluster.leader()
    to = next(i for i in cluster.nodes if i != leader)
    with capture_logs() as logged:
        await cluster.nodes[leader].driver.transfer_leadership(NodeId(to), SOON_MS)
    ends = [entry for entry in logged if entry["event"] == "leadership_ended"]
    assert [entry["reason"] for entry in ends] == [f"handed over to controller {to}, as asked"]
    assert ends[0]["had_served"]


async def test_a_leader_that_stops_lets_what_was_appended_commit(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    old = await cluster.leader()
    node = cluster.nodes[old]
    writes = [asyncio.create_task(node.controller.write(create(f"last-{i}"))) for i in range(20)]
    await asyncio.sleep(0)

    await cluster.stop(old)

    answered = await asyncio.gather(*writes)
    assert [stream_ids(item) for item in answered] == [(1 + i,) for i in range(20)]
    new = await cluster.leader()
    await cluster.hash_at(new, answered[-1].offset)


async def test_a_leader_that_is_hurried_does_not_wait_for_a_majority(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.fill("a", 1)
    leader = await cluster.leader()
    monkeypatch.setattr(quorum_driver, "_STOP_ROUNDS", 1_000_000)  # of telling the voters
    cluster.isolate(leader)
    driver = cluster.nodes[leader].driver
    writing = asyncio.create_task(cluster.nodes[leader].controller.write(create("lost")))
    await until(lambda: driver.next_offset > driver.high_watermark, "it is appended")
    hurried = asyncio.Event()
    stopping = asyncio.create_task(cluster.stop(leader, hurried))
    await until(lambda: driver.is_stopping, "it stops")
    hurried.set()
    await asyncio.wait_for(stopping, 60)
    with pytest.raises((OutcomeUnknownError, NotLeaderError)):
        await writing


async def test_a_session_sees_its_own_write_on_every_controller(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    for round_ in range(5):
        written = await cluster.write(create(f"b-{round_}"))
        for node in cluster.nodes.values():
            seen = await node.controller.read(
                DescribeStreams(), at_least=written.offset, timeout_ms=SOON_MS
            )
            assert seen.offset >= written.offset
            assert seen.answer.total == 2 + round_  # type: ignore[attr-defined]
    lonely = next(i for i, n in cluster.nodes.items() if not n.driver.is_leader)
    cluster.isolate(lonely)
    written = await cluster.write(create("c"))
    behind = cluster.nodes[lonely].controller
    with pytest.raises(quorum_errors.NotCaughtUpError):
        await behind.read(DescribeStreams(), at_least=written.offset, timeout_ms=20)
    old = await behind.read(DescribeStreams(), at_least=0)
    assert old.offset < written.offset, "without more asked for, it tells what it has"


async def test_neither_a_session_nor_a_successor_waits_for_a_replay_that_was_put_off(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await cluster.fill("a", 1)
    followers = [node for node in cluster.nodes.values() if not node.driver.is_leader]

    def have(offset: int) -> bool:
        return all(node.controller.committed_end >= offset for node in followers)

    await until(lambda: have(last.offset), "the first is replayed")
    monkeypatch.setattr(delivery, "REPLAYED_AFTER_S", 3_600.0)
    written = await cluster.write(create("b"))
    await until(
        lambda: all(node.driver.high_watermark >= written.offset for node in followers),
        "the commit is known",
    )
    assert all(node.controller.committed_end < written.offset for node in followers)

    behind = followers[0].controller
    seen = await behind.read(DescribeStreams(), at_least=written.offset, timeout_ms=SOON_MS)
    assert seen.offset >= written.offset
    later = await cluster.write(create("c"))
    await behind.read(DescribeStreams(), at_least=later.offset, timeout_ms=SOON_MS)

    old = await cluster.leader()
    successor = followers[1].key.node_id
    await cluster.nodes[old].driver.transfer_leadership(successor, SOON_MS)
    await until(lambda: cluster.nodes[successor].controller.is_active, "it leads")


async def test_linearizable_reads_that_can_not_be_proven_are_bounded(tmp_path: Path) -> None:
    limits = QuorumLimits(max_pending_reads=3)
    async with MemoryCluster(tmp_path, limits=limits) as cluster:
        await cluster.fill("a", 1)
        node = cluster.nodes[await cluster.leader()]
        cluster.isolate(node.key.node_id)
        reads = []
        for _ in range(3):
            reads.append(asyncio.create_task(node.driver.read_barrier()))
            await asyncio.sleep(0.001)
        with pytest.raises(quorum_errors.TooManyReadsError, match="3"):
            await node.driver.read_barrier()
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, NotLeaderError)


async def test_leadership_that_ends_between_two_batches_of_one_turn_is_no_defect(
    tmp_path: Path,
) -> None:
    limits = QuorumLimits(max_batch_bytes=400)
    async with MemoryCluster(tmp_path, limits=limits) as cluster:
        await cluster.fill("a", 1)
        old = await cluster.leader()
        node = cluster.nodes[old]
        cluster.isolate(old)
        writes = [
            asyncio.create_task(node.controller.write(create(f"doubtful-{i}"))) for i in range(50)
        ]
        await asyncio.sleep(0)
        forming = node.driver.next_offset - node.driver.describe().end_offset
        assert forming == 50, "not flushed yet, and more than one batch takes"
        node.clock.skipped_ms += 60_000

        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            assert isinstance(outcome, OutcomeUnknownError)

        assert not node.driver.fatal.done()
        cluster.cut.clear()
        assert stream_ids(await cluster.write(create("after"))) == (1,)


async def test_a_read_behind_a_round_of_several_is_answered_after_its_rest(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "ROUND_REST_MS", 200)
    monkeypatch.setattr(waiters, "REST_A_READ_MS", 100)
    await cluster.fill("a", 1)
    node = cluster.nodes[await cluster.leader()]
    await asyncio.gather(*(node.driver.read_barrier() for _ in range(2)))
    before = _read_round(node)

    assert await asyncio.wait_for(node.driver.read_barrier(), PATIENCE_S) >= 1
    assert _read_round(node) == before + 1


async def test_reads_in_flight_together_ask_the_voters_twice(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    node = cluster.nodes[await cluster.leader()]
    before = _read_round(node)

    async def read_after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await node.driver.read_barrier()

    indexes = await asyncio.gather(*(read_after(2 * (number % 2)) for number in range(64)))

    assert min(indexes) >= 1
    assert _read_round(node) - before == 2, (
        "one for the first half, one for all that came meanwhile"
    )


def _read_round(node: Node) -> int:
    role = node.driver._core.role
    assert isinstance(role, Leader)
    return role.read_round


async def test_a_follower_alone_has_no_leader_although_it_remembers_one(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 1)
    leader = await cluster.leader()
    follower, third = (node_id for node_id in cluster.nodes if node_id != leader)

    def described(node_id: int = follower) -> QuorumDescription:
        return cluster.nodes[node_id].driver.describe()

    await until(lambda: described().has_leader, "the leader answers")
    assert described(leader).has_leader
    for node_id in (leader, third):
        await cluster.kill(node_id)
    await until(lambda: not described().has_leader, "the loss is noticed")
    remembered: set[str] = set()

    def is_follower_again() -> bool:
        """Look in each turn: between campaigns a voter goes back to the leader that it knows."""
        remembered.add(described().role)
        assert not described().has_leader
        return {"prospective", "follower"} <= remembered

    await until(is_follower_again, "it has asked for votes in vain")
    assert described().leader_id == leader
    await cluster.start(third)
    await until(lambda: described().has_leader, "there is a leader")
