"""What a controller logs of its life: start, voters, leadership, snapshots, stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local_cluster import ChildFailedError
from tests.kit.real_cluster import (
    STEADY,
    controller_command,
    format_data,
    leader_of,
    running_cluster,
    start_python,
    streammeta,
    wait_until,
)

pytestmark = pytest.mark.process


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
