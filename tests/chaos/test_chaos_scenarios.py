"""One fault at a time: damaged log, changed voters, full disk, leader replaced unawares.

A file size limit stands for the full disk: the system call fails in the same way, with EFBIG.
"""

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from streammeta.client.controllers import methods
from streammeta.rpc.failures import read_failure
from tests.chaos.chaos_checks import check_histories
from tests.chaos.chaos_scene import SOON_S, Scene, put_request, scene_in
from tests.chaos.workload import Workload, WorkloadSize
from tests.kit.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

WRITES = 60


async def write_much(scene: Scene, rng: random.Random) -> None:
    for number in range(WRITES):
        await scene.put(f"key-{number}", rng.randbytes(400).hex())


def flip_a_byte(directory: Path) -> tuple[Path, int]:
    """Flip one bit in the middle of the log; return the file and the byte's position."""
    path = max(directory.glob("*.log"), key=lambda log: log.stat().st_size)
    data = bytearray(path.read_bytes())
    position = len(data.rstrip(b"\0")) // 2  # behind what was written is room made ahead, zeros
    data[position] ^= 0x10
    path.write_bytes(data)
    return path, position


async def is_repairing(scene: Scene, node_id: int) -> bool:
    view = await scene.watch.describe_quorum(node_id)
    return view is not None and view.repairing


async def follows_whole(scene: Scene, node_id: int) -> bool:
    """Whether a controller is an ordinary follower, nothing of its log missing."""
    view = await scene.watch.describe_quorum(node_id)
    return view is not None and view.role == "follower" and not view.repairing


async def test_a_damaged_replica_helps_nobody_to_lead_before_it_is_repaired(scene: Scene) -> None:
    rng = random.Random(8)
    await write_much(scene, rng)
    one, other, hurt = scene.cluster.members
    for node in scene.cluster.members:
        await scene.cluster.kill(node)
    flip_a_byte(scene.cluster.data_dir(hurt))
    await scene.cluster.start_node(hurt)
    await scene.cluster.start_node(one)
    # With an ordinary vote of the damaged one, these two would elect a leader well within this.
    with pytest.raises(TimeoutError):
        await scene.watch.wait_for_leader(5.0)
    assert await is_repairing(scene, hurt)

    await scene.cluster.start_node(other)
    await scene.leader()
    await until(lambda: follows_whole(scene, hurt), "the damaged follower to be repaired")
    assert await scene.get("key") == "first"
    await scene.check_healed(expected_in_logs=["log_damaged"])
    # It votes again: with it and one other there is a leader.
    await scene.cluster.kill(await scene.leader())
    await scene.put("key", "second")


LOAD = WorkloadSize(kv_clients=4, stream_clients=2)


async def loaded(scene: Scene) -> Workload:
    workload = Workload(scene.cluster.client_endpoints, seed=1, size=LOAD)
    await workload.prepare()
    workload.start()
    return workload


async def served(workload: Workload) -> None:
    """Wait until clients have been answered a good number of times more."""
    wanted = workload.counts["acknowledged"] + 100

    async def is_served() -> bool:
        workload.check_running()
        return workload.counts["acknowledged"] >= wanted

    await until(is_served, "clients to be served")


async def check_history(scene: Scene, workload: Workload) -> None:
    """End the load and check all that clients saw."""
    await workload.stop()
    await workload.read_everything()
    await workload.close()
    workload.dump(scene.cluster.root)
    check_histories(workload.kv.history(), workload.stream.history())
    await scene.check_healed()


async def test_three_voters_become_five_and_three_again_under_load(tmp_path: Path) -> None:
    async with scene_in(tmp_path, controllers=5, first_voters=3) as scene:
        workload = await loaded(scene)
        for node in (4, 5):
            await scene.join(node)
            await served(workload)
        assert await scene.voters() == {1, 2, 3, 4, 5}

        leader = await scene.leader()
        follower = next(node for node in (1, 2, 3) if node != leader)
        for node in (follower, leader):
            await scene.remove(node)
            await served(workload)
            await scene.cluster.terminate(node)
        assert await scene.voters() == {1, 2, 3, 4, 5} - {follower, leader}
        await served(workload)

        assert workload.counts["failed"] == 0
        await check_history(scene, workload)


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
