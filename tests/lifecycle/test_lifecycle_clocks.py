"""Neither a leader's wall clock nor an id it may have forgotten deletes an object too early."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from streammeta.controller.lifecycle import deletion_order
from streammeta.controller.lifecycle.deletion_order import INHERITED_KEPT_MS, InheritedIds
from streammeta.controller.lifecycle.sweeps import DOUBTED_MS, Expiry
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.requests import HoldDeletions
from streammeta.controller.metadata.api.validation import TTL_MS_MAX
from streammeta.controller.metadata.decisions.maintenance import DeletionHold
from streammeta.controller.metadata.decisions.named_objects import NAMED_LEVEL
from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.controller.runtime.replication.log_time import JUMP_MS, LogTime
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.steady_time import REPORTED_JUMP_MS
from tests.kit.built_objects import built_object
from tests.kit.waiting import ManualClock
from tests.lifecycle.lifecycle_world import BROKER, NAMESPACE, World, running
from tests.lifecycle.test_lifecycle_ahead import key_of, stream_data
from tests.lifecycle.test_lifecycle_deletion import DELAY_MS, deleting, new_deletion

DAY_MS = 24 * 3_600_000
PREPARED, MARKED = {ObjectState.PREPARED}, {ObjectState.MARK_DESTROYED}


def change_leader(world: World, clock_moves_ms: int) -> Expiry:
    """Let a controller lead whose wall clock differs from the last one's; return its expiry."""
    world.clock.wall_ahead_ms += clock_moves_ms
    world.succeed()
    expiry = Expiry(world.controller, 5)
    world.log.lead()
    return expiry


async def put_committed_object(world: World) -> None:
    """Leave a time in the map that does not expire."""
    (stream_id,) = await world.open_streams(1)
    await world.commit({stream_id: (0, 10)})


# -- log time


def test_log_time_follows_the_monotonic_clock_within_a_term() -> None:
    clock = ManualClock(5_000, wall_ahead_ms=400 * DAY_MS)
    log_time = LogTime(clock)
    log_time.begin_term()
    start_ms = log_time.now_ms()
    assert start_ms == clock.wall_ms()

    clock.wall_ahead_ms += 400 * DAY_MS
    clock.advance(20_000)
    assert log_time.now_ms() == start_ms + 22_000, "a tenth faster, no more"

    clock.wall_ahead_ms -= 800 * DAY_MS
    clock.advance(20_000)
    assert log_time.now_ms() == start_ms + 22_000 + 18_000, "a tenth slower, never backwards"
    assert log_time.elapsed_ms == 40_000


