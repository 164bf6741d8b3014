"""An adoption whose command or leader is killed midway: a repeat ends with the same map."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.cli.recovery.adoption_survey import read_map_state
from streammeta.cli.recovery.snapshot_command import download
from streammeta.client import StreamClient
from tests.backup.test_adoption_process import KEPT, read_back, restore, run
from tests.backup.test_restore_process import NAMESPACE, Restoring, is_copied, options
from tests.kit.doomed_child import REPOSITORY
from tests.kit.real_cluster import FAST, describe, leader_of, running_cluster
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process

UPLOADS = 12
"""Of each of two streams, each in an object of its own."""


async def uploaded(cluster: LocalCluster, root: Path) -> tuple[int, dict[int, list[bytes]]]:
    """Upload many objects behind a backup; return its end, and the payloads of each stream."""
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=1007
    ) as streams:
        ids = await streams.create_streams([{"of": "one"}, {"of": "two"}])
        (await streams.open_streams(ids)).require_all()
        await asyncio.to_thread(wait_until, lambda: is_copied(cluster, root), "the streams' backup")
        end_offset = describe(cluster).high_watermark
        written: dict[int, list[bytes]] = {stream_id: [] for stream_id in ids}
        for number in range(UPLOADS):
            for stream_id, payloads in written.items():
                payloads.append(f"{stream_id} {number}".encode())
                await streams.append_many(stream_id, payloads[-1:])
    return end_offset, written


def state_of(cluster: LocalCluster) -> tuple[Any, ...]:
    """Return streams and objects of the leader's map."""
    with ControllerClient(cluster.endpoints) as client, tempfile.TemporaryFile() as copy:
        download(client, copy)
        state = read_map_state(copy)
    assert state is not None
    return state.streams, state.undecided, state.object_ids.tolist(), state.held


def doomed(cluster: LocalCluster, step: str, at: int, victim: int = 0) -> int:
    """Adopt, while the child or the victim is killed at some call; return its exit code."""
    words = ("--connect", cluster.connect, "--store", cluster.store_uri)
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.backup.doomed_adoption", step, str(at), str(victim)),
            *("restore", "adopt", "--yes", *words),
        ],
        cwd=REPOSITORY,
        check=False,
        stdout=subprocess.DEVNULL,
        timeout=120,
    ).returncode


def started(cluster: LocalCluster) -> None:
    cluster.start_all()
    leader_of(cluster)
    wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")


def test_killed_midway_it_is_repeated_and_the_map_is_the_same(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, options=(*options(tmp_path), *KEPT)) as old:
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        point, wanted = run(uploaded(old, tmp_path))
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
    restoring = Restoring(tmp_path, "second")
    assert restoring.make_plan("--to-offset", str(point))["exit_code"] == 0
    restoring.applied()
    cluster = restoring.cluster
    twin = twin_of(cluster, tmp_path)
    try:
        started(cluster)
        total = restore("adopt", "--dry-run", cluster=cluster)["adoptable"]
        assert total == 2 * UPLOADS
        for step, at, left in (("after", 2, total - 6), ("before", 2, total - 9)):
            assert doomed(cluster, step, at) == -signal.SIGKILL
            assert restore("adopt", "--dry-run", cluster=cluster)["adoptable"] == left
        leader = leader_of(cluster)
        assert doomed(cluster, "under way", 2, cluster.children[leader].process.pid) in (0, 1)
        assert cluster.children[leader].process.wait(60) == -signal.SIGKILL
        cluster.children[leader].stop()
        cluster.start(leader)
        repeated = restore("adopt", "--yes", cluster=cluster)
        assert repeated["exit_code"] == 0, repeated
        again = restore("adopt", "--yes", cluster=cluster)
        assert (again["exit_code"], again["adopted"], again["lost"]) == (0, 0, [])
        found = state_of(cluster)
        assert restore("finish", cluster=cluster)["exit_code"] == 0
        assert run(read_back(cluster, sorted(wanted))) == wanted
    finally:
        cluster.stop_all()
    try:
        started(twin)
        assert restore("adopt", "--yes", cluster=twin)["adopted"] == total
        assert found == state_of(twin), "as if nobody had been killed"
    finally:
        twin.stop_all()


def twin_of(cluster: LocalCluster, root: Path) -> LocalCluster:
    """Return the same cluster, yet to start, over a bucket of its own; one of them may run."""
    shutil.copytree(cluster.root, root / "twin")
    shutil.copytree(root / "bucket", root / "twin-bucket")
    return LocalCluster(
        root / "twin",
        cluster.cluster_id,
        f"file://{root}/twin-bucket",
        cluster.ports,
        (*FAST, *KEPT, "--namespace", NAMESPACE),
        peer_ports=cluster.peer_ports,
        starter=start_warm,
    )
