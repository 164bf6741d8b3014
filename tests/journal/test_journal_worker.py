"""Disk work is carried out in order; what finds no room waits in order, and reads go on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum import events
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.runtime.persistence import quorum_disk
from streammeta.storage.durable_files import DiskFullError
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk, Left

BATCHES = [tools.batch(i, 1 + i // 2, bytes([65 + i]) * 40) for i in range(6)]
STATE = QuorumState(Epoch(10), ReplicaKey(NodeId(2)))
AHEAD = tools.snapshot_id(50, 9)
AHEAD_DATA = tools.snapshot_bytes(AHEAD)


@pytest.fixture
def disk() -> CrashDisk:
    return tools.written_disk()


def reopen(disk: CrashDisk) -> Journal:
    return tools.open_journal(tools.DIRECTORY, 100, disk)


def append(token: int, *batches: Batch) -> events.AppendLog:
    return events.AppendLog(token, batches)


def install_work(token: int) -> list[quorum_disk.Work]:
    half = len(AHEAD_DATA) // 2
    return [
        events.WriteSnapshotChunk(AHEAD, 0, AHEAD_DATA[:half]),
        events.WriteSnapshotChunk(AHEAD, half, AHEAD_DATA[half:]),
        events.InstallSnapshot(token, AHEAD, len(AHEAD_DATA), hashlib.sha256(AHEAD_DATA).digest()),
    ]


def all_kinds(journal: Journal) -> list[quorum_disk.Work]:
    """Return work of every kind, whose order matters."""
    tools.take_snapshot(journal, tools.snapshot_id(2, 1))
    return [
        events.PersistQuorumState(1, STATE),
        append(2, *BATCHES[2:4]),
        events.TruncateLog(3, EndOffset(3)),
        append(4, tools.batch(3, 5, b"another" * 9), tools.batch(4, 5, b"and another")),
        events.ReadLog(1, EndOffset(3), 1),
        events.TrimLog(5, EndOffset(2)),
        events.ReadLog(2, EndOffset(0), 1),
        *install_work(6),
        append(7, tools.batch(50, 9, b"after the snapshot")),
        events.ReadSnapshot(3, AHEAD, 5, 4),
        events.ClearDamage(8),
    ]


def test_work_is_done_in_order_with_one_report_of_what_is_flushed_together(disk: CrashDisk) -> None:
    journal = reopen(disk)
    journal.append(BATCHES[:2])
    progress = quorum_disk.DiskWorker(journal).run(all_kinds(journal))
    assert (progress.left, progress.full) == ((), None)
    reports = list(progress.reports)
    chunk_report = reports.pop(-3)
    assert isinstance(chunk_report, events.SnapshotReadDone)
    assert chunk_report.chunk is not None
    assert chunk_report.chunk.data == AHEAD_DATA[5:9]
    assert reports == [
        events.LogReadDone(1, (tools.batch(3, 5, b"another" * 9),)),
        events.LogReadDone(2, ()),
        events.WriteDone(5),
        events.WriteDone(6),
        events.SnapshotInstalled(AHEAD, tools.VOTERS),
        events.WriteDone(7),
        events.WriteDone(8),
    ]
    held = tools.held_by(reopen(disk.after_crash(Left.NOTHING)))
    assert held.state == STATE
    assert held.batches == (tools.batch(50, 9, b"after the snapshot"),)


def test_what_is_reported_done_is_durable_at_every_point(disk: CrashDisk) -> None:
    """Carried out one by one, each report of a write stands for something that survives."""
    journal = reopen(disk)
    worker = quorum_disk.DiskWorker(journal)
    for token, item in enumerate(BATCHES):
        assert worker.run([append(token, item)]).reports == (events.WriteDone(token),)
        held = tools.held_by(reopen(disk.after_crash(Left.NOTHING)))
        assert list(held.batches) == BATCHES[: token + 1]


def test_a_refused_snapshot_is_told_and_work_goes_on(disk: CrashDisk) -> None:
    journal = reopen(disk)
    work = install_work(1)
    work[1] = events.WriteSnapshotChunk(AHEAD, len(AHEAD_DATA) // 2, b"x")
    reports = quorum_disk.DiskWorker(journal).run([*work, append(2, BATCHES[0])]).reports
    assert reports == (
        events.WriteDone(1),
        events.SnapshotInstalled(AHEAD, None),
        events.WriteDone(2),
    )
    assert tools.read_all(journal) == BATCHES[:1]


def read_ids(reports: Sequence[quorum_disk.Report]) -> list[int]:
    return [
        r.read_id for r in reports if isinstance(r, events.LogReadDone | events.SnapshotReadDone)
    ]


def test_full_at_every_byte_the_work_ends_as_if_there_had_been_room(disk: CrashDisk) -> None:
    """All kinds of work, the disk full after any number of bytes, then with room again."""
    roomy = disk.copy()
    journal = reopen(roomy)
    journal.append(BATCHES[:2])
    quorum_disk.DiskWorker(journal).run(all_kinds(journal))
    installed = events.SnapshotInstalled(AHEAD, tools.VOTERS)
    expected = tools.read_all(journal)
    tokens_seen = set()
    for space in range(3000):
        victim = disk.copy()
        journal = reopen(victim)
        journal.append(BATCHES[:2])
        worker = quorum_disk.DiskWorker(journal)
        work = all_kinds(journal)
        victim.space, victim.charges_overwriting = space, True
        progress = worker.run(work)
        if progress.full is None:
            break
        reports = list(progress.reports)
        waiting = worker.run(progress.left)
        assert waiting.full is not None, "it does not go on by itself"
        reports.extend(waiting.reports)
        victim.space = None
        more = append(9, tools.batch(51, 9, b"newer work"))
        last = worker.run([*waiting.left, more])
        assert last.full is None
        reports.extend(last.reports)
        tokens = [report.token for report in reports if isinstance(report, events.WriteDone)]
        assert tokens == sorted(set(tokens)), f"{space} bytes free"
        assert tokens[-1] == 9
        tokens_seen.update(tokens)
        # A read may come earlier than it would have, but is answered, and once.
        assert sorted(read_ids(reports)) == [1, 2, 3], f"{space} bytes free"
        assert [r for r in reports if isinstance(r, events.SnapshotInstalled)] == [installed]
        assert tools.read_all(journal) == [*expected, tools.batch(51, 9, b"newer work")]
    else:
        raise AssertionError("never enough room")
    assert len(tokens_seen) > 4


def test_while_full_reads_are_served_and_writes_keep_their_order(disk: CrashDisk) -> None:
    journal = reopen(disk)
    worker = quorum_disk.DiskWorker(journal)
    assert worker.run([append(1, *BATCHES[:3])]).full is None
    tools.take_snapshot(journal, tools.snapshot_id(1, 1))
    disk.space = 0
    read_of_what_waits = events.ReadLog(2, EndOffset(3), 1)
    work: list[quorum_disk.Work] = [
        append(2, *BATCHES[3:5]),
        events.ReadLog(1, EndOffset(0), 1),
        read_of_what_waits,
        events.PersistQuorumState(3, STATE),
        events.ReadSnapshot(4, tools.snapshot_id(1, 1), 0, 3),
        events.ReadSnapshot(5, tools.snapshot_id(1, 9), 0, 3),
    ]
    progress = worker.run(work)
    assert isinstance(progress.full, DiskFullError)
    served = [type(report) for report in progress.reports]
    assert served == [events.LogReadDone, events.SnapshotReadDone, events.SnapshotReadDone]
    assert progress.reports[0] == events.LogReadDone(1, (BATCHES[0],))
    assert progress.left == (work[0], read_of_what_waits, work[3])
    late_read = quorum_disk.DiskRead(EndOffset(2), 1, lambda _: None)
    assert worker.serve([late_read]).reports == (
        quorum_disk.DiskReadDone(late_read, (BATCHES[2],)),
    )
    disk.space = None
    assert worker.run(progress.left).reports == (
        events.LogReadDone(2, (BATCHES[3],)),
        events.WriteDone(3),
    )


def test_while_full_a_trim_makes_room(disk: CrashDisk) -> None:
    """What would free the disk does not wait behind what found it full."""
    journal = reopen(disk)
    worker = quorum_disk.DiskWorker(journal)
    worker.run([append(1, *BATCHES[:5])])
    tools.take_snapshot(journal, tools.snapshot_id(4, 2))
    start = journal.start_offset
    disk.space = 0
    trims: list[quorum_disk.Work] = [
        events.TrimLog(3, EndOffset(4)),
        events.TrimLog(4, EndOffset(50)),
    ]
    progress = worker.run([append(2, BATCHES[5]), *trims])
    assert progress.full is not None
    assert journal.start_offset > start
    assert progress.left == (append(2, BATCHES[5]), *trims), "they are reported in their turn"
    disk.space = None
    assert worker.run(progress.left[:2]).reports == (events.WriteDone(3),)


def test_a_finished_snapshot_is_reported_or_dropped(disk: CrashDisk) -> None:
    journal = reopen(disk)
    worker = quorum_disk.DiskWorker(journal)
    worker.run([append(1, *BATCHES[:3])])
    writers = [
        tools.sealed_snapshot(journal, tools.snapshot_id(end, epoch))
        for end, epoch in ((2, 1), (3, 2))
    ]
    finished = worker.run([quorum_disk.FinishSnapshot(writers[1])])
    assert finished.reports == (events.SnapshotTaken(tools.snapshot_id(3, 2)),)
    late = worker.run([*install_work(2), quorum_disk.FinishSnapshot(writers[0])])
    (dropped,) = [
        report for report in late.reports if isinstance(report, quorum_disk.SnapshotDropped)
    ]
    assert dropped.snapshot_id == tools.snapshot_id(2, 1)
    assert journal.snapshots.kept == (AHEAD,)


class Recorder:
    def __init__(self) -> None:
        self.reports: list[quorum_disk.CoreReport] = []
        self.full: list[DiskFullError | None] = []
        self.errors: list[BaseException] = []
        self.changed = asyncio.Event()

    def note(self, kind: list[object]) -> Callable[[object], None]:
        def take(item: object) -> None:
            kind.append(item)
            self.changed.set()

        return take

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def running(disk: CrashDisk) -> AsyncIterator[tuple[quorum_disk.JournalThread, Recorder]]:
    recorder = Recorder()
    thread = quorum_disk.JournalThread(
        reopen(disk),
        on_report=recorder.note(recorder.reports),  # type: ignore[arg-type]
        on_full=recorder.note(recorder.full),  # type: ignore[arg-type]
        on_error=recorder.note(recorder.errors),  # type: ignore[arg-type]
    )
    thread.start()
    try:
        yield thread, recorder
    finally:
        await thread.stop()


async def test_the_thread_reports_full_once_and_healed_once(disk: CrashDisk) -> None:
    async with running(disk) as (thread, recorder):
        thread.submit(append(1, BATCHES[0]))
        await recorder.wait_for(lambda: recorder.reports == [events.WriteDone(1)])
        disk.space = 0
        thread.submit(append(2, BATCHES[1]))
        await recorder.wait_for(lambda: len(recorder.full) == 1)
        read: list[tuple[Batch, ...]] = []
        thread.submit(events.PersistQuorumState(3, STATE))
        thread.submit(quorum_disk.DiskRead(EndOffset(0), 1, recorder.note(read)))  # type: ignore[arg-type]
        await recorder.wait_for(lambda: read == [(BATCHES[0],)])
        assert recorder.reports == [events.WriteDone(1)]
        disk.space = None
        await recorder.wait_for(lambda: recorder.reports[-1] == events.WriteDone(3))
        assert [type(item) for item in recorder.full] == [DiskFullError, type(None)]
        assert recorder.errors == []

    held = tools.held_by(reopen(disk.after_crash(Left.NOTHING)))
    assert (list(held.batches), held.state) == (BATCHES[:2], STATE)


async def test_the_thread_finishes_what_is_queued_before_it_ends(disk: CrashDisk) -> None:
    async with running(disk) as (thread, _):
        for token, item in enumerate(BATCHES):
            thread.submit(append(token, item))

    assert list(tools.held_by(reopen(disk.after_crash(Left.NOTHING))).batches) == BATCHES


async def test_the_thread_ends_on_a_full_disk_without_waiting_for_room(disk: CrashDisk) -> None:
    async with running(disk) as (thread, recorder):
        disk.space = 0
        thread.submit(append(1, BATCHES[0]))
        await recorder.wait_for(lambda: len(recorder.full) == 1)

    assert tools.held_by(reopen(disk.after_crash(Left.ALL))).batches == ()


async def test_the_first_error_ends_the_thread_and_is_reported(disk: CrashDisk) -> None:
    """F3: after an error the state of the disk is unknown; nothing more is written."""
    async with running(disk) as (thread, recorder):
        thread.submit(append(1, BATCHES[1]))
        thread.submit(append(2, BATCHES[0]))
        await recorder.wait_for(lambda: len(recorder.errors) == 1)
        assert isinstance(recorder.errors[0], ValueError)
        thread.submit(append(3, BATCHES[0]))
        assert recorder.reports == []

    assert tools.held_by(reopen(disk.after_crash(Left.ALL))).batches == ()


async def test_chunks_are_read_while_the_journal_is_busy(disk: CrashDisk) -> None:
    async with running(disk) as (thread, recorder):
        for item in install_work(1):
            thread.submit(item)
        installed = events.SnapshotInstalled(AHEAD, tools.VOTERS)
        await recorder.wait_for(lambda: installed in recorder.reports)
        disk.space = 0
        thread.submit(append(2, tools.batch(50, 9, b"waits")))
        thread.submit(events.ReadSnapshot(7, AHEAD, 0, 1 << 20))
        await recorder.wait_for(
            lambda: any(isinstance(item, events.SnapshotReadDone) for item in recorder.reports)
        )
