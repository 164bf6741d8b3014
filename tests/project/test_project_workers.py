"""A run on several workers never has more than three clusters of processes at a time."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MARKS = ("process", "s3")

MODULE = """
import os, pathlib, pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("number", range(4))
def test_tells_its_worker(number):
    with pathlib.Path({log!r}).open("a") as log:
        log.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""

FILES = 9
WORKERS = 5


# xdist stops grouping, without a word, when pytest has changed the way it names tests.
def test_tests_that_start_processes_share_three_workers(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    log = tmp_path / "workers"
    for number, mark in itertools.product(range(FILES), MARKS):
        module = MODULE.format(mark=mark, log=str(log))
        (tmp_path / f"test_{mark}_{number}.py").write_text(module)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(WORKERS), "--dist", "loadgroup", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    workers = log.read_text().split()
    assert len(workers) == 4 * FILES * len(MARKS)
    assert len(set(workers)) == 3, workers
