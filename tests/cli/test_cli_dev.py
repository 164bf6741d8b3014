"""`streammeta dev --tls`: what it prints is enough for the next command, and for a broker."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from streammeta.cli.local_certificates import LocalCertificates
from streammeta.cli.local_cluster import PROGRAM, start_child
from streammeta.client import BrokerSession, ControllerClient, PermissionDeniedError
from streammeta.rpc.identity import USER_ROLES, Role
from streammeta.rpc.tls import TlsFiles


def test_certificates_of_an_earlier_run_are_used_again(tmp_path: Path) -> None:
    first = LocalCertificates(tmp_path, "test").of(Role.BROKER, 7)
    shown = first.certificate.read_bytes()
    again = LocalCertificates(tmp_path, "test")
    assert (again.of(Role.BROKER, 7), first.certificate.read_bytes()) == (first, shown)
    first.key.chmod(0o644)  # as good as expired: of no use
    assert again.of(Role.BROKER, 7).load().certificate != shown
    assert str(again.of(Role.ADMIN, "a.b").load().principal) == "admin/a.b"


@pytest.mark.process
async def test_the_next_command_connects_by_what_dev_prints(tmp_path: Path) -> None:
    words = [*PROGRAM, "dev", "--tls", "--data-dir", str(tmp_path), "--format", "json"]
    child = start_child("dev", words, tmp_path / "dev.log")
    try:
        answer = json.loads(child.read_line())
        assert answer["ok"], child.log_tail()
        variables = answer["environment"]
        assert variables["STREAMMETA_CONNECT"] == answer["connect"]
        assert _describe(variables)[0] == 0
        code, said = _describe({"STREAMMETA_CONNECT": answer["connect"]})
        assert (code, said["error"]["code"]) == (1, "NO_CONTROLLER")
        assert "--tls-ca" in said["error"]["hint"]

        folder = tmp_path / "certificates"
        assert {f"{role}-dev.pem" for role in USER_ROLES} <= {one.name for one in folder.iterdir()}
        seven = TlsFiles(folder / "ca.pem", folder / "broker-7.pem", folder / "broker-7.key")
        async with ControllerClient(answer["connect"].split(","), tls=seven) as client:
            await BrokerSession.open(client, 7, 1)
            with pytest.raises(PermissionDeniedError, match="broker/7 may not speak for node 8"):
                await BrokerSession.open(client, 8, 1)
    finally:
        assert child.stop(30) == 0


def _describe(variables: dict[str, str]) -> tuple[int, dict[str, dict[str, str]]]:
    done = subprocess.run(
        [*PROGRAM, "quorum", "describe", "--format", "json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)
