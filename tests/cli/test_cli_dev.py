"""`streammeta dev`: its lines are enough to connect, and a killed controller runs again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.dev_command import LEVEL_PENDING, PORT_COUNT
from streammeta.cli.local.local_certificates import LocalCertificates
from streammeta.cli.local.local_cluster import (
    PROGRAM,
    LocalCluster,
    free_ports,
    start_child,
    taken_ports,
)
from streammeta.cli.local.restarting import DELAY_MAX_S, STEADY_AFTER_S, Supervisor
from streammeta.cli.root import cli
from streammeta.client.errors import PermissionDeniedError
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.controller.features import SUPPORTED
from streammeta.tls.files import TlsFiles
from streammeta.tls.identity import USER_ROLES, Role
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get


def test_certificates_of_an_earlier_run_are_used_again(tmp_path: Path) -> None:
    first = LocalCertificates(tmp_path, "test").of(Role.BROKER, 7)
    shown = first.certificate.read_bytes()
    again = LocalCertificates(tmp_path, "test")
    assert (again.of(Role.BROKER, 7), first.certificate.read_bytes()) == (first, shown)
    first.key.chmod(0o644)  # as good as expired: of no use
    assert again.of(Role.BROKER, 7).load().certificate != shown
    assert str(again.of(Role.ADMIN, "a.b").load().principal) == "admin/a.b"


@dataclass
class FakeChild:
    """A child that ends when a test says so."""

    name: str
    pid: int
    log_path: Path = Path("a.log")
    returncode: int | None = None

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    @property
    def process(self) -> FakeChild:
        return self

    def wait_ready(self) -> str:
        return ""


@dataclass
class FakeCluster:
    """Three children; `spawn` starts one in place of another."""

    children: dict[int, FakeChild] = field(default_factory=dict)
    started: int = 0

    def spawn(self, node_id: int) -> None:
        self.started += 1
        self.children[node_id] = FakeChild(f"controller {node_id}", self.started)


@dataclass
class Scene:
    """A supervisor over fakes, by a clock that is set by hand."""

    now: float = 0.0
    reports: list[str] = field(default_factory=list)
    cluster: FakeCluster = field(default_factory=FakeCluster)

    def __post_init__(self) -> None:
        for node_id in (1, 2, 3):
            self.cluster.spawn(node_id)
        cluster = cast(LocalCluster, self.cluster)
        self.supervisor = Supervisor(cluster, self.reports.append, lambda: self.now)
        self.supervisor.look()

    def end(self, node_id: int, code: int = -9) -> float:
        """End a controller; return the delay after which it runs again."""
        child, ended_at = self.cluster.children[node_id], self.now
        child.returncode = code
        while self.cluster.children[node_id] is child:
            self.supervisor.look()
            self.now += 0.25
        return self.now - 0.25 - ended_at


def test_a_controller_that_ends_is_restarted_and_the_others_stay() -> None:
    scene = Scene()
    others = [scene.cluster.children[node_id] for node_id in (1, 3)]
    assert scene.end(2) == 0.5
    assert [scene.cluster.children[node_id] for node_id in (1, 3)] == others
    assert scene.reports[0] == (
        "controller 2 ended (killed by signal 9), restarting in 0.5 s. Its log is a.log"
    )
    assert scene.end(1, 3) == 0.5
    assert any("controller 1 ended (exit code 3)" in line for line in scene.reports)


def test_restarts_of_a_controller_that_keeps_ending_are_delayed_up_to_a_bound() -> None:
    scene = Scene()
    assert [scene.end(2) for _ in range(7)] == [0.5, 1, 2, 4, 8, DELAY_MAX_S, DELAY_MAX_S]
    assert scene.end(3) == 0.5  # delays are those of one controller
    scene.now += STEADY_AFTER_S
    assert scene.end(2) == 0.5


def test_a_port_in_use_is_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        first = min(taken - 1, 65_536 - PORT_COUNT)
        root = tmp_path / "dev"
        code = run_cli(cli, ["dev", "--port", str(first), "--data-dir", str(root)])
    said = capsys.readouterr().err
    assert code == 1
    assert f"port: {first} needs {first} to {first + PORT_COUNT - 1}" in said
    assert str(taken) in said
    assert not root.exists()


@pytest.mark.process
def test_a_killed_controller_of_a_new_cluster_runs_again_at_the_newest_level(
    tmp_path: Path,
) -> None:
    words = [*PROGRAM, "dev", "--data-dir", str(tmp_path), "--port", str(_first_port())]
    child = start_child("dev", [*words, "--format", "json"], tmp_path / "dev.log")
    try:
        answer = json.loads(child.read_line())
        places = answer["controllers"]
        assert [place["endpoint"] for place in places] == answer["connect"].split(",")
        features = ("features", "describe", "--format", "json")
        code, said = _run(features, {"STREAMMETA_CONNECT": answer["connect"]})
        assert (code, said["level"]) == (0, SUPPORTED.highest)
        assert not (tmp_path / LEVEL_PENDING).exists()

        os.kill(places[1]["pid"], signal.SIGKILL)
        wait_until(lambda: "controller 2 runs again" in child.log_tail(), "controller 2 runs again")
        assert "controller 2 ended (killed by signal 9), restarting in 0.5 s" in child.log_tail()
        assert child.is_running
        for place in places:
            status, page = get(place["status"].removeprefix("http://").rstrip("/"), "/")
            assert (status, "<html" in page) == (200, True)
        os.kill(places[0]["pid"], 0)
    finally:
        assert child.stop(30) == 0


@pytest.mark.process
async def test_the_next_command_connects_by_what_dev_prints(tmp_path: Path) -> None:
    words = [*PROGRAM, "dev", "--tls", "--data-dir", str(tmp_path), "--format", "json"]
    child = start_child("dev", words, tmp_path / "dev.log")
    try:
        answer = json.loads(child.read_line())
        assert answer["ok"], child.log_tail()
        variables = answer["environment"]
        assert variables["STREAMMETA_CONNECT"] == answer["connect"]
        assert _describe(variables)[0] == 0
        for place in answer["controllers"]:
            page = place["status"].removeprefix("http://").rstrip("/")
            assert get(page, "/")[0] == 200  # in plain text: a browser has no certificate
        code, said = _describe({"STREAMMETA_CONNECT": answer["connect"]})
        assert (code, said["error"]["code"]) == (1, "NO_CONTROLLER")
        assert "--tls-ca" in said["error"]["hint"]

        folder = tmp_path / "certificates"
        assert {f"{role}-dev.pem" for role in USER_ROLES} <= {one.name for one in folder.iterdir()}
        seven = TlsFiles(folder / "ca.pem", folder / "broker-7.pem", folder / "broker-7.key")
        async with ControllerClient(answer["connect"].split(","), tls=seven) as client:
            await BrokerSession.open(client, 7, 1)
            with pytest.raises(PermissionDeniedError, match=r"broker/7.*8"):
                await BrokerSession.open(client, 8, 1)
    finally:
        assert child.stop(30) == 0


def _first_port() -> int:
    """Return the first of as many free ports as `dev` takes."""
    while True:
        (first,) = free_ports(1)
        if not taken_ports(range(first, first + PORT_COUNT)):
            return first


def _describe(variables: dict[str, str]) -> tuple[int, dict[str, Any]]:
    return _run(("quorum", "describe", "--format", "json"), variables)


def _run(words: tuple[str, ...], variables: dict[str, str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*PROGRAM, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)
