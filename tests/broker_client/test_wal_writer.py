"""A writer on a real write-ahead log: what it acknowledges survives whatever fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
from tests.kit.fake_broker import Broker, broker, until
from tests.kit.memory_store import MemoryObjectStore

CONFIG = WriterConfig(durability="wal", linger_s=0.01, close_deadline_s=0.5)


class SwitchedStore(MemoryObjectStore):
    """A store that can be out of reach."""

    is_down = False

    def put(
        self,
        key: str,
        data: Body,
        *,
        if_absent: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        if self.is_down:
            raise StoreUnavailableError("the store is out of reach")
        super().put(key, data, if_absent=if_absent, tags=tags)


async def opened_log(disk: FileSystem, session: BrokerSession, epoch: int = 1) -> WriteAheadLog:
    return await WriteAheadLog.open(LOG, LogIdentity(session.namespace, 1000, epoch), files=disk)


async def restarted(one: Broker, disk: CrashDisk, store: MemoryObjectStore) -> None:
    """Let a new process recover what the log holds."""
    session = await BrokerSession.open(one.client, 1000, 2)
    log = await opened_log(disk.after_kill(), session, 2)
    async with StreamWriter(session, store, CONFIG, log=log) as writer:
        writer.attach(session.inherited)
        await writer.recover()
    await log.close()


async def test_appends_are_acknowledged_while_the_store_is_down_and_survive_it() -> None:
    async with broker() as one:
        one.store = store = SwitchedStore()
        disk = CrashDisk()
        streams = await one.opened(2)
        log = await opened_log(disk, one.session)
        writer = StreamWriter(one.session, store, CONFIG, log=log)
        writer.attach(streams)
        store.is_down = True
        for number in range(20):
            ack = await writer.append(streams[number % 2].stream_id, b"%d" % number)
            assert await ack == number // 2
        await writer.close()
        await log.close()
        store.is_down = False
        assert await one.payloads(streams[0].stream_id) == []
        await restarted(one, disk, store)
        for parity, stream in enumerate(streams):
            wanted = [b"%d" % number for number in range(parity, 20, 2)]
            assert await one.payloads(stream.stream_id) == wanted


async def test_what_is_committed_is_trimmed() -> None:
    async with broker() as one:
        (stream,) = await one.opened(1)
        log = await opened_log(CrashDisk(), one.session)
        async with StreamWriter(one.session, one.store, CONFIG, log=log) as writer:
            writer.attach([stream])
            await (await writer.append(stream.stream_id, b"0"))
            await writer.flush()
            await until(lambda: log.trimmed == log.end == 1, "trim")
        await log.close()


async def test_on_a_full_disk_appends_wait_for_their_commit_and_the_log_heals() -> None:
    async with broker() as one:
        disk = CrashDisk()
        (stream,) = await one.opened(1)
        log = await opened_log(disk, one.session)
        async with StreamWriter(one.session, one.store, CONFIG, log=log) as writer:
            writer.attach([stream])
            await (await writer.append(stream.stream_id, b"0"))
            disk.space = 0
            for number in range(1, 5):
                await (await writer.append(stream.stream_id, b"%d" % number))
                assert len(await one.payloads(stream.stream_id)) == number + 1
            disk.space = None
            commits = one.hold()
            await (await writer.append(stream.stream_id, b"5"))  # the log has it
            commits.set()
        await log.close()
        assert await one.payloads(stream.stream_id) == [b"%d" % number for number in range(6)]


async def test_a_broken_log_refuses_appends_and_keeps_what_it_acknowledged() -> None:
    async with broker() as one:
        one.store = store = SwitchedStore()
        store.is_down = True
        disk = FailingDisk()
        (stream,) = await one.opened(1)
        log = await opened_log(disk, one.session)
        writer = StreamWriter(one.session, store, CONFIG, log=log)
        writer.attach([stream])
        await (await writer.append(stream.stream_id, b"0"))
        disk.has_failed = True
        with pytest.raises(WriteAheadLogBrokenError):
            await (await writer.append(stream.stream_id, b"1"))
        with pytest.raises(WriteAheadLogBrokenError):
            await writer.append(stream.stream_id, b"2")
        await writer.close()
        await log.close()
        store.is_down = disk.has_failed = False
        await restarted(one, disk, store)
        assert await one.payloads(stream.stream_id) in ([b"0"], [b"0", b"1"])


class FailingDisk(CrashDisk):
    """A disk that fails each call that changes it, once told so."""

    has_failed = False

    def begin_call(self) -> None:
        super().begin_call()
        if self.has_failed:
            raise OSError(5, "the disk is gone")


async def test_acknowledged_records_of_a_stream_taken_away_are_set_aside(tmp_path: Path) -> None:
    async with broker() as one:
        (stream,) = await one.opened(1)
        identity = LogIdentity(one.session.namespace, 1000, 1)
        log = await WriteAheadLog.open(tmp_path, identity)
        async with StreamWriter(one.session, one.store, CONFIG, log=log) as writer:
            writer.attach([stream])
            other = await BrokerSession.open(one.client, 2000, 1)
            (await other.open_streams({stream.stream_id: 9})).require_all()
            await (await writer.append(stream.stream_id, b"0"))
            await until(lambda: log.trimmed == 1, "trim")
        await log.close()
        assert await one.payloads(stream.stream_id) == []
    assert len(list(tmp_path.glob("*.aside"))) == 1  # noqa: ASYNC240 - the scenario is over
