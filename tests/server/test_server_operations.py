"""A controller's log, quiet under load, and the steps of docs/operations/repair.md as written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import (
    ChildFailedError,
    LocalCluster,
    free_ports,
    start_child,
)
from streammeta.client import StreamClient
from tests.kit.real_cluster import (
    STEADY,
    controller_command,
    format_data,
    leader_of,
    quorum,
    replica,
    running_cluster,
    start_python,
    streammeta,
    writes_going_on,
)
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "repair.md"
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
    cluster = LocalCluster(
        tmp_path, "demo", f"file://{bucket}", free_ports(3), options, starter=start_warm
    )
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


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_tells_the_life_of_a_controller(tmp_path: Path) -> None:
    log = tmp_path / "controller-1.log"

    def of(name: str) -> list[dict[str, Any]]:
        return [event for event in logged(log) if event["event"] == name]

    with running_cluster(tmp_path, count=1, options=STEADY) as cluster:
        leader_of(cluster)
        joined = cluster.join()
        added = ("--node-id", str(joined), "--endpoint", cluster.peer_endpoints[-1])
        wait_until(
            lambda: streammeta("quorum", "add-voter", "--connect", cluster.connect, *added)["ok"],
            "the observer to vote",
        )
        streammeta("quorum", "snapshot", "--connect", cluster.endpoints[0])
        wait_until(lambda: bool(of("checkpoint_written")), "the snapshot to be logged")
        assert cluster.children[1].stop() == 0

    (start,) = of("controller_starting")
    assert (start["node_id"], start["cluster_id"]) == (1, "test")
    assert start["version"]
    assert start["settings"]["store_uri"] == f"file://{tmp_path}/bucket"
    assert start["settings"]["listen"] == cluster.endpoints[0]
    assert of("controller_ready")
    last = of("voters_changed")[-1]["voters"]
    assert [voter.partition("@")[0] for voter in last] == ["1", str(joined)]
    named = zip(last, cluster.peer_endpoints, strict=True)
    assert all(endpoint in voter for voter, endpoint in named)
    assert [event["signal"] for event in of("controller_stopping")] == ["SIGTERM"]
    names = [event["event"] for event in logged(log)]
    assert names[0] == "controller_starting"
    assert names[-1] == "controller_stopped"


def test_the_log_keeps_no_secret_of_the_store(tmp_path: Path) -> None:
    """The settings are logged before anything can stop the start."""
    format_data(tmp_path)
    store = "s3://bucket?endpoint=http://127.0.0.1:1&accessKey=hidden-key&secretKey=hidden-secret"
    child = start_python("refused", controller_command(tmp_path, store=store), tmp_path)
    with pytest.raises(ChildFailedError):
        child.wait_ready()

    text = child.log_path.read_text()
    assert "s3://bucket?endpoint=http://127.0.0.1:1" in text
    assert "hidden" not in text


@pytest.mark.parametrize("writes_wanted", [300, pytest.param(5_000, marks=pytest.mark.slow)])
def test_controllers_under_load_log_neither_warnings_nor_errors(
    tmp_path: Path, writes_wanted: int
) -> None:
    """Standard error is JSON, a line each, with a checkpoint, up to an end without errors."""

    def events() -> list[dict[str, Any]]:
        logs = (tmp_path / f"controller-{node}.log" for node in cluster.node_ids)
        return [event for log in logs for event in logged(log)]

    def names() -> set[str]:
        return {event["event"] for event in events()}

    options = (*STEADY, "--snapshot-log-bytes", "5000")
    with running_cluster(tmp_path, options=options) as cluster:
        leader_of(cluster)
        with writes_going_on(cluster) as writes:
            wait_until(lambda: len(writes.acknowledged) > writes_wanted, "writes", 100)
            wait_until(lambda: "checkpoint_written" in names(), "a checkpoint", 100)
        seen = events()
        assert [event for event in seen if event["level"] not in ("debug", "info")] == []
    # That others stop is no warning either.
    seen = events()
    assert [event["event"] for event in seen].count("controller_stopped") == len(cluster.node_ids)
    assert [event for event in seen if event["level"] not in ("debug", "info")] == []


ROUNDS, STREAMS = 40, 5


def log_of(cluster: LocalCluster, node_id: int) -> list[dict[str, Any]]:
    """Return the lines of a controller's standard error; one that is no JSON is an error."""
    text = (cluster.root / f"controller-{node_id}.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


async def load(cluster: LocalCluster) -> None:
    """Write, read and trim, through a session that ends."""
    store = f"file://{cluster.root / 'bucket'}"
    async with await StreamClient.open(cluster.endpoints, store, node_id=7) as client:
        streams = await client.create_streams([{"topic": "quiet"}] * STREAMS)
        await client.open_streams(streams)
        for number in range(ROUNDS):
            acks = [client.append(stream, b"%d" % number) for stream in streams]
            await asyncio.gather(*acks)
        for stream in streams:
            records = [bytes(record.payload) async for record in client.iterate(stream)]
            assert records == [b"%d" % number for number in range(ROUNDS)]


def test_nothing_above_info_is_logged_in_normal_operation(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        asyncio.run(load(cluster))
        logs = {node_id: log_of(cluster, node_id) for node_id in cluster.node_ids}
    for node_id, lines in logs.items():
        assert lines[0]["event"] == "controller_starting", "the first line says what runs"
        names = [line["event"] for line in log_of(cluster, node_id)]
        assert "controller_stop_hurried" not in names, "a cluster asks each one to end only once"
        assert names[-1] == "controller_stopped"
        assert lines[0]["version"]
        assert lines[0]["settings"]["store_uri"].endswith("/bucket")
        loud = [line for line in lines if line["level"] not in ("debug", "info")]
        assert not loud
    assert any(line["event"] == "leader_elected" for lines in logs.values() for line in lines)
