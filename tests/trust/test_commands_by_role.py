"""Real controllers over TLS: each command with the least role that does, and with one too few."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, tls_words
from streammeta.cli.root import cli
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def cluster(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    root = tmp_path_factory.mktemp("roles")
    (root / "bucket").mkdir()
    running = LocalCluster(
        root,
        "test",
        f"file://{root / 'bucket'}",
        free_ports(1),
        STEADY,
        tls={1: authority.issue("controller/1")},
        starter=start_warm,
    )
    try:
        running.start_all()
        yield running
    finally:
        running.stop_all()


@pytest.fixture
def run(cluster: LocalCluster, authority: Authority, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command as a principal; return its exit code and object."""

    def as_principal(principal: str, *words: str) -> tuple[int, dict[str, Any]]:
        files = tls_words(authority.issue(principal))
        at = ("--connect", cluster.endpoints[0], *files, "--format", "json")
        split = words.index("--") if "--" in words else len(words)
        code = run_cli(cli, [*words[:split], *at, *words[split:]])
        return code, json.loads(capsys.readouterr().out)

    wait_until(lambda: as_principal("monitor/m", "health", "--service", "leader")[0] == 0, "leads")
    return as_principal


@pytest.mark.parametrize(
    ("principal", "words"),
    [
        ("monitor/m", "health"),
        ("reader/r", "shell -- ls /streams"),
        ("reader/r", "shell -- ls /kv"),
        ("reader/r", "shell -- ls /nodes"),
        ("reader/r", "shell -- ls /objects"),
        ("reader/r", "quorum describe"),
        ("reader/r", "cluster hash"),
        ("reader/r", "node list"),
        ("reader/r", "compact plan --all --store STORE"),
        ("compactor/c", "compact --all --store STORE"),
        ("backup/b", "quorum snapshot"),
        ("backup/b", "snapshot export --to parquet TARGET"),
        ("admin/a", "quorum transfer --to 1"),
    ],
)
def test_a_command_does_with_this_role(
    run: Run, cluster: LocalCluster, tmp_path: Path, principal: str, words: str
) -> None:
    named = words.replace("STORE", cluster.store_uri).replace("TARGET", str(tmp_path / "map"))
    code, answer = run(principal, *named.split())
    assert (code, answer.get("error")) == (0, None)


@pytest.mark.parametrize(
    ("principal", "words", "needs"),
    [
        ("monitor/m", "quorum describe", "admin"),
        ("monitor/m", "shell -- ls /streams", "reader"),
        ("monitor/m", "cluster hash", "reader"),
        ("backup/b", "node list", "reader"),
        ("reader/r", "quorum snapshot", "backup"),
        ("reader/r", "quorum transfer", "admin"),
        ("reader/r", "node lock --node-id 1001", "admin"),
        ("compactor/c", "snapshot export --to parquet TARGET", "backup"),
        ("monitor/m", "compact plan --all --store STORE", "compactor"),
    ],
)
def test_one_that_lacks_the_role_is_told_which(
    run: Run, cluster: LocalCluster, tmp_path: Path, principal: str, words: str, needs: str
) -> None:
    named = words.replace("STORE", cluster.store_uri).replace("TARGET", str(tmp_path / "map"))
    code, answer = run(principal, *named.split())
    assert (code, answer["ok"], answer["error"]["code"]) == (1, False, "ROLE_LACKS_CALL")
    assert f"{principal} may not call " in answer["error"]["message"]
    assert needs in answer["error"]["hint"].partition(":")[0]
