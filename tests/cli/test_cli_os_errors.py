"""Hints for errors of the operating system fit the kind of error."""

from __future__ import annotations

import errno
import socket

import pytest

from streammeta.cli.framework.output import explain, run_cli
from streammeta.cli.root import cli


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EADDRINUSE, "address in use"), "choose another address to listen on"),
        (OSError(errno.EADDRNOTAVAIL, "no such address"), "choose another address to listen on"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "that its server runs"),
        (socket.gaierror(-2, "Name or service not known"), "that its server runs"),
        (PermissionError(errno.EACCES, "denied", "/x"), "check the path"),
    ],
)
def test_the_next_step_fits_the_error(error: OSError, hint: str) -> None:
    assert hint in explain(error).hint


def test_a_listener_whose_error_has_the_cause_alone() -> None:
    error = OSError("http-listen: can't listen on 127.0.0.1:1")
    error.__cause__ = OSError(errno.EADDRINUSE, "address in use")
    assert "choose another address to listen on" in explain(error).hint


def test_a_kafka_broker_on_a_port_in_use_names_the_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["kafka", "--connect", "127.0.0.1:1", "--store", "file:///tmp", "--node-id", "1"]
        code = run_cli(cli, [*words, "--listen", f"127.0.0.1:{port}"])
    said = capsys.readouterr().err
    assert code == 1
    assert f"'127.0.0.1', {port}" in said
    assert "choose another address to listen on" in said
