"""Rolling upgrades under load and faults: any order, back before the level is raised, not after."""

import itertools
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from streammeta.controller.features import SUPPORTED
from tests.chaos.chaos_run import run_chaos
from tests.kit.real_cluster import leader_of, writes_going_on
from tests.upgrade.mixed_cluster import (
    MixedCluster,
    ended,
    expect_equal_maps,
    features,
    mixed_cluster,
    raise_level,
    refused_by,
    restart,
)

pytestmark = pytest.mark.process
LEVEL = SUPPORTED.highest
TOLD = f"start a version that runs at level {LEVEL}"
ALL = (1, 2, 3)


def upgrade_one_by_one(cluster: MixedCluster, order: Sequence[int]) -> None:
    """Upgrade under writes; until the last one is done the level stays where it is."""
    for done, node_id in enumerate(order, start=1):
        restart(cluster, node_id, is_older=False)
        if done < len(order):
            told = refused_by(cluster, LEVEL)
            if leader_of(cluster) not in cluster.older:
                assert all(f"controller {older} " in told for older in cluster.older), told


def expect_level(cluster: MixedCluster) -> None:
    answer = features(cluster, "describe")
    assert (answer["exit_code"], answer["level"]) == (0, LEVEL), answer
    rows = {row["node_id"]: (row["lowest"], row["highest"]) for row in answer["controllers"]}
    assert rows == dict.fromkeys(ALL, (1, LEVEL))
    assert all(row["version"] for row in answer["controllers"])


def expect_refused(cluster: MixedCluster, node_id: int) -> None:
    """The older version does not start again, and leaves the directory as it is."""
    directory = cluster.data_dir(node_id)
    cluster.children[node_id].stop()
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    cluster.older.add(node_id)
    checked = subprocess.run(
        [*cluster._command(node_id), "--check-config"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (checked.returncode, TOLD in checked.stderr) == (1, True)
    cluster.spawn(node_id)
    assert TOLD in ended(cluster, node_id)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    cluster.older.discard(node_id)
    cluster.start(node_id)


def test_three_are_upgraded_and_none_can_go_back(tmp_path: Path) -> None:
    with mixed_cluster(tmp_path, older=ALL) as cluster, writes_going_on(cluster) as writes:
        upgrade_one_by_one(cluster, (3, 1, 2))
        writes.expect_progress()
        raise_level(cluster, LEVEL)
        expect_level(cluster)
        expect_refused(cluster, leader_of(cluster) % 3 + 1)
        writes.expect_progress()
        expect_equal_maps(cluster)


def test_before_the_level_is_raised_all_can_go_back(tmp_path: Path) -> None:
    with mixed_cluster(tmp_path, older=(1, 3)) as cluster, writes_going_on(cluster) as writes:
        for node_id in (1, 2):
            restart(cluster, node_id, is_older=node_id == 2)
        restart(cluster, 1, is_older=True)
        writes.expect_progress()
        expect_equal_maps(cluster)


def test_an_older_observer_stops_at_the_level_and_does_not_start_again(tmp_path: Path) -> None:
    with mixed_cluster(tmp_path, older=(), count=1) as cluster:
        raise_level(cluster, LEVEL)
        cluster.older.add(2)
        observer = cluster.join()
        assert "the cluster is at feature level" in ended(cluster, observer)
        expect_refused(cluster, observer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [*itertools.permutations(ALL)], ids=lambda order: "".join(map(str, order))
)
@pytest.mark.parametrize("comes_back", [False, True], ids=["straight", "back half-way"])
def test_any_order_of_upgrades(tmp_path: Path, order: tuple[int, ...], comes_back: bool) -> None:
    with mixed_cluster(tmp_path, older=ALL) as cluster, writes_going_on(cluster) as writes:
        if comes_back:
            restart(cluster, order[0], is_older=False)
            restart(cluster, order[0], is_older=True)
        upgrade_one_by_one(cluster, order)
        writes.expect_progress()
        raise_level(cluster, LEVEL)
        expect_level(cluster)
        expect_equal_maps(cluster)


SECONDS = 20.0
OLDER = "tests.upgrade.older_small_segments"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("older", [(1,), (1, 2)], ids=["a minority", "a majority"])
def test_faults_lose_nothing_between_two_versions(tmp_path: Path, older: tuple[int, ...]) -> None:
    modules = dict.fromkeys(older, OLDER)
    report = run_chaos(tmp_path, random.randrange(1 << 31), 3, SECONDS, modules)

    assert report.acknowledged > 0
    assert sum(report.faults.values()) > 3
