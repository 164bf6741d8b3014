"""A controller whose disk lost what it had acknowledged gets it back before it votes again."""

from pathlib import Path

import pytest

from tests.kit.memory_cluster import MemoryCluster, create, stream_ids
from tests.kit.waiting import until


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


@pytest.mark.parametrize("which", ["first segment", "newest snapshot"])
async def test_a_damaged_follower_repairs_itself_from_the_leader(
    tmp_path: Path, which: str
) -> None:
    async with MemoryCluster(tmp_path) as cluster:
        last = await cluster.fill("a", 40)
        damaged = next(i for i in cluster.nodes if not cluster.nodes[i].driver.is_leader)
        await cluster.hash_at(damaged, last.offset)
        if which == "newest snapshot":
            await cluster.nodes[damaged].driver.take_snapshot()
        await cluster.kill(damaged)
        pattern = "*.log" if which == "first segment" else "*.checkpoint"
        flip_a_byte(sorted((tmp_path / f"node{damaged}").glob(pattern))[0])

        node = await cluster.start(damaged)

        await cluster.agree(damaged, last.offset)
        await until(lambda: not node.driver.describe().is_repairing, "the repair to end")
        after = await cluster.write(create("after"))
        assert stream_ids(after) == (40,)
        restarted = await cluster.restart(damaged)
        assert not restarted.driver.describe().is_repairing
        await cluster.agree(damaged, after.offset)
