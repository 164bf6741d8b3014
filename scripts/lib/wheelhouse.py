"""Wheels for the tests that install streammeta into fresh environments, which work offline.

One folder for each interpreter that this machine has of those the product supports: the thin
client's dependencies, and the Google Cloud library whose top-level names (`proto`, `google`) must
not collide with ours. Run by scripts/setup: `python scripts/lib/wheelhouse.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
WHEELHOUSE = ROOT / ".venv" / "wheelhouse"
VERSIONS = ("3.11", "3.12", "3.13")
NEIGHBOURS = ("google-cloud-storage", "proto-plus")


def interpreters() -> dict[str, Path]:
    """Return the interpreters that can make environments, by version ("3.12").

    Looks at the running one, along PATH, and at the versions that pyenv keeps: its commands on PATH
    refuse to run the versions that are not selected.
    """
    found: dict[str, Path] = {}
    for version in VERSIONS:
        usable = (path for path in _candidates(version) if _is_usable(path, version))
        if (first := next(usable, None)) is not None:
            found[version] = first
    return found


def wheels_for(version: str) -> Path:
    """Return the folder with the wheels for one version; complete after scripts/setup."""
    return WHEELHOUSE / version


def main() -> None:
    """Fill the folder of every interpreter, and reuse existing files."""
    for version, python in interpreters().items():
        if not wheels_for(version).exists():
            _download(version, python)


def _candidates(version: str) -> Iterator[Path]:
    yield Path(sys.executable)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder, f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)


def _is_usable(python: Path, version: str) -> bool:
    if not python.exists():
        return False
    program = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return said.returncode == 0 and said.stdout.strip() == version


def _download(version: str, python: Path) -> None:
    """Download with a pip of that interpreter; the folder appears when it is complete."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    WHEELHOUSE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEELHOUSE) as place:
        subprocess.run([python, "-m", "venv", f"{place}/environment"], check=True)
        pip = (f"{place}/environment/bin/python", "-m", "pip", "download", "--quiet")
        options = ("--only-binary=:all:", "--constraint", str(CONSTRAINTS))
        wanted = ("--dest", f"{place}/wheels", *project["dependencies"], *NEIGHBOURS)
        subprocess.run([*pip, *options, *wanted], check=True)
        shutil.move(f"{place}/wheels", wheels_for(version))


if __name__ == "__main__":
    main()
