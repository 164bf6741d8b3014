"""`streammeta dev` and the demo: connection lines, ports, restarts, and checks that fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from scripts.demonstration import steps
from scripts.demonstration.story import Bucket, MappedKeys, Reads, Story, summarize
from streammeta.cli.framework.output import run_cli
from streammeta.cli.local import local_cluster
from streammeta.cli.local.dev_command import LEVEL_PENDING, PORT_COUNT, LocalCertificates
from streammeta.cli.local.local_cluster import (
    DELAY_MAX_S,
    PROGRAM,
    STEADY_AFTER_S,
    LocalCluster,
    Supervisor,
    free_ports,
    start_child,
    taken_ports,
)
from streammeta.cli.reconcile.reconcile_command import apply_command, plan_command
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


def test_a_port_in_use_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_killed_controller_runs_again_at_the_newest_level(tmp_path: Path) -> None:
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


_ELSEWHERE = """
from streammeta.cli.local import local_cluster
local_cluster._STEADY_PORTS = range({first}, {end})
print(*local_cluster.free_ports(10))
"""


def test_no_port_is_given_twice_before_its_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = local_cluster.free_ports(1)
    monkeypatch.setattr(local_cluster, "_STEADY_PORTS", range(first, first + 60))
    given = {first, *local_cluster.free_ports(10), *local_cluster.free_ports(10)}
    code = _ELSEWHERE.format(first=first, end=first + 60)
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(given) == 21
    assert len(found) == 10
    assert given.isdisjoint(map(int, found))


FOREIGN = "theirs"
ORPHAN = "orphan"
LIVE = {"a", "b"}

READS = Reads(rows=10, rows_again=10, rows_beside=3, failure_beside="")
BUCKET = Bucket(before=LIVE | {ORPHAN, FOREIGN}, after=LIVE | {FOREIGN}, foreign_key=FOREIGN)
MAPPED = MappedKeys(live=LIVE, known=LIVE | {"prepared"})


def story() -> Story:
    return Story(
        uploaded={1, 2, 3},
        compactions=2,
        failover_s=0.2,
        expired_deleted=1,
        refusal="NOT_YOUR_NODE",
        orphans={ORPHAN},
        brokers_done={0, 1},
    )


def test_a_good_run() -> None:
    figures, failed = summarize(story(), READS, BUCKET, MAPPED, (10, 4))
    assert failed == []
    assert figures["ok"] is True
    assert (figures["objects_before_compaction"], figures["objects_after_compaction"]) == (3, 2)
    assert (figures["orphans_deleted"], figures["live_deleted"]) == (1, 0)


@pytest.mark.parametrize(
    ("reads", "bucket", "mapped", "check"),
    [
        (replace(READS, rows=-1), BUCKET, MAPPED, "read back after compaction"),
        (replace(READS, rows_again=9), BUCKET, MAPPED, "after reconciliation"),
        (replace(READS, rows_beside=0), BUCKET, MAPPED, "while objects were compacted"),
        (replace(READS, failure_beside="stream 4 differs"), BUCKET, MAPPED, "stream 4 differs"),
        (READS, replace(BUCKET, after={"a", FOREIGN}), MAPPED, "exactly the orphans"),
        (READS, replace(BUCKET, after={"a", FOREIGN}), MAPPED, "every live object"),
        (READS, replace(BUCKET, after=LIVE), MAPPED, "except the foreign one"),
        (READS, replace(BUCKET, after=LIVE | {ORPHAN, FOREIGN}), MAPPED, "exactly the orphans"),
        (
            READS,
            replace(BUCKET, after=LIVE | {"left", FOREIGN}),
            MAPPED,
            "the metadata contains all keys",
        ),
        (READS, BUCKET, MappedKeys(LIVE | {"c"}, LIVE | {"c"}), "one object for each broker"),
    ],
)
def test_what_may_go_wrong(reads: Reads, bucket: Bucket, mapped: MappedKeys, check: str) -> None:
    figures, failed = summarize(story(), reads, bucket, mapped, (10, 4))
    assert figures["ok"] is False
    assert any(check in sentence for sentence in failed), failed


def test_a_broker_that_could_speak_for_another() -> None:
    _, failed = summarize(replace(story(), refusal=""), READS, BUCKET, MAPPED, (10, 4))
    assert failed == ["a broker may not act for another: "]


def test_the_demo_calls_reconcile_as_it_is() -> None:
    place = ["--store", "s3://b", "--connect", "h:1"]
    made = plan_command.make_context("plan", steps.reconcile_plan_words(place, "p")[2:])
    assert (made.params["unsafe_grace_ms"], made.params["max_share"]) == (0, 0.5)
    applied = apply_command.make_context("apply", steps.reconcile_apply_words(place, "p")[2:])
    assert (applied.params["yes"], applied.params["connect"]) == (True, ("h:1",))
