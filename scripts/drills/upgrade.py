"""Drill of a rolling upgrade: three controllers under continuous writes, then the feature level.

The older version is the current one with the previous level and the hellos of version 1, as in
the tests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from scripts.demonstration.narrator import Narrator
from streammeta.controller.features import SUPPORTED
from tests.kit.real_cluster import leader_of, writes_going_on
from tests.upgrade.mixed_cluster import (
    MixedCluster,
    expect_equal_maps,
    mixed_cluster,
    raise_level,
    refused_by,
    restart,
)

_CONTROLLERS = (1, 2, 3)


def run(root: Path, narrator: Narrator) -> Mapping[str, object]:
    """Carry out the drill in `root`, and return its figures, with times in seconds.

    Raises:
        AssertionError: a step failed, an acknowledged write is lost, or the metadata differs.
    """
    restarts: dict[str, object] = {}
    with mixed_cluster(root, older=_CONTROLLERS) as cluster:
        narrator.step("three controllers run the older version; one client writes continuously")
        with writes_going_on(cluster) as writes:
            for node_id in _order(cluster):
                restarts[f"restart_{node_id}_s"] = _upgrade(cluster, node_id, narrator)
            narrator.step(f"streammeta features upgrade --to {SUPPORTED.highest}")
            raise_level(cluster, SUPPORTED.highest)
            writes.expect_progress()
            narrator.step("streammeta cluster hash")
            expect_equal_maps(cluster)
    narrator.step("every acknowledged write exists")
    return {
        **restarts,
        "level": SUPPORTED.highest,
        "writes_acknowledged": len(writes.acknowledged),
        "longest_wait_of_a_write_s": round(writes.longest_wait_s, 3),
    }


def _order(cluster: MixedCluster) -> list[int]:
    """Return the controllers in the order of an upgrade: the leader comes last."""
    leader = leader_of(cluster)
    return [*(node_id for node_id in _CONTROLLERS if node_id != leader), leader]


def _upgrade(cluster: MixedCluster, node_id: int, narrator: Narrator) -> float:
    narrator.step(f"controller {node_id} is restarted in the new version")
    began = time.monotonic()
    restart(cluster, node_id, is_older=False)
    seconds = round(time.monotonic() - began, 1)
    if cluster.older:
        told = refused_by(cluster, SUPPORTED.highest)
        narrator.show(f"the level can't be raised yet: {told.partition(': ')[2]}")
    return seconds
