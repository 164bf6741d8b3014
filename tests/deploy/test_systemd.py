"""The unit is well-formed and shut in, and a controller speaks to the manager that it names.

No systemd runs here: its own linter reads the unit, and a socket takes the manager's part.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from streammeta.cli.local.local_cluster import Child
from streammeta.cli.root import cli
from streammeta.controller.process.operating_system import ServiceManager
from tests.kit.real_cluster import controller_command, format_data, start_python
from tests.kit.tools import needs, path_of

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy/systemd/streammeta.service"
SETTINGS = ROOT / "deploy/systemd/controller.toml"

EXPOSURE_MAX = 15
"""Tenths of systemd's score of exposure: 0 is shut in, 96 is open."""

PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
"""Of prctl(2): memory that can be written never becomes executable, as the unit asks for."""

DENIED_THEN_RUN = f"""
import ctypes, os, sys
answer = ctypes.CDLL(None).prctl({PR_SET_MDWE}, {PR_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0)
os.environ["DENIED"] = str(answer == 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

needs_linter = needs("systemd-analyze")


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [path_of("systemd-analyze"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_linter
def test_the_unit_is_well_formed(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "streammeta"
    unit = UNIT.read_text().replace("/opt/streammeta/bin/streammeta", str(program))
    assert str(program) in unit
    place = tmp_path / "streammeta.service"
    place.write_text(unit)
    done = analyze("verify", "--man=no", place)
    ours = [line for line in done.stderr.splitlines() if "streammeta" in line]
    assert (done.returncode, ours) == (0, [])


@needs_linter
def test_the_unit_is_shut_in() -> None:
    done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", UNIT)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_unit_runs_the_settings_beside_it() -> None:
    start = re.search(r"^ExecStart=(.*)$", UNIT.read_text(), re.M)
    assert start is not None
    program, *words = start[1].split()
    assert Path(program).name == "streammeta"
    assert words == ["controller", "--config", f"/etc/streammeta/{SETTINGS.name}"]
    shown = CliRunner().invoke(cli, ["config", "show", "--config", str(SETTINGS)])
    assert shown.exit_code == 0, shown.output


@contextlib.contextmanager
def manager_at(address: str) -> Iterator[Callable[[], str]]:
    """A service manager's socket; yields a call that waits for the next datagram."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address.replace("@", "\0", 1))
        channel.settimeout(60)
        yield lambda: channel.recv(4096).decode()


def heard_until(receive: Callable[[], str], line: str) -> list[str]:
    """All lines up to and including the first that begins with `line`."""
    heard: list[str] = []
    while not any(notice.startswith(line) for notice in heard):
        heard += receive().splitlines()
    return heard


@pytest.mark.process
@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_controller_tells_of_its_life(tmp_path: Path, is_abstract: bool) -> None:
    format_data(tmp_path)
    address = f"@streammeta-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}
    with manager_at(address) as receive:
        child = start_python("told", controller_command(tmp_path), tmp_path, environment)
        try:
            begun = heard_until(receive, "READY=1")
            assert begun[0].startswith("EXTEND_TIMEOUT_USEC=")
            assert "WATCHDOG=1" not in begun
            child.wait_ready()
            heard_until(receive, "WATCHDOG=1")
            child.process.terminate()
            heard_until(receive, "STOPPING=1")
            assert child.process.wait(60) == 0
        finally:
            child.kill()


@pytest.mark.process
def test_a_controller_runs_where_no_memory_becomes_executable(tmp_path: Path) -> None:
    format_data(tmp_path)
    words = ["-c", DENIED_THEN_RUN, *controller_command(tmp_path)]
    child: Child = start_python("shut-in", words, tmp_path)
    try:
        child.wait_ready()
        environment = Path(f"/proc/{child.process.pid}/environ").read_bytes()
        if b"DENIED=True" not in environment:
            pytest.skip("this kernel does not deny it")
        child.process.terminate()
        assert child.process.wait(60) == 0
    finally:
        child.kill()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
    ids=["none", "zero", "no number", "another process"],
)
async def test_a_process_that_is_not_watched_sends_no_beats(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    address = str(tmp_path / "notify")
    with manager_at(address) as receive:
        manager = ServiceManager({"NOTIFY_SOCKET": address, **environment})
        manager.ready("serves")
        assert receive() == "READY=1\nSTATUS=serves"
        await manager.run()  # ends, since there is nothing more to say
        manager.stopping("ends")
        assert receive() == "STOPPING=1\nSTATUS=ends"


async def test_a_manager_that_is_gone_hurts_nobody(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    manager.ready("serves")
    await manager.run()
