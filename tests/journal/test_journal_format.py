"""The bytes in a data directory are those written down, and those of earlier releases."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import google_crc32c
import pytest

from tests.broker_client.wal_tools import LOG, open_disk, recovered, sequences_of
from tests.journal.journal_tools import (
    CLUSTER,
    DIRECTORY,
    STATE,
    VOTERS,
    batch,
    held_by,
    open_journal,
    snapshot_id,
    written_disk,
)
from tests.kit.crash_disk import CrashDisk


def crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def written() -> CrashDisk:
    batches = batch(0, 3, b"ab", b"", b"cde", control=True), batch(3, 7, b"f")
    return written_disk(1, batches, snapshots=((3, 3),))


def sealed(disk: CrashDisk, name: str) -> dict[str, object]:
    data = disk.contents()[DIRECTORY / name]
    assert data.endswith(b"}\n")
    fields = json.loads(data)
    checksum = fields.pop("checksum")
    assert checksum == crc(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return dict(fields)


def test_the_names_are_the_documented_ones() -> None:
    assert sorted(path.name for path in written().contents()) == [
        "00000000000000000000.log",
        "00000000000000000003-0000000003.checkpoint",
        "00000000000000000003.log",
        "flushed-mark",
        "meta.json",
        "quorum-state",
    ]


def test_small_files() -> None:
    disk = written()
    meta = sealed(disk, "meta.json")
    assert len(bytes.fromhex(str(meta.pop("log_id")))) == 16
    assert meta.pop("directory_id") == "d"
    (voter,) = VOTERS
    assert meta == {
        "version": 2,
        "cluster_id": CLUSTER,
        "node_id": 1,
        "bootstrap_voters": [{"node_id": 1, "directory_id": "d", "endpoint": voter.endpoint}],
    }
    assert sealed(disk, "quorum-state") == {
        "version": 1,
        "epoch": 9,
        "leader_id": 3,
        "voted_id": 2,
        "voted_directory_id": "",
    }


def test_segments_as_written_by_hand() -> None:
    """Bytes made from the document alone are what the journal wrote."""
    disk = written()
    log_id = bytes.fromhex(str(sealed(disk, "meta.json")["log_id"]))

    def segment(base: int, previous_epoch: int, *batches: bytes) -> bytes:
        fields = struct.pack(">4s16sQQ", b"SMS2", log_id, base, previous_epoch)
        return fields + struct.pack(">I", crc(fields)) + b"".join(batches)

    def one_batch(
        base: int, epoch: int, flushed: int, kind: int, payloads: tuple[bytes, ...]
    ) -> bytes:
        body = b"".join(struct.pack(">I", len(p)) for p in payloads) + b"".join(payloads)
        counts = (crc(body), len(body), base, epoch, flushed, kind, len(payloads))
        fields = struct.pack(">IIQQQBI", *counts)
        return b"SMB1" + struct.pack(">I", crc(log_id + fields)) + fields + body

    contents = disk.contents()
    first = segment(0, 0, one_batch(0, 3, 0, 2, (b"ab", b"", b"cde")))
    second = segment(3, 3, one_batch(3, 7, 3, 1, (b"f",)))
    assert contents[DIRECTORY / "00000000000000000000.log"] == first
    assert contents[DIRECTORY / "00000000000000000003.log"] == second


def test_the_mark_as_written_by_hand() -> None:
    """A mark made from the document alone counts; the slot with the higher sequence wins."""
    disk = written()
    log_id = bytes.fromhex(str(sealed(disk, "meta.json")["log_id"]))

    def slot(sequence: int, end_offset: int, cutting: int) -> bytes:
        body = struct.pack(">QQB", sequence, end_offset, cutting)
        return struct.pack(">I", crc(log_id + body)) + body

    for slots, expected_end in (
        ((slot(90, 4, 0), slot(91, 3, 1)), 3),  # a cut at 3 was begun: it is finished
        ((slot(92, 4, 0), slot(91, 3, 1)), 4),
        ((slot(92, 4, 0), b"torn"), 4),
    ):
        contents = disk.contents()
        contents[DIRECTORY / "flushed-mark"] = slots[0].ljust(4096, b"\0") + slots[1]
        journal = open_journal(DIRECTORY, 1, CrashDisk.holding(contents))
        assert (journal.end_offset, journal.log_start.lost) == (expected_end, None)


FILES = json.loads(Path(__file__).with_name("golden_logs.json").read_text())
"""By the name of a log: its files by name, compressed, in base64."""


def golden(name: str, directory: Path) -> CrashDisk:
    files = FILES[name].items()
    return CrashDisk.holding(
        {directory / file: zlib.decompress(base64.b64decode(data)) for file, data in files}
    )


@pytest.mark.parametrize(("name", "is_repaired"), [("journal", False), ("repaired journal", True)])
def test_a_journal_of_an_earlier_release_opens_unchanged(name: str, is_repaired: bool) -> None:
    disk = golden(name, DIRECTORY)
    before = disk.contents()
    held = held_by(open_journal(DIRECTORY, 120, disk))
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
