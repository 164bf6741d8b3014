"""Snapshots of running controllers: nothing committed is lost, and nothing waits for them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streammeta.controller.errors import OutcomeUnknownError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.runtime.persistence.checkpointer import CheckpointLimits
from streammeta.controller.runtime.quorum_errors import NoDiskSpaceError, SnapshotFailedError
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader, Sink
from streammeta.controller.snapshot.voters import section_voters
from tests.kit.memory_cluster import BROKER, MemoryCluster, Node, create, is_fetch, stream_ids
from tests.kit.waiting import until

OFTEN = CheckpointLimits(log_bytes=500, interval_ms=600_000, retry_ms=50)


async def test_a_restart_from_snapshot_and_tail_equals_replay(lone: MemoryCluster) -> None:
    await lone.fill("a", 20)
    taken = await lone.nodes[0].driver.take_snapshot()
    last = await lone.fill("b", 5)
    replayed = await lone.hash_at(0, last.offset)

    node = await lone.restart(0)

    assert await lone.hash_at(0, last.offset) == replayed
    assert node.journal.snapshots.kept == (taken,)
    assert node.driver.describe().snapshot_id == taken
    again = await lone.write(create("a-3"))
    assert stream_ids(again) == (3,), "what was remembered is remembered"


async def test_a_snapshot_at_every_offset_restores_the_same_map(lone: MemoryCluster) -> None:
    await lone.leader()
    for index in range(6):
        last = await lone.fill(f"x{index}", 1)
        taken = await lone.nodes[0].driver.take_snapshot()
        assert taken.end_offset == last.offset
        before = await lone.hash_at(0, last.offset)
        await lone.restart(0)
        assert await lone.hash_at(0, last.offset) == before


async def test_a_follower_far_behind_gets_a_snapshot_and_then_the_tail(tmp_path: Path) -> None:
    limits = QuorumLimits(snapshot_chunk_bytes=700, snapshots_kept=1)
    async with MemoryCluster(tmp_path, limits=limits) as cluster:
        behind = await cluster.follower()
        registered = await cluster.write(r.RegisterNode(node=BROKER))
        stale = cluster.nodes[behind].controller
        await cluster.hash_at(behind, registered.offset)
        await cluster.kill(behind)
        await cluster.fill("a", 60)
        taken = await cluster.nodes[await cluster.leader()].driver.take_snapshot()
        leading = cluster.nodes[await cluster.leader()]
        await until(lambda: leading.journal.start_offset > 0, "segments to be gone")
        assert leading.driver.describe().log_start_offset == taken.end_offset
        await cluster.fill("b", 3)

        node = await cluster.start(behind)

        assert node.controller is not stale
        last = await cluster.fill("c", 1)
        await cluster.agree(behind, last.offset)
        assert taken in node.journal.snapshots.kept
        restarted = await cluster.restart(behind)
        await cluster.agree(behind, last.offset)
        assert len(restarted.driver.describe().voters) == 3, "the snapshot names the voters"


async def test_a_running_follower_that_was_cut_off_replaces_its_state(tmp_path: Path) -> None:
    limits = QuorumLimits(snapshot_chunk_bytes=700, snapshots_kept=1, tail_bytes=1)
    async with MemoryCluster(tmp_path, limits=limits) as cluster:
        first = await cluster.fill("a", 3)
        leader = await cluster.leader()
        behind = next(i for i in cluster.nodes if i != leader)
        await cluster.hash_at(behind, first.offset)
        cluster.isolate(behind)
        await cluster.fill("b", 60)
        leading = cluster.nodes[await cluster.leader(among=lambda i: i != behind)]
        taken = await leading.driver.take_snapshot()
        await until(
            lambda: leading.driver.describe().log_start_offset == taken.end_offset, "a trim"
        )
        session = asyncio.create_task(
            cluster.nodes[behind].controller.read(
                r.DescribeStreams(), at_least=taken.end_offset, timeout_ms=60_000
            )
        )

        cluster.cut.clear()

        answered = await session
        assert answered.offset >= taken.end_offset
        last = await cluster.fill("c", 1)
        await cluster.agree(behind, last.offset)
        assert taken in cluster.nodes[behind].journal.snapshots.kept


async def test_every_controller_takes_its_own_and_trims_its_log(tmp_path: Path) -> None:
    async with MemoryCluster(tmp_path, checkpoints=OFTEN) as cluster:
        written = 0
        while not all(_has_trimmed(node) for node in cluster.nodes.values()):
            assert written < 2_000, "two snapshots and a trim everywhere"
            last = await cluster.write(_overwrite(written))
            written += 1
        for node in cluster.nodes.values():
            assert node.journal.start_offset <= node.journal.snapshots.kept[0].end_offset
        for node_id in list(cluster.nodes):
            await cluster.restart(node_id)
        hashes = {await cluster.hash_at(i, last.offset) for i in cluster.nodes}
        assert len(hashes) == 1


def _overwrite(number: int) -> r.PutKVs:
    """Return a write that makes the log longer and the map no larger."""
    value = number.to_bytes(1_000, "big")
    return r.PutKVs(items=(r.KVToPut(key="same", value=value, overwrite=True),))


def _has_trimmed(node: Node) -> bool:
    return len(node.journal.snapshots.kept) == 2 and node.journal.start_offset > 0


class _SlowFreeze:
    """Holds the writing thread of checkpoints until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, controller: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.frozen = asyncio.Event()
        self.go_on = asyncio.Event()
        original = controller.freeze

        def freeze(point: Any) -> Any:
            write = original(point)
            self.frozen.set()

            def hold(sink: Sink) -> object:
                asyncio.run_coroutine_threadsafe(self.go_on.wait(), self.loop).result(60)
                return write(sink)

            return hold

        monkeypatch.setattr(controller, "freeze", freeze)


