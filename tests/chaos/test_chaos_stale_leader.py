"""A leader that was replaced unawares answers nothing old, and acknowledges nothing."""

import asyncio
from pathlib import Path

import grpc
import pytest

from streammeta.client.controllers import methods
from streammeta.rpc.failures import read_failure
from tests.chaos.chaos_scene import SOON_S, Scene, put_request, scene_in
from tests.kit.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

READS = 20


async def follows(scene: Scene, node_id: int, leader: int) -> bool:
    """Whether a controller takes that one for the leader."""
    answer = await scene.watch.describe(node_id)
    return answer is not None and answer.leader_id == leader


async def serving_leader(scene: Scene) -> int:
    """Return the leader that answers reads, as soon as there is one."""
    found = 0

    async def is_found() -> bool:
        nonlocal found
        found = await scene.leader()
        return await scene.get_from(found, "key") == "first"

    await until(is_found, "a leader that answers reads")
    return found


async def test_a_stopped_leader_serves_nothing_old_when_it_goes_on(scene: Scene) -> None:
    old = await serving_leader(scene)
    scene.cluster.pause(old)
    new = await scene.watch.wait_for_leader(SOON_S, other_than=old)
    await scene.put_through(new, "key", "second")
    # These wait in the old leader's socket until it goes on, believing that it leads.
    reads = [asyncio.create_task(scene.get_from(old, "key", SOON_S)) for _ in range(READS)]
    await asyncio.sleep(0.1)  # nothing tells when they have got there; less only weakens this
    scene.cluster.resume(old)

    assert set(await asyncio.gather(*reads)) <= {None, "second"}
    await until(lambda: follows(scene, old, new), "the old leader to follow the new one")
    await scene.check_healed()


async def test_a_leader_cut_off_serves_nothing_old_however_long_it_believes_to_lead(
    tmp_path: Path,
) -> None:
    # It would take half a minute to notice by itself that no voter fetches any more.
    credulous = {1: ("--election-timeout-ms", "100", "--fetch-timeout-ms", "20000")}

    async with scene_in(tmp_path, node_options=credulous) as scene:
        while (leader := await serving_leader(scene)) != 1:
            await scene.watch.transfer(leader, to=1)
        cut = scene.cut_off(1)
        new = await scene.watch.wait_for_leader(SOON_S, other_than=1)
        # Through the new one alone: a write that waits in controller 1 would hold up reads there.
        await scene.put_through(new, "key", "second")
        assert await follows(scene, 1, 1), "controller 1 was to believe that it leads"

        reads = [asyncio.create_task(scene.get_from(1, "key")) for _ in range(READS)]
        assert set(await asyncio.gather(*reads)) == {None}
        with pytest.raises(grpc.aio.AioRpcError):
            await scene.client.attempt(1, methods.PUT_KVS, put_request("key", "never"))

        scene.cluster.network.heal(cut)
        await until(lambda: is_no_leader(scene, 1), "controller 1 to step down")
        assert await scene.get("key") == "second"
        await scene.check_healed()


async def test_clients_of_a_leader_cut_off_are_sent_away(scene: Scene) -> None:
    old = await scene.leader()
    cut = scene.cut_off(old)

    async def is_sent_away() -> bool:
        try:
            await scene.client.attempt(old, methods.PUT_KVS, put_request("lost", "lost"))
        except grpc.aio.AioRpcError as error:
            failure = read_failure(error)
            return failure.reason == "NOT_LEADER"
        raise AssertionError("a leader cut off from all others has acknowledged a write")

    await until(is_sent_away, "the leader cut off to step down")
    # Before that its log, longer than the others', could still make it leader again.
    await until(lambda: elected_besides(scene, old), "the others to elect another")
    scene.cluster.network.heal(cut)
    assert await scene.get("key") == "first"
    assert await scene.get("lost") == ""
    await scene.check_healed()


async def elected_besides(scene: Scene, old: int) -> bool:
    """Whether some other controller leads a later epoch."""
    return await scene.watch.ask() not in (None, old)


async def is_no_leader(scene: Scene, node_id: int) -> bool:
    """Whether a controller knows that it does not lead."""
    answer = await scene.watch.describe(node_id)
    return answer is not None and answer.leader_id != node_id
