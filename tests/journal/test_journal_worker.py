"""Disk work is carried out in order; what finds no room waits in order, and reads go on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.events import (
    AppendLog,
    ClearDamage,
    InstallSnapshot,
    LogReadDone,
    PersistQuorumState,
    ReadLog,
    ReadSnapshot,
    SnapshotInstalled,
    SnapshotReadDone,
    SnapshotTaken,
    TrimLog,
    TruncateLog,
    WriteDone,
    WriteSnapshotChunk,
)
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.runtime.quorum_disk import (
    CoreReport,
    DiskRead,
    DiskReadDone,
    DiskWorker,
    FinishSnapshot,
    JournalThread,
    Report,
    SnapshotDropped,
    Work,
)
from streammeta.storage.durable_files import DiskFullError
from tests.journal.journal_tools import (
    VOTERS,
    batch,
    held_by,
    make,
    open_journal,
    read_all,
    snapshot_bytes,
    snapshot_id,
    take_snapshot,
)
from tests.kit.crash_disk import CrashDisk, Left

DIRECTORY = Path("/node")
BATCHES = [batch(i, 1 + i // 2, bytes([65 + i]) * 40) for i in range(6)]
STATE = QuorumState(Epoch(10), ReplicaKey(NodeId(2)))
AHEAD = snapshot_id(50, 9)
AHEAD_DATA = snapshot_bytes(AHEAD)


@pytest.fixture
def disk() -> CrashDisk:
    disk = CrashDisk()
    make(DIRECTORY, disk)
    return disk.copy()


def reopen(disk: CrashDisk) -> Journal:
    return open_journal(DIRECTORY, 100, disk)


def append(token: int, *batches: Batch) -> AppendLog:
    return AppendLog(token, batches)


def install_work(token: int) -> list[Work]:
    half = len(AHEAD_DATA) // 2
    return [
        WriteSnapshotChunk(AHEAD, 0, AHEAD_DATA[:half]),
        WriteSnapshotChunk(AHEAD, half, AHEAD_DATA[half:]),
        InstallSnapshot(token, AHEAD, len(AHEAD_DATA), hashlib.sha256(AHEAD_DATA).digest()),
    ]


def all_kinds(journal: Journal) -> list[Work]:
    """Return work of every kind, whose order matters."""
    take_snapshot(journal, snapshot_id(2, 1))
    return [
        PersistQuorumState(1, STATE),
        append(2, *BATCHES[2:4]),
        TruncateLog(3, EndOffset(3)),
        append(4, batch(3, 5, b"another" * 9), batch(4, 5, b"and another")),
        ReadLog(1, EndOffset(3), 1),
        TrimLog(5, EndOffset(2)),
        ReadLog(2, EndOffset(0), 1),
        *install_work(6),
        append(7, batch(50, 9, b"after the snapshot")),
        ReadSnapshot(3, AHEAD, 5, 4),
        ClearDamage(8),
    ]


def test_work_is_done_in_order_with_one_report_for_what_is_flushed_together(
    disk: CrashDisk,
) -> None:
    journal = reopen(disk)
    journal.append(BATCHES[:2])
    progress = DiskWorker(journal).run(all_kinds(journal))
    assert (progress.left, progress.full) == ((), None)
    reports = list(progress.reports)
    chunk_report = reports.pop(-3)
    assert isinstance(chunk_report, SnapshotReadDone)
    assert chunk_report.chunk is not None
    assert chunk_report.chunk.data == AHEAD_DATA[5:9]
    assert reports == [
        LogReadDone(1, (batch(3, 5, b"another" * 9),)),
        LogReadDone(2, ()),
        WriteDone(5),
        WriteDone(6),
        SnapshotInstalled(AHEAD, VOTERS),
        WriteDone(7),
        WriteDone(8),
    ]
    held = held_by(reopen(disk.after_crash(Left.NOTHING)))
    assert held.state == STATE
    assert held.batches == (batch(50, 9, b"after the snapshot"),)


def test_what_is_reported_done_is_durable_at_every_point(disk: CrashDisk) -> None:
    """Carried out one by one, each report of a write stands for something that survives."""
    journal = reopen(disk)
    worker = DiskWorker(journal)
    for token, item in enumerate(BATCHES):
        assert worker.run([append(token, item)]).reports == (WriteDone(token),)
        held = held_by(reopen(disk.after_crash(Left.NOTHING)))
        assert list(held.batches) == BATCHES[: token + 1]


def test_a_refused_snapshot_is_told_and_work_goes_on(disk: CrashDisk) -> None:
    journal = reopen(disk)
    work = install_work(1)
    work[1] = WriteSnapshotChunk(AHEAD, len(AHEAD_DATA) // 2, b"x")
    reports = DiskWorker(journal).run([*work, append(2, BATCHES[0])]).reports
    assert reports == (WriteDone(1), SnapshotInstalled(AHEAD, None), WriteDone(2))
    assert read_all(journal) == BATCHES[:1]


def read_ids(reports: Sequence[Report]) -> list[int]:
    return [r.read_id for r in reports if isinstance(r, LogReadDone | SnapshotReadDone)]


def test_full_at_every_byte_the_work_ends_as_if_there_had_been_room(disk: CrashDisk) -> None:
    """All kinds of work, the disk full after any number of bytes, then with room again."""
    roomy = disk.copy()
    journal = reopen(roomy)
    journal.append(BATCHES[:2])
    DiskWorker(journal).run(all_kinds(journal))
    installed = SnapshotInstalled(AHEAD, VOTERS)
    expected = read_all(journal)
    tokens_seen = set()
    for space in range(3000):
        victim = disk.copy()
        journal = reopen(victim)
        journal.append(BATCHES[:2])
        worker = DiskWorker(journal)
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
        more = append(9, batch(51, 9, b"newer work"))
        last = worker.run([*waiting.left, more])
        assert last.full is None
        reports.extend(last.reports)
        tokens = [report.token for report in reports if isinstance(report, WriteDone)]
        assert tokens == sorted(set(tokens)), f"{space} bytes free"
        assert tokens[-1] == 9
        tokens_seen.update(tokens)
        # A read may come earlier than it would have, but is answered, and once.
        assert sorted(read_ids(reports)) == [1, 2, 3], f"{space} bytes free"
        assert [r for r in reports if isinstance(r, SnapshotInstalled)] == [installed]
        assert read_all(journal) == [*expected, batch(51, 9, b"newer work")]
    else:
        raise AssertionError("never enough room")
    assert len(tokens_seen) > 4


def test_while_full_reads_are_served_and_writes_keep_their_order(disk: CrashDisk) -> None:
    journal = reopen(disk)
    worker = DiskWorker(journal)
    assert worker.run([append(1, *BATCHES[:3])]).full is None
    take_snapshot(journal, snapshot_id(1, 1))
    disk.space = 0
    read_of_what_waits = ReadLog(2, EndOffset(3), 1)
    work: list[Work] = [
        append(2, *BATCHES[3:5]),
        ReadLog(1, EndOffset(0), 1),
        read_of_what_waits,
        PersistQuorumState(3, STATE),
        ReadSnapshot(4, snapshot_id(1, 1), 0, 3),
        ReadSnapshot(5, snapshot_id(1, 9), 0, 3),
    ]
    progress = worker.run(work)
    assert isinstance(progress.full, DiskFullError)
    served = [type(report) for report in progress.reports]
    assert served == [LogReadDone, SnapshotReadDone, SnapshotReadDone]
    assert progress.reports[0] == LogReadDone(1, (BATCHES[0],))
    assert progress.left == (work[0], read_of_what_waits, work[3])
    late_read = DiskRead(EndOffset(2), 1, lambda _: None)
    assert worker.serve([late_read]).reports == (DiskReadDone(late_read, (BATCHES[2],)),)
    disk.space = None
    assert worker.run(progress.left).reports == (LogReadDone(2, (BATCHES[3],)), WriteDone(3))


def test_while_full_a_trim_makes_room(disk: CrashDisk) -> None:
    """What would free the disk does not wait behind what found it full."""
    journal = reopen(disk)
    worker = DiskWorker(journal)
    worker.run([append(1, *BATCHES[:5])])
    take_snapshot(journal, snapshot_id(4, 2))
    start = journal.start_offset
    disk.space = 0
    trims: list[Work] = [TrimLog(3, EndOffset(4)), TrimLog(4, EndOffset(50))]
    progress = worker.run([append(2, BATCHES[5]), *trims])
    assert progress.full is not None
    assert journal.start_offset > start
    assert progress.left == (append(2, BATCHES[5]), *trims), "they are reported in their turn"
    disk.space = None
    assert worker.run(progress.left[:2]).reports == (WriteDone(3),)


def test_a_finished_snapshot_is_reported_or_dropped(disk: CrashDisk) -> None:
    journal = reopen(disk)
    worker = DiskWorker(journal)
    worker.run([append(1, *BATCHES[:3])])
    writers = [journal.begin_snapshot(snapshot_id(end, epoch)) for end, epoch in ((2, 1), (3, 2))]
    for writer in writers:
        writer.write(snapshot_bytes(writer.snapshot_id))
        writer.seal()
    finished = worker.run([FinishSnapshot(writers[1])])
    assert finished.reports == (SnapshotTaken(snapshot_id(3, 2)),)
    late = worker.run([*install_work(2), FinishSnapshot(writers[0])])
    (dropped,) = [report for report in late.reports if isinstance(report, SnapshotDropped)]
    assert dropped.snapshot_id == snapshot_id(2, 1)
    assert journal.snapshots == (AHEAD,)


class Recorder:
    """Collects what a journal's thread reports."""

    def __init__(self) -> None:
        self.reports: list[CoreReport] = []
        self.full: list[DiskFullError | None] = []
        self.errors: list[BaseException] = []
        self.changed = asyncio.Event()

    def note(self, kind: list[object]) -> Callable[[object], None]:
        def take(item: object) -> None:
            kind.append(item)
            self.changed.set()

        return take

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def run_with_thread(
    disk: CrashDisk, body: Callable[[JournalThread, Recorder], Awaitable[None]]
) -> None:
    async def run() -> None:
        recorder = Recorder()
        journal = reopen(disk)
        thread = JournalThread(
            journal,
            on_report=recorder.note(recorder.reports),  # type: ignore[arg-type]
            on_full=recorder.note(recorder.full),  # type: ignore[arg-type]
            on_error=recorder.note(recorder.errors),  # type: ignore[arg-type]
        )
        thread.start()
        try:
            await body(thread, recorder)
        finally:
            await thread.stop()

    asyncio.run(run())


