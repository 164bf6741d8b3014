"""Expiry goes by the earliest deadline and asks nothing of the bucket."""

import asyncio

from streammeta.controller.lifecycle.sweeps import EXPIRE_BATCH_MAX, Expiry
from streammeta.controller.metadata.requests import PrepareObjects
from streammeta.controller.metadata.values import ObjectState
from tests.lifecycle.lifecycle_world import BROKER, World, until


async def prepared(world: World, request_id: str, count: int, ttl_ms: int) -> list[int]:
    request = PrepareObjects(request_id=request_id, node=BROKER, count=count, ttl_ms=ttl_ms)
    first = (await world.write(request)).first_object_id
    return list(range(first, first + count))


async def test_objects_expire_by_deadline_in_bounded_entries() -> None:

    world = World()
    await world.start()
    late = await prepared(world, "a", 10, 60_000)
    early = await prepared(world, "b", 2 * EXPIRE_BATCH_MAX + 1, 5_000)
    task = asyncio.create_task(Expiry(world.controller, world.clock, 5).run())
    world.clock.advance(5_000)
    await asyncio.sleep(0.03)
    assert world.states(early) == {ObjectState.PREPARED}, "at the deadline it may still commit"

    end = world.log.next_offset
    world.clock.advance(1)
    expired = {ObjectState.MARK_DESTROYED}
    await until(lambda: world.states(early) == expired, "expiry", lambda: None)
    await asyncio.sleep(0.03)

    assert world.log.next_offset == end + 3
    assert world.states(late) == {ObjectState.PREPARED}
    assert world.store.requests == []
    task.cancel()
    await asyncio.wait([task])


async def test_who_does_not_lead_expires_nothing_and_goes_on_when_it_does() -> None:

    world = World()
    await world.start()
    ids = await prepared(world, "a", 5, 1_000)
    world.log.lose_leadership(truncate=False)
    task = asyncio.create_task(Expiry(world.controller, world.clock, 5).run())
    world.clock.advance(2_000)
    await asyncio.sleep(0.03)
    assert world.states(ids) == {ObjectState.PREPARED}
    world.log.lead()
    expired = {ObjectState.MARK_DESTROYED}
    await until(lambda: world.states(ids) == expired, "expiry", lambda: None)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
