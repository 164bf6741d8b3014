"""Controllers of two versions in one cluster, and the steps of a rolling upgrade."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streammeta.cli.local.local_cluster import PROGRAM, LocalCluster, free_ports
from tests.kit.real_cluster import STEADY, leader_of, quorum, replica, streammeta
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

OLDER = (sys.executable, "-m", "tests.upgrade.older_controller")


@dataclass(slots=True)
class MixedCluster(LocalCluster):
    """A cluster whose controllers in `older` are of the older version when they start."""

    older: set[int] = field(default_factory=set)

    def _command(self, node_id: int) -> list[str]:
        command = LocalCluster._command(self, node_id)
        return [*OLDER, *command[len(PROGRAM) :]] if node_id in self.older else command


@contextlib.contextmanager
def mixed_cluster(root: Path, older: Sequence[int], count: int = 3) -> Iterator[MixedCluster]:
    """Start controllers, those of `older` in the older version; stop them at the end."""
    bucket = root / "bucket"
    bucket.mkdir()
    uri = f"file://{bucket}"
    cluster = MixedCluster(
        root, "test", uri, free_ports(count), STEADY, older=set(older), starter=start_warm
    )
    try:
        cluster.start_all()
        leader_of(cluster)
        yield cluster
    finally:
        cluster.stop_all()


def restart(cluster: MixedCluster, node_id: int, *, is_older: bool) -> None:
    """Restart a controller in a version, as an operator does; wait until it has caught up."""
    leader = leader_of(cluster)
    if leader == node_id:
        quorum(cluster, "transfer")
    assert cluster.children[node_id].stop() == 0
    (cluster.older.add if is_older else cluster.older.discard)(node_id)
    cluster.start(node_id)
    wait_until(lambda: _follows(cluster, node_id), f"controller {node_id} has caught up")


def _follows(cluster: MixedCluster, node_id: int) -> bool:
    seen = replica(cluster, node_id)
    return seen.get("last_fetch_ms") is not None and seen["lag"] < 100


def ended(cluster: MixedCluster, node_id: int) -> str:
    """Wait until a controller has ended by itself, with an error; return what it said last."""
    child = cluster.children[node_id]
    wait_until(lambda: not child.is_running, f"controller {node_id} ends")
    assert child.stop() == 1
    return child.log_tail(2)


def features(cluster: MixedCluster, command: str, *words: str) -> dict[str, Any]:
    """Run `streammeta features`."""
    return streammeta("features", command, "--connect", cluster.connect, *words)


def raise_level(cluster: MixedCluster, level: int) -> None:
    """Raise the level, first as a dry run, as an operator does."""
    for words in (["--dry-run"], []):
        answer = features(cluster, "upgrade", "--to", str(level), *words)
        assert (answer["exit_code"], answer["level_before"], answer["level"]) == (0, 1, level)


def refused_by(cluster: MixedCluster, level: int) -> str:
    """Return the error of an attempt to raise the level, which must be refused."""
    answer = features(cluster, "upgrade", "--to", str(level))
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "FEATURE_LEVEL"), answer
    return str(answer["error"]["message"])


def expect_equal_maps(cluster: MixedCluster) -> None:
    """Require that all controllers have the same map and the same log."""
    answer = streammeta("cluster", "hash", "--connect", cluster.connect)
    assert (answer["exit_code"], answer["verdict"]) == (0, "ok"), answer
    assert len(answer["members"]) == len(cluster.ports)