async def test_no_write_waits_for_a_checkpoint(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.fill("a", 5)
    node = cluster.nodes[await cluster.leader()]
    slow = _SlowFreeze(monkeypatch, node.controller)
    taking = asyncio.create_task(node.driver.take_snapshot())
    await slow.frozen.wait()

    answered = await node.controller.write(create("meanwhile"))
    frozen = await node.controller.frozen()

    assert not taking.done()
    slow.go_on.set()
    taken = await taking
    # Voters may tell of their disks meanwhile: such a record can follow the answered one.
    assert taken.end_offset < answered.offset <= frozen.id.end_offset


async def test_a_leaders_view_counts_only_once_it_is_committed(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.fill("a", 5)
    node = cluster.nodes[leader := await cluster.leader()]
    cluster.drops = lambda sender, other, request: leader == other and is_fetch(request)
    doubtful = asyncio.create_task(node.controller.write(create("doubtful")))
    taking = asyncio.create_task(node.driver.take_snapshot())
    await until(lambda: bool(cluster.snapshot_files(leader)), "a file")
    assert cluster.snapshot_files(leader)[-1].endswith(".tmp")

    cluster.drops = lambda *_: False

    answered = await doubtful
    taken = await taking
    assert taken.end_offset >= answered.offset
    assert taken in node.journal.snapshots.kept


async def test_a_snapshot_ends_where_a_batch_ends(lone: MemoryCluster) -> None:
    await lone.fill("a", 1)
    node = lone.nodes[0]
    writing = asyncio.create_task(node.controller.write(create("b")))
    await asyncio.sleep(0)
    end_offset = node.driver.next_offset
    assert node.driver.describe().end_offset < end_offset, "a batch is being formed"

    point = node.driver.snapshot_point()

    assert point.snapshot_id.end_offset == end_offset
    assert node.driver.describe().end_offset == end_offset, "that batch has ended"
    assert (await writing).offset == end_offset


async def test_a_view_of_a_leader_that_lost_leadership_is_thrown_away(
    cluster: MemoryCluster,
) -> None:
    await cluster.fill("a", 5)
    old = await cluster.leader()
    node = cluster.nodes[old]
    cluster.isolate(old)
    doubtful = asyncio.create_task(node.controller.write(create("doubtful")))
    await asyncio.sleep(0)
    taking = asyncio.create_task(node.driver.take_snapshot())
    await asyncio.sleep(0)
    uncommitted_end = node.driver.next_offset

    with pytest.raises(OutcomeUnknownError):
        await doubtful

    new = await cluster.leader(among=lambda i: i != old)
    answered = await cluster.nodes[new].controller.write(create("other"))
    taken = await taking
    assert taken.end_offset < uncommitted_end, "the next one holds committed state only"
    cluster.cut.clear()
    last = await cluster.fill("b", 1)
    assert stream_ids(answered) == (5,), "its id was never used"
    await cluster.hash_at(old, last.offset)
    await cluster.restart(old)
    await cluster.agree(old, last.offset)


async def test_without_room_a_checkpoint_is_put_off_and_leaves_nothing(tmp_path: Path) -> None:
    async with MemoryCluster(tmp_path, size=1, checkpoints=OFTEN) as cluster:
        node = cluster.nodes[0]
        node.files.full_for = lambda path: ".checkpoint" in path.name
        node.files.is_full = True
        last = await cluster.fill("a", 20)
        with pytest.raises(NoDiskSpaceError, match="checkpoint"):
            await node.driver.take_snapshot()
        assert not node.journal.snapshots.kept
        assert cluster.snapshot_files(0) == []
        assert not node.driver.fatal.done()

        node.files.is_full = False

        await until(lambda: bool(node.journal.snapshots.kept), "another try, by itself")
        assert node.journal.snapshots.kept[-1].end_offset >= last.offset


async def test_a_restart_writes_no_checkpoint_amid_the_replay_of_the_log_behind_the_last(
    tmp_path: Path,
) -> None:
    async with MemoryCluster(tmp_path, size=1, checkpoints=OFTEN) as cluster:
        node = cluster.nodes[0]
        await cluster.fill("a", 20)
        taken = await node.driver.take_snapshot()
        last = await cluster.fill("b", 40)  # more than OFTEN, less than the checkpoint
        assert node.journal.snapshots.kept[-1] == taken
        files = cluster.snapshot_files(0)

        node = await cluster.restart(0)

        await cluster.hash_at(0, last.offset)
        await node.driver.read_barrier()
        assert cluster.snapshot_files(0) == files


async def test_a_snapshot_names_the_voters_and_nothing_new_makes_no_new_one(
    lone: MemoryCluster,
) -> None:
    node = lone.nodes[0]
    await lone.fill("a", 1)
    taken = await node.driver.take_snapshot()
    assert await node.driver.take_snapshot() == taken
    with node.journal.snapshots.open(taken) as file:
        voters = section_voters(CheckpointReader(file))
    assert [voter.key for voter in voters] == [node.key]
    assert node.driver.snapshot_point().voters == voters


async def test_a_controller_that_stops_takes_no_snapshot(lone: MemoryCluster) -> None:
    await lone.fill("a", 1)
    driver = lone.nodes[0].driver
    await lone.stop(0)
    with pytest.raises(SnapshotFailedError, match="stopping"):
        await driver.take_snapshot()
