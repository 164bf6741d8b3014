"""A full disk refuses writes in plain words, loses nothing, and is forgotten when there is room.

A file size limit stands for the full disk: the system call fails in the same way, with EFBIG.
"""

import grpc
import pytest

from streammeta.client.controllers import methods
from streammeta.rpc.failures import read_failure
from tests.chaos.chaos_scene import SOON_S, Scene, put_request
from tests.kit.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

VALUE = "x" * 1000
ROOM_BYTES = 10_000


async def is_full(scene: Scene, node_id: int, *, wanted: bool = True) -> bool:
    view = await scene.watch.describe_quorum(node_id)
    return view is not None and view.disk_full == wanted


async def refusal(scene: Scene, node_id: int, acknowledged: list[str]) -> str | None:
    """Put one more value through a controller; the reason if it does not acknowledge it."""
    key = f"key-{len(acknowledged)}"
    try:
        await scene.client.attempt(node_id, methods.PUT_KVS, put_request(key, VALUE))
    except grpc.aio.AioRpcError as error:
        return read_failure(error).reason
    acknowledged.append(key)
    return None


async def check_kept(scene: Scene, acknowledged: list[str]) -> None:
    for key in acknowledged:
        assert await scene.get(key) == VALUE


async def test_log_lines_that_find_no_room_either_do_no_harm(scene: Scene) -> None:
    leader = await scene.leader()
    pids = {node: child.pid for node, child in scene.cluster.children.items()}
    scene.cluster.fill_every_disk(leader)
    await scene.put("key", "second")  # the others have room for it
    await scene.watch.wait_for_leader(SOON_S, other_than=leader)
    await scene.put("key", "third")

    scene.cluster.free_disk(leader)
    await until(lambda: is_full(scene, leader, wanted=False), "the room to be found")
    await scene.check_healed(expected_in_logs=["disk_full"])

    async def leads_when_asked_to() -> bool:
        present = await scene.leader()
        if present != leader:
            await scene.watch.transfer(present, to=leader)
        return await scene.watch.ask() == leader

    await until(leads_when_asked_to, "the first leader to lead again")
    await scene.put("key", "fourth")
    assert pids == {node: child.pid for node, child in scene.cluster.children.items()}
    await scene.check_healed(expected_in_logs=["disk_full"])


@pytest.mark.parametrize("kind", ["all", "a majority", "all but the leader"])
async def test_reads_go_on_and_writes_are_refused_while_no_majority_has_room(
    scene: Scene, kind: str
) -> None:
    leader = await scene.leader()
    members = sorted(scene.cluster.members, key=lambda node: node != leader)
    full = {"all": members, "a majority": members[:2], "all but the leader": members[1:]}[kind]
    for node in full:
        scene.cluster.fill_disk(node, ROOM_BYTES)
    acknowledged: list[str] = []

    async def is_refused() -> bool:
        present = await scene.leader()
        return await refusal(scene, present, acknowledged) == "DISK_FULL"

    await until(is_refused, "a full majority to be told")
    await check_kept(scene, acknowledged)
    await until(is_refused, "writes to be refused, still")

    for node in full:
        scene.cluster.free_disk(node)
    await scene.put("key", "second")
    await check_kept(scene, acknowledged)
    await scene.check_healed(expected_in_logs=["disk_full", "majority_full"])
