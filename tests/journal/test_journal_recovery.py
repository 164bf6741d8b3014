"""Recovery after damage and after a crash at any call keeps or reports every flushed batch.

Each change is stopped at every call it makes to the disk, before the call and after it, and for
each of those at everything that may be left of what was not synced. The recovery that follows is
stopped at every call as well.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streammeta.controller.ids import EndOffset, Epoch, NodeId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.journal.errors import DirectoryNotFormattedError, JournalDamagedError
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.quorum.voters import ReplicaKey
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk, Left, PowerFailure, crashes, flipped

BATCHES = [
    tools.batch(0, 1, b"one", control=True),
    tools.batch(1, 1, b"two", b"", b"three"),
    tools.batch(4, 3, b"x" * 300, control=True),
    tools.batch(5, 4, b"last"),
]


def write(path: Path, *groups: list[Batch], segment_bytes: int = tools.ONE_SEGMENT) -> None:
    if not path.exists() or not list(path.iterdir()):
        tools.make(path)
    journal = tools.open_journal(path, segment_bytes)
    for group in groups:
        journal.append(group)
        journal.sync()
    journal.close()


def test_only_the_tail_of_a_large_log_is_held_and_all_its_control_batches(tmp_path: Path) -> None:
    large = [tools.batch(i, 1, bytes(1 << 20), control=i < 2) for i in range(10)]
    write(tmp_path, large)
    journal = tools.open_journal(tmp_path)
    start = journal.log_start
    assert start.end_offset == 10
    assert 2 <= len(start.tail) <= 4
    assert [b.base_offset for b in start.control] == [0, 1]
    journal.close()


@pytest.mark.parametrize("name", ["quorum-state", "meta.json", "flushed-mark", "damage.json"])
def test_damaged_small_files_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, BATCHES)
    path = tmp_path / name
    good = path.read_bytes() if path.exists() else b'{"promised_end_offset": 3}\n'
    bad = bytes(byte ^ 1 for byte in good)
    path.write_bytes(bad)
    with pytest.raises(JournalDamagedError, match=f"{name}"):
        tools.open_journal(tmp_path)
    assert path.read_bytes() == bad


def test_a_missing_quorum_state_is_never_made_anew(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    (tmp_path / "quorum-state").unlink()
    with pytest.raises(JournalDamagedError, match="vote"):
        tools.open_journal(tmp_path)


def test_a_quorum_state_older_than_the_log_is_refused(tmp_path: Path) -> None:
    """An old file was put back: the vote it holds is not the last one."""
    tools.make(tmp_path, state=QuorumState(Epoch(3)))
    old = (tmp_path / "quorum-state").read_bytes()
    journal = tools.open_journal(tmp_path)
    journal.write_quorum_state(QuorumState(Epoch(4)))
    journal.append(BATCHES)
    journal.close()
    (tmp_path / "quorum-state").write_bytes(old)
    with pytest.raises(JournalDamagedError, match=r"epoch 3.*4"):
        tools.open_journal(tmp_path)


@pytest.mark.parametrize("segment_bytes", [tools.ONE_SEGMENT, 1, 200])
@pytest.mark.parametrize("keep", range(len(BATCHES)))
def test_a_truncated_log_ends_and_goes_on(tmp_path: Path, segment_bytes: int, keep: int) -> None:
    write(tmp_path, BATCHES, segment_bytes=segment_bytes)
    journal = tools.open_journal(tmp_path, segment_bytes)
    journal.truncate(BATCHES[keep].base_offset)
    assert tools.read_all(journal) == BATCHES[:keep]
    replacement = tools.batch(BATCHES[keep].base_offset, 9, b"new", b"er")
    journal.append([replacement])
    journal.close()
    journal = tools.open_journal(tmp_path, segment_bytes)
    held = tools.held_by(journal)
    assert list(held.batches) == [*BATCHES[:keep], replacement]
    assert held.lost is None
    journal.close()


def test_a_batch_is_never_cut_in_half(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    journal = tools.open_journal(tmp_path)
    with pytest.raises(ValueError, match="at 2"):
        journal.truncate(EndOffset(2))
    journal.close()


def test_a_batch_that_does_not_continue_the_log_is_refused(tmp_path: Path) -> None:
    tools.make(tmp_path)
    journal = tools.open_journal(tmp_path)
    journal.append(BATCHES[:1])
    with pytest.raises(ValueError, match="continue"):
        journal.append(BATCHES[2:3])
    journal.append(BATCHES[1:3])
    with pytest.raises(ValueError, match="epoch 2"):
        journal.append([tools.batch(5, 2, b"older epoch")])
    journal.close()


@pytest.mark.parametrize("trim", range(7))
@pytest.mark.parametrize("segment_bytes", [tools.ONE_SEGMENT, 1, 200])
def test_a_trimmed_log_keeps_all_from_there(tmp_path: Path, segment_bytes: int, trim: int) -> None:
    write(tmp_path, BATCHES, segment_bytes=segment_bytes)
    journal = tools.open_journal(tmp_path, segment_bytes)
    tools.take_snapshot(journal, tools.snapshot_id(4, 1))
    tools.take_snapshot(journal, tools.snapshot_id(6, 4))
    journal.trim(EndOffset(trim))
    start_offset = journal.start_offset
    for _ in range(2):
        journal.close()
        journal = tools.open_journal(tmp_path, segment_bytes)
        held = tools.held_by(journal)
        assert held.start_offset == start_offset
        assert held.start_offset <= trim
        assert held.snapshots == tuple(
            which
            for which in (tools.snapshot_id(4, 1), tools.snapshot_id(6, 4))
            if which.end_offset >= trim
        )
        assert list(held.batches) == [b for b in BATCHES if b.base_offset >= held.start_offset]
        below = [b for b in BATCHES if b.end_offset <= held.start_offset]
        assert journal.log_start.start_epoch == (below[-1].epoch if below else 0)
        if segment_bytes == 1:
            assert held.batches[0].end_offset > trim or len(held.batches) == 1
        if below:
            assert journal.read(EndOffset(held.start_offset - 1), 100) == ()
    journal.append([tools.batch(6, 4, b"more")])
    assert tools.read_all(journal)[-1].end_offset == 7
    journal.close()


def test_a_log_is_never_trimmed_beyond_the_newest_snapshot(tmp_path: Path) -> None:
    write(tmp_path, BATCHES, segment_bytes=1)
    journal = tools.open_journal(tmp_path, 1)
    with pytest.raises(ValueError, match="snapshot"):
        journal.trim(EndOffset(1))
    tools.take_snapshot(journal, tools.snapshot_id(4, 1))
    with pytest.raises(ValueError, match="snapshot"):
        journal.trim(EndOffset(5))
    assert tools.read_all(journal) == BATCHES
    journal.close()


def test_a_trimmed_log_can_be_cut_back_to_its_start(tmp_path: Path) -> None:
    write(tmp_path, BATCHES, segment_bytes=1)
    journal = tools.open_journal(tmp_path, 1)
    tools.take_snapshot(journal, tools.snapshot_id(4, 1))
    journal.trim(EndOffset(4))
    assert journal.start_offset == 4
    journal.truncate(EndOffset(4))
    journal.append([tools.batch(4, 2, b"epoch 2 fits after 1, not after 3")])
    journal.close()
    journal = tools.open_journal(tmp_path, 1)
    assert [(e.epoch, e.start_offset) for e in journal.log_start.epoch_starts] == [(2, 4)]
    journal.close()


def test_a_refused_journal_leaves_no_file_open(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    state = tmp_path / "quorum-state"
    state.write_bytes(state.read_bytes()[:-9])

    for _ in range(3):
        with pytest.raises(JournalDamagedError):
            tools.open_journal(tmp_path)
    gc.collect()

    assert open_files_below(tmp_path) == []


def open_files_below(folder: Path) -> list[Path]:
    """Return what this process holds open in `folder` (Linux)."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    targets = [link.readlink() for link in links if link.exists()]
    return [target for target in targets if target.is_relative_to(folder)]


