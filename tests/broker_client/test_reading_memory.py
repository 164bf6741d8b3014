"""However much is read, a reader keeps within the memory it was given: measured from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_client.reading_process import LIMIT_BYTES, STORED_BYTES

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.process
@pytest.mark.parametrize("payload", [1_000, 16_384], ids=["small records", "large records"])
def test_resident_memory_grows_by_no_more_than_the_limits(payload: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.broker_client.reading_process", str(tmp_path), str(payload)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["read_bytes"] >= STORED_BYTES
    assert measured["held_bytes"] <= LIMIT_BYTES
    assert measured["grown_bytes"] <= LIMIT_BYTES * 1.2, measured
