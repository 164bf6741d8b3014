"""Waiting appends share batches, and records take the offsets they were promised."""

import asyncio
from pathlib import Path

import pytest

from streammeta.controller.errors import NotLeaderError, OutcomeUnknownError
from streammeta.controller.ids import EndOffset
from streammeta.controller.metadata.api.requests import GetKVs, KVKey, KVToPut, PutKVs
from streammeta.controller.quorum.messages import RequestHeader, UpdateVoterRequest
from streammeta.controller.quorum.voters import Voter
from streammeta.controller.runtime.replication import append_batching
from tests.kit.memory_cluster import (
    CLUSTER,
    STEADY,
    MemoryCluster,
    Node,
    answered,
    create,
    is_fetch,
    stream_ids,
)
from tests.kit.waiting import PATIENCE_S, until

WAITING = 10


async def settle() -> None:
    """Let everything that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_nobody_waits_while_there_is_room() -> None:
    turns = append_batching.AppendTurns()
    await asyncio.wait_for(turns.wait(append_batching.BATCHES_UNDER_WAY_MAX - 1), PATIENCE_S)


async def test_who_waits_goes_on_together_and_nobody_overtakes() -> None:
    turns, done = append_batching.AppendTurns(), []

    async def append(name: str, under_way: int) -> None:
        await turns.wait(under_way)
        done.append(name)

    tasks = [
        asyncio.create_task(append("first", append_batching.BATCHES_UNDER_WAY_MAX)),
        asyncio.create_task(append("second", append_batching.BATCHES_UNDER_WAY_MAX)),
        asyncio.create_task(append("late", 0)),
    ]
    await settle()
    turns.give_if(append_batching.BATCHES_UNDER_WAY_MAX)
    await settle()
    assert done == []
    tasks[1].cancel()  # its caller has gone
    turns.give_if(append_batching.BATCHES_UNDER_WAY_MAX - 1)
    await settle()
    assert done == ["first", "late"]


async def test_many_that_waited_append_in_several_turns_of_the_event_loop() -> None:
    """All go on, whether or not those before them append anything."""
    turns, done = append_batching.AppendTurns(), []

    async def append(number: int) -> None:
        await turns.wait(append_batching.BATCHES_UNDER_WAY_MAX)
        done.append(number)

    tasks = [asyncio.create_task(append(number)) for number in range(1_000)]
    await settle()
    turns.give_if(0)
    before = 0
    while len(done) < len(tasks):
        await asyncio.sleep(0)
        assert len(done) - before <= append_batching.GIVEN_PER_TURN
        before = len(done)
    assert done == sorted(done)


async def test_writes_that_arrive_behind_two_batches_share_the_third(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 1)
    node = cluster.nodes[await cluster.leader()]
    cluster.drops = lambda one, other, request: is_fetch(request)
    begun = node.driver.next_offset
    writes = []
    for number in range(append_batching.BATCHES_UNDER_WAY_MAX + WAITING):
        writes.append(asyncio.create_task(node.controller.write(create(f"b{number}"))))
        await settle()  # so that each is a batch of its own if it may
    assert node.driver.next_offset == begun + append_batching.BATCHES_UNDER_WAY_MAX

    cluster.drops = lambda *_: False

    answers = await asyncio.gather(*writes)
    assert [stream_ids(answer) for answer in answers] == [
        (1 + number,) for number in range(len(writes))
    ]
    batches = node.journal.read(EndOffset(begun), 1 << 20)
    ends = [batch.end_offset for batch in batches]
    assert ends == [begun + 1, begun + 2, begun + len(writes)]


async def test_who_waits_when_leadership_is_lost_is_told(cluster: MemoryCluster) -> None:
    await cluster.fill("a", 1)
    old = await cluster.leader()
    node = cluster.nodes[old]
    cluster.isolate(old)
    writes = []
    for number in range(append_batching.BATCHES_UNDER_WAY_MAX + 1):
        writes.append(asyncio.create_task(node.controller.write(create(f"b{number}"))))
        await settle()
    await until(lambda: not node.driver.is_leader, "it to resign")
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes[:-1]] == [
        OutcomeUnknownError
    ] * append_batching.BATCHES_UNDER_WAY_MAX
    with pytest.raises(NotLeaderError):
        await writes[-1]


def update_of(follower: Node, leader: Node) -> UpdateVoterRequest:
    """What makes the leader write a record of its own: a voter that has moved."""
    header = RequestHeader(
        cluster_id=CLUSTER,
        sender=follower.key,
        receiver=leader.key,
        epoch=leader.driver.epoch,
        incarnation=99,
        request_id=99,
    )
    return UpdateVoterRequest(header=header, voter=Voter(follower.key, "moved:1"))


def is_settled(node: Node) -> bool:
    """Whether every voter's disk is recorded, and committed: no other record is on its way."""
    voters = node.driver.describe().voters
    core = node.driver._core
    return all(v.key.directory_id for v in voters) and core.high_watermark == core.log.end_offset


async def test_a_voter_record_between_an_append_and_its_flush_shifts_nothing(
    tmp_path: Path,
) -> None:
    async with MemoryCluster(tmp_path, timings=STEADY) as cluster:
        await cluster.fill("a", 2)
        leader = cluster.nodes[await cluster.leader()]
        await until(lambda: is_settled(leader), "every voter's disk is recorded")
        follower = next(node for node in cluster.nodes.values() if node is not leader)
        put = PutKVs(items=(KVToPut(key="k", value=b"v"),))
        # Both run in this turn of the event loop; what was put is flushed in the next.
        writing = asyncio.create_task(leader.controller.write(put))
        updating = asyncio.create_task(answered(leader.driver, update_of(follower, leader)))
        await updating
        endpoints = {voter.peer_endpoint for voter in leader.driver.describe().voters}
        assert "moved:1" in endpoints, "no record was written in between"
        written = await writing
        get = GetKVs(keys=(KVKey(key="k"),))
        for node in cluster.nodes.values():
            read = await node.controller.read(get, at_least=written.offset)
            assert read.answer == written.answer
