"""A run on several workers has three clusters of processes at most while other tests are left."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MARKS = ("process", "s3", *3 * ("filterwarnings('error')",))
"""Those of files, of which the first two have processes."""

MODULE = """
import os, pathlib, pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("number", range(4))
def test_tells_its_worker(number):
    with pathlib.Path({log!r}).open("a") as log:
        log.write(os.environ["PYTEST_XDIST_WORKER"] + " {file}\\n")
"""

FILES = 4
WORKERS = 4


# xdist stops grouping, without a word, when pytest has changed the way it names tests.
@pytest.mark.timeout(600)
def test_tests_that_start_processes_share_three_workers(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    log = tmp_path / "workers"
    for file, mark in enumerate(MARKS * FILES):
        module = MODULE.format(mark=mark, log=str(log), file=file)
        (tmp_path / f"test_{file}.py").write_text(module)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(WORKERS), "--dist", "loadgroup", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    begun = [(worker, int(file)) for worker, file in lines]
    assert len(begun) == 4 * FILES * len(MARKS)
    others = list(dict.fromkeys(file for _, file in begun if file % len(MARKS) > 1))
    # Each worker may have been given one more file than it has begun.
    some_are_left = begun[: [file for _, file in begun].index(others[-2 * WORKERS])]
    workers = {worker for worker, file in some_are_left if file % len(MARKS) < 2}
    assert 1 <= len(workers) <= 3, workers
