"""Chains, verification, retention and points in time, over random backups by one or two leaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from streammeta.controller.backup import chains
from streammeta.controller.backup.errors import BackupDamagedError
from streammeta.controller.backup.replaying import replay
from streammeta.controller.backup.verification import verify
from streammeta.storage.cluster_files.backup_files import (
    CheckpointName,
    FileName,
    Inventory,
    SegmentManifest,
    SegmentName,
)
from tests.backup.backup_world import Backup, random_log
from tests.kit.seeds import seeds

HOUR_MS, DAY_MS = 3_600_000, 86_400_000

SEEDS = seeds(2, slow=3)


def random_backup(seed: int) -> Backup:
    backup = Backup(random_log(seed))
    backup.put_randomly()
    return backup


@pytest.mark.parametrize("seed", SEEDS)
def test_every_end_from_the_first_base_on_is_restored_as_it_was(seed: int) -> None:
    backup = random_backup(seed)
    inventory, log = backup.archive.inventory(), backup.log
    verified = verify(inventory, backup.archive, is_all=True)
    assert verified.damages == ()
    newest = chains.newest_chain(inventory)
    assert newest is not None
    assert newest.end_offset == log.ends[-1]
    assert chains.find_unreachable(inventory) == ()
    first = 0 if inventory.segments[0].start_offset == 0 else inventory.checkpoints[0].end_offset
    for position, view in zip(log.positions, log.views, strict=True):
        chain = chains.chain_to(inventory, position.end_offset)
        assert (chain is not None) == (position.end_offset >= first)
        if chain is not None:
            replayed = replay(chain, backup.archive, end_offset=position.end_offset)
            assert replayed.position == position
            assert replayed.cluster_metadata.state_hash() == view.digest()
            assert not position.end_offset or replayed.last_ms >= backup.ms_at(position.end_offset)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_that_is_missing_damaged_or_another_one_is_found(seed: int) -> None:
    backup = random_backup(seed)
    rng, store = Random(seed), backup.store
    whole = store.objects()
    for key in rng.sample(sorted(whole), min(len(whole), 12)):
        data = bytearray(whole[key])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        store.put(key, bytes(data))
        if key.endswith(".json"):
            verify(backup.archive.inventory(), backup.archive, is_all=True)  # a time may be wrong
        else:
            assert_found(backup, f"flipped byte in {key}")
            store.delete_many([key])
            assert_found(backup, f"no {key}")
        others = [name for name in whole if name[-8:] == key[-8:] and whole[name] != whole[key]]
        if others:
            store.put(key, whole[rng.choice(others)])
            assert_found(backup, f"another file as {key}")
        store.put(key, whole[key])
    assert verify(backup.archive.inventory(), backup.archive, is_all=True).damages == ()


def assert_found(backup: Backup, what: str) -> None:
    found = verify(backup.archive.inventory(), backup.archive, is_all=True)
    assert found.damages, what


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_segment_ends_the_chain_and_is_named(seed: int) -> None:
    """Nothing behind a gap is taken for restorable unless a checkpoint covers the gap."""
    log = random_log(seed)
    backup, ends = Backup(log), log.ends
    for start, end in zip(ends[::4], ends[4::4], strict=False):
        backup.put_segment(start, end)
    names = backup.archive.inventory().segments
    gone = Random(seed).choice(names[:-1])
    backup.archive.delete([gone])
    inventory = backup.archive.inventory()
    chain = chains.newest_chain(inventory)
    assert (chain.end_offset if chain else 0) == gone.start_offset
    assert {one.start_offset >= gone.end_offset for one in chains.find_unreachable(inventory)} == {
        True
    }
    verified = verify(inventory, backup.archive)
    assert f"offsets from {gone.start_offset} to {gone.end_offset}" in str(verified.damages[0])
    assert chains.chain_to(inventory, names[-1].end_offset) is None
    backup.put_checkpoint(gone.end_offset)
    assert verify(backup.archive.inventory(), backup.archive).damages == ()


def test_leaders_that_disagree_are_found() -> None:
    one, other = Backup(random_log(1)), Backup(random_log(2))
    ends = [end for end in one.log.ends if end in other.log.ends]
    one.put_segment(ends[0], ends[2])
    other.store = one.store
    other.put_segment(ends[2], ends[-1])
    found = verify(one.archive.inventory(), one.archive)
    assert "continues another log" in str(found.damages[0])
    one.put_segment(ends[1], one.log.ends[-1])
    found = verify(one.archive.inventory(), one.archive, is_all=True)
    assert f"disagrees with another file about the log below {ends[2]}" in str(found.damages[-1])


def test_a_map_that_is_not_that_of_a_checkpoint_on_the_way_is_found() -> None:
    backup = Backup(random_log(4))
    first, *_, last = ends = backup.log.ends
    backup.put_segment(first, last)
    backup.put_checkpoint(ends[20])
    chain = chains.chain_to(backup.archive.inventory(), ends[19])
    assert chain is not None
    assert chain.base is None
    chain = chains.newest_chain(Inventory(backup.archive.inventory().segments, (), (), {}))
    assert chain is not None
    good = {ends[20]: backup.log.view_at(ends[20]).digest().hex()}
    replay(chain, backup.archive, state_hashes=good)
    with pytest.raises(BackupDamagedError, match=f"{ends[20]}"):
        replay(chain, backup.archive, state_hashes={ends[20]: "00"})


@pytest.mark.parametrize("seed", SEEDS)
def test_retention_keeps_every_point_from_its_time_on_and_the_newest_chain(seed: int) -> None:
    backup = random_backup(seed)
    log, rng = backup.log, Random(seed)
    newest = chains.newest_chain(backup.archive.inventory())
    assert newest is not None
    for index in (*sorted(rng.sample(range(len(log.ends)), 4)), len(log.ends) + 100):
        before = backup.archive.inventory()
        keep_ms = max(0, max(before.written_ms.values()) - backup.ms_at(0) - 1_000 * index)
        gone = chains.find_dispensable(before, keep_ms)
        assert newest.base not in gone
        assert not set(newest.segments) & set(gone)
        wanted = [end for end in log.ends[index:] if chains.chain_to(before, end) is not None]
        assert backup.archive.delete(gone) == len(gone)
        after = backup.archive.inventory()
        assert chains.find_dispensable(after, keep_ms) == ()
        for end in wanted:
            chain = chains.chain_to(after, end)
            assert chain is not None
            view = replay(chain, backup.archive, end_offset=end).cluster_metadata.freeze()
            assert view.digest() == log.view_at(end).digest()


def names(*pairs: tuple[int, int]) -> tuple[SegmentName, ...]:
    return tuple(sorted(SegmentName(*pair) for pair in pairs))


def steady(times_ms: Sequence[int]) -> Inventory:
    """A backup of a segment and a checkpoint at each of some times, ten offsets apart."""
    segments = names(*((10 * at, 10 * at + 10) for at in range(len(times_ms))))
    checkpoints = tuple(CheckpointName(segment.end_offset, 1) for segment in segments)
    written: dict[FileName, int] = dict(zip(segments, times_ms, strict=True))
    written |= dict(zip(checkpoints, times_ms, strict=True))
    return Inventory(segments, checkpoints, (), written)


WEEK = [DAY_MS + 6 * HOUR_MS * at for at in range(40)]


def test_retention_keeps_the_newest_checkpoint_that_is_older() -> None:
    gone = chains.find_dispensable(steady(WEEK), 7 * DAY_MS)
    assert max(one.end_offset for one in gone) == 110, "of 40 checkpoints 28 are 7 days old at most"
    assert len([name for name in gone if isinstance(name, CheckpointName)]) == 10


def test_retention_keeps_the_newest_checkpoints_whatever_their_age() -> None:
    left = set(steady(WEEK).files) - set(chains.find_dispensable(steady(WEEK), 0))
    ends = sorted(segment.end_offset for segment in left if isinstance(segment, CheckpointName))
    assert ends == [380, 390, 400]
    assert chains.find_dispensable(steady(WEEK[:2]), 0) == ()


@pytest.mark.parametrize("jump_ms", [30 * DAY_MS, -30 * DAY_MS, 3_650 * DAY_MS])
@pytest.mark.parametrize("files", [1, 8])
def test_a_jump_of_the_clock_that_stamps_files_removes_none_early(jump_ms: int, files: int) -> None:
    for at in (*range(32), 40 - files):
        times = [*WEEK[:at], *(one + jump_ms for one in WEEK[at : at + files]), *WEEK[at + files :]]
        age_ms = chains.file_ages(steady(times), 7 * DAY_MS // chains.JUMPS_MIN)
        assert max(age_ms.values()) <= WEEK[-1] - WEEK[0] + 7 * DAY_MS // chains.JUMPS_MIN

        gone = chains.find_dispensable(steady(times), 7 * DAY_MS)
        assert all(WEEK[segment.end_offset // 10 - 1] < WEEK[-1] - 5 * DAY_MS for segment in gone)


def test_files_that_were_copied_to_another_bucket_are_new() -> None:
    assert chains.find_dispensable(steady([WEEK[0]] * 40), DAY_MS) == ()


def test_retention_without_an_old_checkpoint_removes_nothing() -> None:
    whole = steady(WEEK)
    none_old = Inventory(whole.segments, whole.checkpoints[-4:], (), whole.written_ms)
    assert chains.find_dispensable(none_old, 7 * DAY_MS) == ()
    assert chains.find_dispensable(Inventory(whole.segments, (), (), whole.written_ms), 0) == ()


def test_the_newest_chain_is_that_which_reaches_furthest() -> None:
    segments = names((10, 20), (12, 30), (18, 24), (30, 31), (40, 50))
    bases = (CheckpointName(10, 1), CheckpointName(20, 1), CheckpointName(35, 2))
    inventory = Inventory(segments, bases, (), {})
    chain = chains.newest_chain(inventory)
    assert chain is not None
    assert (chain.base, chain.end_offset) == (bases[2], 35)
    assert chains.find_unreachable(inventory) == names((40, 50))
    chain = chains.chain_to(inventory, 31)
    assert chain is not None
    assert (chain.base, chain.segments) == (bases[1], names((12, 30), (30, 31)))
    assert chains.chain_to(inventory, 33) is None
    assert chains.chain_to(inventory, 9) is None
    assert chains.newest_chain(Inventory(segments, (), (), {})) is None


def make_backup() -> tuple[Backup, dict[SegmentName, SegmentManifest]]:
    """Return a backup of one segment a batch, with the manifests."""
    backup = Backup(random_log(7))
    for start, end in pairwise(backup.log.ends):
        backup.put_segment(start, end)
    archive = backup.archive
    return backup, {file: archive.segment_manifest(file) for file in archive.inventory().segments}


@pytest.mark.parametrize("jump_ms", [0, 30 * DAY_MS, -30 * DAY_MS])
@pytest.mark.parametrize("first", [1, 20, 31])
def test_a_leader_with_a_wrong_clock_moves_no_point(jump_ms: int, first: int) -> None:
    backup, manifests = make_backup()
    segments = sorted(manifests, key=lambda segment: segment.end_offset)
    written = backup.archive.inventory().written_ms
    for name in segments[first : first + 9]:
        manifests[name] = replace(manifests[name], last_ms=manifests[name].last_ms + jump_ms)
    for count, name in enumerate(segments, start=1):
        to_ms = backup.ms_at(name.end_offset)
        assert chains.count_committed_by(segments, to_ms, written, manifests.__getitem__) == count
        assert (
            chains.count_committed_by(segments, to_ms - 1, written, manifests.__getitem__)
            == count - 1
        )


def test_a_segment_before_another_was_committed_before_it() -> None:
    backup, manifests = make_backup()
    segments = sorted(manifests, key=lambda segment: segment.end_offset)
    written = dict(backup.archive.inventory().written_ms)
    written[segments[5]] += 30 * DAY_MS
    to_ms = backup.ms_at(segments[9].end_offset)
    assert chains.count_committed_by(segments, to_ms, written, manifests.__getitem__) == 10


def test_a_copied_backup_has_the_leaders_times() -> None:
    backup, manifests = make_backup()
    segments = sorted(manifests, key=lambda segment: segment.end_offset)
    written: dict[FileName, int] = dict.fromkeys(
        segments, backup.ms_at(segments[-1].end_offset) + DAY_MS
    )
    to_ms = backup.ms_at(segments[9].end_offset)
    assert chains.count_committed_by(segments, to_ms, written, manifests.__getitem__) == 10
    assert chains.count_committed_by([], to_ms, {}, manifests.__getitem__) == 0
