"""A real controller that takes tokens: commands by token, and files replaced while it serves."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.output import run_cli
from streammeta.cli.local.local_cluster import free_ports
from streammeta.cli.root import cli
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY, controller_command, format_data, streammeta
from tests.kit.waiting import wait_until
from tests.trust.audited_cluster import AuditedCluster
from tests.trust.test_token_door import POLICY
from tests.trust.test_tokens import DISCOVERY
from tests.trust.token_issuer import AUDIENCE, ISSUER, Issuer, publishing

KEYS = "jwks.json"


class TokenCluster(AuditedCluster):
    """Controllers that take tokens, at `token_endpoints` in the order of their ids."""

    token_endpoints: Sequence[str] = ()

    issuer = ISSUER

    def _command(self, node_id: int) -> list[str]:
        keys = ("--oidc-keys", str(self.root / KEYS)) if self.issuer == ISSUER else ()
        token_endpoint = self.token_endpoints[node_id - 1]
        return [
            *AuditedCluster._command(self, node_id),
            *("--token-listen", token_endpoint, "--policy", str(self.root / "policy.toml")),
            *("--oidc-issuer", self.issuer, "--oidc-audience", AUDIENCE),
            *(*keys, "--tls-reload-ms", "50"),
        ]


@contextmanager
def token_cluster(
    root: Path, authority: Authority, issuer: Issuer, count: int = 1
) -> Iterator[TokenCluster]:
    """Start it; the keys are in a file, or of another issuer, which publishes them."""
    bucket = root / "bucket"
    bucket.mkdir()
    (root / KEYS).write_bytes(issuer.jwks)
    (root / "policy.toml").write_text(POLICY)
    ports = free_ports(2 * count)
    cluster = TokenCluster(root, "test", f"file://{bucket}", ports[:count], STEADY)
    cluster.tls = {
        node_id: authority.issue(f"controller/{node_id}") for node_id in cluster.node_ids
    }
    cluster.token_endpoints = [f"127.0.0.1:{port}" for port in ports[count:]]
    cluster.issuer = issuer.name
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop_all()


class Person:
    """Runs commands by a token in a file."""

    def __init__(self, cluster: TokenCluster, authority: Authority, token: str) -> None:
        self._file = cluster.root / "token"
        self._file.touch(mode=0o600)
        self.shows(token)
        self._endpoints = cluster.token_endpoints
        self._options = ("--tls-ca", str(authority.ca), "--token-file", str(self._file))

    def shows(self, token: str) -> None:
        self._file.write_text(token)

    def runs(self, *words: str, at: int = 1) -> dict[str, Any]:
        """Run a command that knows one controller's address alone."""
        return streammeta(*words, "--connect", self._endpoints[at - 1], *self._options)

    def reaches_the_leader(self, at: int) -> bool:
        """Whether a linearizable read is answered, by way of one controller."""
        return bool(self.runs("node", "list", at=at)["exit_code"] == 0)

    def is_refused(self) -> bool:
        found = self.runs("node", "list")
        assert found["exit_code"] == 0 or found["error"]["code"] == "NO_IDENTITY"
        return bool(found["exit_code"])


@pytest.mark.process
def test_a_person_works_by_token_until_key_or_policy_change(
    tmp_path: Path, authority: Authority
) -> None:
    issuer = Issuer()
    token = issuer.token(department="data")
    with token_cluster(tmp_path, authority, issuer) as cluster:
        alice = Person(cluster, authority, token)
        wait_until(lambda: alice.runs("node", "list")["exit_code"] == 0, "a leader")
        assert alice.runs("quorum", "describe")["exit_code"] == 0
        assert alice.runs("cluster", "hash")["exit_code"] == 0
        assert alice.runs("health")["exit_code"] == 0
        refused = alice.runs("node", "lock", "--node-id", "1000")
        assert refused["error"]["code"] == "ROLE_LACKS_CALL"
        assert "role admin, which the policy grants to users" in refused["error"]["hint"]

        issuer.add("k2")
        issuer.remove("k1")
        cluster.root.joinpath(KEYS).write_bytes(issuer.jwks)
        wait_until(alice.is_refused, "the removed key to be forgotten")
        assert "Get a new token" in alice.runs("node", "list")["error"]["hint"]
        renewed = issuer.token(key_id="k2", department="data")
        alice.shows(renewed)
        assert not alice.is_refused()

        denied = f'{POLICY}[deny]\nprincipals = ["user/alice"]\n'
        cluster.root.joinpath("policy.toml").write_text(denied)
        cluster.children[1].process.send_signal(signal.SIGHUP)
        wait_until(alice.is_refused, "the policy to be read again")
        cluster.stop_all()
        lines = cluster.lines()
        said = json.dumps(lines) + cluster.root.joinpath("controller-1.log").read_text()
    callers = {line["principal"] for line in lines if line["call"].startswith("NodeService")}
    assert callers == {"user/alice", "anonymous"}
    for part in (*token.split("."), *renewed.split(".")):
        assert part not in said


