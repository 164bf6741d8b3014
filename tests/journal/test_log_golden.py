"""Logs in files of an earlier release open, hold what was written, and stay as they are."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import pytest

from tests.broker_client.wal_tools import LOG, open_disk, recovered, sequences_of
from tests.journal.journal_tools import (
    STATE,
    batch,
    held_by,
    open_journal,
    snapshot_id,
)
from tests.kit.crash_disk import CrashDisk

FILES = json.loads(Path(__file__).with_name("golden_logs.json").read_text())
"""By the name of a log: its files by name, compressed, in base64."""

NODE = Path("/node")


def golden(name: str, directory: Path) -> CrashDisk:
    files = FILES[name].items()
    return CrashDisk.holding(
        {directory / file: zlib.decompress(base64.b64decode(data)) for file, data in files}
    )


@pytest.mark.parametrize(("name", "is_repaired"), [("journal", False), ("repaired journal", True)])
def test_a_journal_of_an_earlier_release_opens_unchanged(name: str, is_repaired: bool) -> None:
    disk = golden(name, NODE)
    before = disk.contents()
    held = held_by(open_journal(NODE, 120, disk))
    batches = (
        batch(0, 3, b"ab", b"", b"cde", control=True),
        batch(3, 7, b"f"),
        batch(4, 8, b"g" * 50, b"h"),
    )
    assert held.batches == batches[: 2 if is_repaired else 3]
    assert (held.state, held.snapshots) == (STATE, (snapshot_id(3, 3),))
    assert (held.lost and held.lost.end_offset) == (6 if is_repaired else None)
    assert disk.contents() == before


@pytest.mark.parametrize(("name", "lost"), [("write-ahead log", 0), ("mended write-ahead log", 2)])
def test_a_write_ahead_log_of_an_earlier_release_opens_unchanged(name: str, lost: int) -> None:
    disk = golden(name, LOG)
    before = disk.contents()
    log = open_disk(disk)
    assert sequences_of(recovered(log)) == [5, *range(6 + lost, 26)]
    assert (log.trimmed, log.end, log.lost) == (5, 26, lost)
    assert disk.contents() == before
