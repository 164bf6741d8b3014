"""The log on a disk that stops at any call and forgets what was not synced."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streammeta.client.errors import DamagedLogError, WrongLogError
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.disk_log import DiskLog, lock_directory
from streammeta.client.wal.disk.files import STATE_NAME, StateFile
from streammeta.client.wal.disk.set_aside import read_set_aside
from streammeta.storage.durable_files import PosixFileSystem
from streammeta.storage.segmented_log import segment_path
from tests.broker_client.wal_tools import (
    IDENTITY,
    LOG,
    group_of,
    open_disk,
    record_at,
    recovered,
    sequences_of,
)
from tests.kit.crash_disk import CrashDisk, Left, PowerFailure, WatchedFiles, flipped


@dataclass
class Known:
    """What the user of a log may rely on at any time."""

    acknowledged: int = 0
    attempted: int = 0
    trimmed: int = 0
    steps: list[str] = field(default_factory=list)


def use(disk: DiskLog, known: Known, rng: random.Random) -> None:
    """Append, in groups of different sizes, trim, and set aside, over several segments."""
    for _ in range(6):
        if rng.random() < 0.2:  # some that is appended now is committed before it is written
            known.trimmed = known.attempted + rng.randint(0, 3)
            disk.trim(known.trimmed)
        groups = []
        for _ in range(rng.randint(1, 3)):
            count = rng.randint(3, 6)
            groups.append(group_of(range(known.attempted, known.attempted + count)))
            known.attempted += count
        assert disk.write(groups) == len(groups)
        known.acknowledged = known.attempted
        if rng.random() < 0.5:
            known.trimmed = rng.randint(known.trimmed, known.acknowledged)
            disk.trim(known.trimmed)
        if rng.random() < 0.2:
            disk.set_aside([record_at(known.trimmed)], "a test")


def check(disk: DiskLog, known: Known) -> None:
    """Nothing acknowledged and not trimmed is missing; nothing is doubled, invented or moved."""
    found = sequences_of(recovered(disk))
    assert found == list(range(disk.trimmed, disk.end))
    assert disk.trimmed <= known.trimmed
    assert known.acknowledged <= max(disk.end, known.trimmed)
    assert disk.end <= max(known.attempted, disk.trimmed)


def crash_points() -> Iterator[tuple[int, bool]]:
    known, disk = Known(), CrashDisk()
    use(open_disk(disk), known, random.Random(5))
    for call in range(1, disk.calls + 1):
        yield call, True
        yield call, False


@pytest.mark.parametrize("left", Left)
def test_a_power_failure_at_any_call_loses_nothing_acknowledged(left: Left) -> None:
    for call, comes_first in crash_points():
        disk = CrashDisk(crash_at=call, crash_comes_first=comes_first)
        known, rng = Known(), random.Random(5)
        with pytest.raises(PowerFailure):
            use(open_disk(disk), known, rng)
        for _ in range(3):
            disk = disk.after_crash(left)
            opened = open_disk(disk)
            check(opened, known)
            known = Known(opened.end, opened.end, opened.trimmed)
            disk.calls, disk.crash_at = 0, rng.randint(1, 25)
            try:
                use(opened, known, rng)
            except PowerFailure:
                continue


@pytest.mark.parametrize("left", Left)
def test_a_power_failure_while_the_log_is_opened_loses_nothing(left: Left) -> None:
    broken = CrashDisk(crash_at=30)
    known = Known()
    with pytest.raises(PowerFailure):
        use(open_disk(broken), known, random.Random(5))
    found = broken.after_kill()
    for call in range(1, 40):
        disk = found.after_kill()
        disk.crash_at = call
        try:
            open_disk(disk)
        except PowerFailure:
            check(open_disk(disk.after_crash(left)), known)


def test_what_a_killed_process_left_unsynced_is_durable_once_the_log_is_open() -> None:
    disk = CrashDisk()
    log = open_disk(disk)
    assert log.write([group_of(range(4))]) == 1
    last = disk.segments()[-1]
    log._write_group(group_of(range(4, 8)))
    killed = disk.after_kill()
    killed.names_now[last].durable = killed.names_now[last].durable[:-1]
    assert sequences_of(recovered(open_disk(killed))) == list(range(8))
    assert sequences_of(recovered(open_disk(killed.after_crash(Left.NAMES)))) == list(range(8))


def test_segments_go_oldest_first_and_the_last_one_stays() -> None:
    disk = CrashDisk()
    log = open_disk(disk)
    for begin in range(0, 40, 4):
        log.write([group_of(range(begin, begin + 4))])
    firsts = [segment.base_offset for segment in log.segments]
    assert len(firsts) > 3
    log.trim(firsts[2] - 1)
    assert [segment.base_offset for segment in log.segments] == firsts[1:]
    log.trim(40)
    assert [segment.base_offset for segment in log.segments] == firsts[-1:]
    assert disk.names(LOG).count(f"{firsts[-1]:020d}.wal") == 1
    assert sequences_of(recovered(open_disk(disk.after_kill()))) == []


def test_segments_settled_before_they_are_written_go_at_once() -> None:
    log = open_disk(CrashDisk())
    log.trim(16)
    for begin in range(0, 16, 4):
        log.write([group_of(range(begin, begin + 4))])
        assert len(log.segments) <= 2
    assert log.segments[0].base_offset >= 12


def test_a_full_disk_refuses_groups_and_leaves_no_trace_of_them() -> None:
    for room in range(0, 700, 23):
        disk = CrashDisk()
        log = open_disk(disk)
        assert log.write([group_of([0, 1])]) == 1
        disk.space = room
        groups = [group_of(range(at, at + 3)) for at in range(2, 17, 3)]
        done = log.write(groups)
        last = log.segments[-1]
        assert len(disk.contents()[segment_path(LOG, last.base_offset, ".wal")]) == last.size
        found = recovered(open_disk(disk.after_kill()))
        assert sequences_of(found) == list(range(2 + 3 * done))
        disk.space = None
        log.start_over(17)
        assert log.write([group_of([17, 18])]) == 1
        assert sequences_of(recovered(open_disk(disk.after_kill()))) == [17, 18]


def test_a_full_disk_does_not_keep_a_log_from_being_recovered() -> None:
    disk = CrashDisk()
    log = open_disk(disk)
    log.write([group_of([0, 1, 2])])
    log._write_group(group_of([3]))
    full = disk.after_kill()
    full.space = 0
    found = open_disk(full)
    assert sequences_of(recovered(found)) == [0, 1, 2, 3]
    found.trim(4)
    assert found.write([group_of([4])]) == 0


def test_starting_over_survives_a_power_failure_at_any_call() -> None:
    for call in range(1, 14):
        for left in Left:
            disk = CrashDisk()
            log = open_disk(disk)
            for begin in range(0, 20, 4):
                log.write([group_of(range(begin, begin + 4))])
            disk.calls, disk.crash_at = 0, call
            done = 0
            try:
                log.start_over(30)
                done = log.write([group_of([30, 31])])
            except PowerFailure:
                pass
            disk = disk.after_crash(left)
            log = open_disk(disk)
            found = sequences_of(recovered(log))
            # Either the start over is not durable yet, or all before it is gone.
            assert found in ([*range(20)], [30, 31], [])
            assert done == 0 or found == [30, 31]
            new = [log.end, log.end + 1]
            log.write([group_of(new)])
            assert sequences_of(recovered(open_disk(disk.after_kill()))) == [*found, *new]


def test_another_nodes_or_clusters_log_is_refused_and_untouched(tmp_path: Path) -> None:
    files = PosixFileSystem()
    lock = lock_directory(files, tmp_path, IDENTITY)
    open_disk(files, tmp_path).close()
    lock.release()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wrong = {
        "node 1000": LogIdentity(IDENTITY.namespace, 1001, 1),
        "'_streammeta_test'": LogIdentity("other", 1000, 1),
    }
    for owner, identity in wrong.items():
        with pytest.raises(WrongLogError, match=f"{owner}"):
            lock_directory(files, tmp_path, identity)
        with pytest.raises(WrongLogError, match=f"{owner}"):
            open_disk(files, tmp_path, identity)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_segment_of_another_node_is_refused(tmp_path: Path) -> None:
    files = PosixFileSystem()
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for directory, node_id in ((mine, 1000), (theirs, 2000)):
        directory.mkdir()
        open_disk(files, directory, LogIdentity(IDENTITY.namespace, node_id, 1)).close()
    name = f"{0:020d}.wal"
    (theirs / name).replace(mine / name)
    with pytest.raises(WrongLogError, match=f"{name}.*2000"):
        open_disk(files, mine)


def test_an_older_process_may_not_use_the_log() -> None:
    disk = CrashDisk()
    log = open_disk(disk, identity=LogIdentity(IDENTITY.namespace, 1000, 9))
    log.write([group_of([0])])
    with pytest.raises(WrongLogError, match="epoch 9"):
        open_disk(disk.after_kill(), identity=LogIdentity(IDENTITY.namespace, 1000, 8))


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"sun")
    with pytest.raises(WrongLogError, match=r"holiday\.jpg"):
        lock_directory(PosixFileSystem(), tmp_path, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_unknown_files_in_a_log_are_never_touched() -> None:
    disk = CrashDisk()
    open_disk(disk)
    strangers = {LOG / name: b"mine" for name in ("a.tmp", "1.wal", "state.old", "x.wal.tmp")}
    disk = CrashDisk.holding({**disk.contents(), **strangers})
    log = open_disk(disk)
    log.write([group_of([0, 1, 2, 3])])
    log.trim(4)
    log.start_over(4)
    contents = disk.contents()
    assert {path: contents[path] for path in strangers} == strangers


def test_segments_without_a_state_file_are_damage(tmp_path: Path) -> None:
    open_disk(PosixFileSystem(), tmp_path).close()
    (tmp_path / "state").unlink()
    with pytest.raises(DamagedLogError, match="missing"):
        lock_directory(PosixFileSystem(), tmp_path, IDENTITY)


def test_what_is_set_aside_can_be_read_without_a_log(tmp_path: Path) -> None:
    log = open_disk(PosixFileSystem(), tmp_path)
    records = [record_at(number) for number in range(5)]
    path = log.set_aside(iter(records), "fenced")
    assert path is not None
    assert list(read_set_aside(path)) == ["fenced", *records]
    assert log.set_aside([], "nothing") is None
    assert not list(tmp_path.glob("*.tmp"))
    second = log.set_aside(records[:1], "deleted")
    assert second is not None
    assert second != path
    path.write_bytes(flipped(path.read_bytes(), -1))
    with pytest.raises(DamagedLogError, match=r"\.aside"):
        list(read_set_aside(path))


def test_no_records_set_aside_replace_others() -> None:
    """Neither of one process nor of the next, which finds the log trimmed further."""
    disk = CrashDisk()
    log = open_disk(disk)
    log.write([group_of(range(12))])
    sets = [[record_at(2), record_at(3)], [record_at(4), record_at(5)], [record_at(6)]]
    paths = [log.set_aside(sets[0], "fenced"), log.set_aside(sets[1], "fenced")]
    log.trim(6)
    paths.append(log.set_aside(sets[2], "fenced"))
    log.trim(7)
    disk = disk.after_kill()
    again = open_disk(disk)
    sets.append([record_at(7)])
    paths.append(again.set_aside(sets[3], "fenced"))
    for path, records in zip(paths, sets, strict=True):
        assert path is not None
        assert list(read_set_aside(path, disk)) == ["fenced", *records]


def test_a_process_that_set_nothing_aside_yet_begins_with_the_first_name_again() -> None:
    """So a recovery that is repeated, with the same records, leaves one file."""
    disk = CrashDisk()
    log = open_disk(disk)
    log.write([group_of(range(3))])
    assert log.set_aside([], "nothing") is None
    path = log.set_aside([record_at(0)], "fenced")
    disk = disk.after_kill()
    assert open_disk(disk).set_aside([record_at(0)], "fenced") == path
    assert [path.name for path in disk.contents() if path.suffix == ".aside"] == [
        path.name if path else ""
    ]


def test_what_was_set_aside_survives_a_power_failure() -> None:
    for left in Left:
        disk = CrashDisk()
        path = open_disk(disk).set_aside([record_at(0)], "fenced")
        assert path is not None
        after = disk.after_crash(left)
        assert list(read_set_aside(path, after)) == ["fenced", record_at(0)]
        open_disk(after)
        assert path in after.contents()


def test_a_torn_slot_of_the_state_file_leaves_the_one_before() -> None:
    disk = CrashDisk()
    open_disk(disk)
    path = LOG / STATE_NAME
    for step in range(1, 5):
        state = StateFile.open(disk, path)
        state.note(step, step * 10)
        data = flipped(disk.contents()[path], 4096 + 4096 * ((step + 1) % 2) + 9)
        torn = StateFile.open(CrashDisk.holding({path: data}), path)
        assert (torn.trimmed, torn.flushed) == (step - 1, (step - 1) * 10)


def test_what_is_not_known_to_be_on_the_disk_is_written_again(tmp_path: Path) -> None:
    log = open_disk(PosixFileSystem(), tmp_path)
    log.write([group_of([0])])
    begin = log.segments[0].size
    log._write_group(group_of([1]))
    end = log.segments[0].size
    log.release()
    written: list[range] = []
    files = WatchedFiles(
        lambda call, at: written.append(at) if call == "write" else None, suffix=""
    )
    open_disk(files, tmp_path).close()
    assert range(begin, end) in written
    written.clear()
    open_disk(files, tmp_path).close()
    assert written == []
