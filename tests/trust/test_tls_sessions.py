"""No TLS session goes on without another look at the certificate, on whichever plane."""

import ssl
from pathlib import Path

import pytest

from streammeta.controller.tls.peer_contexts import PeerTls
from streammeta.tls.files import TlsContents
from streammeta.tls.server_certificates import ServerCertificates
from tests.kit.certificates import Authority


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> TlsContents:
    authority = Authority(tmp_path_factory.mktemp("sessions"), "ours")
    return authority.issue("controller/1", cluster_id="ours").load()


def connected(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLObject:
    """Shake hands in memory, and read what the server sends on its own; return the client's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, session=session)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    theirs.write(b"x")
    assert ours.read(1) == b"x"
    return ours


def test_a_session_is_never_resumed(contents: TlsContents) -> None:
    client = contents.context(ssl.PROTOCOL_TLS_CLIENT)
    peers, clients = PeerTls.of(contents), ServerCertificates(contents)
    http = contents.context(ssl.PROTOCOL_TLS_SERVER)
    clients_of = [clients.context(asks_clients=asks) for asks in (True, False)]
    for server in (peers.listening, http, *clients_of):
        assert server is not None
        first = connected(server, client, None)
        assert first.session is None or not first.session.has_ticket
        assert not connected(server, client, first.session).session_reused


def test_contexts_are_made_in_one_place() -> None:
    root = Path(__file__).parents[2]
    packages = (
        "controller",
        "commands",
        "storage",
        "reconcile",
        "brokers",
        "broker_client",
        "proto",
    )
    found = {
        str(path.relative_to(root))
        for package in packages
        for path in (root / package / "streammeta").rglob("*.py")
        if "ssl.SSLContext(" in path.read_text() or "create_default_context" in path.read_text()
    }
    assert found == {"proto/streammeta/tls/files.py"}
