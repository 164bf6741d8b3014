"""Bytes that prove nothing stay while a commit of their id may have been forgotten."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from streammeta.controller.lifecycle import deletion_order
from streammeta.controller.lifecycle.deletion_order import INHERITED_KEPT_MS, InheritedIds
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.decisions.named_objects import NAMED_LEVEL
from tests.lifecycle.lifecycle_world import BROKER, World
from tests.lifecycle.test_lifecycle_ahead import MARKED, deleting, key_of, stream_data

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
    kept = await prepare(world, b"x", b"named object " * 100)
    gone = await prepare(world, None, stream_data((stream, 0, 5)))
    world.succeed()
    with capture_logs() as logs:
        async with deleting(world) as deletion:
            restarted_ms = world.clock.monotonic_ms()
            world.log.lead()
            await expire(world, kept + gone)
            await world.removal(gone, tick_ms=100)
            await world.until(lambda: deletion.describe().unproven == 2, "both", tick_ms=100)

            world.clock.advance(
                INHERITED_KEPT_MS - (world.clock.monotonic_ms() - restarted_ms) - 10_000
            )
            for _ in range(20):
                world.clock.advance(100)
                await asyncio.sleep(0.005)
            assert world.states(kept) == MARKED
            assert {key_of(one) for one in kept} <= set(world.store.objects())
            assert (deletion.describe().ahead, deletion.describe().refused) == (0, 0)

            await world.removal(kept, tick_ms=1_000)
            assert deletion.describe().unproven == 0
    events = [line for line in logs if line["event"] == "objects_unproven"]
    assert sum(line["count"] for line in events) == 2
    assert all(line["example"] in map(key_of, kept) for line in events)


async def test_what_a_process_prepared_itself_is_deleted_without_delay(world: World) -> None:
    world.succeed()
    async with deleting(world):
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
    async with deleting(world):
        world.log.lead()
        await world.removal(ids, tick_ms=100)


async def test_a_commit_of_an_inherited_id_is_an_object_like_any_other(world: World) -> None:
    (stream,) = await world.open_streams(1)
    (object_id,) = await prepare(world, b"named")
    world.succeed()
    async with deleting(world):
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
