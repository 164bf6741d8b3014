"""A full disk refuses writes alone; one that lost data is whole again before its node votes."""

import asyncio
from pathlib import Path

import pytest

from streammeta.controller.errors import LimitExceededError, OutcomeUnknownError
from streammeta.controller.metadata.api.requests import DescribeStreams
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError
from tests.kit.memory_cluster import MemoryCluster, create, stream_ids
from tests.kit.waiting import until


@pytest.mark.parametrize("spare", [0, 1, 40])
async def test_writes_are_refused_and_reads_served_until_there_is_room(
    lone: MemoryCluster, spare: int
) -> None:
    before = await lone.fill("a", 3)
    node = lone.nodes[0]
    node.files.spare = spare
    node.files.is_full = True
    under_way = asyncio.create_task(node.controller.write(create("under-way")))
    await until(lambda: node.driver.describe().is_disk_full, "the disk to be full")

    with pytest.raises(NoDiskSpaceError, match="controller 0") as refused:
        await node.controller.write(create("refused"))
    assert isinstance(refused.value, LimitExceededError)
    assert node.driver.is_leader, "it goes on leading"
    barrier = await node.driver.read_barrier()
    assert barrier >= before.offset
    session = asyncio.create_task(node.controller.read(DescribeStreams(), at_least=before.offset))
    assert not under_way.done()

    node.files.is_full = False

    assert stream_ids(await under_way) == (3,), "what was taken in is not lost"
    assert (await session).offset >= before.offset
    assert stream_ids(await lone.write(create("refused"))) == (4,)
    last = await lone.fill("b", 1)
    wanted = await lone.hash_at(0, last.offset)
    await lone.restart(0)
    assert await lone.hash_at(0, last.offset) == wanted


async def test_a_leader_with_a_full_disk_hands_over_to_a_voter_with_room(
    cluster: MemoryCluster,
) -> None:
    before = await cluster.fill("a", 2)
    full = await cluster.leader()
    node = cluster.nodes[full]
    began = node.driver.epoch
    node.files.is_full = True
    # The others keep it: a majority has it on disk though the leader has not.
    done = await node.controller.write(create("kept-by-the-others"))
    assert done.offset > before.offset

    successor = await cluster.leader(lambda node_id: node_id != full)
    assert cluster.nodes[successor].driver.epoch == began + 1, "by one election"
    assert stream_ids(await cluster.write(create("by-the-next"))) == (3,)
    answered = await cluster.nodes[successor].controller.read(DescribeStreams())
    assert answered.answer.total == 4  # type: ignore[attr-defined]

    node.files.is_full = False
    last = await cluster.write(create("again"))
    await cluster.agree(full, last.offset)


async def test_a_leader_goes_on_with_reads_while_no_voter_has_room(cluster: MemoryCluster) -> None:
    before = await cluster.fill("a", 2)
    leader = await cluster.leader()
    node = cluster.nodes[leader]
    for other in cluster.nodes.values():
        other.files.is_full = True
    under_way = asyncio.create_task(node.controller.write(create("under-way")))
    await until(lambda: node.driver.describe().is_disk_full, "the disk to be full")

    answered = await node.controller.read(DescribeStreams())

    assert answered.offset >= before.offset
    assert not under_way.done()
    for other in cluster.nodes.values():
        other.files.is_full = False
    assert stream_ids(await cluster.write(create("under-way"))) == (2,)
    under_way.cancel()


async def test_a_leader_alone_with_room_refuses_writes_at_once_and_holds_up_no_read(
    cluster: MemoryCluster,
) -> None:
    before = await cluster.fill("a", 2)
    leader = await cluster.leader()
    node = cluster.nodes[leader]
    epoch = node.driver.epoch
    others = [other for i, other in cluster.nodes.items() if i != leader]
    for other in others:
        other.files.is_full = True
    under_way = asyncio.create_task(node.controller.write(create("under-way")))
    read_before = asyncio.create_task(node.controller.read(DescribeStreams()))
    await until(lambda: node.driver.is_short_of_space, "the voters' disks to be full")

    end_offset = node.driver.next_offset
    with pytest.raises(NoDiskSpaceError):
        await node.controller.write(create("refused"))
    assert node.driver.next_offset == end_offset, "nothing is appended"
    for read in (read_before, node.controller.read(DescribeStreams())):
        assert (await read).answer.total == 2  # type: ignore[attr-defined]
    session = await node.controller.read(DescribeStreams(), at_least=before.offset)
    assert session.answer.total == 2  # type: ignore[attr-defined]
    with pytest.raises(OutcomeUnknownError):
        await under_way
    assert (node.driver.is_leader, node.driver.epoch) == (True, epoch)

    for other in others:
        other.files.is_full = False
    assert stream_ids(await cluster.write(create("under-way"))) == (2,)
    assert stream_ids(await cluster.write(create("refused"))) == (3,)


async def test_a_follower_with_a_full_disk_catches_up_when_there_is_room(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 2)
    follower = await cluster.follower()
    cluster.nodes[follower].files.is_full = True
    last = await cluster.fill("b", 20)
    assert cluster.nodes[follower].journal.end_offset < last.offset

    cluster.nodes[follower].files.is_full = False

    await cluster.agree(follower, last.offset)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


@pytest.mark.parametrize("which", ["first segment", "newest snapshot"])
async def test_a_damaged_follower_repairs_itself_from_the_leader(
    tmp_path: Path, which: str
) -> None:
    async with MemoryCluster(tmp_path) as cluster:
        last = await cluster.fill("a", 40)
        damaged = next(i for i in cluster.nodes if not cluster.nodes[i].driver.is_leader)
        await cluster.hash_at(damaged, last.offset)
        if which == "newest snapshot":
            await cluster.nodes[damaged].driver.take_snapshot()
        await cluster.kill(damaged)
        pattern = "*.log" if which == "first segment" else "*.checkpoint"
        flip_a_byte(sorted((tmp_path / f"node{damaged}").glob(pattern))[0])

        node = await cluster.start(damaged)

        await cluster.agree(damaged, last.offset)
        await until(lambda: not node.driver.describe().is_repairing, "the repair to end")
        after = await cluster.write(create("after"))
        assert stream_ids(after) == (40,)
        restarted = await cluster.restart(damaged)
        assert not restarted.driver.describe().is_repairing
        await cluster.agree(damaged, after.offset)
