"""A run on several workers never has two clusters of processes at a time."""

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


# xdist stops grouping, without a word, when pytest has changed the way it names tests.
def test_tests_that_start_processes_share_a_worker(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    log = tmp_path / "workers"
    for mark in MARKS:
        (tmp_path / f"test_{mark}.py").write_text(MODULE.format(mark=mark, log=str(log)))

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    workers = log.read_text().split()
    assert len(workers) == 4 * len(MARKS)
    assert len(set(workers)) == 1, workers
