"""Three real controllers: their policies, and the role that each command needs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import LocalCluster, free_ports, tls_words
from streammeta.cli.root import cli
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, STEADY, streammeta
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process


class PolicedCluster(LocalCluster):
    """Controllers with a policy each."""

    def policy(self, node_id: int) -> Path:
        return self.root / f"policy-{node_id}.toml"

    def _command(self, node_id: int) -> list[str]:
        return [*LocalCluster._command(self, node_id), "--policy", str(self.policy(node_id))]

    def replace_policy(self, node_id: int, text: str) -> None:
        self.policy(node_id).write_text(text)
        self.children[node_id].process.send_signal(signal.SIGHUP)

    def events(self, node_id: int) -> list[str]:
        lines = (self.root / f"controller-{node_id}.log").read_text().splitlines()
        return [str(json.loads(line)["event"]) for line in lines]


@contextmanager
def policed_cluster(root: Path, authority: Authority) -> Iterator[PolicedCluster]:
    bucket = root / "bucket"
    bucket.mkdir()
    cluster = PolicedCluster(root, "test", f"file://{bucket}", free_ports(3), FAST)
    cluster.tls = {node_id: authority.issue(f"controller/{node_id}") for node_id in (1, 2, 3)}
    for node_id in cluster.node_ids:
        cluster.policy(node_id).write_text("# one\n")
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


def described(cluster: LocalCluster, alice: TlsFiles) -> dict[str, Any]:
    return streammeta("quorum", "describe", "--connect", cluster.connect, *tls_words(alice))


def leader_among(cluster: LocalCluster, alice: TlsFiles, node_ids: set[int]) -> bool:
    return described(cluster, alice).get("leader_id") in node_ids


def test_operators_see_policies_that_differ_and_a_denied_controller_takes_no_part(
    tmp_path: Path, authority: Authority
) -> None:
    alice = authority.issue("admin/alice")
    with policed_cluster(tmp_path, authority) as cluster:
        wait_until(lambda: described(cluster, alice).get("leader_id") is not None, "a leader")
        seen = described(cluster, alice)
        assert seen["policy"] == "equal"
        before = {row["node_id"]: row for row in seen["policies"]}
        assert len({row["sha256"] for row in before.values()}) == 1

        cluster.replace_policy(1, "# two\n")
        wait_until(lambda: described(cluster, alice)["policy"] == "DIFFERENT", "the news")
        after = {row["node_id"]: row for row in described(cluster, alice)["policies"]}
        assert after[1]["loaded"] > before[1]["loaded"]
        assert (after[2], after[3]) == (before[2], before[3])

        for node_id in (1, 2):
            cluster.replace_policy(node_id, '[deny]\nprincipals = ["controller/3"]\n')
        wait_until(lambda: leader_among(cluster, alice, {1, 2}), "the others to go on without it")
        wait_until(
            lambda: all(
                {"peer_certificate_denied", "peer_hello_refused"} & set(cluster.events(node_id))
                for node_id in (1, 2)
            ),
            "both to refuse it",
        )
        for node_id in (1, 2):
            cluster.replace_policy(node_id, "# two\n")

        def is_back() -> bool:
            rows = described(cluster, alice)["replicas"]
            third = next(row for row in rows if row["node_id"] == 3)
            return bool(third["role"] == "leader" or third.get("lag") == 0)

        wait_until(is_back, "it to be let in again")


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
