"""Damage below what was flushed is told, put aside and remembered; nothing is dropped silently."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from streammeta.controller.ids import EndOffset
from streammeta.controller.journal.errors import JournalDamagedError
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.messages import Batch
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk, flipped

BATCHES = (
    tools.batch(0, 1, b"one", control=True),
    tools.batch(1, 1, b"two", b"", b"three"),
    tools.batch(4, 3, b"x" * 40, control=True),
    tools.batch(5, 4, b"last"),
)
END = 6
LOST = LostEntries(EndOffset(END), tools.STATE.epoch)


def flips(disk: CrashDisk, path: Path) -> list[tuple[int, bytes]]:
    """Return the file with one bit flipped, for each of its bytes."""
    good = disk.contents()[path]
    rng = random.Random(1)
    return [(i, flipped(good, i, rng.randrange(8))) for i in range(len(good))]


def recovered(disk: CrashDisk, segment_bytes: int = tools.ONE_SEGMENT) -> tools.Held:
    """Recover, and check that a second recovery finds the same and new batches can follow."""
    held = tools.held_by(tools.open_journal(tools.DIRECTORY, segment_bytes, disk))
    disk.locked = False
    assert tools.held_by(tools.open_journal(tools.DIRECTORY, segment_bytes, disk)) == held
    disk.locked = False
    assert not [path for path in disk.contents() if path.name.endswith((".tmp", ".part"))]
    more = disk.copy()
    journal = tools.open_journal(tools.DIRECTORY, segment_bytes, more)
    journal.append([tools.batch(held.end_offset, 9, b"more")])
    journal.close()
    assert (
        tools.open_journal(tools.DIRECTORY, segment_bytes, more).end_offset == held.end_offset + 1
    )
    return held


def batch_ends(disk: CrashDisk, path: Path, base: int) -> list[tuple[int, int]]:
    """Return (byte, offset) of every batch end in a segment whose first batch begins at `base`."""
    data = disk.contents()[path]
    inside = [b for b in BATCHES if b.base_offset >= base]
    starts = [i for i in range(len(data)) if data.startswith(b"SMB1", i)] + [len(data)]
    return [(byte, b.end_offset) for byte, b in zip(starts[1:], inside, strict=False)]


def findings(disk: CrashDisk) -> list[dict[str, object]]:
    found = json.loads(disk.contents()[tools.DIRECTORY / "damage.json"])["findings"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("segment_bytes", [tools.ONE_SEGMENT, 170, 1])
def test_a_flipped_bit_below_the_mark_is_told_and_what_is_before_it_stays(
    segment_bytes: int,
) -> None:
    disk = tools.written_disk(segment_bytes, BATCHES)
    for path in disk.segments():
        base = int(path.stem)
        for position, bad in flips(disk, path):
            where = f"{path.name}, byte {position}"
            damaged = disk.with_file(path, bad)
            held = recovered(damaged, segment_bytes)
            good_ends = [e for byte, e in batch_ends(disk, path, base) if byte <= position]
            good_end = max([base, *good_ends])
            assert held.lost == LOST, where
            assert held.end_offset == good_end, where
            assert held.batches == tuple(b for b in BATCHES if b.end_offset <= good_end), where
            assert damaged.contents()[path.with_name(path.name + ".damaged")] == bad, where
            (finding,) = findings(damaged)
            assert finding["file"] == path.name, where
            assert finding["offset"] == good_end, where
            assert isinstance(finding["byte"], int)
            assert finding["byte"] <= position, where


@pytest.mark.parametrize("segment_bytes", [tools.ONE_SEGMENT, 170, 1])
def test_a_shortened_segment_is_told_at_every_length(segment_bytes: int) -> None:
    disk = tools.written_disk(segment_bytes, BATCHES)
    for path in disk.segments():
        good = disk.contents()[path]
        for size in range(len(good)):
            held = recovered(disk.with_file(path, good[:size]), segment_bytes)
            assert held.lost == LOST, f"{path.name} of {size} bytes"
            assert held.batches == BATCHES[: len(held.batches)]
            assert held.end_offset >= int(path.stem)


def test_a_missing_segment_is_told_and_what_is_before_it_stays() -> None:
    disk = tools.written_disk(1, BATCHES)
    assert len(disk.segments()) == 4
    for index, path in enumerate(disk.segments()):
        damaged = disk.with_file(path, None)
        held = recovered(damaged, 1)
        assert (held.lost, held.batches) == (LOST, BATCHES[:index])
        aside = [p for p in damaged.contents() if p.name.endswith(".log.damaged")]
        assert len(aside) == 3 - index


def test_with_a_snapshot_damage_below_it_costs_no_promise() -> None:
    """The snapshot has what the damaged part said; the log begins behind it."""
    disk = tools.written_disk(1, BATCHES, snapshots=((4, 1),))
    for path in disk.segments()[:2]:
        for position, bad in flips(disk, path):
            held = recovered(disk.with_file(path, bad), 1)
            where = f"{path.name}, byte {position}"
            assert held.lost is None, where
            assert held.end_offset == END, where
            assert held.batches == tuple(
                b for b in BATCHES if b.base_offset >= held.start_offset
            ), where
    for path in disk.segments()[2:]:
        for position, bad in flips(disk, path):
            held = recovered(disk.with_file(path, bad), 1)
            assert held.lost == LOST, f"{path.name}, byte {position}"
            assert held.batches == BATCHES[: len(held.batches)]
            assert held.end_offset == int(path.stem)


def test_in_one_segment_damage_below_a_snapshot_begins_the_log_at_its_end() -> None:
    disk = tools.written_disk(tools.ONE_SEGMENT, BATCHES, snapshots=((4, 1),))
    (path,) = disk.segments()
    bad = disk.contents()[path].replace(b"three", b"thrxe")
    held = recovered(disk.with_file(path, bad))
    assert (held.start_offset, held.end_offset, held.lost) == (4, 4, LOST)


def test_a_damaged_newest_snapshot_is_put_aside_and_the_log_reaches_back_to_the_older() -> None:
    disk = tools.written_disk(1, BATCHES, snapshots=((4, 1), (6, 4)))
    journal = tools.open_journal(tools.DIRECTORY, 1, disk)
    journal.trim(EndOffset(4))
    journal.close()
    newest = tools.DIRECTORY / "00000000000000000006-0000000004.checkpoint"
    good = disk.contents()[newest]
    for bad in [data for _, data in flips(disk, newest)] + [
        good[:size] for size in range(len(good))
    ]:
        damaged = disk.with_file(newest, bad)
        held = recovered(damaged, 1)
        assert (held.lost, held.end_offset, held.start_offset) == (None, END, 4)
        assert held.snapshots == (tools.snapshot_id(4, 1),)
        assert damaged.contents()[newest.with_name(newest.name + ".damaged")] == bad


def test_without_a_snapshot_below_it_a_trimmed_log_is_of_no_use() -> None:
    """C3: what a log that begins at 4 follows is gone; nothing may be built on it."""
    disk = tools.written_disk(1, BATCHES, snapshots=((4, 1),))
    journal = tools.open_journal(tools.DIRECTORY, 1, disk)
    journal.trim(EndOffset(4))
    journal.close()
    (snapshot,) = (path for path in disk.contents() if path.suffix == ".checkpoint")
    damaged = disk.with_file(snapshot, None)
    held = recovered(damaged, 1)
    assert (held.start_offset, held.end_offset, held.lost) == (0, 0, LOST)
    assert sum(path.name.endswith(".log.damaged") for path in damaged.contents()) == 2


def with_outdated_mark(segment_bytes: int, *batches: Batch) -> CrashDisk:
    """Return a disk whose batches were flushed one by one, with the mark of the first flush.

    After a power failure the mark may be old.
    """
    disk = tools.written_disk(segment_bytes, batches[:1])
    mark = disk.contents()[tools.DIRECTORY / "flushed-mark"]
    journal = tools.open_journal(tools.DIRECTORY, segment_bytes, disk)
    for item in batches[1:]:
        journal.append([item])
        journal.sync()
    journal.close()
    return disk.with_file(tools.DIRECTORY / "flushed-mark", mark)


def test_damage_is_told_with_an_outdated_mark_if_a_later_batch_vouches() -> None:
    """Each batch says what was flushed before it."""
    disk = with_outdated_mark(tools.ONE_SEGMENT, *BATCHES)
    (path,) = disk.segments()
    bad = disk.contents()[path].replace(b"three", b"thrxe")
    held = recovered(disk.with_file(path, bad))
    assert held.batches == BATCHES[:1]
    assert held.lost == LOST, "every batch behind the damage may have been acknowledged"


def test_batches_that_can_not_be_used_are_promises_all_the_same() -> None:
    """With an outdated mark: behind a bad segment header, and where the snapshot is gone."""
    disk = with_outdated_mark(1, *BATCHES)
    newest = disk.segments()[-1]
    bad = b"X" + disk.contents()[newest][1:]
    assert recovered(disk.with_file(newest, bad), 1).lost == LOST
    without_beginning = disk.with_file(disk.segments()[0], None)
    assert recovered(without_beginning, 1).lost == LOST


@pytest.mark.parametrize("straddle", [1, 20, 44, 45])
def test_a_batch_that_vouches_is_found_wherever_it_begins(straddle: int) -> None:
    """Also where its header lies across two of the pieces in which a file is read."""
    header_bytes, length_bytes, piece = 45, 4, 1 << 20
    large = tools.batch(1, 1, bytes(piece - straddle - header_bytes - length_bytes))
    disk = with_outdated_mark(tools.ONE_SEGMENT, BATCHES[0], large, tools.batch(2, 1, b"vouches"))
    (path,) = disk.segments()
    good = disk.contents()[path]
    start = good.index(b"SMB1", good.index(b"SMB1") + 1)
    bad = good[:start] + b"X" + good[start + 1 :]
    held = recovered(disk.with_file(path, bad))
    assert held.lost == LostEntries(EndOffset(3), tools.STATE.epoch)


def test_a_bad_end_of_a_segment_that_is_not_the_last_is_no_torn_tail() -> None:
    """It was flushed before the next one began, whatever an outdated mark says."""
    disk = with_outdated_mark(1, *BATCHES)
    path = disk.segments()[2]
    bad = disk.contents()[path][:-1] + b"!"
    damaged = disk.with_file(path, bad)
    held = recovered(damaged, 1)
    assert held.lost == LOST
    assert damaged.contents()[path.with_name(path.name + ".damaged")] == bad


def test_a_tail_torn_at_any_byte_is_cut() -> None:
    """The last batch was written and never flushed; any part of it may be missing or wrong."""
    disk = tools.written_disk(tools.ONE_SEGMENT, BATCHES[:3])
    (path,) = disk.segments()
    flushed = disk.contents()[path]
    journal = tools.open_journal(tools.DIRECTORY, files=disk)
    journal.append(BATCHES[3:])
    whole = disk.contents()[path]
    disk.locked = False
    for size in range(len(flushed), len(whole)):
        changed = flipped(whole, size, 2)
        for data in (whole[:size], flushed + bytes(size - len(flushed)), changed):
            torn = disk.with_file(path, data)
            held = recovered(torn)
            assert (held.batches, held.lost) == (BATCHES[:3], None), f"torn at byte {size}"
            assert torn.contents()[path] == flushed
    kept = [p.name for p in disk.contents() if "damage" in p.name]
    assert kept == []


def test_a_batch_at_another_place_or_of_another_log_is_damage() -> None:
    """F6: a write that went astray, or never arrived, has a good checksum and is in no place."""
    same = ((tools.batch(0, 1, b"same"),), (tools.batch(1, 1, b"same"),))
    disk, other = (
        tools.written_disk(tools.ONE_SEGMENT, *same),
        tools.written_disk(tools.ONE_SEGMENT, *same),
    )
    (path,) = disk.segments()
    data, stranger = disk.contents()[path], other.contents()[path]
    first = data.index(b"SMB1")
    size = (len(data) - first) // 2
    for bad, named in (
        (data[:-size] + data[first : first + size], "base offset is 0"),
        (data[:-size] + stranger[-size:], "checksum"),
        (data[:-size] + bytes(size), "magic"),
    ):
        damaged = disk.with_file(path, bad)
        held = recovered(damaged)
        assert (held.end_offset, held.lost) == (1, LostEntries(EndOffset(2), tools.STATE.epoch))
        (finding,) = findings(damaged)
        assert named in str(finding["what"])


def test_damage_found_again_adds_to_what_is_known() -> None:
    """A second disk error during the repair must not shorten the promise."""
    disk = tools.written_disk(1, BATCHES)
    first = disk.with_file(disk.segments()[3], None)
    assert recovered(first, 1).lost == LOST
    second = first.with_file(first.segments()[1], None)
    held = recovered(second, 1)
    assert (held.lost, held.end_offset) == (LOST, 1)
    assert len(findings(second)) == 2


def test_cleared_damage_stays_cleared() -> None:
    disk = tools.written_disk(1, BATCHES)
    damaged = disk.with_file(disk.segments()[3], None)
    journal = tools.open_journal(tools.DIRECTORY, 1, damaged)
    assert journal.log_start.lost == LOST
    journal.append(BATCHES[3:])
    journal.sync()
    journal.clear_damage()
    journal.close()
    held = recovered(damaged, 1)
    assert (held.lost, held.batches) == (None, BATCHES)


def test_damage_met_while_reading_says_where_and_how_to_go_on() -> None:
    disk = tools.written_disk(tools.ONE_SEGMENT, BATCHES)
    (path,) = disk.segments()
    journal = tools.open_journal(tools.DIRECTORY, files=disk)
    inode = disk.names_now[path]
    position = inode.content.index(b"three")
    inode.content = inode.content.replace(b"three", b"thrxe")
    with pytest.raises(JournalDamagedError, match="offset 1") as met:
        tools.read_all(journal)
    assert met.value.path == path
    assert 0 < met.value.offset < position
