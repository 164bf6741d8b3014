"""A writer on a real write-ahead log, and after a restart: what it acknowledged is uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streammeta.client import OpenedStream, WriterConfig
from streammeta.client.errors import WriteAheadLogBrokenError
from streammeta.client.parts import BrokerSession, StreamWriter
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.client.wal.disk.recovery import (
    AsideRun,
    RecoveryPlan,
    StreamHistory,
    Verdict,
    recover_into,
    stream_histories,
)
from streammeta.client.wal.disk.set_aside import read_set_aside
from streammeta.storage.durable_files import FileSystem
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import Body
from tests.broker_client.wal_tools import IDENTITY, LOG, encoded
from tests.kit.crash_disk import CrashDisk
from tests.kit.fake_broker import Broker, broker, writing
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.waiting import until

COMMITTED, UPLOAD, ASIDE = Verdict.COMMITTED, Verdict.UPLOAD, Verdict.ASIDE


def record(stream_id: int, epoch: int, begin: int, end: int) -> RecordBatch:
    return RecordBatch(stream_id, epoch, begin, end - begin, b"%d" % begin)


def judged(plan: RecoveryPlan, *records: RecordBatch) -> list[Verdict]:
    return [plan.validate(batch) for batch in records]


def test_a_held_stream_is_continued_where_the_map_ends() -> None:
    plan = RecoveryPlan([OpenedStream(1, 7, 0, 100)])
    below, at, behind = record(1, 7, 90, 100), record(1, 7, 100, 105), record(1, 7, 105, 106)
    assert judged(plan, below, at, behind) == [COMMITTED, UPLOAD, UPLOAD]
    report = plan.report
    assert (report.committed, report.uploaded, report.set_aside) == (1, 2, 0)


def test_streams_are_judged_each_for_itself() -> None:
    plan = RecoveryPlan([OpenedStream(1, 7, 0, 10), OpenedStream(2, 3, 0, 20)])
    records = [
        record(1, 7, 10, 11),
        record(2, 3, 19, 20),
        record(2, 3, 20, 21),
        record(1, 7, 11, 12),
    ]
    assert judged(plan, *records) == [UPLOAD, COMMITTED, UPLOAD, UPLOAD]


def test_behind_a_gap_everything_of_the_stream_is_set_aside() -> None:
    plan = RecoveryPlan([OpenedStream(1, 7, 0, 100)])
    records = [record(1, 7, 101, 103), record(1, 7, 103, 104), record(1, 7, 106, 107)]
    assert judged(plan, *records) == [ASIDE] * 3
    reason = "it does not continue the stream, which ends at offset 100"
    assert plan.report.aside == [
        AsideRun(1, 7, 101, 104, reason),
        AsideRun(1, 7, 106, 107, reason),
    ]


def test_a_record_across_the_end_or_logged_twice_is_never_uploaded() -> None:
    plan = RecoveryPlan([OpenedStream(1, 7, 0, 100)])
    records = [record(1, 7, 99, 101), record(1, 7, 100, 101), record(1, 7, 100, 101)]
    assert judged(plan, *records) == [ASIDE, UPLOAD, ASIDE]


def test_a_record_of_a_former_epoch_is_committed_only_below_the_end_of_its_range() -> None:
    history = StreamHistory(start_offset=5, ends={6: 50, 7: 100})
    plan = RecoveryPlan([OpenedStream(1, 7, 5, 100)], {1: history})
    records = [record(1, 6, 49, 50), record(1, 6, 50, 60), record(1, 7, 100, 101)]
    assert judged(plan, *records) == [COMMITTED, ASIDE, UPLOAD]
    assert plan.report.aside == [AsideRun(1, 6, 50, 60, "epoch 6 of the stream ended at offset 50")]


def test_a_stream_of_another_owner_takes_nothing() -> None:
    history = StreamHistory(0, {7: 50, 8: 90}, pending=((30, 40),))
    plan = RecoveryPlan([], {1: history})
    records = [
        record(1, 7, 20, 30),
        record(1, 7, 35, 36),
        record(1, 7, 50, 51),
        record(1, 9, 90, 91),
        record(2, 0, 0, 1),
    ]
    assert judged(plan, *records) == [COMMITTED, ASIDE, ASIDE, ASIDE, ASIDE]
    assert [run.reason for run in plan.report.aside] == [
        "epoch 7 of the stream was closed before it was committed",
        "epoch 7 of the stream ended at offset 50",
        "the stream has no range of epoch 9",
        "the stream does not exist, or no longer",
    ]


def test_what_the_stream_was_trimmed_behind_is_settled() -> None:
    plan = RecoveryPlan([], {1: StreamHistory(60, {8: 90})})
    assert judged(plan, record(1, 7, 50, 60), record(1, 7, 60, 61)) == [COMMITTED, ASIDE]


async def test_the_histories_of_streams_come_from_the_controllers() -> None:
    async with broker() as one:
        (opened,) = await one.opened(1, epoch=4)
        assert await stream_histories(one.client, [opened.stream_id, 99]) == {
            opened.stream_id: StreamHistory(0, {4: 0})
        }


async def test_recovery_uploads_sets_aside_and_can_be_repeated(tmp_path: Path) -> None:
    async with broker() as one:
        held, closed, lost = await one.opened(3, epoch=4)
        await one.session.close_streams({closed.stream_id: 4})
        log = await WriteAheadLog.open(tmp_path, IDENTITY)
        good = [record(held.stream_id, 4, n, n + 1) for n in range(5)]
        unwanted = [record(closed.stream_id, 4, 0, 3), record(lost.stream_id, 3, 0, 1)]
        for logged in (*good[:2], *unwanted, *good[2:]):
            log.append(*encoded(logged))
        await log.close()
        session = await BrokerSession.open(one.client, 1000, 2)
        for _ in range(2):
            log = await WriteAheadLog.open(tmp_path, IDENTITY)
            uploaded: list[RecordBatch] = []

            async def upload(each: RecordBatch, into: list[RecordBatch] = uploaded) -> None:
                into.append(each)

            report = await recover_into(log, session, upload)
            assert uploaded == good
            assert (report.committed, report.uploaded, report.set_aside) == (0, 5, 2)
            assert report.file is not None
            assert list(read_set_aside(report.file))[1:] == unwanted
            assert aside_files(tmp_path) == [report.file]
            await log.close()


async def test_a_record_of_an_older_epoch_takes_no_offset_of_a_newer_one(tmp_path: Path) -> None:
    """The process itself went on from another offset under a new epoch."""
    async with broker() as one:
        (stream,) = await one.opened(1, epoch=4)
        await one.reopened([stream.stream_id], 5)
        older, newer = record(stream.stream_id, 4, 0, 2), record(stream.stream_id, 5, 0, 1)
        log = await WriteAheadLog.open(tmp_path, IDENTITY)
        for logged in (older, newer):
            log.append(*encoded(logged))
        await log.close()

        session = await BrokerSession.open(one.client, 1000, 2)
        log = await WriteAheadLog.open(tmp_path, IDENTITY)
        uploaded: list[RecordBatch] = []

        async def upload(each: RecordBatch) -> None:
            uploaded.append(each)

        report = await recover_into(log, session, upload)
        assert uploaded == [newer]
        assert report.file is not None
        assert list(read_set_aside(report.file))[1:] == [older]
        await log.close()


def test_a_record_of_a_newer_epoch_than_the_held_one_continues_nothing() -> None:
    """Another process has the stream by now, and this one does not know yet."""
    plan = RecoveryPlan([OpenedStream(1, 7, 0, 100)], {1: StreamHistory(0, {7: 100, 8: 100})})
    assert judged(plan, record(1, 8, 100, 101), record(1, 7, 100, 101)) == [ASIDE, UPLOAD]


def test_a_record_before_the_start_of_its_stream_is_not_compared() -> None:
    """Nothing is stored there any more, so it could not be found."""
    plan = RecoveryPlan([], {1: StreamHistory(60, {7: 50, 8: 90})})
    assert not plan.is_doubtful(record(1, 7, 55, 61))
    assert plan.is_doubtful(record(1, 8, 88, 91)) is False
    assert judged(plan, record(1, 7, 50, 60)) == [COMMITTED]


def aside_files(directory: Path) -> list[Path]:
    return list(directory.glob("*.aside"))


async def test_an_empty_log_asks_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    async with broker() as one:
        log = await WriteAheadLog.open(tmp_path, IDENTITY)
        calls = dict(one.cluster.calls)

        async def upload(each: RecordBatch) -> None:
            pytest.fail(f"{each} was never logged")

        report = await recover_into(log, one.session, upload)
        assert report.file is None
        assert dict(one.cluster.calls) == calls
        assert aside_files(tmp_path) == []
        await log.close()


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


@pytest.mark.parametrize("is_down", [False, True])
async def test_giving_up_batches_is_no_clean_end(
    monkeypatch: pytest.MonkeyPatch, is_down: bool
) -> None:
    store, ends = SwitchedStore(), []
    async with (
        await opened_log(CrashDisk()) as log,
        writing(log=log, store=store, **CONFIG) as (_, writer),
    ):

        async def close(*, cleanly: bool = True) -> None:
            ends.append(cleanly)
            await end(cleanly=cleanly)

        end = writer.heartbeat.close
        monkeypatch.setattr(writer.heartbeat, "close", close)
        store.is_down = is_down
        await (await writer.append(0, b"0"))
        await writer.close()
        assert ends[0] is not is_down


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
