"""The steps in docs/operations.md that replace a lost disk do, run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streammeta.cli.local_cluster import LocalCluster, free_ports, start_child
from tests.kit.real_cluster import STEADY, quorum, replica, wait_until, writes_going_on

pytestmark = pytest.mark.process

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
NODE = 3


def steps(heading: str) -> list[str]:
    """The commands of a section, in order."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", section, re.M | re.S)
    return [re.sub(r"\\\n\s*", "", block).strip() for block in blocks]


def test_a_lost_disk_is_replaced_by_the_documented_commands(tmp_path: Path) -> None:
    commands = steps("Replacing a lost disk")
    assert [command.split()[1:3] for command in commands] == [
        ["quorum", "remove-voter"],
        ["storage", "format"],
        ["controller", "--node-id"],
        ["quorum", "describe"],
        ["quorum", "add-voter"],
    ]
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    options = (*STEADY, "--snapshot-log-bytes", "20000")
    cluster = LocalCluster(tmp_path, "demo", f"file://{bucket}", free_ports(3), options)
    others = {1: cluster.peer_endpoints[0], 2: cluster.peer_endpoints[1]}
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CONNECT": ",".join(cluster.endpoints[: NODE - 1]),
        "SEEDS": ",".join(f"{node_id}@{endpoint}" for node_id, endpoint in others.items()),
        "ENDPOINT": cluster.endpoints[NODE - 1],
        "PEER": cluster.peer_endpoints[NODE - 1],
        "DATA": str(cluster.data_dir(NODE)),
        "STORE": cluster.store_uri,
    }
    try:
        cluster.start_all()
        with writes_going_on(cluster) as writes:
            writes.expect_progress()
            cluster.children[NODE].kill()
            cluster.wipe(NODE)
            for command in commands:
                if command.startswith("streammeta controller"):
                    shell = ["bash", "-c", f"exec {command}"]
                    log_path = tmp_path / "replaced.log"
                    cluster.children[NODE] = start_child("replaced", shell, log_path, env)
                    cluster.children[NODE].wait_ready()
                    wait_until(lambda: replica(cluster, NODE).get("lag", 99) < 99, "it catches up")
                    continue
                done = subprocess.run(
                    ["bash", "-euc", command],
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=90,
                    check=False,
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert quorum(cluster, "describe")["voter_ids"] == [1, 2, 3]
            # With the new voter and one of the old there is a majority.
            cluster.children[1].kill()
            writes.expect_progress()
    finally:
        cluster.stop_all()
