"""The audit log's writer and its file: order, restarts, full files and renames by others."""

import asyncio
import json
import stat
from pathlib import Path

import pytest

from streammeta.controller.errors import AuditUnavailableError
from streammeta.controller.trust.audit.check import split, verify
from streammeta.controller.trust.audit.file import AuditFile, Entry, StandardOutput
from streammeta.controller.trust.audit.lines import line_hash
from streammeta.controller.trust.audit.writer import AuditWriter
from streammeta.storage.durable_files import DiskFullError, PosixFileSystem
from tests.kit.crash_disk import CrashDisk, Left, crashes
from tests.kit.waiting import until
from tests.trust.audited_cluster import MemoryLog, line

PATH = Path("/logs/audit.log")


def entries(*numbers: int) -> list[Entry]:
    return [Entry(line(number)) for number in numbers]


def start() -> list[Entry]:
    return [Entry(line(0, call="audit.start"))]


def breaks(disk: CrashDisk) -> list[str]:
    files = [
        split(path.name, data)
        for path, data in disk.contents().items()
        if path.parent == PATH.parent and data
    ]
    return [break_.problem for chain in verify(files) for break_ in chain.breaks]


def test_a_chain_goes_on_after_a_restart() -> None:
    disk = CrashDisk()
    first = AuditFile(disk, PATH)
    first.append(entries(1, 2))
    head = first.chain.head
    first.close()
    second = AuditFile(disk, PATH)
    assert (second.chain.seq, second.chain.head) == (2, head)
    second.append(start())
    assert breaks(disk) == []


def test_a_full_file_is_renamed_after_its_last_line() -> None:
    disk = CrashDisk()
    log = AuditFile(disk, PATH, bytes_max=700)
    for number in range(7):
        log.append(entries(number))
    names = [name for name in disk.names(PATH.parent) if name != PATH.name]
    assert names == ["audit.log.000000000003", "audit.log.000000000006"]
    assert breaks(disk) == []


def test_a_chain_goes_on_after_a_restart_with_an_empty_file() -> None:
    disk = CrashDisk()
    AuditFile(disk, PATH).append(entries(1))
    full = disk.contents()[PATH]
    disk = CrashDisk.holding({PATH.with_name("audit.log.000000000001"): full, PATH: b""})
    AuditFile(disk, PATH).append(start())
    assert breaks(disk) == []


@pytest.mark.parametrize("space", range(4))
def test_a_full_file_that_finds_no_room_to_be_renamed_loses_and_repeats_nothing(space: int) -> None:
    disk = CrashDisk()
    log = AuditFile(disk, PATH, bytes_max=1)
    log.append(entries(1))
    disk.space = space
    for _ in range(3):
        with pytest.raises(DiskFullError):
            log.append(entries(2))
    disk.space = None
    log.append(entries(2))
    data = b"".join(disk.contents().values())
    assert sorted(json.loads(row)["seq"] for row in data.splitlines()) == [1, 2]
    assert breaks(disk) == []


