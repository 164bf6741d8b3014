"""A full disk refuses writes in plain words, loses nothing, and is forgotten when there is room.

A file size limit stands for the full disk: the system call fails in the same way, with EFBIG.
"""

from pathlib import Path

import grpc
import pytest

from streammeta.client import methods
from streammeta.rpc.failures import read_failure
from tests.chaos.chaos_scene import SOON_S, Scene, play, put_request, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

VALUE = "x" * 1000
ROOM_BYTES = 10_000


async def is_full(scene: Scene, node_id: int, *, wanted: bool = True) -> bool:
    view = await scene.watch.describe_quorum(node_id)
    return view is not None and view.disk_full == wanted


def test_a_leader_with_a_full_disk_refuses_writes_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    async def scenario(scene: Scene) -> None:
        leader = await scene.watch.wait_for_leader(SOON_S)
        pids = {node: child.pid for node, child in scene.cluster.children.items()}
        scene.cluster.fill_disk(leader, ROOM_BYTES)
        acknowledged: list[str] = []
        refusals: list[str] = []

        async def is_refused_or_led_by_another() -> bool:
            key = f"key-{len(acknowledged)}"
            try:
                await scene.client.attempt(leader, methods.PUT_KVS, put_request(key, VALUE))
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
                refusals.append(failure.reason)
                return refusals[-1] in ("DISK_FULL", "NOT_LEADER")
            acknowledged.append(key)
            return False

        await wait_until(is_refused_or_led_by_another, "a full disk to be told")
        assert len(acknowledged) >= ROOM_BYTES // len(VALUE) // 2
        assert await is_full(scene, leader)
        for key in acknowledged:
            assert await scene.get(key) == VALUE

        scene.cluster.free_disk(leader)
        await wait_until(lambda: is_full(scene, leader, wanted=False), "the room to be found")
        await scene.put("key", "second")
        for key in acknowledged:
            assert await scene.get(key) == VALUE
        assert pids == {node: child.pid for node, child in scene.cluster.children.items()}
        await scene.check_healed(expected_in_logs=["disk_full"])

    play(tmp_path, scenario)


def test_log_lines_that_find_no_room_either_do_no_harm(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        leader = await scene.watch.wait_for_leader(SOON_S)
        pids = {node: child.pid for node, child in scene.cluster.children.items()}
        scene.cluster.fill_every_disk(leader)
        await scene.put("key", "second")  # the others have room for it
        await scene.watch.wait_for_leader(SOON_S, other_than=leader)
        await scene.put("key", "third")

        scene.cluster.free_disk(leader)
        await wait_until(lambda: is_full(scene, leader, wanted=False), "the room to be found")
        await scene.check_healed(expected_in_logs=["disk_full"])

        async def leads_when_asked_to() -> bool:
            present = await scene.watch.wait_for_leader(SOON_S)
            if present != leader:
                await scene.watch.transfer(present, to=leader)
            return await scene.watch.ask() == leader

        await wait_until(leads_when_asked_to, "the first leader to lead again")
        await scene.put("key", "fourth")
        assert pids == {node: child.pid for node, child in scene.cluster.children.items()}
        await scene.check_healed(expected_in_logs=["disk_full"])

    play(tmp_path, scenario)


def test_a_follower_with_a_full_disk_holds_up_nobody_and_catches_up(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        leader = await scene.watch.wait_for_leader(SOON_S)
        follower = next(node for node in scene.cluster.members if node != leader)
        pid = scene.cluster.children[follower].pid
        scene.cluster.fill_disk(follower, ROOM_BYTES)
        for number in range(3 * ROOM_BYTES // len(VALUE)):
            await scene.put(f"key-{number}", VALUE)
        await wait_until(lambda: is_full(scene, follower), "the follower's disk to be full")
        assert await scene.watch.ask() == leader

        scene.cluster.free_disk(follower)
        await wait_until(lambda: is_full(scene, follower, wanted=False), "the room to be found")
        assert scene.cluster.children[follower].pid == pid
        await scene.check_healed(expected_in_logs=["disk_full"])

    play(tmp_path, scenario)


@pytest.mark.parametrize("kind", ["all", "a majority", "all but the leader"])
def test_reads_go_on_and_writes_are_refused_while_no_majority_has_room(
    tmp_path: Path, kind: str
) -> None:
    async def scenario(scene: Scene) -> None:
        leader = await scene.watch.wait_for_leader(SOON_S)
        members = sorted(scene.cluster.members, key=lambda node: node != leader)
        full = {"all": members, "a majority": members[:2], "all but the leader": members[1:]}[kind]
        for node in full:
            scene.cluster.fill_disk(node, ROOM_BYTES)
        acknowledged: list[str] = []

        async def is_refused() -> bool:
            """Put until the leader says that disks are full; then that is the answer."""
            key = f"key-{len(acknowledged)}"
            present = await scene.watch.wait_for_leader(SOON_S)
            try:
                await scene.client.attempt(present, methods.PUT_KVS, put_request(key, VALUE))
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
                return failure.reason == "DISK_FULL"
            acknowledged.append(key)
            return False

        await wait_until(is_refused, "a full majority to be told")
        for key in acknowledged:
            assert await scene.get(key) == VALUE
        await wait_until(is_refused, "writes to be refused, still")

        for node in full:
            scene.cluster.free_disk(node)
        await scene.put("key", "second")
        for key in acknowledged:
            assert await scene.get(key) == VALUE
        await scene.check_healed(expected_in_logs=["disk_full", "majority_full"])

    play(tmp_path, scenario)
