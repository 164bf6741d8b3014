"""The simulated disk keeps what was synced, and of the rest whatever it likes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from streammeta.storage.durable_files import DirectoryInUseError, DiskFullError
from tests.sim.sim_disk import SimDisk, StoppedError

HOME = Path("/home")
FILE = HOME / "file"


def disk_with(data: bytes) -> SimDisk:
    disk = SimDisk()
    file = disk.open(FILE, create=True)
    file.write(0, data)
    file.sync()
    disk.sync_directory(HOME)
    return disk


def content(disk: SimDisk, path: Path = FILE) -> bytes:
    file = disk.open(path)
    return file.read(0, file.size())


def outcomes(change: bytes, *, seeds: int = 300) -> set[bytes]:
    """What power failures leave of b"old" with `change` written behind it and not synced."""
    left = set()
    for seed in range(seeds):
        disk = disk_with(b"old")
        disk.open(FILE).write(3, change)
        disk.crash(random.Random(seed))
        left.add(content(disk))
    return left


def test_what_was_synced_survives_any_power_failure() -> None:
    assert all(data.startswith(b"old") for data in outcomes(b"new" * 50))


def test_what_was_not_synced_may_be_lost_kept_or_torn() -> None:
    change = bytes(range(1, 201))
    left = outcomes(change)
    assert {b"old", b"old" + change} <= left
    assert any(b"old" < data < b"old" + change and data in b"old" + change for data in left)
    # Sectors survive one by one: one that is missing reads as zeros.
    assert any(b"\0" in data and data.endswith(change[-8:]) for data in left)


def test_the_death_of_the_process_alone_loses_nothing() -> None:
    disk = disk_with(b"old")
    disk.open(FILE).write(3, b"new")
    disk.lock(HOME / ".lock")
    disk.end_process()
    assert content(disk) == b"oldnew"
    disk.lock(HOME / ".lock").release()


def test_names_are_lost_until_their_directory_is_synced() -> None:
    seen = set()
    for seed in range(50):
        disk = disk_with(b"old")
        file = disk.open(HOME / "other", create=True)
        file.write(0, b"new")
        file.sync()
        disk.rename(HOME / "other", FILE)
        disk.crash(random.Random(seed))
        seen.add((content(disk), tuple(disk.names(HOME))))
    assert seen == {(b"old", ("file",)), (b"old", ("file", "other")), (b"new", ("file",))}


def test_a_rename_is_durable_when_the_directory_is_synced() -> None:
    for seed in range(50):
        disk = disk_with(b"old")
        disk.rename(FILE, HOME / "other")
        disk.sync_directory(HOME)
        disk.crash(random.Random(seed))
        assert disk.names(HOME) == ["other"]


def test_a_failed_sync_loses_what_it_should_have_kept_and_says_so() -> None:
    disk = disk_with(b"old")
    disk.fail_sync_after = 2
    file = disk.open(FILE)
    file.write(3, b"kept")
    file.sync()
    file.write(7, b"lost")
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    file.sync()
    assert content(disk) == disk.durable(FILE) == b"oldkept"


def test_a_full_disk_writes_what_fits_and_takes_no_new_name() -> None:
    disk = disk_with(b"old")
    disk.space = 2
    with pytest.raises(DiskFullError):
        disk.open(FILE).write(3, b"new")
    assert content(disk) == b"oldne"
    with pytest.raises(DiskFullError):
        disk.open(HOME / "other", create=True)
    disk.open(FILE).write(0, b"OLD")  # room it has already
    disk.open(FILE).truncate(1)
    disk.open(HOME / "other", create=True)


def test_a_removed_file_gives_its_room_back_and_stays_readable() -> None:
    disk = disk_with(b"old")
    disk.space = 0
    file = disk.open(FILE)
    disk.remove(FILE)
    assert disk.space == 3
    assert file.read(0, 3) == b"old"
    with pytest.raises(FileNotFoundError):
        disk.open(FILE)


def test_a_stop_comes_at_the_ordered_call() -> None:
    disk = disk_with(b"old")
    disk.crash_after = 2
    file = disk.open(FILE)
    file.write(3, b"1")
    with pytest.raises(StoppedError):
        file.write(4, b"2")
    disk.crash(random.Random(0))
    disk.open(FILE).write(3, b"3")


def test_rot_stays_until_the_byte_is_gone() -> None:
    disk = disk_with(b"old")
    disk.flip(FILE, 1, 0)
    assert content(disk) == b"omd"
    assert disk.is_rotten()
    disk.crash(random.Random(0))
    assert content(disk) == b"omd"
    disk.rename(FILE, HOME / "file.damaged")
    assert not disk.is_rotten()
    disk.rename(HOME / "file.damaged", FILE)
    disk.open(FILE).truncate(1)
    assert not disk.is_rotten()


def test_a_directory_is_locked_once() -> None:
    disk = SimDisk()
    lock = disk.lock(HOME / ".lock")
    with pytest.raises(DirectoryInUseError):
        disk.lock(HOME / ".lock")
    lock.release()
    disk.lock(HOME / ".lock")