@pytest.mark.process
def test_a_caller_with_a_token_reaches_the_leader_by_the_address_of_any_controller(
    tmp_path: Path, authority: Authority
) -> None:
    issuer = Issuer()
    with token_cluster(tmp_path, authority, issuer, count=3) as cluster:
        root = Person(cluster, authority, issuer.token(groups=["storage-admins"]))

        def is_seen_by_all() -> bool:
            return all(root.reaches_the_leader(at) for at in cluster.node_ids)

        wait_until(is_seen_by_all, "a leader")
        leader = root.runs("quorum", "describe")["leader_id"]
        followers = [node_id for node_id in cluster.node_ids if node_id != leader]
        for at in followers:
            described = root.runs("quorum", "describe", at=at)
            told = {row["node_id"]: row["endpoint"] for row in described["replicas"]}
            assert told == dict(zip(cluster.node_ids, cluster.token_endpoints, strict=True))
            assert described["policy"] == "equal"
            members = root.runs("cluster", "hash", at=at)["members"]
            assert [member["verdict"] for member in members] == ["ok"] * 3
        assert root.runs("quorum", "transfer", "--to", str(followers[0]), at=followers[1])["ok"]
        wait_until(is_seen_by_all, "the leader that was asked for")

        cluster.children[followers[0]].kill()
        wait_until(lambda: root.reaches_the_leader(leader), "another leader")
        assert root.reaches_the_leader(followers[1])
        cluster.start(followers[0])  # a follower that no leader has to connect to
        wait_until(lambda: root.reaches_the_leader(followers[0]), "the leader to be known")


@pytest.mark.process
def test_keys_come_from_an_issuer_that_publishes_them(tmp_path: Path, authority: Authority) -> None:
    with publishing() as publisher:
        issuer = Issuer(publisher.address)
        said = {"issuer": publisher.address, "jwks_uri": f"{publisher.address}/jwks"}
        publisher.answers[DISCOVERY] = (200, json.dumps(said).encode())
        publisher.answers["/jwks"] = (200, issuer.jwks)
        with token_cluster(tmp_path, authority, issuer) as cluster:
            alice = Person(cluster, authority, issuer.token(department="data"))
            wait_until(lambda: alice.runs("node", "list")["exit_code"] == 0, "a leader")
            for name in ("eve", "mallory"):
                alice.shows(Issuer(publisher.address).token(name, headers={"kid": name}))
                assert alice.is_refused()
        assert publisher.asked == [DISCOVERY, "/jwks"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"token_listen": "127.0.0.1:1"}, "token-listen: needs --tls-ca, --tls-cert and --tls-key"),
        ({"token_advertise": "h:1"}, "token-advertise: needs --token-listen"),
        ({"oidc_issuer": ISSUER}, "oidc-issuer: needs --token-listen"),
        ({"oidc_audience": "x"}, "oidc-audience: needs --token-listen"),
        ({"oidc_keys": "x"}, "oidc-keys: needs --token-listen"),
    ],
    ids=["tls", "advertise", "issuer", "audience", "keys"],
)
def test_a_setting_for_tokens_alone_is_refused(
    options: dict[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(cli, [*controller_command(tmp_path, **options)[2:], "--check-config"]) != 0
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replaced", "why"),
    [
        ({}, "the configuration is valid"),
        ({"policy": ""}, "token-listen: needs --policy, which maps the claims"),
        ({"oidc-issuer": ""}, "token-listen: needs --oidc-issuer"),
        ({"oidc-audience": ""}, "token-listen: needs --oidc-audience"),
        ({"token-listen": "x"}, "token-listen: 'x', must be HOST:PORT"),
        (
            {"token-listen": "0.0.0.0:2"},
            "token-advertise: '0.0.0.0:2' is not an address that others",
        ),
        ({"token-advertise": "[::]:2"}, "token-advertise: '[::]:2' is not an address that others"),
        ({"token-advertise": "c1.test:2"}, "does not name 'c1.test', the host that --token-adv"),
        ({"token-listen": "127.0.0.1:1"}, "token-listen: '127.0.0.1:1' is used by another"),
        ({"oidc-issuer": "http://a.b"}, "oidc-issuer: 'http://a.b', must begin with https://"),
        ({"oidc-keys": "http://a.b"}, "oidc-keys: 'http://a.b', must begin with https://"),
        ({"oidc-keys": "", "oidc-issuer": "us"}, "'us' is not an address that publishes keys"),
        ({"oidc-keys": "missing.json"}, "oidc-keys: missing.json: can't be read: No such file"),
    ],
    ids=[
        *("good", "no-policy", "no-issuer", "no-audience", "no-address", "wildcard", "nowhere"),
        *("another-name", "taken", "plain-issuer"),
        *("plain-keys", "no-keys", "missing"),
    ],
)
def test_settings_for_tokens_are_checked_at_start(
    replaced: dict[str, str],
    why: str,
    tmp_path: Path,
    authority: Authority,
    capsys: pytest.CaptureFixture[str],
) -> None:
    format_data(tmp_path)
    files = authority.issue("controller/1")
    (tmp_path / KEYS).write_bytes(Issuer().jwks)
    (tmp_path / "policy.toml").write_text(POLICY)
    settings = {
        "tls-ca": str(files.ca),
        "tls-cert": str(files.certificate),
        "tls-key": str(files.key),
        "policy": str(tmp_path / "policy.toml"),
        "token-listen": "127.0.0.1:2",
        "peer-listen": "127.0.0.1:1",
        "oidc-issuer": ISSUER,
        "oidc-audience": AUDIENCE,
        "oidc-keys": str(tmp_path / KEYS),
        **replaced,
    }
    given = {name: value for name, value in settings.items() if value}
    status = run_cli(cli, [*controller_command(tmp_path, **given)[2:], "--check-config"])
    said = capsys.readouterr()
    assert why in said.out + said.err
    assert (status == 0) == (not replaced)
