"""Drill of the loss of a majority: two of three disks are deleted under load, one recovers.

The drill reads the survivor's flushed entries from its directory before the recovery,
independent of the practised commands.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.demonstration.narrator import Narrator
from streammeta.cli.framework.client import ControllerClient
from streammeta.controller.journal.inspection import open_stopped_directory
from streammeta.controller.recover.survivor import read_survivor
from tests.kit.real_cluster import Writes, leader_of, running_cluster, streammeta, values
from tests.recover.recovering import DEAD, SURVIVOR, Recovering


def run(root: Path, narrator: Narrator) -> Mapping[str, object]:
    """Carry out the drill in `root`, and return its figures, with times in seconds.

    Raises:
        AssertionError: a step failed, or entries of the survivor are lost.
    """
    with running_cluster(root) as cluster:
        narrator.step("three controllers run; one client writes continuously")
        leader_of(cluster)
        writes = Writes(cluster)
        writes.start()
        try:
            writes.expect_progress()
            figures = _lose_and_recover(Recovering(cluster), writes, narrator)
        finally:
            writes.stop()
        acknowledged = set(writes.acknowledged)
        with ControllerClient(cluster.endpoints, timeout_s=30) as client:
            missing = acknowledged - values(client).keys()
        hashes = streammeta("cluster", "hash", "--connect", cluster.connect)
        assert hashes["exit_code"] == 0, hashes
    known_lost = figures.pop("_lost")
    assert missing <= known_lost, f"lost although the survivor had them: {missing - known_lost}"
    narrator.step("all entries of the survivor and all later writes exist")
    return {
        **figures,
        "writes_acknowledged": len(acknowledged),
        "acknowledged_only_by_the_lost": len(known_lost),
        "longest_wait_of_a_write_s": round(writes.longest_wait_s, 3),
    }


def _lose_and_recover(recovering: Recovering, writes: Writes, narrator: Narrator) -> dict[str, Any]:
    cluster = recovering.cluster
    narrator.step("controllers 1 and 2 are killed (kill -9), their disks are deleted")
    began = time.monotonic()
    recovering.lose(*DEAD)
    cluster.children[SURVIVOR].kill()
    acknowledged = set(writes.acknowledged)
    lost = acknowledged - _keys_of(cluster.data_dir(SURVIVOR))
    narrator.show(f"{len(acknowledged)} writes were acknowledged, the survivor misses {len(lost)}")
    figures: dict[str, Any] = {"_lost": lost}
    steps: Mapping[str, Callable[[], object]] = {
        "inspect": recovering.inspect,
        "plan": recovering.plan,
        "apply": lambda: recovering.apply("--yes"),
    }
    for name, step in steps.items():
        narrator.step(f"streammeta recover {name}")
        figures[f"{name}_s"], answer = _timed(step)
        assert isinstance(answer, dict)
        assert answer["exit_code"] == 0, answer
    figures["start_s"], _ = _timed(lambda: _start(recovering))
    narrator.step("streammeta restore finish")
    recovering.finish()
    writes.expect_progress()
    figures["without_writes_s"] = round(time.monotonic() - began, 1)
    narrator.step(f"controller {SURVIVOR} leads alone and accepts writes")
    _return_old_disk(recovering, narrator)
    for node_id in DEAD:
        narrator.step(f"controller {node_id} gets an empty disk and a vote")
        figures[f"add_voter_{node_id}_s"], _ = _timed(
            lambda node_id=node_id: recovering.add_voter(node_id)  # type: ignore[misc]
        )
    writes.expect_progress()
    return figures


def _start(recovering: Recovering) -> None:
    recovering.cluster.start(SURVIVOR)
    leader_of(recovering.cluster)


def _return_old_disk(recovering: Recovering, narrator: Narrator) -> None:
    cluster, node_id = recovering.cluster, DEAD[0]
    shutil.copytree(recovering.lost(node_id), cluster.data_dir(node_id))
    cluster.spawn(node_id)
    told = recovering.end_of(node_id)
    assert "LogOfBeforeError" in told, told
    narrator.step(f"controller {node_id} returns with its old disk and is rejected")
    cluster.wipe(node_id)


def _keys_of(directory: Path) -> set[str]:
    """Return the keys in a stopped controller's metadata after its whole log."""
    with open_stopped_directory(directory) as (files, identity):
        survivor = read_survivor(directory, files, identity)
    return set(survivor.replayed.cluster_metadata.freeze().sections()["kvs"]["key"])


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    began = time.monotonic()
    result = work()
    return round(time.monotonic() - began, 1), result
