"""Room behind the last batch spares flushes the file's metadata, and is never taken for a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from streammeta.controller.journal.inspection import Inspection, open_stopped_directory
from streammeta.controller.journal.journal import Journal
from streammeta.controller.journal.segment import SMALL_BYTES
from streammeta.controller.quorum.messages import Batch
from tests.journal import journal_tools as tools
from tests.kit.crash_disk import CrashDisk, Left

ROOM_BYTES = 1000


def small(offset: int) -> Batch:
    return tools.batch(offset, 1, b"payload %d" % offset)


@pytest.fixture
def disk() -> CrashDisk:
    disk = CrashDisk()
    tools.make(tools.DIRECTORY, disk)
    return disk


def reopen(disk: CrashDisk, segment_bytes: int = tools.ONE_SEGMENT) -> Journal:
    return tools.open_journal(tools.DIRECTORY, segment_bytes, disk, room_bytes=ROOM_BYTES)


def append(journal: Journal, *batches: Batch) -> None:
    for item in batches:
        journal.append([item])
        journal.sync()


def log_size(disk: CrashDisk) -> int:
    return len(disk.contents()[disk.segments()[-1]])


def test_small_batches_lengthen_the_file_once_for_many(disk: CrashDisk) -> None:
    journal = reopen(disk)
    append(journal, small(0))
    sizes = []
    for offset in range(1, 50):
        append(journal, small(offset))
        sizes.append(log_size(disk))
    frame_bytes = log_size(disk) // 50
    assert len(set(sizes)) <= 49 * frame_bytes // ROOM_BYTES + 2
    assert tools.read_all(journal) == [small(offset) for offset in range(50)]
    assert tools.read_all(reopen(disk.after_crash(Left.NOTHING))) == tools.read_all(journal)


def test_a_large_batch_makes_no_room(disk: CrashDisk) -> None:
    journal = reopen(disk)
    append(journal, tools.batch(0, 1, b"x" * SMALL_BYTES))
    assert disk.contents()[disk.segments()[-1]].endswith(b"x")


def test_a_large_batch_is_written_over_room_and_beyond(disk: CrashDisk) -> None:
    journal = reopen(disk)
    large = tools.batch(1, 1, b"x" * (SMALL_BYTES + ROOM_BYTES))
    append(journal, small(0), large, small(2))
    found = reopen(disk.after_crash(Left.NOTHING))
    assert tools.read_all(found) == [small(0), large, small(2)]


def test_the_last_segment_alone_has_room(disk: CrashDisk) -> None:
    journal = reopen(disk, segment_bytes=200)
    batches = [small(offset) for offset in range(10)]
    append(journal, *batches)
    *full, last = disk.segments()
    assert len(full) >= 2
    contents = disk.contents()
    assert not any(contents[path].endswith(b"\0") for path in full)
    assert contents[last].endswith(b"\0")
    for left in Left:
        found = reopen(disk.after_crash(left), segment_bytes=200)
        assert tools.held_by(found).lost is None
        assert tools.read_all(found) == batches


def test_a_batch_that_fits_without_room_is_taken(disk: CrashDisk) -> None:
    journal = reopen(disk)
    append(journal, small(0))
    roomy = log_size(disk)
    offset = 1
    while log_size(disk) == roomy:  # until the room is used up
        append(journal, small(offset))
        offset += 1
    disk = disk.after_crash(Left.NOTHING)
    journal = reopen(disk)
    disk.space = 200
    append(journal, small(offset), small(offset + 1))
    assert tools.read_all(journal) == [small(number) for number in range(offset + 2)]
    disk.space = None
    assert tools.read_all(reopen(disk.after_crash(Left.NOTHING))) == tools.read_all(journal)


def test_a_batch_torn_within_room_is_cut(disk: CrashDisk) -> None:
    journal = reopen(disk)
    append(journal, small(0))
    path = disk.segments()[-1]
    before = disk.contents()[path]
    journal.append([small(1)])
    after = disk.contents()[path]
    assert len(before) == len(after)
    whole = len(after.rstrip(b"\0"))
    begin = len(before.rstrip(b"\0"))
    for end in range(begin, whole):
        torn = disk.after_crash(Left.NOTHING).with_file(path, after[:end] + before[end:])
        found = reopen(torn)
        assert tools.held_by(found).lost is None
        assert tools.read_all(found) == [small(0)], f"{end - begin} bytes of it"
        assert log_size(torn) == begin


def test_room_is_neither_damage_nor_a_torn_tail(tmp_path: Path) -> None:
    tools.make(tmp_path)
    journal = tools.open_journal(tmp_path, room_bytes=ROOM_BYTES)
    append(journal, small(0), small(1))
    journal.close()
    with open_stopped_directory(tmp_path) as (files, identity):
        inspection = Inspection(tmp_path, files, identity)
        inspection.run()
    assert (inspection.findings, inspection.torn_bytes) == ([], 0)
    assert inspection.end_offset == 2
    (segment,) = tmp_path.glob("*.log")
    with segment.open("r+b") as file:
        file.seek(len(segment.read_bytes().rstrip(b"\0")))
        file.write(b"SMB1 half")
    with open_stopped_directory(tmp_path) as (files, identity):
        inspection = Inspection(tmp_path, files, identity)
        inspection.run()
    assert (inspection.findings, inspection.torn_bytes) == ([], 9)
