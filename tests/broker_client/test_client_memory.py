"""Reader, writer and compaction stay within the memory they are given, measured from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.broker_client import memory_child

pytestmark = pytest.mark.process

ALLOWANCE = 1.2
ROOT = Path(__file__).resolve().parents[2]


def measured(name: str, *arguments: object) -> dict[str, Any]:
    """Run a child process to its end; return the figures on its last line."""
    program = [sys.executable, "-m", "tests.broker_client.memory_child"]
    command = [*program, name, json.dumps(arguments, default=str)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("payload", [1_000, 16_384], ids=["small records", "large records"])
def test_a_reader_grows_by_no_more_than_its_limits(payload: int, tmp_path: Path) -> None:
    report = measured("reader", tmp_path, memory_child.write_objects(tmp_path, payload))
    assert report["read"] >= memory_child.OBJECTS * memory_child.OBJECT_BYTES
    assert report["held"] <= memory_child.LIMIT_BYTES
    assert report["grown"] <= memory_child.LIMIT_BYTES * ALLOWANCE, report


@pytest.mark.parametrize(
    ("record_bytes", "streams", "total"),
    [(16_384, 50, 120 * memory_child.MIB), (200, 400, 12 * memory_child.MIB)],
    ids=["16 KiB", "200 B"],
)
def test_a_fast_writer_grows_within_its_buffer(record_bytes: int, streams: int, total: int) -> None:
    limit = 24 * memory_child.MIB
    report = measured("writer", limit, record_bytes, streams, total)
    assert report["found_full"] > 0, "the producer never met a full buffer"
    assert report["stored"] > total
    assert limit // 2 < report["grown"] < limit * ALLOWANCE, report


@pytest.mark.parametrize(
    ("streams", "record_bytes", "overlap"),
    [(6, 64_000, True), (300, 4_000, False)],
    ids=["6", "300"],
)
def test_a_compaction_grows_by_no_more_than_its_budget(
    tmp_path: Path, streams: int, record_bytes: int, overlap: bool
) -> None:
    budget, total = 24 * memory_child.MIB, 96 * memory_child.MIB
    shape = (8 * memory_child.MIB, streams, record_bytes, overlap)
    report = measured("compactor", tmp_path, budget, total, *shape)
    assert report["bytes_read"] > total * 0.8
    assert report["bytes_written"] > total * 0.8
    assert report["sources_checked"] == total // (8 * memory_child.MIB)
    assert budget // 4 < report["grown"] < budget * ALLOWANCE, report
