"""Programs of other projects that tests run, and released Java classes as their peers."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

FETCHED = Path(__file__).resolve().parents[2] / ".tools" / "bin"


def program(*names: str) -> str | None:
    """Return the path of the first of these programs that is there."""
    for name in names:
        found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
        if found is not None:
            return found
    return None


def needs(*names: str) -> pytest.MarkDecorator:
    """Return a mark for tests that run one of these programs: without it they are skipped."""
    return pytest.mark.skipif(
        program(*names) is None, reason=f"no {names[0]} on PATH: run ./scripts/fetch_tools"
    )


def path_of(name: str) -> str:
    """Return the path of a program that a test runs behind `needs(name)`."""
    found = program(name)
    assert found is not None, name
    return found


_ROOT = Path(__file__).parent.parent.parent
_PEERS = _ROOT / "tests" / "interop"
_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class JavaPeer:
    """A compiled `Peer.java` of tests/interop, with the classes it needs."""

    classpath: str

    def run(self, *words: str) -> list[str]:
        """Run it; return the lines of its standard output."""
        quick = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m")
        command = ["java", *quick, "-cp", self.classpath, "Peer"]
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()


def java_peer(name: str, classes: Path) -> JavaPeer:
    """Compile a peer into `classes`; the test is skipped if something it needs is not there."""
    fetched = _ROOT / ".java" / f"{name}-classpath"
    if not fetched.exists():
        pytest.skip(f"classes of {name} are not there: run ./scripts/fetch_peers")
    for program in ("java", "javac"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH: install a JDK")
    jars = fetched.read_text().strip()
    missing = [jar for jar in jars.split(":") if not Path(jar).exists()]
    if missing:
        pytest.skip(f"{missing[0]} is gone: run ./scripts/fetch_peers")
    source = _PEERS / name / "Peer.java"
    subprocess.run(["javac", "-cp", jars, "-d", str(classes), str(source)], check=True)
    return JavaPeer(f"{classes}:{jars}")