SEGMENT_BYTES = 200
ROOM_BYTES = 120
"""Room for one small batch and part of the next."""
WRITTEN = [
    tools.batch(0, 1, b"leads", control=True),
    tools.batch(1, 1, b"x" * 90, b"y" * 40),
    tools.batch(3, 2, b"z" * 150),
    tools.batch(4, 2, b"four"),
    tools.batch(5, 3, b"v" * 160),
    tools.batch(6, 3, b"six", control=True),
]
NEW_STATE = QuorumState(Epoch(10), ReplicaKey(NodeId(3)))

Change = Callable[[Journal], None]


def started() -> CrashDisk:
    """Return a disk with a flushed log of several segments and two snapshots."""
    groups = [[item] for item in WRITTEN]
    return tools.written_disk(SEGMENT_BYTES, *groups, snapshots=((3, 1), (5, 2)))


def reopen(disk: CrashDisk) -> Journal:
    return tools.open_journal(tools.DIRECTORY, SEGMENT_BYTES, disk, room_bytes=ROOM_BYTES)


def recover(disk: CrashDisk) -> None:
    reopen(disk)


def crashes_in(disk: CrashDisk, change: Change) -> Iterator[tuple[str, CrashDisk]]:
    """Yield every disk that a crash in a change of the recovered journal can leave."""

    def act(victim: CrashDisk) -> None:
        with victim.unharmed():
            journal = reopen(victim)
        change(journal)

    return crashes(disk, act)


