"""Object logs on a bad store, from seeds: what was acknowledged is committed, once, in order.

`STREAMMETA_SEEDS=first:last` runs other seeds.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from streammeta.client.errors import (
    FailoverSupersededError,
    NodeEpochExpiredError,
    WriteAheadLogError,
)
from streammeta.client.wal.bucket.failover import FailoverReport, recover_node
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_log.slot import Sealer
from tests.broker_client.object_log_world import (
    NAMESPACE,
    SimBroker,
    World,
    simulated,
)


def seeds(count: int, start: int = 0) -> range:
    first, _, last = os.environ.get("STREAMMETA_SEEDS", f"{start}:{start + count}").partition(":")
    return range(int(first), int(last))


async def recovered(world: World, epoch: int, by: int) -> FailoverReport | None:
    """Recover a process, again and again while the store fails; None: a newer one does so."""
    while True:
        try:
            return await recover_node(
                world.store, NAMESPACE, world.departed(epoch), Sealer(by, 1), chunk_bytes=900
            )
        except StoreUnavailableError:
            await asyncio.sleep(0.05)
        except (FailoverSupersededError, NodeEpochExpiredError):
            return None


async def lived(world: World, epoch: int) -> SimBroker:
    """Run a process for a while, then kill it, or let it go on as a zombie."""
    broker = SimBroker(world, epoch)
    await broker.start()
    await asyncio.sleep(world.rng.uniform(0, 4))
    if world.rng.random() < 0.6:
        broker.kill()
    return broker


async def settle(world: World, brokers: list[SimBroker]) -> None:
    """Let zombies try for as long as anything sent may land, then compare."""
    await asyncio.sleep(25)
    for broker in brokers:
        broker.kill()
    world.check()


async def one_recoverer(world: World) -> None:
    broker = await lived(world, 1)
    assert await recovered(world, 1, by=8) is not None
    assert not world.map.open_streams
    await settle(world, [broker])


async def recoverers_that_crash(world: World) -> None:
    """Several begin, some at once, some end at a random moment; the last one stays."""
    broker = await lived(world, 1)
    tasks = []
    for number in range(world.rng.randint(1, 4)):
        tasks.append(asyncio.create_task(recovered(world, 1, by=8 + number)))
        await asyncio.sleep(world.rng.uniform(0, 1))
        if world.rng.random() < 0.7:
            tasks[-1].cancel()
    assert await recovered(world, 1, by=20) is not None
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not world.map.open_streams
    await settle(world, [broker])


async def restarts_beside_recoverers(world: World) -> None:
    """The node comes back, perhaps while another recovers it, again and again."""
    brokers = []
    tasks = []
    for epoch in range(1, world.rng.randint(3, 6)):
        try:
            brokers.append(await lived(world, epoch))
        except (WriteAheadLogError, NodeEpochExpiredError, StoreUnavailableError):
            world.map.is_recovered = False  # a start that failed is tried with the next epoch
        if world.rng.random() < 0.5:
            tasks.append(asyncio.create_task(recovered(world, epoch, by=8)))
            await asyncio.sleep(world.rng.uniform(0, 0.5))
    newest = world.map.node_epoch
    assert await recovered(world, newest, by=9) is not None
    await asyncio.gather(*tasks)
    await settle(world, brokers)


@pytest.mark.parametrize(
    "scenario", [one_recoverer, recoverers_that_crash, restarts_beside_recoverers]
)
def test_what_was_acknowledged_is_committed_once_whatever_store_and_brokers_do(
    scenario: object,
) -> None:
    for seed in seeds(12):
        simulated(seed, scenario)  # type: ignore[arg-type]
