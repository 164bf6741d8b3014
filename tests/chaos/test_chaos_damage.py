"""A replica whose log is damaged says where, forgets no promise, and gets back what it lost."""

import random
from pathlib import Path

import pytest

from tests.chaos.chaos_scene import Scene
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
