"""Commands and clients whose certificate is refused or missing ask once, and say why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2_grpc

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.methods import PREPARE_OBJECTS
from streammeta.client.errors import PermissionDeniedError
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.vocabulary.errors import ControllerError
from streammeta.rpc.blocking_client import BlockingClient, LeaderCallError
from streammeta.tls.files import TlsFiles
from streammeta.v1 import (
    admin_pb2_grpc,
    common_pb2,
    nodes_pb2,
    nodes_pb2_grpc,
    objects_pb2,
    objects_pb2_grpc,
    quorum_pb2_grpc,
)
from streammeta.v1.nodes_pb2_grpc import NodeServiceStub
from tests.kit.certificates import Authority
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented
from tests.trust.trusted_server import TrustedServer, trusting

_SERVICES = (admin_pb2_grpc, health_pb2_grpc, nodes_pb2_grpc, objects_pb2_grpc, quorum_pb2_grpc)
DENIED = grpc.StatusCode.PERMISSION_DENIED


class Refusing(unimplemented(*_SERVICES)):  # type: ignore[misc]
    """A controller that refuses every caller, and counts the calls."""

    def __init__(self, code: grpc.StatusCode, reason: str, needs: str) -> None:
        self.calls = 0
        self._refusal = (code, reason, needs)

    def _refuse(self, _request: object, context: Any) -> None:
        self.calls += 1
        code, reason, needs = self._refusal
        metadata = {"principal": "reader/bob", "needs": needs} if needs else {}
        abort(context, code, reason, "reader/bob may not", metadata)

    Check = CheckObjects = DescribeCluster = DescribeQuorum = GetNodes = LockNode = _refuse


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Run a command that fails; return its error."""
    assert run_cli(cli, [*words, "--format", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    error: dict[str, str] = answer["error"]
    return error


def options(tls: TlsFiles) -> Sequence[str]:
    files = (tls.ca, tls.certificate, tls.key)
    return [
        word
        for pair in zip(("--tls-ca", "--tls-cert", "--tls-key"), files, strict=True)
        for word in map(str, pair)
    ]


COMPACT = ("compact", "plan", "--all", "--store", "file:///tmp")


@pytest.mark.parametrize(
    "words",
    [
        ("node", "list"),
        ("node", "lock", "--node-id", "1001"),
        ("quorum", "describe"),
        ("quorum", "transfer"),
        ("cluster", "hash"),
        COMPACT,
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("code", "reason", "needs", "wanted"),
    [
        (DENIED, "ROLE_LACKS_CALL", "role admin", "his needs role admin:"),
        (DENIED, "NOT_YOUR_NODE", "broker/1002", "his needs broker/1002:"),
        (grpc.StatusCode.UNAUTHENTICATED, "NO_IDENTITY", "", "a certificate of this cluster"),
    ],
)
def test_a_refused_caller_learns_whose_certificate_is_needed(
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    code: grpc.StatusCode,
    reason: str,
    needs: str,
    wanted: str,
) -> None:
    controller = Refusing(code, reason, needs)
    with served_by_threads(controller, *_SERVICES) as endpoint:
        error = said(capsys, *words, "--connect", endpoint)
    assert error["code"] == reason
    assert error["message"].endswith(": reader/bob may not")
    assert wanted in error["hint"]
    assert "--tls-cert" in error["hint"]


@pytest.mark.parametrize(
    "words", [("node", "list"), ("node", "lock", "--node-id", "1001"), COMPACT]
)
def test_a_refused_call_is_not_repeated_at_another_controller(
    capsys: pytest.CaptureFixture[str], words: Sequence[str]
) -> None:
    one, other = (Refusing(DENIED, "ROLE_LACKS_CALL", "role admin") for _ in range(2))
    with served_by_threads(one, *_SERVICES) as at, served_by_threads(other, *_SERVICES) as there:
        said(capsys, *words, "--connect", f"{at},{there}")
    assert one.calls + other.calls == 1


def test_health_tells_of_a_refusal_too(capsys: pytest.CaptureFixture[str]) -> None:
    controller = Refusing(DENIED, "ROLE_LACKS_CALL", "role monitor")
    with served_by_threads(controller, *_SERVICES) as endpoint:
        error = said(capsys, "health", "--connect", endpoint)
    assert (error["code"], "role monitor" in error["hint"]) == ("ROLE_LACKS_CALL", True)


def test_reconciliation_tells_of_a_refusal_too() -> None:
    controller = Refusing(DENIED, "ROLE_LACKS_CALL", "role reconciler or admin")
    with (
        served_by_threads(controller, *_SERVICES) as endpoint,
        LeaderClient([endpoint], 5) as leader,
        pytest.raises(ControllerError, match="reconciler"),
    ):
        leader.describe()
    assert controller.calls == 1


def ask(
    capsys: pytest.CaptureFixture[str], endpoint: str, tls: TlsFiles | None
) -> list[dict[str, str]]:
    """Return the errors of commands that connect in different ways."""
    given = () if tls is None else options(tls)
    return [
        said(capsys, *words, "--connect", endpoint, *given)
        for words in (("node", "list"), ("quorum", "describe"), ("health",), COMPACT_SOON)
    ]


COMPACT_SOON = (*COMPACT, "--timeout", "0.5")


def test_a_client_in_plain_text_at_a_port_that_speaks_tls(
    capsys: pytest.CaptureFixture[str], authority: Authority
) -> None:
    controller = Refusing(DENIED, "REFUSED", "")
    tls = authority.issue("controller/1")
    with served_by_threads(controller, *_SERVICES, tls=tls) as endpoint:
        for error in ask(capsys, endpoint, None):
            assert error["code"] == "NO_CONTROLLER"
            assert "Socket closed" in error["message"]
            assert error["hint"].startswith("if the controllers require TLS, set --tls-ca")
    assert controller.calls == 0


def test_a_client_over_tls_at_a_port_that_speaks_plain_text(
    capsys: pytest.CaptureFixture[str], authority: Authority
) -> None:
    controller = Refusing(DENIED, "REFUSED", "")
    with served_by_threads(controller, *_SERVICES) as endpoint:
        for error in ask(capsys, endpoint, authority.issue("admin/alice")):
            assert error["hint"].startswith("the port uses plain text")


def test_a_controller_of_another_authority(
    capsys: pytest.CaptureFixture[str], authority: Authority, stranger: Authority
) -> None:
    controller = Refusing(DENIED, "REFUSED", "")
    with served_by_threads(controller, *_SERVICES, tls=stranger.issue("controller/1")) as endpoint:
        for error in ask(capsys, endpoint, authority.issue("admin/alice")):
            assert error["hint"].startswith("the controller's certificate was not signed by")


def test_a_controller_that_is_reached_by_another_name(
    capsys: pytest.CaptureFixture[str], authority: Authority
) -> None:
    controller = Refusing(DENIED, "REFUSED", "")
    elsewhere = authority.issue("controller/1", hosts=("c1.example.org",))
    with served_by_threads(controller, *_SERVICES, tls=elsewhere) as endpoint:
        for error in ask(capsys, endpoint, authority.issue("admin/alice")):
            assert "names other hosts" in error["hint"]


def test_a_certificate_that_the_controller_refuses(
    capsys: pytest.CaptureFixture[str], authority: Authority, stranger: Authority
) -> None:
    """The client trusts both authorities, so that its own look passes."""
    controller = Refusing(DENIED, "REFUSED", "")
    both = authority.folder / "both.pem"
    both.write_bytes(authority.ca.read_bytes() + stranger.ca.read_bytes())
    eve = stranger.issue("admin/eve")
    with served_by_threads(controller, *_SERVICES, tls=authority.issue("controller/1")) as endpoint:
        for error in ask(capsys, endpoint, TlsFiles(both, eve.certificate, eve.key)):
            assert error["message"].count("Socket closed. Over TLS this may mean") == 1
            assert error["hint"].startswith("a controller that rejects a certificate closes")
    assert controller.calls == 0


def test_files_of_no_use_are_named_before_anything_connects(
    capsys: pytest.CaptureFixture[str], authority: Authority, stranger: Authority
) -> None:
    ours, theirs = authority.issue("admin/alice"), stranger.issue("admin/eve")
    mixed = options(TlsFiles(ours.ca, theirs.certificate, theirs.key))
    error = said(capsys, "node", "list", "--connect", "127.0.0.1:1", *mixed)
    assert error["code"] == "TLS"
    assert error["message"].startswith(f"tls-cert: {theirs.certificate} ")
    assert "`streammeta certs show`" in error["hint"]


@pytest_asyncio.fixture
async def server(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[TrustedServer, list[str]]]:
    """Yield a leader, and the calls that come to its authenticator."""
    async with trusting(authority) as server:
        entered: list[str] = []
        authenticate = server.authenticator.authenticate

        def counted(method: str, context: Any) -> Any:
            entered.append(method)
            return authenticate(method, context)

        monkeypatch.setattr(server.authenticator, "authenticate", counted)
        yield server, entered


def endpoints(server: TrustedServer) -> list[str]:
    """Return two ways to the leader, as if they were two controllers."""
    return [server.endpoint, server.endpoint.replace("127.0.0.1", "localhost")]


async def test_the_brokers_client_asks_once(server: tuple[TrustedServer, list[str]]) -> None:
    leader, entered = server
    request = objects_pb2.PrepareObjectsRequest(
        node=common_pb2.NodeIdentity(node_id=1008, node_epoch=1), count=1, ttl_ms=60_000
    )
    for principal, needs in (("broker/1007", "broker/1008"), ("reader/spark", "role broker")):
        entered.clear()
        client = ControllerClient(endpoints(leader), tls=leader.authority.issue(principal))
        async with client:
            with pytest.raises(PermissionDeniedError, match=needs):
                await client.call(PREPARE_OBJECTS, request)
        assert len(entered) == 1


async def test_the_commands_client_asks_once(server: tuple[TrustedServer, list[str]]) -> None:
    leader, entered = server

    def ask() -> LeaderCallError:
        tls = leader.authority.issue("reader/spark")
        request = nodes_pb2.LockNodeRequest(node_id=1007)

        def lock(channel: grpc.Channel, left_s: float) -> nodes_pb2.LockNodeResponse:
            return NodeServiceStub(channel).LockNode(request, timeout=left_s)

        with (
            BlockingClient(endpoints(leader), tls=tls) as client,
            pytest.raises(LeaderCallError) as raised,
        ):
            client.call_leader(lock, 20.0)
        return raised.value

    error = await asyncio.to_thread(ask)
    assert error.is_final
    assert error.failure.code is grpc.StatusCode.PERMISSION_DENIED
    assert error.failure.metadata == {"principal": "reader/spark", "needs": "role admin"}
    assert len(entered) == 1