def test_the_thread_reports_full_once_and_healed_once(disk: CrashDisk) -> None:
    async def body(thread: JournalThread, recorder: Recorder) -> None:
        thread.submit(append(1, BATCHES[0]))
        await recorder.wait_for(lambda: recorder.reports == [WriteDone(1)])
        disk.space = 0
        thread.submit(append(2, BATCHES[1]))
        await recorder.wait_for(lambda: len(recorder.full) == 1)
        read: list[tuple[Batch, ...]] = []
        thread.submit(PersistQuorumState(3, STATE))
        thread.submit(DiskRead(EndOffset(0), 1, recorder.note(read)))  # type: ignore[arg-type]
        await recorder.wait_for(lambda: read == [(BATCHES[0],)])
        assert recorder.reports == [WriteDone(1)]
        disk.space = None
        await recorder.wait_for(lambda: recorder.reports[-1] == WriteDone(3))
        assert [type(item) for item in recorder.full] == [DiskFullError, type(None)]
        assert recorder.errors == []

    run_with_thread(disk, body)
    held = held_by(reopen(disk.after_crash(Left.NOTHING)))
    assert (list(held.batches), held.state) == (BATCHES[:2], STATE)


def test_the_thread_finishes_what_is_queued_before_it_ends(disk: CrashDisk) -> None:
    async def body(thread: JournalThread, _recorder: Recorder) -> None:
        for token, item in enumerate(BATCHES):
            thread.submit(append(token, item))

    run_with_thread(disk, body)
    assert list(held_by(reopen(disk.after_crash(Left.NOTHING))).batches) == BATCHES


