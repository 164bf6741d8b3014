"""A full disk leaves nothing half done: the same call succeeds when there is room again.

The disk is full after every number of bytes, then it heals, or the process restarts first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streammeta.cli.framework.output import explain
from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.journal.errors import DirectoryNotFormattedError
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.storage.durable_files import DiskFullError, PosixFile
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk, Left

SEGMENT_BYTES = 150
BATCHES = [
    tools.batch(0, 1, b"one" * 9),
    tools.batch(1, 1, b"two" * 30),
    tools.batch(2, 2, b"x" * 60),
]
MORE = [tools.batch(3, 2, b"more"), tools.batch(4, 2, b"y" * 120), tools.batch(5, 3, b"z" * 30)]
NEW_STATE = QuorumState(Epoch(10), ReplicaKey(NodeId(2)), NodeId(1))
AHEAD = tools.snapshot_id(100, 5)
AHEAD_DATA = tools.snapshot_bytes(AHEAD)


def reopen(disk: CrashDisk) -> Journal:
    return tools.open_journal(tools.DIRECTORY, SEGMENT_BYTES, disk, room_bytes=100)


@pytest.fixture
def disk() -> CrashDisk:
    return tools.written_disk(SEGMENT_BYTES, BATCHES, snapshots=((1, 1),))


def append_more(journal: Journal) -> None:
    journal.append([item for item in MORE if item.base_offset >= journal.end_offset])
    journal.sync()


def take_one(journal: Journal) -> None:
    writer = journal.snapshots.begin(tools.snapshot_id(2, 1))
    try:
        writer.write(tools.snapshot_bytes(writer.snapshot_id))
    except DiskFullError:
        writer.abandon()
        raise
    writer.seal()
    while not journal.finish_snapshot(writer):
        pass


def download_ahead(journal: Journal) -> None:
    tools.download(journal, AHEAD, AHEAD_DATA)


def install_ahead(journal: Journal) -> None:
    digest = hashlib.sha256(AHEAD_DATA).digest()
    journal.install_snapshot(AHEAD, len(AHEAD_DATA), digest)


def nothing(_journal: Journal) -> None:
    pass


Action = Callable[[Journal], None]
CALLS: dict[str, tuple[Action, Action]] = {
    "append": (nothing, append_more),
    "quorum-state": (nothing, lambda journal: journal.write_quorum_state(NEW_STATE)),
    "truncate": (nothing, lambda journal: journal.truncate(EndOffset(1))),
    "download": (nothing, download_ahead),
    "install": (download_ahead, install_ahead),
}


def held_after_power_failure(disk: CrashDisk, left: Left) -> tools.Held:
    return tools.held_by(reopen(disk.after_crash(left)))


def full_at_every_byte(
    disk: CrashDisk, prepare: Action, act: Action
) -> Iterator[tuple[int, CrashDisk, Journal]]:
    """Yield the disk and journal after `act` met a full disk, for every number of free bytes."""
    for space in range(2000):
        victim = disk.copy()
        journal = reopen(victim)
        prepare(journal)
        victim.space, victim.charges_overwriting = space, True
        try:
            act(journal)
        except DiskFullError:
            yield space, victim, journal
        else:
            assert space, "there was room from the beginning"
            return
    raise AssertionError("never enough room")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_found_no_room_can_be_repeated(disk: CrashDisk, name: str) -> None:
    prepare, act = CALLS[name]
    roomy = disk.copy()
    journal = reopen(roomy)
    before = tools.held_by(journal)
    prepare(journal)
    act(journal)
    journal.close()
    after = tools.held_by(reopen(roomy.copy()))
    for space, victim, journal in full_at_every_byte(disk, prepare, act):
        for left in Left:
            held = held_after_power_failure(victim, left)
            assert is_between(held, before, after), f"{space} bytes free, {left.name} left"
        victim.space = None
        act(journal)
        assert tools.read_all(journal) == list(after.batches), f"{space} bytes free"
        journal.close()
        assert tools.held_by(reopen(victim.copy())) == after, f"{space} bytes free"


def is_between(held: tools.Held, before: tools.Held, after: tools.Held) -> bool:
    """Whether this is the old state, the new one, or the old with some of the new batches."""
    grown = after.batches[: len(held.batches)] == held.batches and len(held.batches) >= len(
        before.batches
    )
    return held in (before, after) or (grown and held.state == before.state and not held.lost)


def test_a_snapshot_that_finds_no_room_leaves_none_taken(disk: CrashDisk) -> None:
    """A half-written snapshot must not be what keeps the disk full."""
    complete = len(tools.snapshot_bytes(tools.snapshot_id(2, 1))) + 1
    for space, victim, journal in full_at_every_byte(disk, nothing, take_one):
        if space == complete:
            continue  # only the name found no room; the file is complete and is finished later
        assert victim.space is not None
        assert [path.name for path in victim.contents() if path.name.endswith(".tmp")] == []
        assert len(journal.snapshots.kept) == 1
        victim.space = None
        take_one(journal)
        assert list(journal.snapshots.kept) == [tools.snapshot_id(1, 1), tools.snapshot_id(2, 1)]


def test_a_repeated_rename_publishes_the_snapshot(disk: CrashDisk) -> None:
    journal = reopen(disk)
    writer = tools.sealed_snapshot(journal, tools.snapshot_id(2, 1))
    disk.space = 0
    with pytest.raises(DiskFullError):
        journal.finish_snapshot(writer)
    assert len(journal.snapshots.kept) == 1
    disk.space = 1
    assert journal.finish_snapshot(writer)
    assert list(journal.snapshots.kept) == [tools.snapshot_id(1, 1), tools.snapshot_id(2, 1)]


def test_without_room_for_the_mark_the_log_is_as_durable_as_before(disk: CrashDisk) -> None:
    """The mark may stay behind, as after a power failure; appending goes on."""
    journal = reopen(disk)
    disk.charges_overwriting = True
    for item in MORE:
        journal.append([item])
        disk.space = 5  # tears the slot that is written
        journal.sync()
        disk.space = None
    held = held_after_power_failure(disk, Left.ALL)
    assert list(held.batches) == BATCHES + MORE
    assert held.lost is None


def test_a_half_written_batch_takes_no_room(disk: CrashDisk) -> None:
    journal = reopen(disk)
    before = disk.contents()
    disk.space = 60
    with pytest.raises(DiskFullError):
        journal.append([tools.batch(3, 2, bytes(500))])
    assert disk.contents() == before
    assert disk.space == 60


def test_damage_that_finds_no_room_to_be_kept_is_found_again(disk: CrashDisk) -> None:
    contents = disk.contents()
    path = max(path for path in contents if path.suffix == ".log")
    contents[path] = contents[path][:-1] + b"!"
    expected = tools.held_by(reopen(CrashDisk.holding(contents)))
    assert expected.lost is not None
    tried = 0
    for space in range(2000):
        victim = CrashDisk.holding(contents)
        victim.space = space
        try:
            reopen(victim)
        except DiskFullError:
            tried += 1
            assert tools.held_by(reopen(victim.copy())) == expected, f"{space} bytes free"
        else:
            break
    assert tried > 0


def test_a_node_starts_on_a_full_disk(disk: CrashDisk) -> None:
    before = tools.held_by(reopen(disk))
    disk.locked, disk.space, disk.charges_overwriting = False, 0, True
    assert tools.held_by(reopen(disk)) == before


def test_a_format_that_found_no_room_can_be_repeated() -> None:
    def act(disk: CrashDisk) -> None:
        format_directory(tools.DIRECTORY, cluster_id=tools.CLUSTER, node_id=tools.NODE, files=disk)

    tried = 0
    for space in range(0, 9000, 7):
        disk = CrashDisk(space=space)
        try:
            act(disk)
        except DiskFullError:
            tried += 1
            with pytest.raises(DirectoryNotFormattedError):
                reopen(disk)
            disk.space = None
            act(disk)
        else:
            break
        assert tools.held_by(reopen(disk)).end_offset == 0, f"{space} bytes free"
    assert tried > 0


@pytest.fixture
def small_files() -> Iterator[int]:
    """Let no file of this process grow beyond a size; the kernel refuses then (EFBIG)."""
    limit = 9000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_kernel_says_when_there_is_no_room(tmp_path: Path, small_files: int) -> None:
    tools.make(tmp_path)
    journal = tools.open_journal(tmp_path)
    with pytest.raises(DiskFullError) as full:
        journal.append([tools.batch(end, 1, bytes(700)) for end in range(100)])
    assert full.value.errno == errno.EFBIG
    end = journal.end_offset
    assert 0 < end < 100
    journal.append([tools.batch(end, 1, b"a small one still fits")])
    journal.close()
    journal = tools.open_journal(tmp_path)
    assert journal.end_offset == end + 1
    journal.close()
    (segment,) = tmp_path.glob("*.log")
    assert segment.stat().st_size <= small_files


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_only_want_of_room_is_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = PosixFile(tmp_path / "file", create=True)

    def fail(*_: object) -> int:
        raise OSError(number, "as ordered")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="as ordered") as failed:
        file.write(0, b"data")
    assert isinstance(failed.value, DiskFullError) == (number != errno.EIO)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="as ordered") as failed:
        file.sync()
    assert not isinstance(failed.value, DiskFullError), "a failed flush is never tried again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 4 MiB, where this process may mount one."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("this process may not mount a file system")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb") as other:
        while True:
            other.write(bytes(4096))
            other.flush()


def test_on_a_real_full_disk_an_election_is_written_from_the_reserve(small_disk: Path) -> None:
    directory = small_disk / "node"
    tools.make(directory)
    journal = tools.open_journal(directory, reserve_bytes=1 << 20)
    assert journal.reserve.shortage is None
    with pytest.raises(OSError, match="No space left"):
        fill_up(small_disk / "other")
    end = EndOffset(0)
    for epoch in range(10, 60):
        journal.write_quorum_state(QuorumState(Epoch(epoch), ReplicaKey(tools.NODE), None))
        journal.append([tools.batch(end, epoch, b"x" * 2000, control=True)])
        journal.sync()
        end = journal.end_offset
        journal.reserve.refill()
        assert isinstance(journal.reserve.shortage, DiskFullError)
    journal.close()
    found = tools.open_journal(directory, reserve_bytes=1 << 20)
    assert (found.quorum_state.epoch, found.end_offset) == (59, end)
    (small_disk / "other").unlink()
    found.reserve.refill()
    assert found.reserve.shortage is None
    found.close()


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("pread", lambda file: file.read(0, 10)),
        ("pwrite", lambda file: file.write(0, b"x")),
        ("ftruncate", lambda file: file.truncate(0)),
        ("fdatasync", lambda file: file.sync()),
        ("fstat", lambda file: file.size()),
    ],
)
def test_an_error_of_the_disk_names_the_file_and_the_way_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    use: Callable[[PosixFile], object],
) -> None:
    file = PosixFile(tmp_path / "00000000000000000000.log", create=True)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=r"Input/output error: .*00000000000000000000\.log"):
        use(file)
    monkeypatch.undo()
    file.close()


def test_the_answer_to_an_unreadable_file_says_what_to_do() -> None:
    answer = explain(OSError(errno.EIO, "Input/output error", "/data/x.log"))
    assert "/data/x.log" in str(answer)
    assert "another disk" in answer.hint
