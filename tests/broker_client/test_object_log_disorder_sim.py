"""Object logs whose listings lag, whose clocks are wrong, and whose node epochs repeat, from seeds.

Processes of one node are killed, closed, stalled for longer than a sweep waits, and started again,
some with an epoch that was used before. Nothing that was acknowledged is lost, and nothing that is
late or unlisted passes for damage. `STREAMMETA_SEEDS=first:last` runs other seeds.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from streammeta.client.errors import (
    DamagedSlotError,
    NodeEpochExpiredError,
    NodeFencedError,
    WriteAheadLogError,
)
from streammeta.client.wal.bucket import ack_lease, sweeping
from streammeta.storage.errors import StoreUnavailableError
from tests.broker_client.object_log_world import SMALL, SimBroker, World, simulated
from tests.broker_client.test_object_log_sim import recovered, seeds, settle

WATCH_S = 60.0
LEASE_S = 5.0
DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_logs_survive_repeated_epochs_stalls_sweeps_and_listings_that_lag() -> None:
    for seed in seeds(12):
        simulated(seed, starts_and_stalls)


@pytest.mark.slow
def test_logs_survive_many_seeds_of_disorder() -> None:
    for seed in seeds(2000):
        simulated(seed, starts_and_stalls)
