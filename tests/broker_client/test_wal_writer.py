"""A writer on a real write-ahead log: what it acknowledges survives whatever fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streammeta.client import BrokerSession, StreamWriter, WriterConfig
from streammeta.client.write_ahead_log.config import LogIdentity
from streammeta.client.write_ahead_log.errors import WriteAheadLogBrokenError
from streammeta.client.write_ahead_log.log import WriteAheadLog
from streammeta.storage.durable_files import FileSystem
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_store.base import Body
from tests.broker_client.wal_tools import LOG
from tests.kit.crash_disk import CrashDisk
from tests.kit.fake_broker import Broker, until, writing
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.memory_store import MemoryObjectStore

CONFIG: dict[str, Any] = {"durability": "wal", "linger_s": 0.01, "close_deadline_s": 0.5}


class SwitchedStore(MemoryObjectStore):
    """A store that can be out of reach."""

    is_down = False

    def put(self, key: str, data: Body, **options: Any) -> None:
        if self.is_down:
            raise StoreUnavailableError("the store is out of reach")
        super().put(key, data, **options)


class FailingDisk(CrashDisk):
    """A disk that fails each call that changes it, once told so."""

    has_failed = False

    def begin_call(self) -> None:
        super().begin_call()
        if self.has_failed:
            raise OSError(5, "the disk is gone")


async def opened_log(disk: FileSystem, epoch: int = 1) -> WriteAheadLog:
    return await WriteAheadLog.open(LOG, LogIdentity(NAMESPACE, 1000, epoch), files=disk)


async def restarted(b: Broker, disk: CrashDisk) -> None:
    """Let a new process recover what the log holds."""
    session = await BrokerSession.open(b.client, 1000, 2)
    async with (
        await opened_log(disk.after_kill(), 2) as log,
        StreamWriter(session, b.store, WriterConfig(**CONFIG), log=log) as writer,
    ):
        writer.attach(session.inherited)
        await writer.recover()


async def test_appends_are_acknowledged_while_the_store_is_down_and_survive_it() -> None:
    store, disk = SwitchedStore(), CrashDisk()
    async with (
        await opened_log(disk) as log,
        writing(2, log=log, store=store, **CONFIG) as (b, writer),
    ):
        store.is_down = True
        for number in range(20):
            assert await (await writer.append(number % 2, b"%d" % number)) == number // 2
        await writer.close()
        await log.close()
        store.is_down = False
        assert await b.payloads(0) == []
        await restarted(b, disk)
        for parity in range(2):
            wanted = [b"%d" % number for number in range(parity, 20, 2)]
            assert await b.payloads(parity) == wanted


async def test_on_a_full_disk_appends_wait_for_their_commit_and_the_log_heals() -> None:
    disk = CrashDisk()
    async with await opened_log(disk) as log, writing(log=log, **CONFIG) as (b, writer):
        await (await writer.append(0, b"0"))
        await writer.flush()
        await until(lambda: log.trimmed == log.end == 1, "trim")
        disk.space = 0
        for number in range(1, 5):
            await (await writer.append(0, b"%d" % number))
            assert len(await b.payloads(0)) == number + 1
        disk.space = None
        commits = b.hold()
        await (await writer.append(0, b"5"))  # the log has it
        commits.set()
        await writer.flush()
        assert await b.payloads(0) == [b"%d" % number for number in range(6)]


async def test_a_broken_log_refuses_appends_and_keeps_what_it_acknowledged() -> None:
    store, disk = SwitchedStore(), FailingDisk()
    async with (
        await opened_log(disk) as log,
        writing(log=log, store=store, **CONFIG) as (b, writer),
    ):
        store.is_down = True
        await (await writer.append(0, b"0"))
        disk.has_failed = True
        with pytest.raises(WriteAheadLogBrokenError):
            await (await writer.append(0, b"1"))
        with pytest.raises(WriteAheadLogBrokenError):
            await writer.append(0, b"2")
        await writer.close()
        await log.close()
        store.is_down = disk.has_failed = False
        await restarted(b, disk)
        assert await b.payloads(0) in ([b"0"], [b"0", b"1"])


async def test_acknowledged_records_of_a_stream_taken_away_are_set_aside(tmp_path: Path) -> None:
    log = await WriteAheadLog.open(tmp_path, LogIdentity(NAMESPACE, 1000, 1))
    async with log, writing(log=log, **CONFIG) as (b, writer):
        await b.steal(0)
        await (await writer.append(0, b"0"))
        await until(lambda: log.trimmed == 1, "trim")
        assert await b.payloads(0) == []
    assert len(list(tmp_path.glob("*.aside"))) == 1  # noqa: ASYNC240 - the scenario is over
