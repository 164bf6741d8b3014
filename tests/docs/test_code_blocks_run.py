"""Code blocks of README and docs run as they are printed, on real processes.

Addresses 127.0.0.1:9000 to 9199 become others that are free, at the same distance from each other,
and folders lie below one of the test's. Commands that run until they are stopped stay for the
scene.
"""

from __future__ import annotations

import ast
import asyncio
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import Child, free_ports, start_child, taken_ports
from tests.docs.block_kinds import Ran
from tests.docs.block_settings import NODE_IDS, SETTINGS
from tests.docs.code_blocks import ROOT, Block, commands, entries_of_pages

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PORTS = range(9000, 9200)
"""Ports that pages have."""

BUCKET = "file:///tmp/streammeta/bucket"
"""Bucket that most pages have."""

SERVICES = re.compile(r"^\S*streammeta (dev|controller|kafka) ")
"""Commands that run until they are stopped."""

RUN = [(block, kind) for block, kind in entries_of_pages().kinds.items() if isinstance(kind, Ran)]


PROMPT = re.compile(r"streammeta shell (?!.*-- )")
"""Commands that ask at a terminal for the next one."""


@dataclass
class Scene:
    """A folder with what the blocks of one scene have started and written."""

    root: Path
    first_port: int
    services: dict[str, Child] = field(default_factory=dict)
    exported: str = ""

    @property
    def endpoints(self) -> list[str]:
        """Where a cluster of the scene is reached, by the address that pages have."""
        return [self.place("127.0.0.1:9091")]

    @property
    def bucket(self) -> str:
        """The bucket of the scene's cluster, by the address that pages have."""
        return self.place(BUCKET)

    def place(self, text: str) -> str:
        """Return text of a page with ports and folders of the scene."""
        text = text.replace("s3://bucket?endpoint=http://127.0.0.1:9000", BUCKET)
        text = re.sub(r"(127\.0\.0\.1:|--port )(9[01]\d\d)\b", self._place_port, text)
        return text.replace("/tmp/", f"{self.root}/").replace("/var/lib/", f"{self.root}/var/")

    def _place_port(self, found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) - PORTS.start + self.first_port}"

    def run_shell(self, text: str) -> None:
        """Run a shell block: services stay, all other lines must end with exit code 0."""
        script: list[str] = []
        for line in commands(self.place(text)):
            if SERVICES.match(line):
                self._run_script(script)
                self._start(line)
            elif PROMPT.search(line):
                self._run_script(script)
                self._run_prompt(line)
            else:
                script.append(line)
        self._run_script(script)

    def stop(self) -> None:
        """End all services."""
        for child in reversed(self.services.values()):
            child.stop(30)

    def _start(self, line: str) -> None:
        line = line.removeprefix(".venv/bin/")
        is_known = [known for known in self.services if known.startswith(line)]
        if is_known and all(self.services[known].is_running for known in is_known):
            return  # another page has started it
        command = ["bash", "-c", f"cd {self.root} && exec {line}"]
        child = start_child(line, command, self.root / "service.log", self._environment())
        self.services[line] = child
        child.wait_ready()

    def _run_script(self, lines: list[str]) -> None:
        if not lines:
            return
        self.exported += "".join(f"{line}\n" for line in lines if line.startswith("export "))
        script = "set -eu\n" + self.exported + "\n".join(lines)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.root,
            env={**os.environ, **self._environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        lines.clear()
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"

    def _run_prompt(self, line: str) -> None:
        """Run a line at a terminal of its own, and type `exit`."""
        ours, theirs = pty.openpty()
        try:
            command = ["bash", "-c", f"cd {self.root} && exec {line}"]
            environment = {**os.environ, **self._environment(), "TERM": "dumb"}
            with subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
            ) as process:
                os.write(ours, b"exit\n")
                assert process.wait(120) == 0, os.read(ours, 4096)
        finally:
            os.close(ours)
            os.close(theirs)

    def _environment(self) -> dict[str, str]:
        """Return the variables of docs/operations/README.md."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "CONNECT": self.endpoints[0],
            "STORE": self.bucket,
            "STREAMMETA_PROFILE": "none",
        }

    async def run_python(self, block: Block, setting: str) -> None:
        """Run a whole program in a process, and a fragment with the names of its setting."""
        text = self.place(block.text)
        if not setting:
            (self.root / "first.py").write_text(text)  # the name that the quickstart gives it
            return
        text = text.replace("node_id=7", f"node_id={next(NODE_IDS)}")
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        program = compile(text, str(block), "exec", flags)
        async with SETTINGS[setting](self.endpoints, self.bucket) as names:
            running = eval(program, names)
            if running is not None:
                await running


@pytest.mark.parametrize("name", dict.fromkeys(kind.scene for _, kind in RUN))
def test_the_blocks_of_a_scene_run_as_they_are_printed(name: str, tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "docker").symlink_to(ROOT / "docker")
    (tmp_path / "var" / "broker").mkdir(parents=True)
    scene = Scene(tmp_path, _first_port())
    failures = []
    try:
        for block, kind in RUN:
            if kind.scene == name:
                try:
                    asyncio.run(_run(scene, block, kind))
                except Exception as error:  # noqa: BLE001 - the other blocks are looked at too
                    failures.append(f"{block}: {type(error).__name__}: {error}")
    finally:
        scene.stop()
    assert not failures, "\n\n".join(failures)


def _first_port() -> int:
    """Return the port in place of 9000, so that those in use by pages are free."""
    while True:
        (first,) = free_ports(1)
        if not taken_ports(range(first + 85, first + 120)):
            return first


async def _run(scene: Scene, block: Block, kind: Ran) -> None:
    if block.language == "python":
        await scene.run_python(block, kind.setting)
        return
    lines = [line for line in block.text.splitlines() if line not in kind.skipped]
    async with SETTINGS[kind.setting](scene.endpoints, scene.bucket):
        await asyncio.to_thread(scene.run_shell, "\n".join(lines))
