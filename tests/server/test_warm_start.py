"""Controllers that tests fork from a process that has loaded the product are like any other."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import Child, LocalCluster, free_ports
from tests.kit.real_cluster import FAST, controller_command, format_data
from tests.kit.waiting import wait_until
from tests.kit.warm_start import ForkedProcess, WarmServer, start_warm

pytestmark = pytest.mark.process


@pytest.fixture
def server() -> Iterator[WarmServer]:
    server = WarmServer(["streammeta.controller.process.server"])
    yield server
    server.end()


def forked(server: WarmServer, root: Path) -> Child:
    """A controller that is ready, alone over `root`."""
    format_data(root)
    words = controller_command(root)[1:]
    with (root / "log").open("ab") as log:
        process = server.start(words, log.fileno(), os.environ)
    child = Child("forked", process, root / "log")
    child.wait_ready()
    return child


def pipes(child: Child) -> set[str]:
    """The pipes that a process has open."""
    found = set()
    for link in Path(f"/proc/{child.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(link.readlink()))
    return {line for line in found if line.startswith("pipe:")}


def test_a_forked_controller_has_its_own_session_directory_and_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: WarmServer
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = forked(server, tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    second = forked(server, tmp_path / "second")

    assert os.getsid(second.pid) == second.pid
    assert Path(f"/proc/{second.pid}/cwd").readlink() == tmp_path
    assert len(pipes(first)) == len(pipes(second)) > 0
    assert not pipes(first) & pipes(second), "nothing of the first is the second's"
    assert (first.stop(), second.stop()) == (0, 0)
    assert all("controller_stopped" in child.log_tail(1) for child in (first, second))


def test_the_end_of_a_forked_controller_is_told(tmp_path: Path, server: WarmServer) -> None:
    child = forked(server, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.01)

    os.kill(child.pid, signal.SIGKILL)

    assert child.process.wait(60) == -signal.SIGKILL
    assert not child.is_running
    assert child.stop() == -signal.SIGKILL


def test_forked_controllers_end_with_the_process_that_could_tell(
    tmp_path: Path, server: WarmServer
) -> None:
    child = forked(server, tmp_path)

    os.kill(server.pid, signal.SIGKILL)

    wait_until(lambda: not Path(f"/proc/{child.pid}").exists(), "the controller ends")
    with pytest.raises(RuntimeError, match="has ended"):
        child.process.poll()
    child.process.stdout.close()  # type: ignore[union-attr]


def test_controllers_of_a_cluster_are_forked_from_two_processes(tmp_path: Path) -> None:
    cluster = LocalCluster(
        *(tmp_path, "test", f"file://{tmp_path}", free_ports(3), FAST), starter=start_warm
    )
    try:
        cluster.start_all()
        parents = [
            Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1]
            for child in cluster.children.values()
        ]
    finally:
        cluster.stop_all()

    assert parents[0] == parents[2] != parents[1]
    assert str(os.getpid()) not in parents


@pytest.mark.parametrize("late", ["PYTHONHASHSEED", "GRPC_VERBOSITY"])
def test_a_setting_that_is_read_when_modules_are_loaded_starts_an_interpreter(
    tmp_path: Path, late: str
) -> None:
    format_data(tmp_path)
    command = [sys.executable, *controller_command(tmp_path)]

    child = start_warm("cold", command, tmp_path / "log", {late: "0"})

    assert not isinstance(child.process, ForkedProcess)
    child.wait_ready()
    assert child.stop() == 0
