"""Logs that return after their node went on without them, from seeds.

Processes of a node write under logs on several disks, copies of these, a log in the bucket, or
none. They die at any request, also while they recover, or write on beside their successors. Other
nodes take their streams over. In the end every log comes back. `STREAMMETA_SEEDS=first:last` runs
other seeds.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from streammeta.client import StreamClientConfig
from streammeta.client.config import WriterConfig
from streammeta.client.errors import BrokerClientError, WriteAheadLogError
from streammeta.client.model import NodeIdentity
from streammeta.client.parts import BrokerSession
from streammeta.client.wal.bucket.bucket_slots import BucketSlots
from streammeta.client.wal.bucket.config import WAL_CONFIG, ObjectLogConfig
from streammeta.client.wal.bucket.departed_node import DepartedNode
from streammeta.client.wal.bucket.failover import recover_node
from streammeta.client.wal.disk.recovery import StoredRecords
from streammeta.controller.metadata.api.requests import (
    AbandonUploads,
    AssignRecoveries,
    RecoveryTarget,
)
from streammeta.storage.errors import StorageError
from streammeta.storage.object_log.slot import Sealer
from tests.broker_client.log_world import Process, World, simulated
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.seeds import seeds

NODE, OTHER, RECOVERER = 7, 8, 9
BUCKET = "bucket"


def config(world: World, log: str | None) -> StreamClientConfig:
    """Return the configuration of a process with the log on a disk, in the bucket, or with none."""
    writer = WriterConfig(
        linger_s=world.rng.choice([0.01, 1.0, 60.0]),
        commit_deadline_s=20.0,
        durability="wal" if log else "object",
    )
    if log is None:
        return StreamClientConfig(writer=writer, allow_missing_log=True)
    if log == BUCKET:
        in_bucket = ObjectLogConfig(linger_s=0.01)
        return StreamClientConfig(writer=writer, object_log=in_bucket, allow_missing_log=True)
    disk = world.disks / log
    return StreamClientConfig(writer=writer, wal_directory=disk, allow_missing_log=True)


async def write(world: World, process: Process) -> None:
    """Append records, and do now and then what makes later appends differ from earlier ones."""
    rng = world.rng
    for _ in range(rng.randint(0, 4)):
        for _ in range(rng.randint(1, 4)):
            if process.streams:
                await process.append(rng.choice(process.streams))
        match rng.randint(0, 11):
            case 0 | 1:
                await process.flush()
            case 2 if process.streams:
                await process.meet_refusals()
            case 3:
                await process.close_streams(process.streams)
                await process.open(set(world.streams))
            case 4:
                await process.flush()
                await process.open(set(process.streams))
            case _:
                await asyncio.sleep(rng.choice([0, 0.02, 0.5, 3.0]))


async def live(world: World, log: str | None, node_id: int = NODE) -> Process | None:
    """Run a process of a node until it ends, in one of the ways in which processes end.

    Return one that goes on, and does not know of its successors.
    """
    rng = world.rng
    process = Process(world, node_id, config(world, log))
    dies_after = rng.randint(0, 25) if rng.random() < 0.3 else None
    if not await process.start(dies_after):
        return None
    if not world.streams:
        await process.create(2)
    await write(world, process)
    match rng.randint(0, 5):
        case 0:
            await process.close()
        case 1:
            await process.close(close_streams=True)
        case 2 if node_id == NODE:
            return process
        case _:
            await process.kill()
    return None


async def end(world: World, process: Process) -> None:
    """Let a process that others take for dead write on for a while, and kill it."""
    with suppress(BrokerClientError, WriteAheadLogError):
        for _ in range(world.rng.randint(0, 5)):
            await process.append(world.rng.choice(process.streams or world.streams))
            await asyncio.sleep(world.rng.choice([0, 0.5]))
        await process.flush()
    await process.kill()


async def recover(world: World, departed: NodeIdentity) -> None:
    """Recover a dead process from its log in the bucket, by another node that may die meanwhile."""
    rng = world.rng
    target = RecoveryTarget(departed.node_id, departed.node_epoch, RECOVERER)
    for patience in (0, 1, 2):
        link = world.new_link(world.badness)
        link.cuts_after = rng.randint(0, 40) if patience < 2 and rng.random() < 0.5 else None
        store = world.store.seen_by(link)
        try:
            async with world.controllers() as controllers:
                session = await BrokerSession.open(
                    controllers, RECOVERER, world.next_epoch(RECOVERER)
                )
                await world.ask(AssignRecoveries(targets=(target,)))
                async with StoredRecords(controllers, store, NAMESPACE) as stored:
                    speaker = DepartedNode(session, departed, store, stored)
                    slots = BucketSlots(store, 5)
                    sealer = Sealer(RECOVERER, session.node.node_epoch)
                    report = await recover_node(slots, NAMESPACE, speaker, sealer)
                    slots.close()
            await world.check_set_aside(report.aside_keys)
            return
        except (BrokerClientError, StorageError):
            if not link.is_cut:
                raise


async def take_over(world: World) -> None:
    """Let other nodes write to the streams of the node, whose process has ended."""
    departed = world.registered(NODE)
    if departed is None:
        return
    if departed.wal_config == WAL_CONFIG:
        await recover(world, NodeIdentity(NODE, departed.node_epoch))
    await give_up(world, NODE)
    await live(world, None, OTHER)
    await give_up(world, OTHER)


async def give_up(world: World, node_id: int) -> None:
    """Close what the last process of a node has open, as an operator does."""
    node = world.registered(node_id)
    if node is not None:
        await world.ask(AbandonUploads(node_id=node_id, close_streams_of_epoch=node.node_epoch))


async def logs_come_and_go(world: World) -> None:
    """One process after the other, each with one of the logs; in the end all logs return."""
    rng = world.rng
    disks = ["disk-0"]
    old: Process | None = None
    for _ in range(rng.randint(2, 6)):
        log = rng.choice([*disks, BUCKET, None, f"disk-{len(disks)}"])
        if old is not None and log in disks:
            await end(world, old)
            old = None
        going_on = await live(world, log)
        if log not in (None, BUCKET, *disks):
            disks.append(str(log))
        if rng.random() < 0.25 and (world.disks / str(log)).exists():
            copy = f"disk-{len(disks)}"
            shutil.copytree(world.disks / str(log), world.disks / copy)
            disks.append(copy)
        if rng.random() < 0.3:
            await take_over(world)
            if going_on is not None and rng.random() < 0.5:
                await end(world, going_on)
                going_on = None
        if old is not None:
            await end(world, old)
        old = going_on
    if old is not None:
        await end(world, old)

    world.badness = 0.0
    await asyncio.sleep(10)  # what was sent has landed
    rng.shuffle(disks)
    for log in [*disks, BUCKET]:
        process = Process(world, NODE, config(world, log))
        assert await process.start()
        await process.close()
    world.ledger.check(await world.read(), world.set_aside())


def test_records_under_logs_that_return_are_read_or_set_aside(tmp_path: Path) -> None:
    for seed in seeds(12, start=150, variable="STREAMMETA_SEEDS"):
        simulated(seed, logs_come_and_go, tmp_path / "disks")


@pytest.mark.slow
def test_many_seeds_of_logs_that_return(tmp_path: Path) -> None:
    for seed in seeds(1000, variable="STREAMMETA_SEEDS"):
        simulated(seed, logs_come_and_go, tmp_path / "disks")
