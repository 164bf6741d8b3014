"""Recovery keeps or reports every flushed batch, and cuts an unflushed tail."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.messages import Batch
from tests.journal.journal_tools import (
    ONE_SEGMENT,
    batch,
    held_by,
    make,
    open_journal,
    read_all,
    snapshot_id,
    take_snapshot,
)

BATCHES = [
    batch(0, 1, b"one", control=True),
    batch(1, 1, b"two", b"", b"three"),
    batch(4, 3, b"x" * 300, control=True),
    batch(5, 4, b"last"),
]


def write(path: Path, *groups: list[Batch], segment_bytes: int = ONE_SEGMENT) -> None:
    if not path.exists() or not list(path.iterdir()):
        make(path)
    journal = open_journal(path, segment_bytes)
    for group in groups:
        journal.append(group)
        journal.sync()
    journal.close()


def test_only_the_tail_of_a_large_log_is_held_and_all_its_control_batches(tmp_path: Path) -> None:
    large = [batch(i, 1, bytes(1 << 20), control=i < 2) for i in range(10)]
    write(tmp_path, large)
    journal = open_journal(tmp_path)
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
        open_journal(tmp_path)
    assert path.read_bytes() == bad


def test_a_missing_quorum_state_is_never_made_anew(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    (tmp_path / "quorum-state").unlink()
    with pytest.raises(JournalDamagedError, match="vote"):
        open_journal(tmp_path)


def test_a_quorum_state_older_than_the_log_is_refused(tmp_path: Path) -> None:
    """An old file was put back: the vote it holds is not the last one."""
    make(tmp_path, state=QuorumState(Epoch(3)))
    old = (tmp_path / "quorum-state").read_bytes()
    journal = open_journal(tmp_path)
    journal.write_quorum_state(QuorumState(Epoch(4)))
    journal.append(BATCHES)
    journal.close()
    (tmp_path / "quorum-state").write_bytes(old)
    with pytest.raises(JournalDamagedError, match=r"epoch 3.*4"):
        open_journal(tmp_path)


@pytest.mark.parametrize("segment_bytes", [ONE_SEGMENT, 1, 200])
@pytest.mark.parametrize("keep", range(len(BATCHES)))
def test_a_truncated_log_ends_and_goes_on(tmp_path: Path, segment_bytes: int, keep: int) -> None:
    write(tmp_path, BATCHES, segment_bytes=segment_bytes)
    journal = open_journal(tmp_path, segment_bytes)
    journal.truncate(BATCHES[keep].base_offset)
    assert read_all(journal) == BATCHES[:keep]
    replacement = batch(BATCHES[keep].base_offset, 9, b"new", b"er")
    journal.append([replacement])
    journal.close()
    journal = open_journal(tmp_path, segment_bytes)
    held = held_by(journal)
    assert list(held.batches) == [*BATCHES[:keep], replacement]
    assert held.lost is None
    journal.close()


def test_a_batch_is_never_cut_in_half(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    journal = open_journal(tmp_path)
    with pytest.raises(ValueError, match="at 2"):
        journal.truncate(EndOffset(2))
    journal.close()


def test_a_batch_that_does_not_continue_the_log_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    journal = open_journal(tmp_path)
    journal.append(BATCHES[:1])
    with pytest.raises(ValueError, match="continue"):
        journal.append(BATCHES[2:3])
    journal.append(BATCHES[1:3])
    with pytest.raises(ValueError, match="epoch 2"):
        journal.append([batch(5, 2, b"older epoch")])
    journal.close()


@pytest.mark.parametrize("trim", range(7))
@pytest.mark.parametrize("segment_bytes", [ONE_SEGMENT, 1, 200])
def test_a_trimmed_log_keeps_all_from_there(tmp_path: Path, segment_bytes: int, trim: int) -> None:
    write(tmp_path, BATCHES, segment_bytes=segment_bytes)
    journal = open_journal(tmp_path, segment_bytes)
    take_snapshot(journal, snapshot_id(4, 1))
    take_snapshot(journal, snapshot_id(6, 4))
    journal.trim(EndOffset(trim))
    start_offset = journal.start_offset
    for _ in range(2):
        journal.close()
        journal = open_journal(tmp_path, segment_bytes)
        held = held_by(journal)
        assert held.start_offset == start_offset
        assert held.start_offset <= trim
        assert held.snapshots == tuple(
            which for which in (snapshot_id(4, 1), snapshot_id(6, 4)) if which.end_offset >= trim
        )
        assert list(held.batches) == [b for b in BATCHES if b.base_offset >= held.start_offset]
        below = [b for b in BATCHES if b.end_offset <= held.start_offset]
        assert journal.log_start.start_epoch == (below[-1].epoch if below else 0)
        if segment_bytes == 1:
            assert held.batches[0].end_offset > trim or len(held.batches) == 1
        if below:
            assert journal.read(EndOffset(held.start_offset - 1), 100) == ()
    journal.append([batch(6, 4, b"more")])
    assert read_all(journal)[-1].end_offset == 7
    journal.close()


def test_a_log_is_never_trimmed_beyond_the_newest_snapshot(tmp_path: Path) -> None:
    write(tmp_path, BATCHES, segment_bytes=1)
    journal = open_journal(tmp_path, 1)
    with pytest.raises(ValueError, match="snapshot"):
        journal.trim(EndOffset(1))
    take_snapshot(journal, snapshot_id(4, 1))
    with pytest.raises(ValueError, match="snapshot"):
        journal.trim(EndOffset(5))
    assert read_all(journal) == BATCHES
    journal.close()


def test_a_trimmed_log_can_be_cut_back_to_its_start(tmp_path: Path) -> None:
    write(tmp_path, BATCHES, segment_bytes=1)
    journal = open_journal(tmp_path, 1)
    take_snapshot(journal, snapshot_id(4, 1))
    journal.trim(EndOffset(4))
    assert journal.start_offset == 4
    journal.truncate(EndOffset(4))
    journal.append([batch(4, 2, b"epoch 2 fits after 1, not after 3")])
    journal.close()
    journal = open_journal(tmp_path, 1)
    assert [(e.epoch, e.start_offset) for e in journal.log_start.epoch_starts] == [(2, 4)]
    journal.close()


def test_a_refused_journal_leaves_no_file_open(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    state = tmp_path / "quorum-state"
    state.write_bytes(state.read_bytes()[:-9])

    for _ in range(3):
        with pytest.raises(JournalDamagedError):
            open_journal(tmp_path)
    gc.collect()

    assert open_files_below(tmp_path) == []


def open_files_below(folder: Path) -> list[Path]:
    """Return what this process holds open in `folder` (Linux)."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    targets = [link.readlink() for link in links if link.exists()]
    return [target for target in targets if target.is_relative_to(folder)]
