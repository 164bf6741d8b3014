"""The memory of a broker stays within the writer's bound while its producer outruns the store."""

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
    ("record_bytes", "streams", "total"),
    [(16_384, 50, 120 * MIB), (200, 400, 12 * MIB)],
    ids=["16 KiB", "200 B"],
)
def test_resident_memory_grows_by_no_more_than_the_limit(
    record_bytes: int, streams: int, total: int
) -> None:
    limit = 24 * MIB
    arguments = map(str, (limit, record_bytes, streams, total))
    done = subprocess.run(
        [sys.executable, "-m", "tests.broker_client.memory_child", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["found_full"] > 0, "the producer never met a full buffer"
    assert report["stored"] > total
    assert limit // 2 < report["grown"] < limit * ALLOWANCE, report
