"""The three planes of real controllers: TLS on each by itself, refusals, and what metrics tell."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority
from tests.kit.real_cluster import FAST, STEADY, put
from tests.kit.waiting import wait_until
from tests.monitoring.http_calls import get
from tests.monitoring.metrics_table import series_names
from tests.monitoring.planes import Planed, Planes, running
from tests.trust.replaced_files import Placed
from tests.trust.test_tls_cluster import hears
from tests.trust.test_tls_files import SOUND

pytestmark = pytest.mark.process

ALL = [Planes(*choice) for choice in itertools.product((True, False), repeat=3)]
QUICK = (*STEADY, "--tls-reload-ms", "50")
NO_ANSWER = (OSError, http.client.HTTPException)
ALIVE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
NOT_AFTER = 'streammeta_tls_certificate_not_after_timestamp_seconds{plane="%s"}'
REFUSED = 'streammeta_connections_refused_total{cause="%s",plane="%s"}'
BEGUN = "streammeta_tls_handshakes_begun_total"
FAILED = [REFUSED % ("handshake_failed", plane) for plane in ("peers", "http")]
POLICY = "policy.toml"
RELOADS = 'streammeta_tls_reloads_total{plane="%s",result="%s"}'


def logged(planed: Planed, event: str) -> list[dict[str, object]]:
    """Return the first controller's events of a kind; every line must be one of its own."""
    lines = (planed.cluster.root / "controller-1.log").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def shakes_hands(endpoint: str, tls: TlsFiles) -> bool:
    host, _, port = endpoint.partition(":")
    context = tls.load().context(ssl.PROTOCOL_TLS_CLIENT)
    try:
        with (
            socket.create_connection((host, int(port)), timeout=60) as opened,
            context.wrap_socket(opened),
        ):
            return True
    except OSError:
        return False


def refuses_clients(planed: Planed, tls: TlsFiles | None) -> bool:
    with ControllerClient(planed.cluster.endpoints, 1, tls=tls) as client:
        try:
            put(client, "refused", "value")
        except CallError:
            return True
    return False


@pytest.mark.parametrize("planes", ALL, ids=str)
def test_every_plane_is_protected_by_itself(
    authority: Authority, tmp_path: Path, planes: Planes
) -> None:
    """Writes need a majority, so that they show that controllers reach each other."""
    with running(tmp_path, authority, planes) as planed:
        planed.wait_ready()
        planed.write("one")
        assert refuses_clients(planed, None if planes.clients else authority.issue("admin/alice"))
        wrong = None if planes.http else authority.issue("monitor/m")
        with pytest.raises(NO_ANSWER):
            get(planed.http_endpoints[0], "/livez", wrong)

        peers = planed.cluster.peer_endpoints[0]
        # With TLS for clients alone, peers speak plain text and take both.
        takes_tls = planes.peers or planes.clients
        assert shakes_hands(peers, authority.issue("controller/2")) == takes_tls
        hears(peers, ALIVE)
        cause = "handshake_failed" if planes.peers else "connection_broken"
        wait_until(lambda: planed.metrics()[REFUSED % (cause, "peers")] >= 1, "it is counted")

        shown = planed.metrics()
        protected = {"clients": planes.clients, "peers": takes_tls, "http": planes.http}
        assert {plane: NOT_AFTER % plane in shown for plane in protected} == protected


@pytest.fixture(scope="module")
def protected(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planed]:
    """Give controllers of which all planes are protected, under a policy that is empty."""
    root = tmp_path_factory.mktemp("protected")
    (root / POLICY).write_text("")
    options = (*FAST, "--policy", str(root / POLICY))
    with running(root, authority, Planes(), options) as planed:
        planed.wait_ready()
        yield planed


