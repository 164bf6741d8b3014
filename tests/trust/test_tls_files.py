"""Files for TLS and other secrets are checked before use; errors name the option and the file."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.tls import files as tls
from streammeta.tls.files import TlsError, TlsFiles, tls_files
from streammeta.tls.secret_files import is_open_to_others
from tests.kit.certificates import Authority


def test_a_set_that_fits_names_its_principal(authority: Authority) -> None:
    contents = authority.issue("broker/1007").load()
    assert str(contents.principal) == "broker/1007"
    assert "PRIVATE" not in repr(contents)


def test_some_of_the_files_are_no_set(tmp_path: Path) -> None:
    assert tls_files(None, None, None) is None
    with pytest.raises(TlsError, match=r"peer-tls-key.*--peer-tls-ca"):
        tls_files(tmp_path, tmp_path, None, "peer-tls")


@pytest.fixture
def good(authority: Authority, tmp_path: Path) -> TlsFiles:
    """Give files of the test's own, which it may spoil."""
    files = authority.issue("admin/alice")
    copies = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
    for source, copy in (
        (files.ca, copies.ca),
        (files.certificate, copies.certificate),
        (files.key, copies.key),
    ):
        copy.write_bytes(source.read_bytes())
    copies.key.chmod(0o600)
    return copies


@pytest.mark.parametrize("installed", [True, False])
def test_each_file_must_be_what_it_should_be(
    good: TlsFiles, authority: Authority, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(tls, "find_spec", lambda _: None)
    absent, nonsense = good.ca.with_name("absent"), good.ca.with_name("nonsense")
    nonsense.write_text("nonsense")
    nonsense.chmod(0o600)
    other = authority.issue("admin/other")
    for files, told in [
        (replace(good, ca=absent), "tls-ca: can't read .*absent"),
        (replace(good, ca=nonsense), "tls-ca: can't use .*nonsense.*must contain CA certificates"),
        (replace(good, certificate=absent), "tls-cert: can't read .*absent"),
        (replace(good, certificate=nonsense), "tls-cert: can't use .*nonsense"),
        (replace(good, key=other.key), "tls-cert: .*with its key, without a password"),
        (replace(good, key=absent), "tls-key: can't read .*absent"),
    ]:
        with pytest.raises(TlsError, match=f"(?s)^{told}"):
            files.load()
    good.key.chmod(0o640)
    with pytest.raises(TlsError, match=r"tls-key.*0640.*600"):
        good.load()


def test_what_needs_cryptography_is_judged_where_it_is_installed(
    good: TlsFiles, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = replace(good, ca=stranger.ca)
    with pytest.raises(TlsError, match=re.escape(f"tls-cert: {good.certificate} was signed by an")):
        foreign.load()
    monkeypatch.setattr(tls, "find_spec", lambda _: None)
    assert foreign.load().principal is None


def test_a_certificate_of_an_authority_is_no_leaf(authority: Authority) -> None:
    as_leaf = TlsFiles(authority.ca, authority.files.certificate, authority.files.key)
    with pytest.raises(TlsError, match="authority"):
        as_leaf.load()


def test_a_bundle_must_hold_an_authority(good: TlsFiles) -> None:
    with pytest.raises(TlsError, match="tls-ca"):
        replace(good, ca=good.certificate).load()


ROOT, OURS = 0, 10001


def status(owner: int, mode: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, OURS, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("process", "owner", "mode", "is_open"),
    [
        (OURS, OURS, 0o600, False),
        (OURS, OURS, 0o400, False),
        (OURS, OURS, 0o640, True),
        (OURS, ROOT, 0o440, False),  # as Kubernetes places it for a group
        (OURS, ROOT, 0o640, False),
        (OURS, ROOT, 0o660, True),
        (OURS, ROOT, 0o444, True),
        (ROOT, ROOT, 0o600, False),
        (ROOT, ROOT, 0o640, True),
    ],
)
def test_a_secret_is_open_to_others(
    monkeypatch: pytest.MonkeyPatch, process: int, owner: int, mode: int, is_open: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: process)
    assert is_open_to_others(status(owner, mode)) == is_open
