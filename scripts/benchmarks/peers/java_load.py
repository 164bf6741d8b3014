"""Loads in Java, whose sources are beside this module, on the jars of the plug-ins."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.figures import BenchmarkError

CLIENTS = Path(__file__).resolve().parents[3] / "clients" / "java"


def jar_of(module: str) -> Path:
    """Return the built jar of a module of the Java clients.

    Raises:
        BenchmarkError: there is none.
    """
    found = sorted((CLIENTS / module / "target").glob(f"{module}-*-SNAPSHOT.jar"))
    if not found:
        raise BenchmarkError(
            f"run ./scripts/java --skip-tests -pl {module} -am: its jar is missing"
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class JavaLoad:
    """A compiled load."""

    name: str
    classes: Path
    class_path: str

    @classmethod
    def compile(cls, name: str, classes: Path, class_path: str) -> "JavaLoad":
        """Compile a load into the folder `classes`."""
        source = Path(__file__).with_name(f"{name}.java")
        _run("javac", "-d", str(classes), "-cp", class_path, str(source))
        return cls(name, classes, class_path)

    def run(self, *words: object) -> list[str]:
        """Return the lines that the load prints.

        Raises:
            BenchmarkError: it failed.
        """
        path = f"{self.classes}:{self.class_path}"
        return _run("java", "-Xmx512m", "-cp", path, self.name, *map(str, words)).splitlines()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{command[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout
