"""The reserve makes room for elections on a full disk, and is taken again when there is room."""

from __future__ import annotations

import pytest

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.journal.inspection import Inspection
from streammeta.controller.journal.journal import Journal
from streammeta.controller.journal.reserve import RESERVE_NAME
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.events import AppendLog, PersistQuorumState, WriteDone
from streammeta.controller.quorum.voters import ReplicaKey
from streammeta.controller.runtime.persistence.quorum_disk import DiskWorker, StateWritten
from streammeta.storage.durable_files import DiskFullError
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk, Left, PowerFailure

RESERVE = tools.DIRECTORY / RESERVE_NAME
RESERVE_BYTES = 8_000
DATA = tools.batch(0, 1, b"data" * 10)
LEADER_CHANGE = tools.batch(1, 9, b"who leads", control=True)


def state(epoch: int) -> QuorumState:
    return QuorumState(Epoch(epoch), ReplicaKey(NodeId(1)), None)


def reopen(disk: CrashDisk) -> Journal:
    return tools.open_journal(tools.DIRECTORY, files=disk, reserve_bytes=RESERVE_BYTES)


@pytest.fixture
def disk() -> CrashDisk:
    """A directory from before there were reserves."""
    disk = tools.written_disk()
    assert RESERVE not in disk.contents()
    return disk


def reserved(disk: CrashDisk) -> int:
    return len(disk.contents().get(RESERVE, b""))


def test_an_older_directory_gets_its_reserve_durably_and_byte_for_byte(disk: CrashDisk) -> None:
    journal = reopen(disk)
    assert journal.reserve.shortage is None
    assert reserved(disk.after_crash(Left.NOTHING)) == RESERVE_BYTES
    assert set(disk.contents()[RESERVE]) - {0}, "nothing that a file system leaves out"
    facts = Inspection(tools.DIRECTORY, disk, journal.identity)
    facts.run()
    assert facts.reserve_bytes == RESERVE_BYTES
    assert not facts.findings


def test_on_a_full_disk_votes_and_a_leader_change_are_written(disk: CrashDisk) -> None:
    journal = reopen(disk)
    journal.append([DATA])
    journal.sync()
    disk.space = 0
    journal.append([LEADER_CHANGE])
    journal.sync()
    assert isinstance(journal.reserve.shortage, DiskFullError)
    assert 0 < reserved(disk) < RESERVE_BYTES
    journal.write_quorum_state(state(10))
    found = reopen(disk.after_crash(Left.NOTHING))
    assert tools.read_all(found) == [DATA, LEADER_CHANGE]
    assert found.quorum_state == state(10)


def test_batches_leave_the_room_that_the_state_needs(disk: CrashDisk) -> None:
    journal = reopen(disk)
    disk.space = 0
    with pytest.raises(DiskFullError):
        journal.append([tools.batch(0, 1, b"x" * 2 * RESERVE_BYTES)])
    while disk.space:
        end = journal.end_offset
        try:
            journal.append([tools.batch(end, 1, b"y" * (disk.space // 4))])
        except DiskFullError:
            disk.space = 0
    journal.sync()
    with pytest.raises(DiskFullError):
        journal.append([tools.batch(journal.end_offset, 1, b"z")])
    journal.write_quorum_state(state(10))
    assert reopen(disk.after_crash(Left.NOTHING)).quorum_state == state(10)


def test_the_reserve_is_taken_again_as_far_as_there_is_room(disk: CrashDisk) -> None:
    journal = reopen(disk)
    disk.space = 0
    journal.append([DATA])
    journal.sync()
    disk.space = 100
    left = reserved(disk)
    journal.reserve.refill()
    assert reserved(disk) == left + 100
    assert journal.reserve.shortage is not None, "it is not whole"
    disk.space = None
    journal.reserve.refill()
    assert journal.reserve.shortage is None
    assert reserved(disk) == RESERVE_BYTES


def test_a_node_that_starts_without_room_for_the_reserve_says_so(disk: CrashDisk) -> None:
    disk.space = 50
    assert isinstance(reopen(disk).reserve.shortage, DiskFullError)
    disk.locked = False
    disk.space = None
    assert reopen(disk).reserve.shortage is None


def test_a_crash_while_the_reserve_makes_room_loses_no_vote(disk: CrashDisk) -> None:
    reopen(disk).close()
    for call in range(1, 40):
        for left in Left:
            victim = disk.copy()
            journal = reopen(victim)
            victim.space, victim.calls, victim.crash_at = 0, 0, call
            has_crashed = False
            try:
                journal.append([DATA])
                journal.sync()
                journal.write_quorum_state(state(10))
            except PowerFailure:
                has_crashed = True
            found = reopen(victim.after_crash(left))
            assert found.quorum_state in (tools.STATE, state(10))
            assert found.reserve.shortage is None
            if not has_crashed:
                assert found.quorum_state == state(10)
                assert tools.read_all(found) == [DATA]
    assert not has_crashed, "every call was a crash once"


def test_a_state_overtakes_batches_that_wait_for_room_and_is_written_once(disk: CrashDisk) -> None:
    journal = reopen(disk)
    worker = DiskWorker(journal)
    disk.space = 0
    stuck = AppendLog(1, (tools.batch(0, 1, b"x" * 2 * RESERVE_BYTES),))
    progress = worker.run(
        [stuck, PersistQuorumState(2, state(10)), PersistQuorumState(3, tools.STATE)]
    )
    assert progress.full is not None
    assert progress.reports == (StateWritten(3),), "the newest counts, and no batch as flushed"
    assert progress.left == (stuck, StateWritten(2), StateWritten(3))
    assert reopen(disk.after_crash(Left.NOTHING)).quorum_state == tools.STATE

    later = worker.serve([PersistQuorumState(4, state(11))])
    assert later.reports == (StateWritten(4),)
    disk.space = None
    done = worker.run([*progress.left, *later.left])
    assert done.reports == (WriteDone(4),)
    assert (journal.quorum_state, done.full) == (state(11), None)
    assert journal.flushed_end == EndOffset(1)


def test_urgent_writes_go_on_while_the_disk_counts_as_full(disk: CrashDisk) -> None:
    journal = reopen(disk)
    worker = DiskWorker(journal)
    disk.space = 0
    progress = worker.run([AppendLog(1, (DATA,)), PersistQuorumState(2, state(10))])
    assert progress.reports == (WriteDone(2),)
    assert progress.left == ()
    assert isinstance(progress.full, DiskFullError), "no other should write more"
    progress = worker.run([AppendLog(3, (LEADER_CHANGE,))], may_refill=False)
    assert progress.reports == (WriteDone(3),)
    disk.space = None
    assert worker.run([]).full is None
    assert reserved(disk) == RESERVE_BYTES
