"""Settings of the listener for HTTP: what is refused at the start, and which files it then uses."""

from __future__ import annotations

import re

import pytest

from streammeta.controller.config import ConfigError
from streammeta.controller.tls.manager import TlsManager
from tests.kit.certificates import Authority
from tests.trust.test_tls_settings import BEYOND, OURS, config

HERE = "127.0.0.1:9093"


@pytest.mark.parametrize(
    ("options", "told"),
    [
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
def test_what_others_could_read_must_be_said(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"http_listen": "localhost:1"},
        {"http_listen": BEYOND, "tls": OURS},
        {"http_listen": BEYOND, "http_tls": OURS},
        {"http_listen": BEYOND, "insecure": True},
        {"http_listen": BEYOND, "tls": OURS, "http_plain_text": True, "insecure": True},
    ],
)
def test_loopback_tls_and_what_is_said_pass(options: dict[str, object]) -> None:
    config(**options)


def test_pages_are_shown_in_plain_text_beside_tls_where_that_is_asked_for_alone() -> None:
    plain = {"tls": OURS, "http_listen": HERE, "http_plain_text": True}
    assert not config(**plain).shows_pages
    assert config(**plain, http_plain_text_pages=True).shows_pages
    assert config(tls=OURS, http_listen=HERE).shows_pages
    assert config(http_listen=HERE).shows_pages


def test_the_files_of_clients_hold_unless_others_are_given(authority: Authority) -> None:
    first, second = (authority.issue("controller/1", serial=serial) for serial in (0, 1))

    def protected(**options: object) -> set[str]:
        return {each.plane for each in TlsManager(config(**options)).states()}

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
