"""Object logs on a bad store, from seeds: what was acknowledged is committed, once, in order.

Listings lag, clocks are wrong and node epochs repeat in the second half: processes of one node are
killed, closed, stalled for longer than a sweep waits, and started again, some with an epoch that
was used before. No acknowledged record is lost, and nothing that is late or unlisted passes for
damage. `STREAMMETA_SEEDS=first:last` runs other seeds.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from streammeta.client import errors
from streammeta.client.errors import (
    DamagedSlotError,
    NodeEpochExpiredError,
    NodeFencedError,
    WriteAheadLogError,
)
from streammeta.client.wal.bucket import ack_lease, sweeping
from streammeta.client.wal.bucket.failover import FailoverReport, recover_node
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_log.slot import Sealer
from tests.broker_client.object_log_world import NAMESPACE, SMALL, SimBroker, World, simulated
from tests.kit.seeds import seeds


async def recovered(world: World, epoch: int, by: int) -> FailoverReport | None:
    """Recover a process, again and again while the store fails; None: a newer one does so."""
    while True:
        try:
            return await recover_node(
                world.store, NAMESPACE, world.departed(epoch), Sealer(by, 1), chunk_bytes=900
            )
        except StoreUnavailableError:
            await asyncio.sleep(0.05)
        except (errors.FailoverSupersededError, errors.NodeEpochExpiredError):
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
        except (errors.WriteAheadLogError, errors.NodeEpochExpiredError, StoreUnavailableError):
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
def test_acknowledged_records_are_committed_once_whatever_fails(scenario: object) -> None:
    for seed in seeds(12, variable="STREAMMETA_SEEDS"):
        simulated(seed, scenario)  # type: ignore[arg-type]


WATCH_S = 60.0
LEASE_S = 5.0
DAY_MS = 86_400_000


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "WATCH_S", WATCH_S)
    monkeypatch.setattr(ack_lease, "LEASE_S", LEASE_S)


async def started(world: World, epoch: int) -> SimBroker | None:
    """Start a process; None: its epoch was used before, or the node is another's."""
    broker = SimBroker(world, epoch, replace(SMALL, retention_s=world.rng.choice([0, 1, 604_800])))
    broker.pauses = world.rng.choice([[0.01, 0.05], [0.5, 2.0], [LEASE_S, 3 * LEASE_S]])
    try:
        await broker.start()
    except DamagedSlotError:
        raise  # no fault of this world damages a log
    except (WriteAheadLogError, NodeEpochExpiredError, NodeFencedError, StoreUnavailableError):
        broker.kill()
        return None
    return broker


async def live(world: World, broker: SimBroker) -> None:
    """Run a process for a while, and end it in one of the ways in which processes end."""
    rng = world.rng
    await asyncio.sleep(rng.choice([0.5, 3.0, 1.1 * WATCH_S]))
    match rng.choice(["kill", "kill", "close", "stall", "stall", "go on"]):
        case "kill":
            broker.kill()
        case "close":
            await broker.close()
        case "stall":
            broker.stall()


async def starts_and_stalls(world: World) -> None:
    """One process after the other, while some of the earlier ones come back."""
    rng, store = world.rng, world.store
    store.lag_s, store.skew_ms = rng.choice([0, 0.5, 3.0]), rng.choice([0, 30 * DAY_MS])
    brokers: list[SimBroker] = []
    epoch = 1
    for _ in range(rng.randint(3, 7)):
        epoch += rng.choice([0, 1, 1])
        broker = await started(world, epoch)
        if broker is not None:
            brokers.append(broker)
            await live(world, broker)
        elif rng.random() < 0.2:
            await recovered(world, epoch, by=8)
        for stalled in brokers:
            if rng.random() < 0.3:
                stalled.resume()
    for stalled in brokers:
        stalled.resume()
    await asyncio.sleep(25)

    store.badness = store.lag_s = 0
    await asyncio.sleep(5)
    world.map.is_recovered = False
    newest = await started(world, epoch + 1)
    assert newest is not None, "the node can't start again"
    newest.kill()
    assert await recovered(world, epoch + 1, by=9) is not None
    await settle(world, [*brokers, newest])


@pytest.mark.usefixtures("short_times")
def test_logs_survive_repeated_epochs_stalls_sweeps_and_listings_that_lag() -> None:
    for seed in seeds(12, variable="STREAMMETA_SEEDS"):
        simulated(seed, starts_and_stalls)


@pytest.mark.slow
@pytest.mark.usefixtures("short_times")
def test_logs_survive_many_seeds_of_disorder() -> None:
    for seed in seeds(2000, variable="STREAMMETA_SEEDS"):
        simulated(seed, starts_and_stalls)
