"""Who may go on after the loss of a majority, and the directory that becomes the only voter's.

The cases are after those of CockroachDB's loqrecovery: coverage, listed dead, stale survivors,
survivors of equal progress, repeated and foreign reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from streammeta.controller.backup.restoring import EPOCH_JUMP
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal import state_files
from streammeta.controller.journal.directory import META_NAME, evidence_name, read_identity
from streammeta.controller.journal.errors import WrongDirectoryError
from streammeta.controller.journal.segment import open_segments
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.quorum.recovered_log import ERA_OFFSETS, era_of
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.recover.applying import Application
from streammeta.controller.recover.planning import (
    RecoveryError,
    RecoveryPlan,
    Report,
    choose_survivor,
    plan_recovery,
    voters_of,
    voters_text,
)
from streammeta.controller.recover.survivor import read_survivor
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from tests.kit.crash_disk import CrashDisk, crashes, flipped
from tests.recover.recover_world import (
    DIRECTORY,
    MADE,
    NEW_DISK,
    NEW_UUID,
    UUID,
    disk_of,
    open_journal,
    plan_of,
    report,
    survivor_on,
    voters,
    written,
)


@dataclass(frozen=True)
class Case:
    """Reports and a list of the dead, with the survivor that goes on or the refusal."""

    name: str
    reports: tuple[Report, ...]
    dead: tuple[int, ...]
    goes_on: int | None = None
    refused: str = ""
    backup: tuple[int, int] | None = None


def five(node_id: int, progress: tuple[int, int] = (4, 100), **changes: Any) -> Report:
    return report(node_id, progress, **{"voters": voters_text(voters(1, 2, 3, 4, 5)), **changes})


CASES = (
    Case("one of three is left", (report(3),), (1, 2), 3),
    Case("the order of the dead is of no matter", (report(3),), (2, 1), 3),
    Case("the longer log of one epoch", (five(4), five(5, (4, 101))), (1, 2, 3), 5),
    Case("the later epoch of a shorter log", (five(4, (5, 90)), five(5)), (1, 2, 3), 4),
    Case("the lowest id of equal logs", (five(5), five(4)), (1, 2, 3), 4),
    Case("the only voter that is left of one", (report(1, voters=""),), (), None, "NOT_A_VOTER"),
    Case("no report", (), (1, 2), None, "NO_REPORT"),
    Case("a majority is there", (report(2), report(3)), (1,), None, "MAJORITY_IS_THERE"),
    Case("all are there", (report(1), report(2), report(3)), (), None, "MAJORITY_IS_THERE"),
    Case(
        "half of four is no majority",
        tuple(report(node_id, voters=voters_text(voters(1, 2, 3, 4))) for node_id in (3, 4)),
        (1, 2),
        3,
    ),
    Case("a dead one is not listed", (report(3),), (1,), None, "DEAD_LIST"),
    Case("a living one is listed as dead", (report(3),), (1, 2, 3), None, "DEAD_LIST"),
    Case("a stranger is listed as dead", (report(3),), (1, 2, 9), None, "DEAD_LIST"),
    Case("nobody is listed as dead", (report(3),), (), None, "DEAD_LIST"),
    Case(
        "a survivor of another cluster",
        (five(4), five(5, cluster_id="other")),
        (1, 2, 3),
        None,
        "FOREIGN_REPORT",
    ),
    Case(
        "a survivor of before a recovery",
        (five(4), five(5, cluster_uuid=NEW_UUID)),
        (1, 2, 3),
        None,
        "FOREIGN_REPORT",
    ),
    Case(
        "a voter that never got anything",
        (five(4), five(5, (0, 0), cluster_uuid="")),
        (1, 2, 3),
        4,
    ),
    Case(
        "an empty log and one of another cluster",
        (five(4, (0, 0), cluster_uuid=""), five(5, cluster_id="other")),
        (1, 2, 3),
        None,
        "FOREIGN_REPORT",
    ),
    Case(
        "an empty log of a node that votes with another disk",
        (five(4), five(5, (0, 0), cluster_uuid="", directory_id="never voted")),
        (1, 2, 3),
        None,
        "NOT_A_VOTER",
    ),
    Case("one directory twice", (five(4), five(4)), (1, 2, 3, 5), None, "REPEATED_REPORT"),
    Case(
        "two disks of one node",
        (five(4), five(4, directory_id="older")),
        (1, 2, 3, 5),
        None,
        "REPEATED_REPORT",
    ),
    Case(
        "a node that votes with another disk",
        (report(3, directory_id="new"),),
        (1, 2),
        None,
        "NOT_A_VOTER",
    ),
    Case("an observer", (report(9),), (1, 2, 3), None, "NOT_A_VOTER"),
    Case("a damaged directory", (report(3, damages=1),), (1, 2), None, "DAMAGED"),
    Case(
        "a directory that is being repaired",
        (report(3, is_repairing=1),),
        (1, 2),
        None,
        "REPAIRING",
    ),
    Case(
        "a stale survivor that is damaged",
        (five(4), five(5, (3, 10), damages=2)),
        (1, 2, 3),
        None,
        "DAMAGED",
    ),
    Case(
        "a stale survivor knows other voters",
        (five(4), report(3, (3, 20))),
        (1, 2, 5),
        4,
    ),
    Case(
        "the most complete names fewer voters than a stale one",
        (report(3), five(5, (3, 20))),
        (1, 2),
        None,
        "NOT_A_VOTER",
    ),
    Case("a backup that is behind", (report(3),), (1, 2), 3, backup=(4, 99)),
    Case("a backup that is as far", (report(3),), (1, 2), 3, backup=(4, 100)),
    Case("a backup that is further", (report(3),), (1, 2), None, "BACKUP_IS_FURTHER", (4, 101)),
    Case(
        "a shorter backup of a later epoch",
        (report(3),),
        (1, 2),
        None,
        "BACKUP_IS_FURTHER",
        (5, 60),
    ),
    Case("a longer backup of an earlier epoch", (report(3),), (1, 2), 3, backup=(3, 200)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_survivor_that_goes_on_or_the_refusal(case: Case) -> None:
    if case.refused:
        with pytest.raises(RecoveryError) as refusal:
            choose_survivor(case.reports, case.dead, backup=case.backup)
        assert refusal.value.code == case.refused
        assert refusal.value.hint, "an error says what to do next"
    else:
        assert choose_survivor(case.reports, case.dead, backup=case.backup).node_id == case.goes_on


def test_the_wrong_list_of_the_dead_is_told_with_what_is_missing_and_foreign() -> None:
    with pytest.raises(RecoveryError, match=r"2.*9"):
        choose_survivor([report(3)], [1, 9])


def test_a_plan_jumps_in_all_numbers_that_others_remember() -> None:
    reports = [report(3), report(2, (3, 90), epoch=70)]
    plan = plan_recovery(reports[0], reports, (1,), MADE)
    assert plan.epoch == 70 + EPOCH_JUMP, "above every epoch that a survivor has seen"
    assert plan.end_offset == ERA_OFFSETS
    assert plan.next_object_id > MADE.claimed_below
    assert plan.undecided_from == 40
    assert (plan.cluster_id, plan.cluster_uuid) == (reports[0].cluster_id, NEW_UUID)
    (voter,) = plan.voters
    assert (voter.key.node_id, voter.key.directory_id) == (3, NEW_DISK)
    assert voter.endpoint == "127.0.0.1:3"


def test_a_second_recovery_goes_on_in_the_next_era() -> None:
    again = report(3, (2_000, ERA_OFFSETS + 7))
    plan = plan_recovery(again, [again], (1, 2), MADE)
    assert era_of(plan.end_offset) == 2


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("cluster_id", "other"),
        ("cluster_uuid", NEW_UUID),
        ("node_id", 2),
        ("directory_id", "another"),
        ("epoch", 6),
        ("last_epoch", 5),
        ("end_offset", 101),
        ("log_hash", "cd"),
    ],
)
def test_a_plan_sees_every_change_of_its_directory(member: str, value: Any) -> None:
    plan = plan_recovery(report(3), [report(3)], (1, 2), MADE)
    assert plan.sees(report(3))
    assert not plan.sees(replace(report(3), **{member: value}))


def test_voters_read_back_as_they_were_written() -> None:
    for some in (voters(), voters(1), voters(1, 2, 30)):
        assert voters_of(voters_text(some)) == some


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
    assert [finding.problem for finding in found] == [""] * len(found)


class Bucket:
    """The marker; it knows whether it was there when the exchange began."""

    def __init__(self) -> None:
        self.puts = 0

    def fence(self) -> None:
        self.puts += 1


def applied(disk: CrashDisk, plan: RecoveryPlan, bucket: Bucket | None = None) -> None:
    Application(DIRECTORY, plan, disk).carry_out((bucket or Bucket()).fence)


def require_recovered(disk: CrashDisk, plan: RecoveryPlan, keys: int) -> None:
    """Open the directory as its controller does; the whole map of before must be in it."""
    journal = open_journal(disk)
    assert journal.identity.directory_id == NEW_DISK
    assert not journal.identity.bootstrap_voters, "no founder: its disk has voted for nobody"
    start = journal.log_start
    assert (start.start_offset, start.end_offset) == (plan.end_offset, plan.end_offset)
    assert start.start_epoch == plan.epoch
    assert journal.quorum_state.epoch == plan.epoch
    assert start.snapshot_voters == plan.voters
    (snapshot,) = start.snapshots
    with journal.snapshots.open(snapshot) as file:
        loaded = read_metadata(file, snapshot)
    assert loaded.cluster_metadata.size().keys == keys
    assert loaded.cluster_metadata.bucket_claim.cluster_uuid == NEW_UUID
    assert loaded.cluster_metadata.next_object_id == plan.next_object_id
    journal.close()


def test_the_survivor_keeps_its_whole_flushed_log_and_what_it_was() -> None:
    log = written(7)
    disk = disk_of(log)
    old = {path.name: data for path, data in disk.contents().items()}
    plan = plan_of(survivor_on(disk).report)
    applied(disk, plan)
    require_recovered(disk.copy(), plan, 7)
    before = DIRECTORY / "recovery-2" / "before"
    kept = read_survivor(before, disk, read_identity(before, disk))
    assert kept.report == survivor_on(disk_of(log)).report, "a whole directory, as it was"
    assert {name: disk.contents()[before / name] for name in disk.names(before)} == {
        name: data for name, data in old.items() if name != "reserve"
    }
    evidence = state_files.read_sealed_json(disk, DIRECTORY / evidence_name(2), 1)
    assert evidence["plan"]["dead"] == "1,2"


def test_a_repeat_changes_nothing() -> None:
    disk = disk_of(written())
    plan = plan_of(survivor_on(disk).report)
    applied(disk, plan)
    first, bucket = disk.contents(), Bucket()
    applied(disk, plan, bucket)
    assert (disk.contents(), bucket.puts) == (first, 0)


def test_a_directory_that_is_not_what_the_plan_saw_is_left_alone() -> None:
    log = written()
    disk = disk_of(log)
    plan = plan_of(survivor_on(disk).report)
    log.put(4, "written since")
    for other, wanted in ((disk_of(log), plan), (disk, replace(plan, from_epoch=9))):
        before, bucket = other.contents(), Bucket()
        with pytest.raises(RecoveryError) as refusal:
            applied(other, wanted, bucket)
        assert refusal.value.code == "ANOTHER_DIRECTORY"
        assert (other.contents(), bucket.puts) == (before, 0)


def test_without_its_marker_nothing_is_exchanged() -> None:
    disk = disk_of(written())
    plan = plan_of(survivor_on(disk).report)

    class AnotherOwnerError(Exception):
        pass

    def refuse() -> None:
        raise AnotherOwnerError

    with pytest.raises(AnotherOwnerError):
        Application(DIRECTORY, plan, disk).carry_out(refuse)
    assert survivor_on(disk).report == survivor_on(disk_of(written())).report


def test_killed_or_cut_off_from_power_at_every_step_it_can_be_repeated() -> None:
    whole = disk_of(written(3))
    plan = plan_of(survivor_on(whole).report)
    bucket = Bucket()

    def act(disk: CrashDisk) -> None:
        applied(disk, plan, bucket)

    count = in_between = 0
    seen = set()
    for when, left in crashes(whole, act):
        count += 1
        found = frozenset(left.contents().items())
        if found in seen:
            continue  # other crashes left the same disk
        seen.add(found)
        names = left.names(DIRECTORY)
        if META_NAME not in names:
            in_between += 1
            assert bucket.puts, when
            with pytest.raises(WrongDirectoryError, match="recover apply"):
                open_journal(left)
        else:
            disk_id = read_identity(DIRECTORY, left).directory_id
            assert disk_id in ("disk3", NEW_DISK), when
            if disk_id == NEW_DISK:
                require_recovered(left.copy(), plan, 3)
        applied(left, plan, bucket)
        require_recovered(left.copy(), plan, 3)
        assert left.names(DIRECTORY / "recovery-2" / "after") == [], when
    assert count > 100
    assert in_between > 5


def test_another_plan_does_not_finish_one_that_was_begun() -> None:
    whole = disk_of(written(3))
    plan = plan_of(survivor_on(whole).report)
    begun = next(
        left
        for _, left in crashes(whole, lambda disk: applied(disk, plan))
        if META_NAME not in left.names(DIRECTORY)
    )
    for other in (replace(plan, created_ms=1), replace(plan, generation=3)):
        before = begun.contents()
        with pytest.raises(RecoveryError) as refusal:
            applied(begun, other)
        assert refusal.value.code == "ANOTHER_PLAN"
        assert begun.contents() == before


def test_a_directory_that_was_recovered_is_recovered_again_under_the_next_generation() -> None:
    disk = disk_of(written(3))
    first = plan_of(survivor_on(disk).report)
    applied(disk, first)
    named = VoterSet((*first.voters, *voters(1, 2)))
    journal = open_journal(disk)
    start = EndOffset(journal.end_offset)
    journal.append([Batch(start, Epoch(first.epoch), BatchKind.CONTROL, (encode_voters(named),))])
    journal.close()
    second = replace(plan_of(survivor_on(disk).report), directory_id="third-disk", generation=3)
    assert second.end_offset == 2 * first.end_offset
    applied(disk, second)
    assert read_identity(DIRECTORY, disk).directory_id == "third-disk"
    assert {evidence_name(2), evidence_name(3)} <= set(disk.names(DIRECTORY))