def test_the_thread_ends_on_a_full_disk_without_waiting_for_room(disk: CrashDisk) -> None:
    async def body(thread: JournalThread, recorder: Recorder) -> None:
        disk.space = 0
        thread.submit(append(1, BATCHES[0]))
        await recorder.wait_for(lambda: len(recorder.full) == 1)

    run_with_thread(disk, body)
    assert held_by(reopen(disk.after_crash(Left.ALL))).batches == ()


def test_the_first_error_ends_the_thread_and_is_reported(disk: CrashDisk) -> None:
    """F3: after an error the state of the disk is unknown; nothing more is written."""

    async def body(thread: JournalThread, recorder: Recorder) -> None:
        thread.submit(append(1, BATCHES[1]))
        thread.submit(append(2, BATCHES[0]))
        await recorder.wait_for(lambda: len(recorder.errors) == 1)
        assert isinstance(recorder.errors[0], ValueError)
        thread.submit(append(3, BATCHES[0]))
        assert recorder.reports == []

    run_with_thread(disk, body)
    assert held_by(reopen(disk.after_crash(Left.ALL))).batches == ()


def test_chunks_are_read_while_the_journal_is_busy(disk: CrashDisk) -> None:
    async def body(thread: JournalThread, recorder: Recorder) -> None:
        for item in install_work(1):
            thread.submit(item)
        installed = SnapshotInstalled(AHEAD, VOTERS)
        await recorder.wait_for(lambda: installed in recorder.reports)
        disk.space = 0
        thread.submit(append(2, batch(50, 9, b"waits")))
        thread.submit(ReadSnapshot(7, AHEAD, 0, 1 << 20))
        await recorder.wait_for(
            lambda: any(isinstance(item, SnapshotReadDone) for item in recorder.reports)
        )

    run_with_thread(disk, body)
