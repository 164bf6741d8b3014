"""The loop and the journal's thread share a journal: one at a time, in order, durable first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum import events
from streammeta.controller.runtime.persistence import quorum_disk
from streammeta.storage.durable_files import DiskFullError
from tests.journal.journal_tools import held_by, read_all, written_disk
from tests.journal.test_journal_worker import BATCHES, STATE, Recorder, append, reopen
from tests.kit.crash_disk import CrashDisk, Left

LOOP, THREAD = "MainThread", "journal"


@dataclass
class Shared:
    """A journal that the loop and its thread share, and who did what to it."""

    thread: quorum_disk.JournalThread
    recorder: Recorder
    journal: Journal
    written_by: list[str] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)
    on_sync: Callable[[], None] = lambda: None

    def spy(self) -> None:
        write, sync = self.journal.append, self.journal.sync

        def append_batches(batches: tuple[object, ...]) -> None:
            self.written_by.append(threading.current_thread().name)
            self.has_begun.set()
            write(batches)  # type: ignore[arg-type]

        def flush() -> None:
            self.on_sync()
            sync()

        self.journal.append = append_batches  # type: ignore[method-assign,assignment]
        self.journal.sync = flush  # type: ignore[method-assign]

    async def reported(self, *reports: events.WriteDone) -> None:
        await self.recorder.wait_for(lambda: len(self.recorder.reports) >= len(reports))
        assert self.recorder.reports == list(reports)


def assert_set(event: threading.Event) -> None:
    """Wait for another thread; a test that gets nowhere fails."""
    assert event.wait(60)


@pytest.fixture
def disk() -> CrashDisk:
    return written_disk()


@asynccontextmanager
async def shared(disk: CrashDisk) -> AsyncIterator[Shared]:
    """Yield a journal whose thread has nothing to do."""
    recorder, journal = Recorder(), reopen(disk)
    thread = quorum_disk.JournalThread(
        journal,
        on_report=recorder.note(recorder.reports),  # type: ignore[arg-type]
        on_full=recorder.note(recorder.full),  # type: ignore[arg-type]
        on_error=recorder.note(recorder.errors),  # type: ignore[arg-type]
    )
    found = Shared(thread, recorder, journal)
    thread.start()
    try:
        thread.submit(events.PersistQuorumState(1, STATE))
        await found.reported(events.WriteDone(1))
        recorder.reports.clear()
        found.spy()
        yield found
    finally:
        await thread.stop()


async def test_the_loop_writes_what_is_small_while_the_thread_has_nothing_to_do(
    disk: CrashDisk,
) -> None:
    async with shared(disk) as it:
        it.thread.submit(append(2, BATCHES[0]))
        it.thread.submit(append(3, BATCHES[1]))
        assert it.written_by == [], "what the turn sends goes first"
        await it.reported(events.WriteDone(3))
        assert it.written_by == [LOOP, LOOP]
        left = held_by(reopen(disk.after_crash(Left.NOTHING)))
        assert list(left.batches) == BATCHES[:2]


async def test_an_append_that_is_awaited_is_flushed_and_reported_at_once_with_those_before_it(
    disk: CrashDisk,
) -> None:
    async with shared(disk) as it:
        it.thread.submit(append(2, BATCHES[0]))
        it.thread.submit(append(3, BATCHES[1]), is_awaited=True)
        assert it.written_by == [LOOP, LOOP]
        assert it.recorder.reports == [events.WriteDone(3)]
        left = held_by(reopen(disk.after_crash(Left.NOTHING)))
        assert list(left.batches) == BATCHES[:2]
        it.thread.submit(append(4, BATCHES[2]))
        await it.reported(events.WriteDone(3), events.WriteDone(4))
        assert it.written_by == [LOOP] * 3, "nothing is written twice"


async def test_a_flush_of_the_loop_is_reported_when_it_is_durable_and_not_before(
    disk: CrashDisk,
) -> None:
    seen: list[list[quorum_disk.CoreReport]] = []
    async with shared(disk) as it:
        it.on_sync = lambda: seen.append(list(it.recorder.reports))
        it.thread.submit(append(2, BATCHES[0]))
        await it.reported(events.WriteDone(2))
        assert seen
        assert not any(seen)


async def test_an_append_behind_work_of_the_thread_goes_there_too(disk: CrashDisk) -> None:
    may_go_on = threading.Event()
    async with shared(disk) as it:
        it.on_sync = lambda: assert_set(may_go_on)
        it.thread.submit(events.PersistQuorumState(2, STATE))
        it.thread.submit(append(3, *BATCHES[:2]))
        await asyncio.to_thread(assert_set, it.has_begun)
        it.thread.submit(append(4, BATCHES[2]))
        assert it.recorder.reports == []
        may_go_on.set()
        await it.reported(events.WriteDone(3), events.WriteDone(4))
        assert it.written_by == [THREAD, THREAD]
        assert it.recorder.errors == []


async def test_work_of_the_thread_takes_along_what_the_loop_was_about_to_write(
    disk: CrashDisk,
) -> None:
    async with shared(disk) as it:
        it.thread.submit(append(2, BATCHES[0]))
        it.thread.submit(events.PersistQuorumState(3, STATE))
        it.thread.submit(append(4, BATCHES[1]))
        await it.recorder.wait_for(lambda: events.WriteDone(4) in it.recorder.reports)
        assert it.written_by == [THREAD, THREAD]
        assert read_all(it.journal) == BATCHES[:2]


async def test_a_full_disk_that_the_loop_meets_is_left_to_the_thread(disk: CrashDisk) -> None:
    async with shared(disk) as it:
        it.thread.submit(append(2, BATCHES[0]))
        await it.reported(events.WriteDone(2))
        disk.space = 0
        it.thread.submit(append(3, BATCHES[1]))
        await it.recorder.wait_for(lambda: len(it.recorder.full) == 1)
        assert it.written_by[:3] == [LOOP, LOOP, THREAD]
        it.thread.submit(append(4, BATCHES[2]))
        disk.space = None
        await it.recorder.wait_for(lambda: it.recorder.reports[-1] == events.WriteDone(4))
        assert set(it.written_by[3:]) == {THREAD}
        assert [type(item) for item in it.recorder.full] == [DiskFullError, type(None)]
        it.thread.submit(append(5, BATCHES[3]))
        await it.recorder.wait_for(lambda: it.recorder.reports[-1] == events.WriteDone(5))
        assert it.written_by[-1] == LOOP
        assert read_all(it.journal) == BATCHES[:4]


async def test_an_error_that_the_loop_meets_ends_all_writing(disk: CrashDisk) -> None:
    async with shared(disk) as it:
        it.thread.submit(append(2, BATCHES[1]))
        await it.recorder.wait_for(lambda: len(it.recorder.errors) == 1)
        assert isinstance(it.recorder.errors[0], ValueError)
        it.thread.submit(append(3, BATCHES[0]))
    assert it.recorder.reports == []
    assert held_by(reopen(disk.after_crash(Left.ALL))).batches == ()


async def test_a_thread_without_work_leaves_the_log_alone(
    disk: CrashDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quorum_disk, "_IDLE_CHECK_S", 0.001)
    checks, are_enough = [0], threading.Event()

    def count() -> None:
        checks[0] += 1
        if checks[0] == 5:
            are_enough.set()

    async with shared(disk) as it:
        it.journal.snapshots.release_idle = count  # type: ignore[method-assign]
        flushers: list[str] = []
        it.on_sync = lambda: flushers.append(threading.current_thread().name)
        it.thread.submit(append(2, BATCHES[0]))
        await it.reported(events.WriteDone(2))
        it.thread.submit(events.PersistQuorumState(3, STATE))  # wakes it from a longer wait
        await asyncio.to_thread(assert_set, are_enough)
        assert flushers.count(THREAD) == 1
