"""Voters come and go under load, a voter's disk is lost: clients notice no more than a retry."""

from pathlib import Path

import pytest

from tests.chaos.chaos_checks import check_histories
from tests.chaos.chaos_scene import Scene, scene_in
from tests.chaos.workload import Workload, WorkloadSize
from tests.kit.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

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