@pytest.mark.parametrize("step_ms", [1, 7, 10, 999])
def test_log_time_reaches_a_wall_clock_that_was_corrected(step_ms: int) -> None:
    clock = ManualClock(5_000)
    log_time = LogTime(clock)
    log_time.begin_term()
    clock.wall_ahead_ms = 500
    last_ms = log_time.now_ms()
    for _ in range(20_000 // step_ms):
        clock.advance(step_ms)
        now_ms = log_time.now_ms()
        assert now_ms >= last_ms
        last_ms = now_ms
    assert 0 <= clock.wall_ms() - log_time.now_ms() <= 10


def test_a_jump_of_the_wall_clock_is_logged_once_with_its_size() -> None:
    clock = ManualClock(5_000)
    log_time = LogTime(clock)
    log_time.begin_term()
    with capture_logs() as logs:
        for jump_ms in (REPORTED_JUMP_MS - 1, 30 * DAY_MS, 0, -30 * DAY_MS, 0):
            clock.wall_ahead_ms += jump_ms
            for _ in range(3):
                clock.advance(50)
                log_time.now_ms()
    sizes = [round(line["jump_ms"] / DAY_MS) for line in logs]
    assert [line["event"] for line in logs] == ["wall_clock_jumped"] * 2
    assert sizes == [30, -30]


# -- prepared objects


async def test_a_jump_within_a_term_moves_no_deadline(world: World) -> None:
    ids = await world.prepare(3, ttl_ms=60_000)
    expiry = Expiry(world.controller, 5)
    world.clock.wall_ahead_ms += 400 * DAY_MS
    later = await world.prepare(2, ttl_ms=60_000)
    await expiry.step()
    assert world.states(ids) == PREPARED

    world.clock.wall_ahead_ms -= 400 * DAY_MS
    world.clock.advance(70_000)
    await expiry.step()
    assert world.states([*ids, *later]) == MARKED


@pytest.mark.parametrize("moves_ms", [400 * DAY_MS, -400 * DAY_MS, 2 * JUMP_MS])
async def test_a_new_leaders_clock_expires_nothing_early_and_keeps_nothing_for_ever(
    world: World, moves_ms: int
) -> None:
    ids = await world.prepare(3, ttl_ms=60_000)
    with capture_logs() as logs:
        expiry = change_leader(world, moves_ms)
    (doubted,) = [line for line in logs if line["event"] == "deadlines_doubted"]
    assert doubted["objects"] == 3
    await expiry.step()
    assert world.states(ids) == PREPARED

    later = await world.prepare(1, ttl_ms=60_000)
    world.clock.advance(60_001)
    await expiry.step()
    assert world.states(ids) == PREPARED
    assert world.states(later) == MARKED, "objects of this term expire in time"

    world.clock.advance(DOUBTED_MS - 60_002)
    await expiry.step()
    assert world.states(ids) == PREPARED
    world.clock.advance(1)
    await expiry.step()
    assert world.states(ids) == MARKED


async def test_the_longest_validity_is_believed_of_a_clock_that_was_a_little_ahead(
    world: World,
) -> None:
    ids = await world.prepare(1, ttl_ms=TTL_MS_MAX)
    expiry = change_leader(world, -JUMP_MS)
    world.clock.advance(DOUBTED_MS)
    await expiry.step()
    assert world.states(ids) == PREPARED


async def test_objects_that_came_due_during_a_change_of_leaders_expire_at_once(
    world: World,
) -> None:
    ids = await world.prepare(1, ttl_ms=60_000)
    world.clock.advance(60_000 + JUMP_MS)
    await change_leader(world, 0).step()
    assert world.states(ids) == MARKED


# -- destroyed objects


async def test_marks_of_a_fast_leader_are_deletable_after_the_delay(world: World) -> None:
    change_leader(world, 400 * DAY_MS)
    ids = await world.destroyed_objects(5)
    change_leader(world, -400 * DAY_MS)
    async with running(new_deletion(world).run()):
        world.log.lose_leadership(truncate=False)
        world.log.lead()
        world.clock.advance(DELAY_MS - 1)
        await asyncio.sleep(0.05)
        assert world.store.requests == [], "the new term waits for the delay itself"
        await world.removal(ids)


async def test_a_jump_within_a_term_deletes_nothing_before_the_delay(world: World) -> None:
    deletion = new_deletion(world)
    world.clock.advance(DELAY_MS)
    ids = await world.destroyed_objects(5)
    world.clock.wall_ahead_ms += 400 * DAY_MS
    async with running(deletion.run()):
        world.clock.advance(DELAY_MS // 2)
        await asyncio.sleep(0.05)
        assert world.store.requests == []
        await world.removal(ids)


# -- holds


async def test_a_fast_leader_does_not_end_a_hold(world: World) -> None:
    await put_committed_object(world)
    await world.write(HoldDeletions(hold_ms=DAY_MS))
    ids = await world.destroyed_objects(2)
    world.clock.wall_ahead_ms += 400 * DAY_MS
    world.succeed()
    deletion = new_deletion(world)
    with capture_logs() as logs:
        world.log.lead()
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "deletion_hold_continues"
    ]
    async with running(deletion.run()):
        world.clock.advance(DAY_MS - 10_000)
        await asyncio.sleep(0.05)
        assert [key_for(id_, NAMESPACE) in world.store.objects() for id_ in ids] == [True, True]
        await world.removal(ids, tick_ms=1_000)


async def test_a_hold_that_ended_long_ago_stays_ended(world: World) -> None:
    await world.write(HoldDeletions(hold_ms=1_000))
    world.clock.advance(DAY_MS)
    await put_committed_object(world)
    ids = await world.destroyed_objects(2)
    world.clock.advance(3 * DAY_MS)
    world.succeed()
    deletion = new_deletion(world)
    world.log.lead()
    async with running(deletion.run()):
        await world.removal(ids, tick_ms=100)


async def test_a_hold_of_a_fast_clock_is_cut_to_the_longest_one(world: World) -> None:
    change_leader(world, 400 * DAY_MS)
    await world.write(HoldDeletions(hold_ms=1_000))
    since_ms = world.controller.cluster_metadata.deletion_hold.since_ms
    expiry = change_leader(world, -400 * DAY_MS)
    await expiry.step()
    now_ms = world.controller.log_time.now_ms()
    assert world.controller.cluster_metadata.deletion_hold == DeletionHold(
        min(since_ms, now_ms), now_ms + TTL_MS_MAX
    )
    end = world.log.next_offset
    await expiry.step()
    assert world.log.next_offset == end, "it is cut once"


TTL_MS = 1_000


async def prepare(world: World, *bodies: bytes | None) -> list[int]:
    ids = await world.prepare(len(bodies), ttl_ms=TTL_MS)
    for object_id, body in zip(ids, bodies, strict=True):
        if body is not None:
            world.store.put(key_of(object_id), body)
    return ids


async def expire(world: World, ids: Sequence[int]) -> None:
    world.clock.advance(2 * TTL_MS)
    await world.write(requests.ExpireObjects(limit=len(ids)))
    assert world.states(ids) == MARKED


async def test_bytes_that_are_no_object_stay_for_a_day_of_a_process_that_has_not_seen_their_id(
    world: World,
) -> None:
    (stream,) = await world.open_streams(1)
    await world.commit({stream: (0, 5)})
    relative = built_object([[RecordBatch(stream, 0, 0, 5, b"x")]], relative=True).data
    kept = await prepare(world, b"x", b"named object " * 100, relative)
    gone = await prepare(world, None, stream_data((stream, 0, 5)))
    world.succeed()
    with capture_logs() as logs:
        async with deleting(new_deletion(world)) as deletion:
            restarted_ms = world.clock.monotonic_ms()
            world.log.lead()
            await expire(world, kept + gone)
            await world.removal(gone, tick_ms=100)
            await world.until(lambda: deletion.describe().unproven == 3, "all", tick_ms=100)

            world.clock.advance(
                INHERITED_KEPT_MS - (world.clock.monotonic_ms() - restarted_ms) - 10_000
            )
            for _ in range(20):
                world.clock.advance(100)
                await asyncio.sleep(0.005)
            assert world.states(kept) == MARKED
            assert {key_of(object_id) for object_id in kept} <= set(world.store.objects())
            assert (deletion.describe().ahead, deletion.describe().refused) == (0, 0)

            await world.removal(kept, tick_ms=1_000)
            assert deletion.describe().unproven == 0
    events = [line for line in logs if line["event"] == "objects_unproven"]
    assert sum(line["count"] for line in events) == 3
    assert all(line["example"] in map(key_of, kept) for line in events)


async def test_what_a_process_prepared_itself_is_deleted_without_delay(world: World) -> None:
    world.succeed()
    async with deleting(new_deletion(world)):
        world.log.lead()
        ids = await prepare(world, b"x")
        world.controller.on_leadership_lost()
        world.log.lead()
        await expire(world, ids)
        await world.removal(ids, tick_ms=100)


async def test_what_was_marked_before_a_restart_can_not_have_been_committed(world: World) -> None:
    ids = await prepare(world, b"x")
    await expire(world, ids)
    world.succeed()
    async with deleting(new_deletion(world)):
        world.log.lead()
        await world.removal(ids, tick_ms=100)


async def test_a_commit_of_an_inherited_id_is_an_object_like_any_other(world: World) -> None:
    (stream,) = await world.open_streams(1)
    (object_id,) = await prepare(world, b"named")
    world.succeed()
    async with deleting(new_deletion(world)):
        world.log.lead()
        named = requests.NamedObjectToCommit(
            object_id=object_id, name="n", object_size=5, owner_stream_id=stream
        )
        await world.write(requests.SetFeatureLevel(level=NAMED_LEVEL))
        await world.write(requests.CommitNamedObjects(node=BROKER, objects=(named,)))
        names = (requests.NamedObjectToDelete(name="n"),)
        await world.write(requests.DeleteNamedObjects(node=BROKER, objects=names))
        await world.removal([object_id], tick_ms=100)


async def test_ids_beyond_the_bound_are_not_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion_order, "INHERITED_IDS_MAX", 2)
    ids = await world.prepare(3)
    inherited = InheritedIds()
    assert inherited.is_over(0), "nothing is kept before the first takeover"
    inherited.note_takeover(world.controller.cluster_metadata, 5)
    assert [object_id in inherited for object_id in ids] == [True, True, False]
    assert not inherited.is_over(5 + INHERITED_KEPT_MS - 1)
    assert inherited.is_over(5 + INHERITED_KEPT_MS)
