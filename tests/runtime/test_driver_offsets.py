"""A record is at the offset it was promised, whatever the quorum writes into the log by itself."""

import asyncio
from pathlib import Path

from streammeta.controller.metadata.requests import GetKVs, KVKey, KVToPut, PutKVs
from streammeta.controller.quorum.messages import RequestHeader, UpdateVoterRequest
from streammeta.controller.quorum.voters import Voter
from tests.runtime.memory_cluster import CLUSTER, STEADY, MemoryCluster, Node, eventually


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
        await eventually(lambda: is_settled(leader), "every voter's disk is recorded")
        follower = next(node for node in cluster.nodes.values() if node is not leader)
        put = PutKVs(items=(KVToPut(key="k", value=b"v"),))
        # Both run in this turn of the event loop; what was put is flushed in the next.
        writing = asyncio.create_task(leader.controller.write(put))
        updating = asyncio.create_task(leader.driver.handle(update_of(follower, leader)))
        await updating
        endpoints = {voter.endpoint for voter in leader.driver.describe().voters}
        assert "moved:1" in endpoints, "no record was written in between"
        written = await writing
        get = GetKVs(keys=(KVKey(key="k"),))
        for node in cluster.nodes.values():
            read = await node.controller.read(get, at_least=written.offset)
            assert read.answer == written.answer
