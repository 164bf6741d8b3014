"""The bytes of a write-ahead log, and their damage: torn tails are cut, the rest is reported."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest

from streammeta.client.errors import DamagedLogError, WrongLogError
from streammeta.client.wal.disk import files
from streammeta.client.wal.disk.quarantine import quarantine
from streammeta.storage.segmented_log import BadFrameError
from tests.broker_client.wal_tools import (
    IDENTITY,
    LOG,
    encoded,
    group_of,
    open_disk,
    record_at,
    recovered,
    sequences_of,
)
from tests.kit.crash_disk import CrashDisk, crashes, flipped
from tests.kit.seeds import seeds

FLUSHED = 26
LOST = 2


def written(flushed: int = FLUSHED) -> CrashDisk:
    """Return a disk with groups of two records in several segments, as a killed process left it."""
    disk = CrashDisk()
    log = open_disk(disk)
    for begin in range(0, flushed, 2):
        log.write([group_of([begin, begin + 1])])
    return disk.after_kill()


def unsynced_tail(disk: CrashDisk) -> tuple[CrashDisk, Path, int]:
    """Append a group without syncing it; return the disk, its segment, and where it begins."""
    log = open_disk(disk)
    path = disk.segments()[-1]
    begin = len(disk.contents()[path])
    log._write_group(group_of([FLUSHED, FLUSHED + 1, FLUSHED + 2]))
    return disk.after_kill(), path, begin


def test_a_tail_torn_at_any_byte_is_cut() -> None:
    disk, path, begin = unsynced_tail(written())
    data = disk.contents()[path]
    for end in range(begin, len(data)):
        torn = disk.with_file(path, data[:end])
        assert sequences_of(recovered(open_disk(torn))) == list(range(FLUSHED))
        assert len(torn.contents()[path]) == begin
    assert sequences_of(recovered(open_disk(disk))) == list(range(FLUSHED + 3))


def test_a_tail_with_any_bit_flipped_or_pages_of_zeros_is_cut() -> None:
    disk, path, begin = unsynced_tail(written())
    data = disk.contents()[path]
    for at in range(begin, len(data)):
        changed = flipped(data, at, at % 8)
        found = open_disk(disk.with_file(path, changed))
        assert sequences_of(recovered(found)) == list(range(FLUSHED))
    zeros = disk.with_file(path, data[:begin] + bytes(len(data) - begin))
    assert sequences_of(recovered(open_disk(zeros))) == list(range(FLUSHED))


def test_of_two_unsynced_frames_the_later_one_alone_does_not_count() -> None:
    disk = written()
    path = disk.segments()[-1]
    begin = len(disk.contents()[path])
    log = open_disk(disk)
    for sequence in (FLUSHED, FLUSHED + 1):
        log._write_group(group_of([sequence]))
    data = flipped(disk.contents()[path], begin + 60)
    torn = disk.with_file(path, data)
    assert sequences_of(recovered(open_disk(torn))) == list(range(FLUSHED))
    assert len(torn.contents()[path]) == begin


def test_a_later_frame_tells_damage_although_the_state_file_is_old() -> None:
    disk = written()
    old_state = disk.contents()[LOG / files.STATE_NAME]
    path = disk.segments()[-1]
    begin = len(disk.contents()[path])
    log = open_disk(disk)
    for sequence in (FLUSHED, FLUSHED + 1):
        log.write([group_of([sequence], size=12)])
    assert disk.segments()[-1] == path
    data = flipped(disk.contents()[path], begin + 60)
    found = CrashDisk.holding({**disk.contents(), LOG / files.STATE_NAME: old_state, path: data})
    with pytest.raises(DamagedLogError, match=f"{path}.*{begin}"):
        open_disk(found)
    log = open_disk(found, mends=True)
    assert sequences_of(recovered(log)) == [*range(FLUSHED), FLUSHED + 1]
    assert log.lost == 1


@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_a_bit_flipped_anywhere_is_reported_and_mended_when_asked(seed: int) -> None:
    rng = random.Random(seed)
    disk = written()
    for path in disk.segments():
        data = disk.contents()[path]
        for at in sorted(rng.sample(range(len(data)), 40)):
            changed = flipped(data, at, rng.randrange(8))
            found = disk.with_file(path, changed)
            before = found.contents()
            with pytest.raises(DamagedLogError, match=f"{path}") as error:
                open_disk(found)
            assert error.value.offset <= at
            assert found.contents() == before, f"seed {seed}, {path} at {at}"
            check_mended(found, path, changed)


def check_mended(found: CrashDisk, path: Path, damaged: bytes) -> None:
    """At most the group with the damage is lost; that is counted, and the damaged file kept."""
    log = open_disk(found, mends=True)
    kept = sequences_of(recovered(log))
    assert log.end == FLUSHED
    assert log.lost == FLUSHED - len(kept)
    assert log.lost in (0, LOST)
    assert kept == sorted(set(kept))
    assert found.contents()[path.with_name(f"{path.name}.damaged")] == damaged
    assert log.write([group_of([FLUSHED])]) == 1
    again = open_disk(found.after_kill())
    assert sequences_of(recovered(again)) == [*kept, FLUSHED]


def test_flushed_records_cut_off_at_any_byte_are_reported_and_counted() -> None:
    disk = written()
    for path in disk.segments():
        data = disk.contents()[path]
        for end in range(0, len(data), 7):
            if path == disk.segments()[-1] and end == 0:
                continue
            cut = disk.with_file(path, data[:end])
            with pytest.raises(DamagedLogError, match=f"{path}"):
                open_disk(cut)
            log = open_disk(cut, mends=True)
            kept = sequences_of(recovered(log))
            assert log.end == FLUSHED
            assert kept == sorted(set(kept))
            assert len(kept) + log.lost == FLUSHED


def test_a_missing_segment_is_reported_and_counted() -> None:
    disk = written()
    firsts = [int(path.stem) for path in disk.segments()]
    assert len(firsts) >= 4
    for index, path in enumerate(disk.segments()):
        lost = range(firsts[index], [*firsts[1:], FLUSHED][index])
        if not lost:
            continue
        found = disk.with_file(path, None)
        with pytest.raises(DamagedLogError):
            open_disk(found)
        log = open_disk(found, mends=True)
        assert sequences_of(recovered(log)) == [n for n in range(FLUSHED) if n not in lost]
        assert (log.end, log.lost) == (FLUSHED, len(lost))
    found = disk
    for path in disk.segments():
        found = found.with_file(path, None)
    with pytest.raises(DamagedLogError, match=f"0 to {FLUSHED - 1}"):
        open_disk(found)
    log = open_disk(found, mends=True)
    assert (recovered(log), log.end, log.lost) == ([], FLUSHED, FLUSHED)


def test_a_damaged_or_missing_state_file_costs_no_record() -> None:
    disk = written()
    path = LOG / files.STATE_NAME
    good = disk.contents()[path]
    slots = flipped(flipped(good, 4100), 8200)
    for bad in (b"", good[:20], flipped(good, 0), slots):
        found = disk.with_file(path, bad)
        with pytest.raises(DamagedLogError, match="state"):
            open_disk(found)
        assert sequences_of(recovered(open_disk(found, mends=True))) == list(range(FLUSHED))
    assert sequences_of(recovered(open_disk(disk.with_file(path, flipped(good, 4100)))))


def test_a_quarantine_can_be_repeated_after_a_power_failure_at_any_call() -> None:
    disk = written()
    path = disk.segments()[1]
    data = flipped(disk.contents()[path], 150)
    damaged = disk.with_file(path, data)
    for where, found in crashes(damaged, lambda victim: quarantine(victim, LOG, IDENTITY)):
        log = open_disk(found, mends=True)
        assert len(recovered(log)) == FLUSHED - LOST, where
        assert found.contents()[path.with_name(f"{path.name}.damaged")] == data


def test_a_quarantine_of_a_good_log_changes_nothing() -> None:
    disk, path, begin = unsynced_tail(written())
    torn = disk.with_file(path, disk.contents()[path][: begin + 11])
    for found in (disk, torn):
        before = found.contents()
        quarantine(found, LOG, IDENTITY)
        assert found.contents() == before


LOG_ID = bytes(range(16))
PATH = Path("log/x.wal")
CODEC = files.frame_codec(LOG_ID)


def encode(body: bytes, count: int) -> bytes:
    return CODEC.encode(
        body, base_offset=4, epoch=9, flushed_end=3, kind=files.FrameKind.RECORDS, count=count
    )


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size)


def checksum(data: bytes) -> bytes:
    return number(google_crc32c.value(data), 4)


def test_the_header_of_a_file_is_laid_out_as_documented() -> None:
    header = files.FileHeader(files.SEGMENT_MAGIC, "näme", 1000, LOG_ID, 77)
    name = "näme".encode()
    rest = b"\0\1" + number(len(name), 2) + number(1000, 4) + LOG_ID + number(77, 8) + name
    data = b"SMWL" + checksum(rest) + rest
    assert header.encode() == data
    assert header.size == len(data) == 40 + len(name)
    assert files.decode_file_header(data + b"what follows", files.SEGMENT_MAGIC, PATH) == header


def test_a_frame_is_laid_out_as_documented() -> None:
    body = b"".join((*encoded(record_at(4)), *encoded(record_at(5))))
    fields = checksum(body) + number(len(body), 4) + number(4, 8) + number(3, 8) + number(9, 8)
    fields += number(1, 1) + number(2, 4)
    data = b"SMWF" + checksum(LOG_ID + fields) + fields + body
    assert encode(body, 2) == data
    header = CODEC.decode_header(data[:45])
    assert (header.base_offset, header.end_offset, header.flushed_end) == (4, 6, 3)
    assert (header.epoch, header.size) == (9, len(data))
    header.check_body(body)
    assert list(files.records_in(header, body)) == [record_at(4), record_at(5)]
    for kind, count in ((4, 2), (1, 1), (1, 3)):
        with pytest.raises(BadFrameError):
            list(files.records_in(replace(header, kind=kind, count=count), body))


def test_the_state_file_is_laid_out_as_documented() -> None:
    disk = CrashDisk()
    log = open_disk(disk)
    log.write([group_of([0, 1, 2])])
    log.trim(2)
    data = disk.contents()[LOG / "state"]
    log_id = data[16:32]
    slots = [(data[at : at + 4], data[at + 4 : at + 28]) for at in (4096, 8192)]
    assert [crc == checksum(log_id + body) for crc, body in slots] == [True, True]
    newest = max(body for _, body in slots)
    assert newest[8:] == number(2, 8) + number(3, 8)


def test_every_changed_bit_of_a_header_or_frame_is_noticed() -> None:
    header = files.FileHeader(files.SEGMENT_MAGIC, "ns", 1000, LOG_ID, 77).encode()
    body = b"".join(encoded(record_at(4)))
    frame = encode(body, 1)
    for bit in range(8 * len(header)):
        with pytest.raises(files.BadHeaderError):
            files.decode_file_header(flipped(header, *divmod(bit, 8)), files.SEGMENT_MAGIC, PATH)
    for bit in range(8 * len(frame)):
        changed = flipped(frame, *divmod(bit, 8))
        with pytest.raises(BadFrameError):
            CODEC.decode_header(changed[:45]).check_body(changed[45:])
    with pytest.raises(BadFrameError, match="checksum"):
        files.frame_codec(LOG_ID[::-1]).decode_header(frame[:45])


def test_a_file_of_another_version_is_refused_by_name() -> None:
    data = files.FileHeader(files.SEGMENT_MAGIC, "ns", 1000, LOG_ID, 77).encode()
    rest = b"\0\2" + data[10:]
    with pytest.raises(WrongLogError, match=r"x\.wal"):
        files.decode_file_header(b"SMWL" + checksum(rest) + rest, files.SEGMENT_MAGIC, PATH)