def held_on(disk: CrashDisk) -> tools.Held:
    """Recover a copy of a disk and return what it holds; recovering it again changes nothing."""
    first = disk.copy()
    held = tools.held_by(reopen(first))
    again = first.after_crash(Left.NOTHING)
    assert tools.held_by(reopen(again)) == held, "a crash after recovery undoes it"
    return held


def append_two(journal: Journal) -> None:
    journal.append([tools.batch(7, 3, b"seven"), tools.batch(8, 4, b"eight" * 40)])
    journal.sync()
    journal.append([tools.batch(9, 4, b"nine")])
    journal.sync()


def install_ahead(journal: Journal) -> None:
    install_new(journal, 100, 4)


def install_over_a_diverging_log(journal: Journal) -> None:
    install_new(journal, 6, 4)


def install_new(journal: Journal, end_offset: int, epoch: int) -> None:
    which = tools.snapshot_id(end_offset, epoch)
    assert tools.install(journal, which, tools.snapshot_bytes(which)) == tools.VOTERS


CHANGES: dict[str, Change] = {
    "truncate within a segment": lambda journal: journal.truncate(EndOffset(6)),
    "truncate several segments": lambda journal: journal.truncate(EndOffset(3)),
    "truncate to a segment's start": lambda journal: journal.truncate(EndOffset(5)),
    "trim": lambda journal: journal.trim(EndOffset(5)),
    "write a snapshot": lambda journal: tools.take_snapshot(journal, tools.snapshot_id(7, 3)),
    "install ahead of the log": install_ahead,
    "install over a diverging log": install_over_a_diverging_log,
    "quorum-state": lambda journal: journal.write_quorum_state(NEW_STATE),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_crash_leaves_the_old_state_or_the_new(name: str) -> None:
    change = CHANGES[name]
    disk = started()
    before = held_on(disk)
    changed = disk.copy()
    change(reopen(changed))
    after = held_on(changed.after_crash(Left.NOTHING))
    assert after != before
    seen = set()
    for where, left in crashes_in(disk, change):
        held = held_on(left)
        # A trim goes step by step: each step is a log that begins later, or a snapshot less.
        held = as_one_of(before, after, held) if name == "trim" else held
        assert held in (before, after), f"{name}, {where}"
        seen.add(held == after)
    assert seen == {True, False}
    assert held_on(changed.after_crash(Left.NOTHING)) == after, "done means durable"


def as_one_of(before: tools.Held, after: tools.Held, held: tools.Held) -> tools.Held:
    """Return `after` for a trim that was carried out in part, and is sound."""
    kept = tuple(item for item in before.batches if item.base_offset >= held.start_offset)
    is_sound = (
        before.start_offset <= held.start_offset <= after.start_offset
        and held.batches == kept
        and set(after.snapshots) <= set(held.snapshots) <= set(before.snapshots)
    )
    same = replace(
        held, start_offset=after.start_offset, batches=after.batches, snapshots=after.snapshots
    )
    return same if is_sound and held != before else held


def test_a_crash_while_appending_loses_nothing_that_was_flushed() -> None:
    disk = started()
    before = held_on(disk).batches
    # The second begins a segment: both segments are flushed together.
    more = (
        tools.batch(7, 3, b"seven" * 40),
        tools.batch(8, 4, b"eight"),
        tools.batch(9, 4, b"nine"),
    )
    flushed = 0

    def append_more(journal: Journal) -> None:
        nonlocal flushed
        flushed = 0
        journal.append(more[:2])
        journal.sync()
        flushed = 2
        journal.append(more[2:])
        journal.sync()
        flushed = 3

    for where, left in crashes_in(disk, append_more):
        held = held_on(left)
        added = held.batches[len(before) :]
        assert held.batches == before + more[: len(added)], where
        assert len(added) >= flushed, f"{where}: {flushed} flushed"
        assert held.lost is None, where


def test_what_a_killed_process_left_is_durable_before_it_counts() -> None:
    """A process is killed at any call; the next one acknowledges more; then the power fails.

    The next process sees files and names that never reached the disk. What it builds on them must
    outlive them.
    """
    disk = started()

    def first_life(victim: CrashDisk) -> None:
        with victim.unharmed():
            journal = reopen(victim)
        append_two(journal)
        journal.truncate(EndOffset(7))
        tools.take_snapshot(journal, tools.snapshot_id(7, 3))
        journal.write_quorum_state(QuorumState(Epoch(10)))
        install_new(journal, 20, 5)

    call = 0
    has_crashed = True
    while has_crashed:
        call += 1
        victim = disk.copy()
        victim.crash_at, has_crashed = call, False
        try:
            first_life(victim)
        except PowerFailure:
            has_crashed = True
        second = victim.after_kill()
        journal = reopen(second)
        held = tools.held_by(journal)
        more = tools.batch(held.end_offset, 9, b"acknowledged")
        journal.append([more])
        journal.sync()
        for left in Left:
            found = held_on(second.after_crash(left))
            expected = replace(held, batches=(*held.batches, more), end_offset=held.end_offset + 1)
            assert found == expected, f"killed after call {call}, {left.name} left"


def test_a_crash_in_recovery_is_recovered_from() -> None:
    """After an install stopped anywhere, recovery itself is stopped anywhere."""
    disk = started()
    before = held_on(disk)
    tried = set()
    for where, left in crashes_in(disk, install_over_a_diverging_log):
        contents = frozenset(left.contents().items())
        if contents in tried:
            continue
        tried.add(contents)
        expected = held_on(left)
        assert expected == before or expected.snapshots == (tools.snapshot_id(6, 4),)
        for then, left_again in crashes(left, recover):
            assert held_on(left_again) == expected, f"{where}, then {then}"


def test_a_crash_while_damage_is_put_aside_forgets_nothing() -> None:
    """The promise is durable before the first damaged byte is moved."""
    disk = started()
    damaged = disk.segments()[2]
    data = flipped(disk.contents()[damaged], -1)
    disk = disk.with_file(damaged, data)
    whole = held_on(started())
    expected = held_on(disk)
    assert expected.lost == LostEntries(EndOffset(7), tools.STATE.epoch)
    assert expected.batches == whole.batches[: len(expected.batches)]
    assert expected.end_offset >= 5
    for where, left in crashes(disk, recover):
        held = held_on(left)
        assert held == expected, where
        kept = [data for path, data in left.copy().contents().items() if b"SMS2" in data]
        assert kept, where


def test_a_crash_while_damage_is_cleared_forgets_it_or_not() -> None:
    disk = started()
    disk = disk.with_file(disk.segments()[-1], None)
    damaged = held_on(disk)
    assert damaged.lost is not None
    outcomes = set()
    for where, left in crashes_in(disk, Journal.clear_damage):
        held = held_on(left)
        assert replace(held, lost=damaged.lost) == damaged, where
        outcomes.add(held.lost)
    assert outcomes == {None, damaged.lost}


def test_a_crash_while_formatting_leaves_a_directory_to_format_or_a_formatted_one() -> None:
    def act(victim: CrashDisk) -> None:
        format_directory(
            tools.DIRECTORY,
            cluster_id=tools.CLUSTER,
            node_id=tools.NODE,
            bootstrap_voters=tools.VOTERS,
            files=victim,
        )

    outcomes = set()
    for where, left in crashes(CrashDisk(), act):
        found = left.copy()
        try:
            journal = reopen(found)
        except DirectoryNotFormattedError:
            outcomes.add("not formatted")
            act(found)
            journal = reopen(found)
        else:
            outcomes.add("formatted")
        assert journal.identity.bootstrap_voters == tools.VOTERS, where
        assert tools.held_by(journal).end_offset == 0, where
    assert outcomes == {"formatted", "not formatted"}
