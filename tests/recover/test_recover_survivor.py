"""A report tells all that a survivor has flushed; reading changes nothing in its directory."""

from __future__ import annotations

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.segment import open_segments
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.recover.report import voters_text
from tests.kit.crash_disk import flipped
from tests.recover.recover_world import (
    DIRECTORY,
    UUID,
    disk_of,
    open_journal,
    survivor_on,
    voters,
    written,
)


def test_a_report_of_a_whole_directory() -> None:
    log = written()
    log.name_voters(5, voters(1, 2, 3, 4))
    log.write(5, r.ClaimBucket(cluster_uuid=UUID, issued_below=2_000))
    disk = disk_of(log)
    before = disk.contents()
    survivor = survivor_on(disk)
    assert disk.contents() == before
    found = survivor.report
    assert (found.cluster_uuid, found.node_id, found.directory_id) == (UUID, 3, "disk3")
    assert found.progress == (5, log.end)
    assert found.voters == voters_text(voters(1, 2, 3, 4))
    assert (found.committed_end, found.issued_below) == (0, 2_000)
    assert (found.damages, found.is_repairing) == (0, 0)
    assert survivor.replayed.cluster_metadata.state_hash() == log.map.state_hash()


def test_the_end_of_a_log_that_is_torn_counts_up_to_the_tear() -> None:
    log = written(8)
    whole = disk_of(log)
    last = whole.segments()[-1]
    torn = whole.with_file(last, whole.contents()[last] + b"SMB1 torn")
    assert survivor_on(torn).report == survivor_on(whole).report


def test_an_announced_cut_is_honoured() -> None:
    log = written(8)
    disk = disk_of(log)
    journal = open_journal(disk)
    journal._mark.begin_cut(EndOffset(log.end - 2))
    journal._mark.sync()
    found = survivor_on(disk.copy()).report
    assert found.end_offset == log.end - 2
    reopened = open_journal(disk.copy())
    assert reopened.end_offset == found.end_offset, "as a start would see it"
    reopened.close()


def test_damage_and_repairs_are_reported() -> None:
    disk = disk_of(written(8))
    first = disk.segments()[0]
    damaged = disk.with_file(first, flipped(disk.contents()[first], -1))
    assert survivor_on(damaged).report.damages > 0
    journal = open_journal(damaged)  # puts the damage aside, and notes what was promised
    journal.close()
    assert survivor_on(damaged.copy()).report.is_repairing == 1


def test_the_hash_of_the_log_tells_histories_apart() -> None:
    one, other = written(5), written(4)
    other.put(4, "another key")
    reports = [survivor_on(disk_of(log)).report for log in (one, other)]
    assert reports[0].progress == reports[1].progress
    assert reports[0].log_hash != reports[1].log_hash


def test_a_segment_is_read_like_the_journal_reads_it() -> None:
    log = written(8)
    disk = disk_of(log)
    assert len(disk.segments()) > 1
    journal = open_journal(disk)
    assert journal.end_offset == survivor_on(disk.copy()).report.end_offset
    journal.close()
    log.batches.append(Batch(EndOffset(log.end), Epoch(5), BatchKind.CONTROL, (b'{"type":"x"}',)))
    found = open_segments(disk, DIRECTORY, journal.identity.log_id)
    assert [one.problem for one in found] == [""] * len(found)
