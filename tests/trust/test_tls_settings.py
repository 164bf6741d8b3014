"""Settings of a controller for TLS: what is refused at the start, and what each plane then uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streammeta.controller.config import ConfigError, ControllerConfig, PeerPlainText
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.tls.manager import TlsManager, check_advertised, warn_of_advertised
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority

OURS = TlsFiles(Path("ca.pem"), Path("own.pem"), Path("own.key"))
BEYOND = "10.0.0.3:9090"


def config(**options: object) -> ControllerConfig:
    settings = {
        "node_id": NodeId(1),
        "cluster_id": ClusterId("test"),
        "listen": "127.0.0.1:9091",
        "advertise": "127.0.0.1:9091",
        "peer_listen": "127.0.0.1:9092",
        "peer_advertise": "127.0.0.1:9092",
        "data_dir": Path("data"),
        "store_uri": "file:///tmp/bucket",
        "namespace": "_streammeta_test",
        **options,
    }
    return ControllerConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"listen": BEYOND}, f"listen: {BEYOND} accepts plain text from other machines"),
        ({"listen": "[::]:1"}, "use --tls-ca, --tls-cert and --tls-key, or --insecure"),
        ({"listen": "0.0.0.0:1"}, "or --insecure"),
        ({"listen": "c3.example:1"}, "or --insecure"),
        ({"peer_listen": BEYOND}, f"peer-listen: {BEYOND} accepts plain text"),
        ({"tls": OURS, "tls_listen": "127.0.0.1:1", "listen": BEYOND}, "listen: 10.0.0.3"),
        (
            {"tls": OURS, "peer_listen": BEYOND, "peer_plain_text": PeerPlainText.TAKEN},
            "use --peer-plain-text none, or --insecure",
        ),
        ({"tls_listen": "127.0.0.1:1"}, "tls-listen: needs --tls-ca"),
        ({"tls": OURS, "tls_listen": "127.0.0.1:9091"}, "tls-listen: '127.0.0.1:9091' is used"),
        ({"tls": OURS, "tls_listen": "h"}, "tls-listen: 'h', must be HOST:PORT"),
        ({"peer_plain_text": PeerPlainText.SPOKEN}, "peer-plain-text: needs files for TLS"),
        ({"tls_reload_ms": 0}, "tls-reload-ms: 0"),
        ({"connection_age_ms": 0}, "connection-age-ms: 0"),
    ],
)
def test_what_would_be_open_to_everybody_must_be_said(
    options: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "localhost:1", "peer_listen": "[::1]:2"},
        {"listen": BEYOND, "peer_listen": "0.0.0.0:1", "insecure": True},
        {"listen": BEYOND, "peer_listen": "0.0.0.0:1", "tls": OURS},
    ],
)
def test_loopback_tls_and_what_is_said_pass(options: dict[str, object]) -> None:
    config(**options)


def test_planes_have_the_certificates_that_are_given(authority: Authority) -> None:
    first = authority.issue("controller/1")
    second = authority.issue("controller/1", serial=1)

    plain = TlsManager(config())
    assert (plain.clients, plain.peers.dialling, plain.peers.listening) == (None, None, None)
    assert plain.describe() == {
        "clients": "127.0.0.1:9091 plain text",
        "peers": "127.0.0.1:9092 plain text",
    }

    both = TlsManager(config(tls=first))
    assert [each[2] for each in both.listeners] == [both.clients]
    assert both.clients is not None
    assert both.peers.dialling is not None
    assert not both.peers.takes_plain_text

    peers = TlsManager(config(peer_tls=second))
    assert peers.clients is None
    assert peers.peers.listening is not None

    moving = TlsManager(
        config(tls=first, tls_listen="127.0.0.1:9", peer_plain_text=PeerPlainText.SPOKEN)
    )
    assert [each[2] for each in moving.listeners] == [None, moving.clients]
    assert (moving.peers.dialling, moving.peers.takes_plain_text) == (None, True)
    assert moving.describe() == {
        "clients": "127.0.0.1:9091 plain text, 127.0.0.1:9 tls 1.3",
        "peers": "127.0.0.1:9092 tls 1.3, plain text spoken",
    }


@pytest.mark.parametrize(
    ("principal", "cluster_id"),
    [("controller/2", "test"), ("broker/1", "test"), ("controller/1", "other")],
)
def test_a_controller_shows_its_own_certificate(
    authority: Authority, principal: str, cluster_id: str
) -> None:
    files = authority.issue(principal, cluster_id=cluster_id)
    uri = re.escape(f"streammeta://{cluster_id}/{principal}")
    for option in ("tls", "peer_tls"):
        told = f"^{option.replace('_', '-')}-cert: .* names {uri}, must name "
        with pytest.raises(ConfigError, match=told + "streammeta://test/controller/1"):
            TlsManager(config(**{option: files}))


@pytest.mark.parametrize(
    ("advertise", "hosts", "is_good"),
    [
        ("127.0.0.1:1", ("127.0.0.1",), True),
        ("[::1]:1", ("::1",), True),
        ("C3.example:1", ("c3.example",), True),
        ("c3.example:1", ("*.example",), True),
        ("c3.far.example:1", ("*.example",), False),
        ("c3.example:1", ("127.0.0.1", "c4.example"), False),
    ],
)
def test_the_names_that_clients_are_told_must_be_in_the_certificate(
    authority: Authority, advertise: str, hosts: tuple[str, ...], is_good: bool
) -> None:
    checked = config(advertise=advertise, tls=authority.issue("controller/1", hosts=hosts))
    if is_good:
        check_advertised(checked)
    else:
        with pytest.raises(ConfigError, match=r"tls-cert.*--advertise"):
            check_advertised(checked)
    with capture_logs() as logs:
        warn_of_advertised(checked)
    assert len(logs) == (not is_good)
