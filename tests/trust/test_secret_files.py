"""Secrets are their owner's, or root's and readable by our group."""

import os
import stat

import pytest

from streammeta.tls.secret_files import is_open_to_others

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
