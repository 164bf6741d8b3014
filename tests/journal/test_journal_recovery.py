"""What was flushed is never lost silently; what was not is cut without a word."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from controller.ids import ClusterId, EndOffset, Epoch, NodeId
from controller.journal.errors import JournalDamagedError
from controller.journal.journal import Journal
from controller.quorum.config import QuorumState
from controller.quorum.messages import Batch, BatchKind
from controller.quorum.voters import ReplicaKey

CLUSTER = ClusterId("c")


def open_journal(path: Path, segment_bytes: int = 64 << 20) -> Journal:
    return Journal.open(
        path,
        cluster_id=CLUSTER,
        node_id=NodeId(1),
        format_if_empty=True,
        segment_bytes=segment_bytes,
    )


def batch(base: int, epoch: int, *payloads: bytes) -> Batch:
    return Batch(EndOffset(base), Epoch(epoch), BatchKind.DATA, payloads)


def write(path: Path, *groups: list[Batch], segment_bytes: int = 64 << 20) -> None:
    """Append each group and flush it."""
    journal = open_journal(path, segment_bytes)
    for group in groups:
        journal.append(group)
        journal.sync()
    journal.close()


def read_all(journal: Journal) -> list[Batch]:
    found: list[Batch] = []
    while chunk := journal.read(found[-1].end_offset if found else EndOffset(0), 100):
        found.extend(chunk)
    return found


def segment_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))


BATCHES = [
    batch(0, 1, b"one"),
    batch(1, 1, b"two", b"", b"three"),
    batch(4, 3, b"x" * 300),
    batch(5, 4, b"last"),
]


@pytest.mark.parametrize("segment_bytes", [64 << 20, 1])
def test_a_reopened_log_is_the_log_that_was_written(tmp_path: Path, segment_bytes: int) -> None:
    write(tmp_path, BATCHES[:2], BATCHES[2:], segment_bytes=segment_bytes)
    journal = open_journal(tmp_path, segment_bytes)
    assert read_all(journal) == BATCHES
    start = journal.log_start
    assert (start.start_offset, start.end_offset, list(start.tail)) == (0, 6, BATCHES)
    assert [(e.epoch, e.start_offset) for e in start.epoch_starts] == [(1, 0), (3, 4), (4, 5)]
    journal.close()


def test_quorum_state_survives(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    assert journal.quorum_state == QuorumState()
    state = QuorumState(Epoch(7), ReplicaKey(NodeId(2)), NodeId(3))
    journal.write_quorum_state(state)
    journal.close()
    journal = open_journal(tmp_path)
    assert journal.quorum_state == state
    journal.close()


def test_a_tail_torn_at_any_byte_is_cut(tmp_path: Path) -> None:
    """The last batch was written and never flushed; any part of it may be missing."""
    write(tmp_path, BATCHES[:3])
    (path,) = segment_files(tmp_path)
    flushed = path.read_bytes()
    journal = open_journal(tmp_path)
    journal.append([BATCHES[3]])
    whole = path.read_bytes()
    mark = (tmp_path / "flushed-mark").read_bytes()
    journal.close()
    for size in range(len(flushed), len(whole)):
        for tail in (whole[len(flushed) : size], bytes(size - len(flushed))):
            path.write_bytes(flushed + tail)
            (tmp_path / "flushed-mark").write_bytes(mark)
            journal = open_journal(tmp_path)
            assert journal.log_start.end_offset == 5, f"torn after {size} bytes"
            assert path.stat().st_size == len(flushed)
            journal.append([BATCHES[3]])
            assert read_all(journal) == BATCHES
            journal.close()


@pytest.mark.parametrize("segment_bytes", [64 << 20, 200])
def test_a_flipped_bit_in_flushed_batches_is_reported(tmp_path: Path, segment_bytes: int) -> None:
    write(tmp_path, BATCHES, segment_bytes=segment_bytes)
    rng = random.Random(1)
    for path in segment_files(tmp_path):
        good = path.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(JournalDamagedError, match=path.name):
                open_journal(tmp_path, segment_bytes)
            assert path.read_bytes() == bad, "damage is not touched"
        path.write_bytes(good)


def test_damage_is_reported_with_an_outdated_mark_if_a_later_batch_vouches(tmp_path: Path) -> None:
    """After a power failure the mark may be old; each batch says what was flushed before it."""
    write(tmp_path, BATCHES[:1])
    mark = (tmp_path / "flushed-mark").read_bytes()
    write(tmp_path, BATCHES[1:3], BATCHES[3:])
    (tmp_path / "flushed-mark").write_bytes(mark)
    (path,) = segment_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"three")] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalDamagedError) as damaged:
        open_journal(tmp_path)
    assert damaged.value.path == path


def test_a_missing_flushed_tail_is_reported(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    (path,) = segment_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalDamagedError, match="batch at 5"):
        open_journal(tmp_path)


def test_a_missing_segment_is_reported(tmp_path: Path) -> None:
    write(tmp_path, BATCHES, segment_bytes=1)
    files = segment_files(tmp_path)
    assert len(files) == 4
    for path in files:
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(JournalDamagedError):
            open_journal(tmp_path, 1)
        path.write_bytes(data)


def test_a_batch_at_another_place_or_of_another_log_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "a", [batch(0, 1, b"same")], [batch(1, 1, b"same")])
    write(tmp_path / "b", [batch(0, 1, b"same")], [batch(1, 1, b"same")])
    (first,), (second,) = segment_files(tmp_path / "a"), segment_files(tmp_path / "b")
    data, other = first.read_bytes(), second.read_bytes()
    header = data.index(b"SMB1")
    size = (len(data) - header) // 2
    first.write_bytes(data[:-size] + data[header : header + size])
    with pytest.raises(JournalDamagedError, match="base offset is 0"):
        open_journal(tmp_path / "a")
    first.write_bytes(data[:-size] + other[-size:])
    with pytest.raises(JournalDamagedError, match="checksum"):
        open_journal(tmp_path / "a")


@pytest.mark.parametrize("name", ["quorum-state", "meta.json", "flushed-mark"])
def test_damaged_small_files_are_reported(tmp_path: Path, name: str) -> None:
    write(tmp_path, BATCHES)
    path = tmp_path / name
    good = path.read_bytes()
    bad = bytes(byte ^ 1 for byte in good)
    path.write_bytes(bad)
    with pytest.raises(JournalDamagedError, match=name):
        open_journal(tmp_path)
    assert path.read_bytes() == bad


def test_a_missing_quorum_state_is_never_made_anew(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    (tmp_path / "quorum-state").unlink()
    with pytest.raises(JournalDamagedError, match="vote"):
        open_journal(tmp_path)


@pytest.mark.parametrize("segment_bytes", [64 << 20, 1, 200])
@pytest.mark.parametrize("keep", range(len(BATCHES)))
def test_a_truncated_log_ends_there_and_goes_on(
    tmp_path: Path, segment_bytes: int, keep: int
) -> None:
    write(tmp_path, BATCHES, segment_bytes=segment_bytes)
    journal = open_journal(tmp_path, segment_bytes)
    journal.truncate(BATCHES[keep].base_offset)
    assert read_all(journal) == BATCHES[:keep]
    replacement = batch(BATCHES[keep].base_offset, 9, b"new", b"er")
    journal.append([replacement])
    journal.close()
    journal = open_journal(tmp_path, segment_bytes)
    assert read_all(journal) == [*BATCHES[:keep], replacement]
    journal.close()


def test_a_batch_is_never_cut_in_half(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    journal = open_journal(tmp_path)
    with pytest.raises(ValueError, match="no batch begins at 2"):
        journal.truncate(EndOffset(2))
    journal.close()


def test_a_batch_that_does_not_continue_the_log_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append(BATCHES[:1])
    with pytest.raises(ValueError, match="does not continue"):
        journal.append(BATCHES[2:3])
    journal.close()


def test_a_refused_journal_leaves_no_file_open(tmp_path: Path) -> None:
    write(tmp_path, BATCHES)
    (segment,) = segment_files(tmp_path)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)

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
