"""A compaction of any size stays within the memory it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1024 * 1024
ALLOWANCE = 1.2
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
@pytest.mark.parametrize(
    ("streams", "record_bytes", "overlap"), [(6, 64_000, 1), (300, 4_000, 0)], ids=["6", "300"]
)
def test_resident_memory_grows_by_no_more_than_the_budget(
    tmp_path: Path, streams: int, record_bytes: int, overlap: int
) -> None:
    budget, total = 24 * MIB, 96 * MIB
    arguments = map(str, (tmp_path, budget, total, 8 * MIB, streams, record_bytes, overlap))
    done = subprocess.run(
        [sys.executable, "-m", "tests.broker_client.compaction_child", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["bytes_read"] > total * 0.8
    assert report["bytes_written"] > total * 0.8
    assert report["sources_checked"] == total // (8 * MIB)
    assert budget // 4 < report["grown"] < budget * ALLOWANCE, report
