"""A snapshot counts once it is complete, intact and durable, and stays readable to its readers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import pytest

from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.voters import VoterSet
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk
from tests.kit.waiting import ManualClock

BATCHES = [
    tools.batch(0, 1, b"one", b"two"),
    tools.batch(2, 1, b"three"),
    tools.batch(3, 2, b"four", b"five", b"six"),
    tools.batch(6, 4, b"seven"),
]


@pytest.fixture
def disk() -> CrashDisk:
    return tools.written_disk(1, BATCHES)


def reopen(disk: CrashDisk) -> Journal:
    disk.locked = False
    return tools.open_journal(tools.DIRECTORY, 1, disk)


def names(disk: CrashDisk, ending: str) -> list[str]:
    return [name for name in disk.names(tools.DIRECTORY) if name.endswith(ending)]


def test_a_snapshot_ends_only_where_a_batch_ends_and_with_its_epoch(disk: CrashDisk) -> None:
    """C1, C2: the end is exclusive, at a batch's end, with the epoch of the batch before it."""
    ends = {0: 0} | {b.end_offset: b.epoch for b in BATCHES}
    for end_offset in range(9):
        for epoch in range(6):
            journal = reopen(disk.copy())
            writer = tools.sealed_snapshot(journal, tools.snapshot_id(end_offset, epoch))
            if ends.get(end_offset) == epoch:
                assert journal.finish_snapshot(writer)
                assert journal.snapshots.kept == (writer.snapshot_id,)
            else:
                with pytest.raises(ValueError, match="snapshot"):
                    journal.finish_snapshot(writer)
                assert journal.snapshots.kept == ()


def test_a_log_can_begin_at_every_snapshot(disk: CrashDisk) -> None:
    """C13: at the log's start only the snapshot's own epoch continues; recovery agrees."""
    for item in BATCHES:
        trimmed = disk.copy()
        journal = reopen(trimmed)
        which = SnapshotId(item.end_offset, item.epoch)
        tools.take_snapshot(journal, which)
        journal.trim(item.end_offset)
        journal.close()
        journal = reopen(trimmed)
        start = journal.log_start
        rest = [b for b in BATCHES if b.base_offset >= start.start_offset]
        assert tools.read_all(journal) == rest
        assert start.snapshots == (which,)
        if start.start_offset == item.end_offset:
            assert start.start_epoch == item.epoch
        journal.close()


def test_an_unfinished_snapshot_does_not_count_and_is_removed_at_start(disk: CrashDisk) -> None:
    journal = reopen(disk)
    tools.sealed_snapshot(journal, tools.snapshot_id(3, 1))
    tools.download(journal, tools.snapshot_id(50, 4), b"the first half")
    assert journal.snapshots.kept == ()
    assert len(names(disk, ".tmp")) == len(names(disk, ".part")) == 1
    journal = reopen(disk)
    assert journal.snapshots.kept == ()
    assert names(disk, ".tmp") == names(disk, ".part") == []


def test_an_abandoned_snapshot_leaves_nothing(disk: CrashDisk) -> None:
    journal = reopen(disk)
    before = disk.contents()
    writer = journal.snapshots.begin(tools.snapshot_id(3, 1))
    writer.write(b"some")
    writer.abandon()
    assert disk.contents() == before


def test_a_snapshot_that_the_log_has_moved_past_is_dropped(disk: CrashDisk) -> None:
    journal = reopen(disk)
    writer = tools.sealed_snapshot(journal, tools.snapshot_id(3, 1))
    ahead = tools.snapshot_id(100, 5)
    assert tools.install(journal, ahead, tools.snapshot_bytes(ahead)) == tools.VOTERS
    assert not journal.finish_snapshot(writer)
    assert journal.snapshots.kept == (ahead,)
    assert names(disk, ".tmp") == []


def test_an_installed_snapshot_begins_the_log_anew(disk: CrashDisk) -> None:
    journal = reopen(disk)
    tools.take_snapshot(journal, tools.snapshot_id(3, 1))
    ahead = tools.snapshot_id(100, 5)
    assert tools.install(journal, ahead, tools.snapshot_bytes(ahead)) == tools.VOTERS
    more = [tools.batch(100, 5, b"goes on")]
    with pytest.raises(ValueError, match="continue"):
        journal.append([tools.batch(100, 4, b"of an epoch before the snapshot's")])
    journal.append(more)
    journal.close()
    journal = reopen(disk)
    held = tools.held_by(journal)
    assert (held.start_offset, held.end_offset, held.snapshots) == (100, 101, (ahead,))
    assert held.lost is None
    assert tools.read_all(journal) == more
    assert journal.log_start.start_epoch == 5


def test_only_what_was_announced_is_installed(disk: CrashDisk) -> None:
    """C6: cut at each byte, a bit flipped in each byte, or another digest: refused, log kept."""
    which = tools.snapshot_id(100, 5)
    good = tools.snapshot_bytes(which)
    journal = reopen(disk)
    before = disk.contents()
    digest = hashlib.sha256(good).digest()
    bad_files = [good[:size] for size in range(1, len(good))]
    bad_files += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    for bad in bad_files:
        tools.download(journal, which, bad)
        assert journal.install_snapshot(which, len(good), digest) is None
        # What the sender itself holds may be bad: then its digest says nothing.
        assert tools.install(journal, which, bad) is None
    tools.download(journal, which, good)
    assert journal.install_snapshot(which, len(good), hashlib.sha256(b"").digest()) is None
    other = tools.snapshot_id(101, 5)
    assert tools.install(journal, which, tools.snapshot_bytes(other)) is None
    assert journal.install_snapshot(which, len(good), digest) is None, "nothing was downloaded"
    assert disk.contents() == before
    assert journal.snapshots.kept == ()
    assert tools.install(journal, which, good) == tools.VOTERS


