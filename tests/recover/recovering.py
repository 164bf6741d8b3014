"""A recovery by the commands, over real controllers of which a majority has lost its disks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from streammeta.cli.local.local_cluster import LocalCluster
from tests.kit.real_cluster import quorum, replica, streammeta
from tests.kit.waiting import wait_until

SURVIVOR = 3
DEAD = (1, 2)


class Recovering:
    """Reports, plan and application for a cluster of three whose survivor is controller 3."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.root = cluster.root
        self.store = ("--store", cluster.store_uri)
        self.plan_file = self.root / "plan.json"
        self.audit_log = self.root / "audit.log"

    def lose(self, *node_ids: int) -> None:
        """End controllers; put their directories where no controller looks for them."""
        for node_id in node_ids:
            self.cluster.children[node_id].kill()
            shutil.move(self.cluster.data_dir(node_id), self.lost(node_id))

    def lost(self, node_id: int) -> Path:
        return self.root / f"lost-{node_id}"

    def inspect(self, node_id: int = SURVIVOR) -> dict[str, Any]:
        where = ("--data-dir", str(self.cluster.data_dir(node_id)))
        return streammeta("recover", "inspect", *where, "--report", str(self.report(node_id)))

    def report(self, node_id: int) -> Path:
        return self.root / f"report-{node_id}.json"

    def plan(self, *more: str, dead: str = "1,2", file: Path | None = None) -> dict[str, Any]:
        return streammeta(
            *("recover", "plan", "--report", str(self.report(SURVIVOR)), "--dead", dead),
            *(*self.store, "--plan", str(file or self.plan_file), *more),
        )

    def apply(self, *more: str, node_id: int = SURVIVOR) -> dict[str, Any]:
        return streammeta(*self.apply_words(*more, node_id=node_id))

    def apply_words(self, *more: str, node_id: int = SURVIVOR) -> tuple[str, ...]:
        return (
            *("recover", "apply", "--plan", str(self.plan_file), *self.store),
            *("--data-dir", str(self.cluster.data_dir(node_id)), "--old-controllers-stopped"),
            *more,
        )

    def recovered(self) -> dict[str, Any]:
        """Inspect, plan and apply; each must succeed. Return the plan."""
        inspected = self.inspect()
        assert inspected["exit_code"] == 0, inspected
        planned = self.plan()
        assert planned["exit_code"] == 0, planned
        applied = self.apply("--yes", "--audit-log", str(self.audit_log))
        assert applied["exit_code"] == 0, applied
        return planned

    def finish(self) -> None:
        """End the recovery mode of the cluster that the survivor leads."""
        where = ("--connect", self.cluster.connect, "--store", self.cluster.store_uri)
        finished = streammeta("restore", "finish", *where, "--leave-behind")
        assert finished["exit_code"] == 0, finished
        assert finished["was_recovering"]

    def end_of(self, node_id: int) -> str:
        """Wait until a controller has ended by itself, in failure; return the end of its log."""
        child = self.cluster.children[node_id]
        assert child.process.wait(60) == 1
        child.stop()
        return child.log_tail()

    def add_voter(self, node_id: int) -> None:
        """Start a controller on an empty disk, and give it a vote."""
        self.cluster.start(node_id)
        wait_until(lambda: replica(self.cluster, node_id).get("lag") == 0, "it to catch up")
        where = ("--endpoint", self.cluster.peer_endpoints[node_id - 1])
        quorum(self.cluster, "add-voter", "--node-id", str(node_id), *where)