def test_plain_text_and_other_protocols_are_refused_counted_and_told_of_once(
    protected: Planed,
) -> None:
    planed, cluster = protected, protected.cluster
    before = planed.metrics()
    for endpoint in (cluster.endpoints[0], cluster.peer_endpoints[0], planed.http_endpoints[0]):
        for said in (ALIVE, bytes(100), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            assert b"200" not in hears(endpoint, said)
    for endpoint in (cluster.endpoints[0], planed.http_endpoints[0]):
        with ControllerClient([endpoint], 1) as client, pytest.raises(CallError):
            put(client, "refused", "value")

    def counted() -> bool:
        now = planed.metrics()
        more = {name: now[name] - before[name] for name in (BEGUN, *FAILED)}
        return more[BEGUN] >= 4 and more[FAILED[0]] >= 3 and more[FAILED[1]] >= 4

    wait_until(counted, "refusals are counted")
    assert len(logged(planed, "peer_handshake_failed")) == 1
    assert len(logged(planed, "http_handshake_failed")) == 1


def test_the_certificate_of_another_plane_is_of_no_use(
    authority: Authority, protected: Planed
) -> None:
    """A monitor's does not write, a broker's reads no metrics."""
    planed = protected
    assert refuses_clients(planed, planed.monitor)
    for role, status in (("broker/7", 403), ("admin/alice", 200), ("controller/2", 200)):
        answer = get(planed.http_endpoints[0], "/metrics", authority.issue(role))
        assert answer[0] == status
    seen = planed.metrics()
    assert seen['streammeta_requests_refused_total{reason="ROLE_LACKS_CALL"}'] >= 1
    assert seen['streammeta_connections{plane="clients"}'] >= 0
    families = {name.partition("{")[0] for name in seen}
    assert families <= series_names()
    assert {seen[f"streammeta_{name}"] for name in ("quorum_voters", "quorum_has_leader")} == {
        3,
        1,
    }


def test_broken_new_files_leave_the_old_in_use_and_are_counted(
    authority: Authority, tmp_path: Path
) -> None:
    placed = Placed(tmp_path / "own", authority.issue("controller/1"))
    with running(tmp_path / "cluster", authority, Planes(), QUICK, placed.files) as planed:
        planed.wait_ready()
        planed.metrics()
        placed.files.key.write_bytes(authority.issue("controller/2").key.read_bytes())

        def reloads(result: str) -> set[float]:
            seen = planed.metrics()
            return {seen[RELOADS % (plane, result)] for plane in ("clients", "peers", "http")}

        wait_until(lambda: reloads("refused") == {1}, "the broken set is counted")
        planed.write("one")
        placed.place(authority.issue("controller/1", serial=1))
        wait_until(lambda: reloads("replaced") == {1}, "the good set is taken")
        assert reloads("refused") == {1}
        planed.write("two")
        assert len(logged(planed, "certificate_not_replaced")) == 1


def test_the_end_of_a_certificate_is_seen_before_and_named_after(
    authority: Authority, tmp_path: Path
) -> None:
    placed = Placed(tmp_path / "own", authority.issue("controller/1"))
    planes = Planes(http=False)
    with running(tmp_path / "cluster", authority, planes, QUICK, placed.files) as planed:
        planed.wait_ready()
        far = planed.metrics()[NOT_AFTER % "clients"]
        assert far > time.time() + 80 * 86_400
        short = replace(SOUND, end=timedelta(seconds=3)).issue(authority, tmp_path)
        placed.place(short)
        wait_until(lambda: planed.metrics()[NOT_AFTER % "clients"] < far, "the gauge shows it")
        assert planed.metrics()[NOT_AFTER % "peers"] < time.time() + 3
        wait_until(lambda: bool(logged(planed, "certificate_expired")), "the log says so")
        assert len(logged(planed, "certificate_expires_soon")) == 1

        at = planed.cluster.endpoints[0]
        host, _, port = at.partition(":")
        context = authority.issue("admin/alice").load().context(ssl.PROTOCOL_TLS_CLIENT)
        with (
            socket.create_connection((host, int(port)), timeout=60) as opened,
            pytest.raises(ssl.SSLCertVerificationError, match="expired"),
        ):
            context.wrap_socket(opened)
        with (
            ControllerClient([at], 1, tls=planed.admin) as client,
            pytest.raises(CallError, match="expired"),
        ):
            put(client, "refused", "value")


def test_a_controller_without_a_quorum_is_alive_and_not_ready(protected: Planed) -> None:
    planed = protected
    for node_id in (2, 3):
        planed.cluster.children[node_id].kill()
    wait_until(lambda: planed.page("/readyz")[0] == 503, "it is not ready")
    assert "[-] leader: no leader answers" in planed.page("/readyz")[1]
    assert planed.page("/livez") == (200, "ok\n")
    for node_id in (2, 3):
        planed.cluster.start(node_id)
    wait_until(lambda: planed.page("/readyz")[0] == 200, "it is ready again")


def test_a_policy_holds_for_pages_as_for_calls(authority: Authority, protected: Planed) -> None:
    denied = ("monitor/denied", "admin/denied")
    monitor, admin = (authority.issue(principal) for principal in denied)
    at = protected.http_endpoints[0]
    assert get(at, "/livez", monitor)[0] == 200
    fingerprints = [authority.fingerprint(principal) for principal in denied]
    policy = protected.cluster.root / POLICY
    policy.write_text(f"[deny]\nfingerprints = {json.dumps(fingerprints)}\n")
    for child in protected.cluster.children.values():
        child.process.send_signal(signal.SIGHUP)
    wait_until(lambda: get(at, "/livez", monitor)[0] == 403, "its certificate is denied")
    wait_until(lambda: refuses_clients(protected, admin), "so is that of a client")
    assert protected.page("/livez")[0] == 200