def test_a_full_file_that_another_program_has_renamed_is_left(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "audit.log", tmp_path / "elsewhere"
    log = AuditFile(PosixFileSystem(), path, bytes_max=1)
    log.append(entries(1))
    path.rename(elsewhere)
    log.append(entries(2))
    log.close()
    found = [split(place.name, place.read_bytes()) for place in (elsewhere, path)]
    assert [len(file.lines) for file in found] == [1, 1]
    assert verify(found)[0].breaks == []


def test_a_file_renamed_by_another_program_is_left_when_told() -> None:
    disk = CrashDisk()
    log = AuditFile(disk, PATH)
    log.append(entries(1))
    disk.rename(PATH, PATH.with_name("audit.log.1"))
    log.append(entries(2))
    log.reopen()
    log.append(entries(3))
    contents = disk.contents()
    assert len(contents[PATH.with_name("audit.log.1")].splitlines()) == 2
    assert len(contents[PATH].splitlines()) == 1
    assert breaks(disk) == []


@pytest.mark.parametrize("leaves", ["reopening", "a restart"])
def test_lines_before_a_sync_are_durable_however_the_file_was_left(leaves: str) -> None:
    """An anchor names the last durable line: a crash that took it would look like a cut."""
    disk = CrashDisk()
    log = AuditFile(disk, PATH)
    log.append(entries(1))
    if leaves == "reopening":
        disk.rename(PATH, PATH.with_name("audit.log.1"))
        log.reopen()
    else:
        log = AuditFile(disk, PATH)
    head = log.chain.head
    after = disk.after_crash(Left.NOTHING).contents()
    assert [line_hash(data.rstrip(b"\n")) for data in after.values() if data] == [head]


def test_a_write_that_found_no_room_is_written_anew() -> None:
    disk = CrashDisk()
    log = AuditFile(disk, PATH)
    log.append(entries(1))
    disk.space = 40
    with pytest.raises(DiskFullError):
        log.append(entries(2, 3))
    assert log.chain.seq == 1
    disk.space = None
    log.append(entries(2, 3))
    assert log.chain.seq == 3
    assert breaks(disk) == []


def test_after_any_crash_the_chain_goes_on_and_what_was_synced_is_there() -> None:
    def act(disk: CrashDisk) -> None:
        log = AuditFile(disk, PATH, bytes_max=500)
        for number in range(4):
            log.append(entries(number))
            log.sync()

    for where, disk in crashes(CrashDisk(), act):
        log = AuditFile(disk, PATH)
        log.append(start())
        assert breaks(disk) == [], where


def test_a_line_cut_short_stays_and_is_followed_by_a_whole_one() -> None:
    disk = CrashDisk()
    log = AuditFile(disk, PATH)
    log.append(entries(1, 2))
    data = disk.contents()[PATH]
    torn = CrashDisk.holding({PATH: data[:-30]})
    AuditFile(torn, PATH).append(start())
    whole, cut, begun = torn.contents()[PATH].splitlines()
    assert json.loads(whole)["seq"] == 1
    assert data.startswith(whole + b"\n" + cut)
    assert json.loads(begun)["seq"] == 2
    assert breaks(torn) == []


def test_a_crash_between_the_newline_of_a_torn_line_and_the_next_line() -> None:
    disk = CrashDisk()
    AuditFile(disk, PATH).append(entries(1, 2))
    torn = CrashDisk.holding({PATH: disk.contents()[PATH][:-30]})
    AuditFile(torn, PATH)
    AuditFile(torn, PATH).append(start())
    assert len(torn.contents()[PATH].splitlines()) == 3
    assert breaks(torn) == []


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "audit.log"
    AuditFile(PosixFileSystem(), path).append(entries(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes().splitlines()) == 1


def test_lines_to_standard_output_are_a_chain_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        log = StandardOutput(file.fileno())
        log.append(entries(1, 2))
        log.sync()
        log.reopen()
        log.append(entries(3))
        log.close()
    (found,) = verify([split("out", path.read_bytes())])
    assert (found.lines, found.breaks) == (3, [])


def numbers(log: MemoryLog) -> list[int]:
    return [json.loads(written)["target"]["node"] - 1000 for written in log.written]


async def test_lines_are_written_in_order_and_all_of_them_before_the_end() -> None:
    log = MemoryLog()
    writer = AuditWriter(log)
    assert all(writer.put(line(number)) for number in range(500))
    await writer.stop()
    assert numbers(log) == list(range(500))
    assert log.synced == 500
    assert writer.head == log.chain


async def test_a_line_that_is_waited_for_is_synced_at_once() -> None:
    log = MemoryLog()
    writer = AuditWriter(log, sync_every_s=3_600)
    writer.put(line(1))
    await writer.written(line(2))
    assert log.synced == 2
    writer.put(line(3))
    await until(lambda: len(log.written) == 3)
    assert log.synced == 2
    await writer.stop()


async def test_lines_are_synced_after_a_while_if_nobody_waits() -> None:
    log = MemoryLog()
    writer = AuditWriter(log, sync_every_s=0.01)
    writer.put(line(1))
    await until(lambda: log.synced == 1)
    await writer.stop()


async def test_without_room_lines_are_lost_and_counted_by_the_next() -> None:
    log = MemoryLog(error=OSError("no room"))
    writer = AuditWriter(log, capacity=2, sync_every_s=0.01)
    assert [writer.put(line(number)) for number in range(5)] == [True, True, False, False, False]
    assert writer.problem
    log.error = None
    await until(lambda: len(log.written) == 2)
    assert writer.put(line(9))
    await writer.stop()
    assert [json.loads(written).get("dropped") for written in log.written] == [None, None, 3]
    assert writer.lost == 3


async def test_who_waits_hears_of_a_failure_and_the_line_is_written_later() -> None:
    log = MemoryLog(error=OSError("no room"))
    writer = AuditWriter(log, sync_every_s=0.01)
    with pytest.raises(AuditUnavailableError):
        await writer.written(line(1))
    await until(lambda: "no room" in writer.problem)
    log.error = None
    await until(lambda: not writer.problem)
    assert numbers(log) == [1]
    await writer.written(line(2))
    await writer.stop()
    assert numbers(log) == [1, 2]


async def test_a_failed_sync_is_a_failure() -> None:
    log = MemoryLog(sync_error=OSError("bad disk"))
    writer = AuditWriter(log, sync_every_s=0.01)
    with pytest.raises(AuditUnavailableError, match="bad disk"):
        await writer.written(line(1))
    log.sync_error = None
    await until(lambda: not writer.problem)
    await writer.stop()
    assert numbers(log) == [1]
    assert log.synced == 1


async def test_a_log_that_can_not_be_written_does_not_keep_the_process() -> None:
    writer = AuditWriter(MemoryLog(error=OSError("no room")), sync_every_s=0.01)
    writer.put(line(1))
    async with asyncio.timeout(60):
        await writer.stop()


async def test_a_log_is_reopened_by_the_thread() -> None:
    log = MemoryLog()
    writer = AuditWriter(log)
    writer.reopen()
    await until(lambda: log.reopened == 1)
    await writer.stop()


async def test_a_caller_that_has_left_is_not_told() -> None:
    log = MemoryLog()
    writer = AuditWriter(log)
    waiting = asyncio.ensure_future(writer.written(line(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await writer.stop()
    assert numbers(log) == [1]
