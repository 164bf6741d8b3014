"""A directory becomes the only voter's, with all that was flushed, whatever step is cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal import state_files
from streammeta.controller.journal.directory import META_NAME, evidence_name, read_identity
from streammeta.controller.journal.errors import WrongDirectoryError
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.recover.applying import Application
from streammeta.controller.recover.planning import RecoveryPlan
from streammeta.controller.recover.report import RecoveryError
from streammeta.controller.recover.survivor import read_survivor
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from tests.kit.crash_disk import CrashDisk, crashes
from tests.recover.recover_world import (
    DIRECTORY,
    NEW_DISK,
    NEW_UUID,
    disk_of,
    open_journal,
    plan_of,
    survivor_on,
    voters,
    written,
)


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
