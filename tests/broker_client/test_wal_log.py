"""The log as a broker uses it: grouped, bounded, broken for good, or waiting for room."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from streammeta.client import errors
from streammeta.client.wal.disk.config import LogConfig
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.storage.durable_files import DiskFullError
from tests.broker_client.wal_tools import IDENTITY, LOG, SMALL, encoded, record_at, sequences_of
from tests.kit.crash_disk import CrashDisk, WatchedFiles, flipped
from tests.kit.seeds import seeds


class OrderedFiles(WatchedFiles):
    """The machine's files, where the next writes and syncs of segments do as the test says."""

    def __init__(self) -> None:
        super().__init__(self.obey)
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fail: Callable[[str], bool] = lambda _: False
        self.error = OSError(errno.EIO, "the disk is gone")
        self.calls: list[str] = []

    def obey(self, call: str, _bytes: range) -> None:
        if call not in ("write", "sync"):
            return
        assert self.may_go_on.wait(60)
        self.calls.append(call)
        if self.fail(call):
            raise self.error


def append(log: WriteAheadLog, *, size: int = 20) -> asyncio.Future[None]:
    return log.append(*encoded(record_at(log.end, size)))


async def settle(future: asyncio.Future[None]) -> BaseException | None:
    await asyncio.wait([future])
    return future.exception()


def kept(log: WriteAheadLog) -> list[int]:
    return sequences_of(log.recover())


async def test_appends_share_a_sync_and_are_done_in_order_after_it(tmp_path: Path) -> None:
    files = OrderedFiles()
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        files.may_go_on.clear()
        done: list[str] = []
        first = append(log)
        first.add_done_callback(lambda _: done.append("first"))
        await asyncio.sleep(0.01)
        later = {append(log) for _ in range(500)}
        assert len(later) == 1
        later.pop().add_done_callback(lambda _: done.append("later"))
        await asyncio.sleep(0.01)
        assert not done
        files.may_go_on.set()
        await log.flush()
        await asyncio.sleep(0)
        assert done == ["first", "later"]
        assert files.calls == ["write", "sync"] * 2


@pytest.mark.parametrize(
    ("call", "number"), [("write", errno.EIO), ("sync", errno.EIO), ("sync", errno.ENOSPC)]
)
async def test_a_failed_call_breaks_the_log_forever(tmp_path: Path, call: str, number: int) -> None:
    """So does a sync that finds no room: what it was to make durable may be gone already."""
    files = OrderedFiles()
    files.error = OSError(number, "the disk is gone")
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        assert await settle(append(log)) is None
        files.fail = lambda name: name == call
        failing = append(log)
        assert isinstance(await settle(failing), errors.WriteAheadLogBrokenError)
        files.fail = lambda _: False
        files.calls.clear()
        with pytest.raises(errors.WriteAheadLogBrokenError):
            append(log)
        with pytest.raises(errors.WriteAheadLogBrokenError):
            log.has_room(1)
        log.trim(1)
    assert files.calls == []
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        assert kept(log) in ([0], [0, 1])


async def test_groups_behind_a_failed_one_fail_with_it(tmp_path: Path) -> None:
    files = OrderedFiles()
    async with await WriteAheadLog.open(tmp_path, IDENTITY, SMALL, files=files) as log:
        files.may_go_on.clear()
        futures = [append(log)]
        await asyncio.sleep(0.01)
        futures += [append(log) for _ in range(20)]
        assert len(set(futures)) > 3
        files.fail = lambda call: call == "sync"
        files.may_go_on.set()
        for future in futures:
            assert isinstance(await settle(future), errors.WriteAheadLogBrokenError)


async def test_used_bytes_stay_within_the_bound_and_trim_gives_them_back(tmp_path: Path) -> None:
    rng = random.Random(11)
    async with await WriteAheadLog.open(tmp_path, IDENTITY, SMALL) as log:
        waits = 0
        for _ in range(150):
            # From tiny ones to the largest that is allowed: each gets its room in the end.
            size = rng.choice([12, 20, 200, 900, log.max_record_bytes - 33])
            while not log.has_room(size + 33):
                waits += 1
                await log.flush()
                if not log.has_room(size + 33):
                    log.trim(rng.randint(log.trimmed, log.end) if rng.random() < 0.8 else log.end)
                    await log.flush()
                assert disk_bytes(tmp_path) <= SMALL.max_bytes
            log.append(*encoded(record_at(log.end, size)))
            assert log.used_bytes <= SMALL.max_bytes
        assert waits > 30


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.wal"))


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in segments(directory))


async def test_what_waits_for_the_disk_is_bounded(tmp_path: Path) -> None:
    files = OrderedFiles()
    config = LogConfig(max_unflushed_bytes=10_000)
    async with await WriteAheadLog.open(tmp_path, IDENTITY, config, files=files) as log:
        files.may_go_on.clear()
        while log.has_room(1033):
            append(log, size=1000)
        assert 8 <= log.end <= 10
        files.may_go_on.set()
        await log.flush()
        assert log.has_room(1033)


async def test_a_full_disk_refuses_until_all_appended_is_trimmed_then_goes_on() -> None:
    disk = CrashDisk()
    async with await WriteAheadLog.open(LOG, IDENTITY, SMALL, files=disk) as log:
        assert await settle(append(log)) is None
        disk.space = 100
        refused = [append(log) for _ in range(12)]
        for future in refused:
            assert isinstance(await settle(future), errors.WriteAheadLogFullError)
        disk.space = None
        for position in (0, 1, log.end - 1):
            log.trim(position)
            assert not log.has_room(40)
            with pytest.raises(errors.WriteAheadLogFullError):
                append(log)
        log.trim(log.end)
        assert log.has_room(40)
        begin = log.end
        assert [await settle(append(log)) for _ in range(9)] == [None] * 9
    async with await WriteAheadLog.open(LOG, IDENTITY, SMALL, files=disk.after_kill()) as log:
        assert kept(log) == list(range(begin, begin + 9))


