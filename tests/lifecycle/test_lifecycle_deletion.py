"""Deletion keeps its order through every crash and refusal; its rate and retries have bounds."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.lifecycle import deletion as deletion_module
from streammeta.controller.lifecycle.deletion import DELETE_BATCH_MAX, IN_FLIGHT_MAX, Deletion
from streammeta.controller.lifecycle.deletion_order import (
    HALVING_PAUSE_MS,
    RATE_MIN,
    RECOVERY_MS,
    RETRY_PAUSES_MS,
    STUCK_AFTER,
    RateLimiter,
    RetryQueue,
)
from streammeta.controller.metadata.api.requests import ExpireObjects, HoldDeletions, PrepareObjects
from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.storage.errors import StorageError, StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import DeleteResult
from tests.kit.seeds import seeds
from tests.lifecycle.lifecycle_world import BROKER, NAMESPACE, World, running

REMOVED, MARKED = {ObjectState.REMOVED}, {ObjectState.MARK_DESTROYED}
DELAY_MS = 1_000
INTERVAL_MS = 20


def new_deletion(
    world: World,
    rate: float = 1e6,
    seed: int = 1,
    may_delete: Callable[[], bool] = lambda: True,
) -> Deletion:
    return Deletion(
        world.controller,
        world.store,
        NAMESPACE,
        world.clock,
        delay_ms=DELAY_MS,
        interval_ms=INTERVAL_MS,
        may_delete=may_delete,
        objects_per_s=rate,
        rng=random.Random(seed),
    )


@contextlib.asynccontextmanager
async def deleting(deletion: Deletion) -> AsyncIterator[Deletion]:
    async with running(deletion.run()):
        yield deletion


def keys_of(ids: Sequence[int]) -> list[str]:
    return [key_for(object_id, NAMESPACE) for object_id in ids]


async def test_bytes_go_after_the_delay_and_then_the_map_forgets(world: World) -> None:
    world.store.put("not/ours", b"someone else's")
    ids = await world.destroyed_objects(1_700)
    async with deleting(new_deletion(world)):
        world.clock.advance(DELAY_MS - 1)
        await asyncio.sleep(3 * INTERVAL_MS / 1_000)
        assert world.store.requests == []
        await world.removal(ids, tick_ms=10)
    assert list(world.store.objects()) == ["not/ours"]
    assert sorted(len(keys) for keys in world.store.requests) == [700, DELETE_BATCH_MAX]


async def test_no_bytes_go_before_their_mark_is_committed(world: World) -> None:
    prepare = PrepareObjects(request_id="a", node=BROKER, count=10, ttl_ms=1_000)
    await world.write(prepare)
    world.log.is_held = True
    world.clock.advance(1_001)
    expiring = asyncio.create_task(world.write(ExpireObjects(limit=10)))
    async with deleting(new_deletion(world)) as deletion:
        await world.until(
            lambda: deletion.describe().in_flight == 10, "deletion to begin", tick_ms=100
        )
        await asyncio.sleep(3 * INTERVAL_MS / 1_000)
        assert world.store.requests == []
        assert world.committed_states(range(10)) == {ObjectState.PREPARED}
        world.log.release()
        await world.removal(range(10), tick_ms=0)
    await expiring


@pytest.mark.parametrize("seed", seeds(4, slow=8))
async def test_a_stop_at_any_point_loses_nothing(world: World, seed: int) -> None:
    """Bytes of an object go only while the committed log says MARK_DESTROYED; none stay behind."""
    rng = random.Random(seed)

    ids: list[int] = []

    def check(keys: Sequence[str]) -> None:
        marked = world.committed_states([int(key.rsplit("/", 1)[1]) for key in keys])
        assert marked <= {*MARKED, *REMOVED}, f"seed {seed}: bytes of {marked} were deleted"

    world.store.on_delete = check
    for _ in range(4):
        ids += await world.destroyed_objects(rng.randrange(1, 30))
        deletion = new_deletion(world, seed=seed)
        world.clock.advance(DELAY_MS + 1)
        async with deleting(deletion):
            world.log.is_held = rng.random() < 0.5
            for _ in range(rng.randrange(40)):
                world.clock.advance(rng.randrange(100))
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                world.log.release()
        world.succeed()
        for object_id in ids:
            kept = key_for(object_id, NAMESPACE) in world.store.objects()
            removed = world.states([object_id]) == REMOVED
            assert not (kept and removed), f"seed {seed}: {object_id} was forgotten too early"
        world.log.lead()
    async with deleting(new_deletion(world, seed=seed)):
        await world.until(
            lambda: world.committed_states(ids) == REMOVED, f"seed {seed}: removal", tick_ms=50
        )
    assert world.store.objects() == {}, f"seed {seed}"


async def test_a_lost_leadership_stops_it_and_a_new_one_starts_over(world: World) -> None:
    ids = await world.destroyed_objects(10)
    world.store.slow_key = keys_of(ids)[0]
    async with deleting(new_deletion(world)) as deletion:
        await world.until(lambda: len(world.store.requests) == 1, "the request", tick_ms=100)
        world.log.lose_leadership(truncate=False)
        world.store.go_on.set()
        await world.until(lambda: deletion.describe().in_flight == 0, "the end")
        assert world.states(ids) == MARKED
        with pytest.raises(NotLeaderError):
            await world.controller.settled()

        world.log.lead()
        world.clock.advance(DELAY_MS - 1)
        await asyncio.sleep(3 * INTERVAL_MS / 1_000)
        assert len(world.store.requests) == 1, "the new reign has to wait the delay itself"
        await world.removal(ids, tick_ms=100)


async def test_a_refused_key_holds_up_no_other_and_is_stuck_visibly(world: World) -> None:
    ids = await world.destroyed_objects(50)
    bad = keys_of(ids)[0]
    world.store.refuses = lambda key: key == bad
    async with deleting(new_deletion(world)) as deletion:
        await world.removal(ids[1:])
        later = await world.destroyed_objects(50)
        await world.removal(later)
        await world.until(lambda: deletion.describe().stuck == 1, "it", tick_ms=1_000)
        status = deletion.describe()
        assert status.sample == ((bad, "AccessDenied: held"),)
        tries = sum(bad in keys for keys in world.store.requests)
        assert tries == STUCK_AFTER
        assert world.states(ids[:1]) == MARKED

        world.store.refuses = lambda _: False
        await world.removal(ids, tick_ms=999)
        assert deletion.describe().stuck == 0


@pytest.mark.parametrize(
    "failure",
    [StoreUnavailableError("broken connection"), StoreRejectedError("malformed")],
    ids=["unavailable", "rejected"],
)
async def test_a_key_that_fails_requests_is_found_out(world: World, failure: StorageError) -> None:
    ids = await world.destroyed_objects(100)
    bad = keys_of(ids)[42]
    world.store.fails_with = lambda keys: failure if bad in keys else None
    async with deleting(new_deletion(world)):
        others = [object_id for object_id in ids if object_id != ids[42]]
        await world.until(lambda: len(world.store.requests) > 0, "a request", tick_ms=200)
        later = await world.destroyed_objects(100)
        await world.removal([*others, *later], tick_ms=200)
    assert world.states(ids[42:43]) == MARKED


@pytest.mark.parametrize(("tried", "untried"), [(1, 0), (3, 0), (1, 2)])
async def test_keys_that_fail_every_request_hold_up_none_that_come_later(
    world: World, tried: int, untried: int
) -> None:
    """They were tried so often, alone, that the bucket seems to be down."""
    ids = await world.destroyed_objects(tried)
    bad = set(keys_of(ids))
    failure = StoreUnavailableError("broken connection")
    world.store.fails_with = lambda keys: failure if bad & set(keys) else None
    async with deleting(new_deletion(world)):
        await world.until(lambda: len(world.store.requests) > 12, "many requests", tick_ms=5_000)
        if untried:
            ids += await world.destroyed_objects(untried)
            bad.update(keys_of(ids))
        later = await world.destroyed_objects(30)
        await world.removal(later, tick_ms=1_000)
    assert world.states(ids) == MARKED


async def test_a_key_that_fails_requests_is_stuck_visibly_though_others_are_deleted(
    world: World,
) -> None:
    ids = await world.destroyed_objects(20)
    (bad,) = keys_of(ids[3:4])
    failure = StoreUnavailableError("broken connection")
    world.store.fails_with = lambda keys: failure if bad in keys else None
    async with deleting(new_deletion(world)) as deletion:
        for _ in range(40):
            await world.removal(await world.destroyed_objects(3), tick_ms=1_000)
        assert deletion.describe().sample == ((bad, "broken connection"),)
    assert world.states(ids[3:4]) == MARKED


async def test_refused_keys_whose_requests_are_slow_hold_up_no_other(world: World) -> None:
    ids = await world.destroyed_objects(100)
    bad = set(keys_of(ids))
    world.store.refuses = lambda key: key in bad
    is_slow = threading.Event()
    go_on = threading.Event()

    def wait(keys: Sequence[str]) -> None:
        if is_slow.is_set() and bad & set(keys):
            go_on.wait(60)

    world.store.on_delete = wait
    async with deleting(new_deletion(world)) as deletion:
        await world.until(lambda: deletion.describe().stuck == len(ids), "refusals", tick_ms=999)
        await world.until(lambda: deletion.describe().in_flight == 0, "the end of requests")
        is_slow.set()
        world.clock.advance(int(RETRY_PAUSES_MS.longest))  # all of them are due now
        await world.until(lambda: deletion.describe().in_flight > 1, "retries")
        later = await world.destroyed_objects(30)
        await world.removal(later, tick_ms=999)
        go_on.set()


async def test_a_throttled_key_is_no_refused_one_and_a_refused_one_beside_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await world.destroyed_objects(3)
    busy, locked, _ = keys_of(ids)
    real = world.store.delete_many

    def answer(keys: Sequence[str]) -> DeleteResult:
        free = [key for key in keys if key not in {busy, locked}]
        failed = {key: "no" for key in keys if key not in free}
        return DeleteResult(real(free).deleted, failed, frozenset({busy} & failed.keys()))

    monkeypatch.setattr(world.store, "delete_many", answer)
    async with deleting(new_deletion(world)) as deletion:
        await world.removal(ids[2:])
        await world.until(lambda: deletion.describe().stuck == 1, "the refused one", tick_ms=999)
        assert deletion.describe().refused == 1
        assert deletion.describe().sample == ((locked, "no"),)


async def test_nothing_is_deleted_while_the_bucket_may_be_another_s(world: World) -> None:
    ids = await world.destroyed_objects(5)
    may_delete = False
    async with deleting(new_deletion(world, may_delete=lambda: may_delete)):
        for _ in range(20):
            world.clock.advance(DELAY_MS)
            await asyncio.sleep(INTERVAL_MS / 1_000)
        assert world.store.requests == []
        may_delete = True
        await world.removal(ids)


async def test_a_slow_request_holds_up_no_other(world: World) -> None:
    ids = await world.destroyed_objects(3 * DELETE_BATCH_MAX)
    world.store.slow_key = keys_of(ids)[0]
    async with deleting(new_deletion(world)) as deletion:
        await world.removal(ids[DELETE_BATCH_MAX:])
        await world.until(lambda: deletion.describe().in_flight == DELETE_BATCH_MAX, "their end")
        world.store.go_on.set()
        await world.removal(ids, tick_ms=0)


async def test_requests_at_once_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion_module, "DELETE_BATCH_MAX", 10)

    running = most = 0
    ids = await world.destroyed_objects(80)

    def count(_: Sequence[str]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        world.store.go_on.wait(0.05)
        running -= 1

    world.store.on_delete = count
    async with deleting(new_deletion(world)):
        await world.removal(ids)
    assert 2 <= most <= IN_FLIGHT_MAX


async def test_an_overloaded_store_is_asked_more_slowly_and_nothing_is_stuck(world: World) -> None:
    ids = await world.destroyed_objects(500)
    world.store.is_throttling = True
    async with deleting(new_deletion(world, rate=1_000)) as deletion:
        await world.until(lambda: deletion.describe().rate < 100, "slowing", tick_ms=40)
        assert deletion.describe().refused == 0
        world.store.is_throttling = False
        world.store.fails_with = lambda _: StoreUnavailableError("busy", throttled=True)
        await world.until(lambda: deletion.describe().rate < 50, "slowing", tick_ms=40)
        world.store.fails_with = lambda _: None
        await world.removal(ids, tick_ms=200)
        await world.until(lambda: deletion.describe().rate == 1_000, "speed", tick_ms=999)


async def test_a_bucket_that_can_not_serve_is_left_alone_and_nothing_is_stuck(world: World) -> None:
    ids = await world.destroyed_objects(5)
    world.store.fails_with = lambda _: StoreUnavailableError("down")
    async with deleting(new_deletion(world)) as deletion:
        for _ in range(600):  # ten minutes
            world.clock.advance(1_000)
            await asyncio.sleep(0.001)
        assert 3 <= len(world.store.requests) < 60
        assert deletion.describe().stuck == 0
        world.store.fails_with = lambda _: None
        await world.removal(ids, tick_ms=999)


async def test_held_objects_stay_until_the_hold_is_over(world: World) -> None:
    before = await world.destroyed_objects(5)
    world.clock.advance(1)
    await world.write(HoldDeletions(hold_ms=60_000))
    held = await world.destroyed_objects(5)
    async with deleting(new_deletion(world)):
        await world.removal(before)
        world.clock.advance(50_000)
        await asyncio.sleep(3 * INTERVAL_MS / 1_000)
        assert world.states(held) == MARKED
        world.clock.advance(10_000)
        await world.removal(held)


RATE = 2_000.0


def taken(pace: RateLimiter, start_ms: int, duration_ms: int, step_ms: int = 100) -> int:
    total = 0
    for now_ms in range(start_ms, start_ms + duration_ms, step_ms):
        offered = pace.available(now_ms)
        pace.take(offered)
        total += offered
    return total


def test_over_any_time_no_more_than_the_rate_and_one_burst() -> None:
    pace = RateLimiter(RATE, 0)
    assert taken(pace, 0, 10_000) <= RATE * 10 + RATE
    assert 0.95 * RATE * 10 <= taken(pace, 10_000, 10_000) <= RATE * 10 + 1


def test_an_overload_halves_the_rate_once_for_all_requests_under_way() -> None:
    pace = RateLimiter(RATE, 0)
    for _ in range(4):
        pace.slow_down(5_000)
    assert pace.rate == RATE / 2
    assert pace.available(5_000) == 0
    pace.slow_down(5_000 + HALVING_PAUSE_MS)
    assert RATE / 4 <= pace.rate < RATE / 3


def test_under_overload_for_ever_it_still_goes_on_and_then_recovers() -> None:
    pace = RateLimiter(RATE, 0)
    for now_ms in range(0, 600_000, HALVING_PAUSE_MS):
        pace.slow_down(now_ms)
    assert RATE_MIN <= pace.rate < RATE / 10
    assert taken(pace, 600_000, 5_000) > 0
    pace.available(605_000 + RECOVERY_MS)
    assert pace.rate == RATE


def test_a_refused_key_waits_longer_each_time_and_is_stuck_in_the_end() -> None:
    retries = RetryQueue(random.Random(1))
    now_ms, pauses = 0, []
    for attempt in range(1, 2 * STUCK_AFTER + 8):
        newly_stuck = retries.refuse({7: f"no {attempt}"}, now_ms)
        assert bool(newly_stuck) == (attempt == STUCK_AFTER)
        assert [attempt.object_id for attempt in retries.stuck()] == [7] * (attempt >= STUCK_AFTER)
        start_ms = now_ms
        while not retries.take_due(now_ms, 10):
            now_ms += 100
        pauses.append(now_ms - start_ms)
    growing = pauses[:10]
    assert all(later >= earlier for earlier, later in zip(growing, growing[2:], strict=False))
    assert RETRY_PAUSES_MS.longest / 2 <= pauses[-1] <= RETRY_PAUSES_MS.longest
    assert retries.stuck()[0].reason == f"no {attempt}"


def test_a_forgotten_key_is_not_tried_again() -> None:
    retries = RetryQueue(random.Random(1))
    retries.refuse({1: "no", 2: "no"}, 0)
    retries.forget([1])
    assert retries.take_due(60_000, 10) == (2,)
    assert retries.take_due(60_000, 10) == ()
    assert 2 in retries


def test_one_bad_key_among_many_is_found_out() -> None:
    """Requests in which it is are refused as a whole; the others get through without it."""
    for seed in range(5):
        retries = RetryQueue(random.Random(seed))
        left = set(range(1_000))
        bad, now_ms, requests = 617, 0, 0
        retries.refuse(dict.fromkeys(left, "rejected"), now_ms)
        while left != {bad}:
            now_ms += 500
            while batch := retries.take_due(now_ms, 1_000):
                requests += 1
                if bad in batch:
                    retries.refuse(dict.fromkeys(batch, "rejected"), now_ms)
                else:
                    retries.forget(batch)
                    left.difference_update(batch)
            assert now_ms < 1_200_000, f"seed {seed}: {len(left)} left"
        assert requests < 200, f"seed {seed}"


def test_the_more_often_keys_were_refused_the_fewer_are_tried_together() -> None:
    retries = RetryQueue(random.Random(1))
    ids = range(64)
    for refusals, together in ((1, 32), (2, 16), (3, 8), (4, 4), (5, 2), (6, 1), (7, 1)):
        retries.refuse(dict.fromkeys(ids, "rejected"), 0)
        sizes = []
        while taken := retries.take_due(int(RETRY_PAUSES_MS.longest), 64):
            sizes.append(len(taken))
        assert sizes == [together] * (64 // together), f"{refusals} refusals"


def test_a_new_leader_has_refused_nothing() -> None:
    retries = RetryQueue(random.Random(1))
    retries.refuse({1: "no"}, 0)
    retries.clear()
    assert (len(retries), 1 in retries, retries.take_due(60_000, 10)) == (0, False, ())


def test_what_was_taken_and_not_judged_comes_again() -> None:
    retries = RetryQueue(random.Random(1))
    retries.refuse({1: "no"}, 0)
    assert retries.take_due(60_000, 10) == (1,)
    retries.postpone([1, 2], 61_000)
    assert retries.take_due(60_999, 10) == ()
    assert retries.take_due(61_000, 10) == (1,)
