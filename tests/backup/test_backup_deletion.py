"""Bytes of objects go only once the backup knows that they are destroyed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from streammeta.controller.backup.chains import newest_chain
from streammeta.controller.backup.replaying import replay
from streammeta.controller.lifecycle import deletion_order
from streammeta.controller.lifecycle.deletion import LONG_WAIT_MS, Deletion
from streammeta.controller.lifecycle.deletion_order import BackupWait
from streammeta.controller.metadata.api.requests import CheckObjects
from streammeta.controller.metadata.tables.values import ObjectState
from tests.backup.upload_world import FlakyStore, UploadWorld
from tests.kit.seeds import seeds
from tests.lifecycle.lifecycle_world import NAMESPACE, running

DELAY_MS = 1_000
GONE = {ObjectState.MARK_DESTROYED, ObjectState.REMOVED}


def at_most(limit: int) -> Callable[[Sequence[int]], Sequence[int]]:
    return lambda due: due[:limit]


def new_deletion(world: UploadWorld, seed: int = 1) -> Deletion:
    return Deletion(
        world.world.controller,
        world.world.store,
        NAMESPACE,
        world.world.clock,
        delay_ms=DELAY_MS,
        interval_ms=20,
        may_delete=lambda: True,
        backed_up_end=lambda: world.backup.end_offset,
        rng=random.Random(seed),
    )


async def waits(world: UploadWorld, deletion: Deletion, count: int) -> None:
    """Let the delay pass; so many objects must wait for the backup then."""
    world.world.clock.advance(DELAY_MS + 1)
    await world.world.until(lambda: deletion.describe().unbacked == count, f"{count} to wait")


async def test_bytes_wait_until_the_mark_is_in_the_backup() -> None:
    world = await UploadWorld().start()
    await world.step()
    ids = await world.world.destroyed_objects(30)
    deletion = new_deletion(world)
    async with running(deletion.run()):
        await waits(world, deletion, 30)
        assert world.world.store.requests == []
        await world.step()
        await world.world.removal(ids)
        assert deletion.describe().unbacked == 0
    assert world.world.store.objects() == {}


async def test_a_bucket_of_backups_that_is_away_holds_deletions_up_and_is_told_of() -> None:
    store = FlakyStore()
    world = await UploadWorld(store).start()
    await world.step()
    ids = await world.world.destroyed_objects(3)
    store.down_for = "backup"
    deletion = new_deletion(world)
    with capture_logs() as logs:
        async with running(deletion.run()):
            await waits(world, deletion, 3)
            for _ in range(LONG_WAIT_MS // 10_000):
                await world.step()
            await world.world.until(
                lambda: [log["event"] for log in logs][-1] == "deletions_wait_for_backup",
                "the log to tell",
            )
            assert deletion.describe().unbacked_ms >= LONG_WAIT_MS
            assert world.world.store.requests == []
            store.down_for = ""
            await world.step()
            await world.world.removal(ids)
    events = [log["event"] for log in logs]
    assert events.count("deletions_wait_for_backup") == events.count("deletions_go_on") == 1


async def test_a_new_leader_waits_until_it_knows_the_end_of_the_backup() -> None:
    world = await UploadWorld().start()
    ids = await world.world.destroyed_objects(5)
    await world.step()
    world.change_leader()
    deletion = new_deletion(world)
    async with running(deletion.run()):
        await waits(world, deletion, 5)
        assert world.world.store.requests == []
        await world.step()
        await world.world.removal(ids)


class RandomHistory:
    """Objects that are destroyed and deleted while leaders and both buckets do as they like."""

    def __init__(self, world: UploadWorld, store: FlakyStore, seed: int) -> None:
        self.world = world
        self.store = store
        self.rng = random.Random(seed)
        self.ids: list[int] = []

    async def step(self, deletion: Deletion) -> None:
        rng = self.rng
        match rng.choice(("destroy", "write", "step", "step", "flaky", "tick", "tick", "trim")):
            case "destroy":
                self.ids += await self.world.world.destroyed_objects(rng.randrange(1, 20))
            case "write":
                await self.world.write(rng.randrange(1, 5))
            case "step":
                await self.world.step()
            case "flaky":
                self.store.down_for = rng.choice(("", "", ".json", "log/", "backup"))
                self.store.is_late = rng.random() < 0.5
            case "tick":
                await self.tick(deletion)
            case "trim":
                self.world.checkpoint()
                self.world.trim()

    async def tick(self, deletion: Deletion) -> None:
        """Let time pass, and deletion do what it can."""
        self.world.world.clock.advance(self.rng.randrange(2 * DELAY_MS))
        deletion._wake.set()
        await asyncio.sleep(0)
        await self.world.world.until(lambda: deletion.describe().in_flight == 0, "idle")


@pytest.mark.parametrize("seed", seeds(4, slow=8))
async def test_no_restored_map_names_an_object_whose_bytes_were_deleted(seed: int) -> None:
    """Whatever leaders and both buckets do: at each deletion the backup says MARK_DESTROYED."""
    store = FlakyStore()
    world = await UploadWorld(store).start()
    history = RandomHistory(world, store, seed)

    def check(keys: Sequence[str]) -> None:
        ids = [int(key.rsplit("/", 1)[1]) for key in keys]
        assert states_in_backup(world, ids) <= GONE, f"seed {seed}: {keys}"

    for _ in range(5):
        world.world.store.on_delete = check
        deletion = new_deletion(world, seed)
        async with running(deletion.run()):
            for _ in range(15):
                await history.step(deletion)
        world.change_leader()
    store.down_for = ""
    deletion = new_deletion(world, seed)
    async with running(deletion.run()):
        while world.world.committed_states(history.ids) - {ObjectState.REMOVED}:
            await world.step()
            await history.tick(deletion)
    assert world.world.store.objects() == {}, f"seed {seed}"


def states_in_backup(world: UploadWorld, ids: Sequence[int]) -> set[ObjectState]:
    chain = newest_chain(world.archive.inventory())
    assert chain is not None
    answer = replay(chain, world.archive).cluster_metadata.query(
        CheckObjects(object_ids=tuple(ids))
    )
    return {ObjectState(state) for state in answer.states}  # type: ignore[attr-defined]


def test_objects_wait_each_for_an_end_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion_order, "WAITING_MAX", 3)
    end = 10
    wait = BackupWait(lambda: end)
    assert wait.release_covered([1, 2], metadata_end=11, now_ms=100, choose=at_most(9)) == []
    assert wait.release_covered([1, 2, 3, 4], metadata_end=20, now_ms=150, choose=at_most(9)) == []
    assert (len(wait), wait.oldest_ms(160)) == (3, 60)
    end = 11
    assert wait.release_covered([1, 2, 3, 4], metadata_end=30, now_ms=170, choose=at_most(1)) == [1]
    assert wait.release_covered([2, 3, 4], metadata_end=30, now_ms=180, choose=at_most(9)) == [2]
    end = 20
    assert wait.release_covered([4], metadata_end=40, now_ms=190, choose=at_most(9)) == [], (
        "what is held is dropped"
    )
    assert wait.release_covered([3, 4], metadata_end=40, now_ms=190, choose=at_most(9)) == []
    wait.clear()
    assert (len(wait), wait.oldest_ms(200)) == (0, 0)