async def test_what_waits_behind_a_refused_group_is_refused_with_it(tmp_path: Path) -> None:
    files = OrderedFiles()
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        files.may_go_on.clear()
        files.fail = lambda call: call == "write"
        files.error = DiskFullError(errno.ENOSPC, "no room")
        first = append(log)
        await asyncio.sleep(0.01)
        behind = append(log)
        files.may_go_on.set()
        assert isinstance(await settle(first), errors.WriteAheadLogFullError)
        files.fail = lambda _: False
        assert isinstance(await settle(behind), errors.WriteAheadLogFullError)
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        assert kept(log) == []


async def test_a_disk_that_stays_full_refuses_again_and_again() -> None:
    disk = CrashDisk()
    async with await WriteAheadLog.open(LOG, IDENTITY, SMALL, files=disk) as log:
        disk.space = 0
        for _ in range(3):
            assert isinstance(await settle(append(log)), errors.WriteAheadLogFullError)
            log.trim(log.end)
        disk.space = None
        assert await settle(append(log)) is None
    async with await WriteAheadLog.open(LOG, IDENTITY, SMALL, files=disk.after_kill()) as log:
        assert kept(log) == [3]


async def test_a_log_heals_though_its_state_had_no_room_to_start_over(tmp_path: Path) -> None:
    def obey(call: str, _bytes: range) -> None:
        if call == "write" and is_full:
            raise DiskFullError(errno.ENOSPC, "no room")

    is_full = False
    files = WatchedFiles(obey, suffix="")
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        assert await settle(append(log)) is None
        is_full = True
        assert isinstance(await settle(append(log)), errors.WriteAheadLogFullError)
        log.trim(log.end)
        await log.flush()
        is_full = False
        begin = log.end
        assert [await settle(append(log)) for _ in range(3)] == [None] * 3
    async with await WriteAheadLog.open(tmp_path, IDENTITY, files=files) as log:
        assert kept(log) == list(range(begin, begin + 3))


async def test_opening_without_room_says_so_and_leaves_the_directory_free() -> None:
    disk = CrashDisk(space=10)
    with pytest.raises(errors.WriteAheadLogFullError):
        await WriteAheadLog.open(LOG, IDENTITY, SMALL, files=disk)
    disk.space = None
    await (await WriteAheadLog.open(LOG, IDENTITY, SMALL, files=disk)).close()


async def test_a_damaged_log_is_refused_or_mended_and_what_is_lost_is_told(tmp_path: Path) -> None:
    async with await WriteAheadLog.open(tmp_path, IDENTITY, SMALL) as log:
        for _ in range(30):
            await settle(append(log))
    path = segments(tmp_path)[1]
    path.write_bytes(flipped(path.read_bytes(), 100))
    with pytest.raises(errors.DamagedLogError, match=rf"{path}.* byte \d+"):
        await WriteAheadLog.open(tmp_path, IDENTITY, SMALL)
    async with await WriteAheadLog.open(tmp_path, IDENTITY, SMALL, damage="quarantine") as log:
        assert (len(kept(log)), log.lost) == (29, 1)
    async with await WriteAheadLog.open(tmp_path, IDENTITY, SMALL) as log:
        assert (len(kept(log)), log.lost) == (29, 1)


async def test_only_one_process_has_the_log_and_close_gives_it_free(tmp_path: Path) -> None:
    async with await WriteAheadLog.open(tmp_path / "a" / "b", IDENTITY) as log:
        with pytest.raises(errors.LogLockedError):
            await WriteAheadLog.open(tmp_path / "a" / "b", IDENTITY)
        unflushed = append(log)
    assert unflushed.result() is None
    with pytest.raises(errors.WriteAheadLogClosedError):
        append(log)
    async with await WriteAheadLog.open(tmp_path / "a" / "b", IDENTITY) as log:
        assert kept(log) == [0]


async def test_records_settled_before_they_are_on_the_disk_do_not_come_back(tmp_path: Path) -> None:
    async with await WriteAheadLog.open(tmp_path, IDENTITY) as log:
        append(log)
        log.trim(1)
        append(log)
    async with await WriteAheadLog.open(tmp_path, IDENTITY) as log:
        assert kept(log) == [1]
        with pytest.raises(ValueError, match="end"):
            log.trim(3)


async def test_a_header_that_does_not_fit_its_payload_is_refused(tmp_path: Path) -> None:
    async with await WriteAheadLog.open(tmp_path, IDENTITY) as log:
        header, payload = encoded(record_at(0))
        for bad in ((header[:-1], payload), (header, payload[:-1])):
            with pytest.raises(ValueError, match="length"):
                log.append(*bad)
        assert log.end == 0


@pytest.mark.parametrize("seed", seeds(2, slow=1))
async def test_a_log_used_at_random_keeps_what_its_model_keeps(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = await WriteAheadLog.open(tmp_path, IDENTITY, SMALL)
    for _ in range(400):
        action = rng.choices(["append", "trim", "flush", "reopen"], [80, 10, 8, 2])[0]
        size = rng.randint(12, 300)
        if action == "append" and log.has_room(size + 33):
            append(log, size=size)
        elif action == "flush":
            await log.flush()
        elif action == "reopen":
            trimmed, end = log.trimmed, log.end
            await log.close()
            log = await WriteAheadLog.open(tmp_path, IDENTITY, SMALL)
            assert kept(log) == list(range(trimmed, end)), f"seed {seed}"
        else:
            log.trim(rng.randint(log.trimmed, log.end))
    await log.close()