def test_chunks_of_two_files_are_never_mixed(disk: CrashDisk) -> None:
    """C7: another leader's file for the same id begins anew; a gap is refused."""
    which, other = tools.snapshot_id(100, 5), tools.snapshot_id(200, 5)
    first, second = tools.snapshot_bytes(which, b"a" * 50), tools.snapshot_bytes(which, b"b" * 50)
    journal = reopen(disk)
    tools.download(journal, which, first[:40])
    with pytest.raises(ValueError, match="download"):
        journal.snapshots.write_chunk(which, 41, b"x")
    with pytest.raises(ValueError, match="download"):
        journal.snapshots.write_chunk(other, 40, b"x")
    journal.snapshots.write_chunk(which, 40, second[40:])
    total, digest = len(second), hashlib.sha256(second).digest()
    assert journal.install_snapshot(which, total, digest) is None
    tools.download(journal, other, b"something else")
    assert tools.install(journal, which, second) == tools.VOTERS
    with journal.snapshots.open(which) as file:
        assert file.read() == second
    assert names(disk, ".part") == []


def test_a_removed_snapshot_stays_readable_until_nobody_reads_it(disk: CrashDisk) -> None:
    """C8: a slow reader finishes the file it began, whatever is trimmed meanwhile."""
    clock = ManualClock(0)
    journal = tools.open_journal(tools.DIRECTORY, 1, disk, monotonic=lambda: clock.now_ms / 1000)
    old, new = tools.snapshot_id(3, 1), tools.snapshot_id(6, 2)
    data = tools.snapshot_bytes(old, bytes(500))
    tools.take_snapshot(journal, old, bytes(500))
    received = b""
    while len(received) < len(data):
        chunk = journal.snapshots.read(old, len(received), 100)
        assert chunk is not None
        assert (chunk.total_bytes, chunk.digest) == (len(data), hashlib.sha256(data).digest())
        received += chunk.data
        if old in journal.snapshots.kept and len(received) > 200:
            tools.take_snapshot(journal, new)
            journal.trim(EndOffset(6))
        clock.advance(59_000)
        journal.snapshots.release_idle()
    assert received == data
    assert journal.snapshots.kept == (new,)
    clock.advance(60_000)
    journal.snapshots.release_idle()
    assert journal.snapshots.read(old, 0, 100) is None


def test_reading_a_snapshot_at_and_beyond_its_end(disk: CrashDisk) -> None:
    journal = reopen(disk)
    which = tools.snapshot_id(3, 1)
    tools.take_snapshot(journal, which)
    data = tools.snapshot_bytes(which)
    for position in (0, 1, len(data) - 1, len(data), len(data) + 9):
        chunk = journal.snapshots.read(which, position, 1 << 20)
        assert chunk is not None
        assert chunk.data == data[position:]
    assert journal.snapshots.read(tools.snapshot_id(3, 2), 0, 10) is None
    journal = reopen(disk)
    chunk = journal.snapshots.read(which, 0, 10)
    assert chunk is not None
    assert chunk.digest == hashlib.sha256(data).digest(), "also of a file found at start"


def spoil_snapshot(disk: CrashDisk) -> str:
    """Change the last byte of the one snapshot; return the file's name."""
    (name,) = names(disk, ".checkpoint")
    inode = disk.names_now[tools.DIRECTORY / name]
    inode.content = inode.content[:-1] + b"!"
    return name


def test_a_snapshot_gone_bad_is_never_handed_on(disk: CrashDisk) -> None:
    journal = reopen(disk)
    tools.take_snapshot(journal, tools.snapshot_id(3, 1))
    journal.close()
    journal = reopen(disk)
    name = spoil_snapshot(disk)
    with pytest.raises(JournalDamagedError, match=name):
        journal.snapshots.read(tools.snapshot_id(3, 1), 0, 10)


def test_a_snapshot_that_went_bad_after_it_was_written_is_not_handed_on_for_ever(
    disk: CrashDisk,
) -> None:
    journal = reopen(disk)
    which = tools.snapshot_id(3, 1)
    tools.take_snapshot(journal, which)
    name = spoil_snapshot(disk)
    chunk = journal.snapshots.read(which, 0, 1 << 20)
    assert chunk is not None
    assert hashlib.sha256(chunk.data).digest() != chunk.digest, "its reader can tell"
    with pytest.raises(JournalDamagedError, match=name):
        journal.snapshots.read(which, 0, 10)
    journal.close()
    assert reopen(disk).snapshots.kept == ()
    assert names(disk, ".damaged") == [f"{name}.damaged"]


def test_the_check_sees_a_file_as_programs_do(tmp_path: Path) -> None:
    """Readers seek from both ends and read pieces, on a real disk."""
    tools.make(tmp_path)
    journal = tools.open_journal(tmp_path)
    journal.append(BATCHES)
    journal.sync()
    tools.take_snapshot(journal, tools.snapshot_id(3, 1))
    journal.close()
    data = tools.snapshot_bytes(tools.snapshot_id(3, 1))

    def check(which: SnapshotId, file: BinaryIO) -> VoterSet:
        assert file.seek(0, 2) == len(data)
        assert file.seek(-5, 1) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.seek(2) == 2
        assert file.read(3) == data[2:5]
        file.seek(0)
        return tools.check_snapshot(which, file)

    journal = tools.open_journal(tmp_path, read_snapshot_voters=check)
    assert journal.snapshots.kept == (tools.snapshot_id(3, 1),)
    journal.close()
