"""A data directory: its bytes, earlier releases' too, its owner, and broken invariants."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.journal import errors
from streammeta.controller.journal.directory import DirectoryIdentity, format_directory
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.voters import ReplicaKey
from tests.broker_client.wal_tools import LOG, open_disk, recovered, sequences_of
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk


def crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def written() -> CrashDisk:
    batches = tools.batch(0, 3, b"ab", b"", b"cde", control=True), tools.batch(3, 7, b"f")
    return tools.written_disk(1, batches, snapshots=((3, 3),))


def sealed(disk: CrashDisk, name: str) -> dict[str, object]:
    data = disk.contents()[tools.DIRECTORY / name]
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
    (voter,) = tools.VOTERS
    assert meta == {
        "version": 2,
        "cluster_id": tools.CLUSTER,
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
    assert contents[tools.DIRECTORY / "00000000000000000000.log"] == first
    assert contents[tools.DIRECTORY / "00000000000000000003.log"] == second


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
        contents[tools.DIRECTORY / "flushed-mark"] = slots[0].ljust(4096, b"\0") + slots[1]
        journal = tools.open_journal(tools.DIRECTORY, 1, CrashDisk.holding(contents))
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
    disk = golden(name, tools.DIRECTORY)
    before = disk.contents()
    held = tools.held_by(tools.open_journal(tools.DIRECTORY, 120, disk))
    batches = (
        tools.batch(0, 3, b"ab", b"", b"cde", control=True),
        tools.batch(3, 7, b"f"),
        tools.batch(4, 8, b"g" * 50, b"h"),
    )
    assert held.batches == batches[: 2 if is_repaired else 3]
    assert (held.state, held.snapshots) == (tools.STATE, (tools.snapshot_id(3, 3),))
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


def test_an_epoch_never_decreases_on_disk() -> None:
    disk = CrashDisk()
    tools.make(tools.DIRECTORY, disk)
    journal = tools.open_journal(tools.DIRECTORY, files=disk)

    with pytest.raises(AssertionError):
        journal.write_quorum_state(QuorumState(Epoch(tools.STATE.epoch - 1)))

    journal.close()
    assert tools.open_journal(tools.DIRECTORY, files=disk).quorum_state == tools.STATE


def test_no_offset_beyond_the_log_counts_as_flushed() -> None:
    disk = CrashDisk()
    tools.make(tools.DIRECTORY, disk)
    journal = tools.open_journal(tools.DIRECTORY, files=disk)
    journal.append([tools.batch(0, 1, b"x")])

    journal.flushed_end = EndOffset(2)

    with pytest.raises(AssertionError):
        journal.sync()


def format_it(path: Path, **options: Any) -> DirectoryIdentity:
    return format_directory(path, **{"cluster_id": tools.CLUSTER, "node_id": tools.NODE, **options})


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_an_unformatted_directory_is_refused_and_stays_empty(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(errors.DirectoryNotFormattedError):
            tools.open_journal(path)
    assert not list(tmp_path.iterdir())


def test_formatting_gives_an_identity_that_stays(tmp_path: Path) -> None:
    identity = format_it(tmp_path / "data", directory_id=DirectoryId("d"))
    journal = tools.open_journal(tmp_path / "data")
    assert journal.identity == identity
    assert identity.directory_id == "d"
    journal.close()
    with pytest.raises(errors.WrongDirectoryError, match="formatted"):
        format_it(tmp_path / "data")


@pytest.mark.parametrize(
    ("cluster_id", "node_id", "named"),
    [
        (ClusterId("other"), tools.NODE, "'other'"),
        (tools.CLUSTER, NodeId(2), "node 2"),
        (tools.CLUSTER, tools.NODE, "x-9"),
    ],
)
def test_the_directory_of_another_is_refused_untouched(
    tmp_path: Path, cluster_id: ClusterId, node_id: NodeId, named: str
) -> None:
    format_it(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(errors.WrongDirectoryError, match=named):
        tools.open_journal(
            tmp_path, cluster_id=cluster_id, node_id=node_id, directory_id=DirectoryId("x-9")
        )
    assert contents(tmp_path) == before


def test_a_directory_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(errors.WrongDirectoryError, match=r"thesis\.tex"):
        tools.open_journal(tmp_path)
    with pytest.raises(errors.WrongDirectoryError, match="empty"):
        format_it(tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"ten years of work"}


def test_unknown_files_beside_ours_are_left_alone(tmp_path: Path) -> None:
    format_it(tmp_path)
    strangers = {"notes.txt": b"n", "7.log": b"7", "x.tmp": b"x", "0.log.tmp": b"0"}
    for name, data in strangers.items():
        (tmp_path / name).write_bytes(data)
    tools.open_journal(tmp_path).close()
    assert strangers.items() <= contents(tmp_path).items()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    format_it(tmp_path)
    journal = tools.open_journal(tmp_path)
    with pytest.raises(errors.DirectoryLockedError, match="pid"):
        tools.open_journal(tmp_path)
    journal.close()
    tools.open_journal(tmp_path).close()


def test_a_directory_with_votes_but_no_identity_is_never_formatted_again(tmp_path: Path) -> None:
    format_it(tmp_path)
    journal = tools.open_journal(tmp_path)
    journal.write_quorum_state(QuorumState(Epoch(3), ReplicaKey(NodeId(2))))
    journal.close()
    (tmp_path / "meta.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(errors.WrongDirectoryError):
        format_it(tmp_path)
    assert contents(tmp_path) == before


def test_one_process_at_a_time_also_after_a_kill(tmp_path: Path) -> None:
    """The lock is the kernel's: it ends with the process, and a file left behind is no lock."""
    format_it(tmp_path)
    program = (
        "import sys, time; from pathlib import Path;"
        "from streammeta.storage.durable_files import PosixFileSystem;"
        "PosixFileSystem().lock(Path(sys.argv[1]) / '.lock'); print('locked', flush=True);"
        "time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(errors.DirectoryLockedError, match=f"pid {child.pid}"):
            tools.open_journal(tmp_path)
    finally:
        child.kill()
        child.communicate()
    tools.open_journal(tmp_path).close()
