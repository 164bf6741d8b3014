"""Settings of a controller: a bad one is named at the start, and each plane uses its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streammeta.controller.config import (
    ConfigError,
    ControllerConfig,
    PeerPlainText,
    next_port,
    parse_peers,
)
from streammeta.controller.ids import ClusterId, NodeId
from streammeta.controller.tls.manager import TlsManager, check_advertised, warn_of_advertised
from streammeta.tls.files import TlsFiles
from tests.kit.certificates import Authority

OURS = TlsFiles(Path("ca.pem"), Path("own.pem"), Path("own.key"))
BEYOND = "10.0.0.3:9090"
HERE = "127.0.0.1:9093"


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
        ({"cluster_id": "a/b"}, "cluster-id: 'a/b'"),
        ({"cluster_id": ""}, "cluster-id"),
        ({"node_id": 1000}, "node-id: 1000"),
        ({"advertise": "h"}, "advertise: 'h'"),
        ({"advertise": "0.0.0.0:9091"}, "advertise: '0.0.0.0:9091' is not an address that others"),
        ({"advertise": "[::]:9091"}, "is not an address that others can connect to"),
        ({"advertise": "h:0"}, "is not an address that others can connect to"),
        ({"peer_listen": "h"}, "peer-listen: 'h'"),
        ({"peer_advertise": "0.0.0.0:9092"}, "peer-advertise: '0.0.0.0:9092' is not an address"),
        ({"peer_listen": "127.0.0.1:9091"}, "peer-listen: '127.0.0.1:9091' equals --listen"),
        ({"peer_advertise": "127.0.0.1:9091"}, "equals --advertise"),
        ({"snapshot_log_bytes": 0}, "snapshot-log-bytes: 0"),
        ({"snapshot_interval_ms": -1}, "snapshot-interval-ms: -1"),
        ({"listen": "localhost"}, "listen: 'localhost'"),
        ({"listen": "h:70000"}, "listen"),
        ({"election_timeout_ms": 0}, "election-timeout-ms: 0"),
        ({"delete_delay_ms": -1}, "delete-delay-ms: -1"),
        ({"delete_rate": 0}, "delete-rate: 0"),
        ({"session_timeout_ms": 0}, "session-timeout-ms: 0"),
        ({"recoveries_per_node": 0}, "recoveries-per-node: 0"),
        ({"sweep_interval_ms": 0}, "sweep-interval-ms: 0"),
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
        ({"http_listen": "h"}, "http-listen: 'h', must be HOST:PORT"),
        ({"http_listen": "127.0.0.1:9091"}, "http-listen: '127.0.0.1:9091' is used by another"),
        ({"http_listen": "127.0.0.1:9092"}, "http-listen: '127.0.0.1:9092' is used by another"),
        ({"http_listen": BEYOND}, f"http-listen: {BEYOND} is plain text, so others on"),
        ({"http_listen": BEYOND, "tls": OURS, "http_plain_text": True}, "or --insecure"),
        ({"http_listen": BEYOND, "peer_tls": OURS}, "use --http-tls-ca, --http-tls-cert and"),
        ({"http_tls": OURS}, "http-tls-ca: needs --http-listen"),
        ({"http_plain_text": True}, "http-plain-text: needs --http-listen"),
        ({"http_listen": HERE, "http_plain_text_pages": True}, "needs --http-plain-text"),
        (
            {"http_listen": HERE, "http_tls": OURS, "http_plain_text": True},
            "http-plain-text: excludes --http-tls-ca",
        ),
    ],
)
def test_a_bad_setting_is_named(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "localhost:1", "peer_listen": "[::1]:2"},
        {"listen": BEYOND, "peer_listen": "0.0.0.0:1", "insecure": True},
        {"listen": BEYOND, "peer_listen": "0.0.0.0:1", "tls": OURS},
        {"http_listen": "localhost:1"},
        {"http_listen": BEYOND, "tls": OURS},
        {"http_listen": BEYOND, "http_tls": OURS},
        {"http_listen": BEYOND, "insecure": True},
        {"http_listen": BEYOND, "tls": OURS, "http_plain_text": True, "insecure": True},
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
    assert [listener[2] for listener in both.listeners] == [both.clients]
    assert both.clients is not None
    assert both.peers.dialling is not None
    assert not both.peers.takes_plain_text

    peers = TlsManager(config(peer_tls=second))
    assert peers.clients is None
    assert peers.peers.listening is not None

    moving = TlsManager(
        config(tls=first, tls_listen="127.0.0.1:9", peer_plain_text=PeerPlainText.SPOKEN)
    )
    assert [listener[2] for listener in moving.listeners] == [None, moving.clients]
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


def test_pages_are_shown_in_plain_text_beside_tls_where_that_is_asked_for_alone() -> None:
    plain = {"tls": OURS, "http_listen": HERE, "http_plain_text": True}
    assert not config(**plain).shows_pages
    assert config(**plain, http_plain_text_pages=True).shows_pages
    assert config(tls=OURS, http_listen=HERE).shows_pages
    assert config(http_listen=HERE).shows_pages


def test_the_files_of_clients_hold_unless_others_are_given(authority: Authority) -> None:
    first, second = (authority.issue("controller/1", serial=serial) for serial in (0, 1))

    def protected(**options: object) -> set[str]:
        return {state.plane for state in TlsManager(config(**options)).states()}

    assert protected(tls=first) == {"clients", "peers"}
    assert protected(tls=first, http_listen=HERE) == {"clients", "peers", "http"}
    assert protected(http_tls=second, http_listen=HERE) == {"http"}
    assert protected(tls=first, http_listen=HERE, http_plain_text=True) == {"clients", "peers"}
    assert protected(http_listen=HERE) == set()

    plain = TlsManager(config(http_listen=HERE))
    assert plain.http.listening is None
    assert plain.describe()["http"] == f"{HERE} plain text"
    both = TlsManager(config(tls=first, http_tls=second, http_listen=HERE))
    assert both.http.listening is not None
    assert not both.http.takes_plain_text
    assert both.describe()["http"] == f"{HERE} tls 1.3"


def test_the_certificate_for_http_is_the_controllers_own(authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"http-tls-cert.*controller/1"):
        TlsManager(config(http_listen=HERE, http_tls=authority.issue("controller/2")))


def test_peers_are_served_one_port_above_clients() -> None:
    assert next_port("listen", "[::1]:9090") == "[::1]:9091"
    for none_next in ("h:65535", "h:0"):
        with pytest.raises(ConfigError, match=r"peer-listen.*--listen"):
            next_port("listen", none_next)
    with pytest.raises(ConfigError, match=r"^listen: 'h'"):
        next_port("listen", "h")


def test_peers_parse() -> None:
    assert parse_peers("seeds", "1@a:1, 2@[::1]:2") == {1: "a:1", 2: "[::1]:2"}
    assert parse_peers("seeds", "") == {}


@pytest.mark.parametrize(
    "text", ["1", "x@a:1", "1@a", "1@a:1,1@b:2", "1@a:b", "1000@a:1", "1@0.0.0.0:1", "1@a:0"]
)
def test_malformed_peers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^seeds: "):
        parse_peers("seeds", text)
