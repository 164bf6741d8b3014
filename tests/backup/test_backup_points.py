"""Points in time of a backup: a leader's wrong clock moves none of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from streammeta.controller.backup.chains import count_committed_by
from streammeta.storage.cluster_files.backup_files import FileName, SegmentManifest, SegmentName
from tests.backup.backup_world import Backup, random_log

DAY_MS = 86_400_000


def make_backup() -> tuple[Backup, dict[SegmentName, SegmentManifest]]:
    """Return a backup of one segment a batch, with the manifests."""
    backup = Backup(random_log(7))
    for start, end in pairwise(backup.log.ends):
        backup.put_segment(start, end)
    archive = backup.archive
    return backup, {one: archive.segment_manifest(one) for one in archive.inventory().segments}


@pytest.mark.parametrize("jump_ms", [0, 30 * DAY_MS, -30 * DAY_MS])
@pytest.mark.parametrize("first", [1, 20, 31])
def test_a_leader_with_a_wrong_clock_moves_no_point(jump_ms: int, first: int) -> None:
    backup, manifests = make_backup()
    segments = sorted(manifests, key=lambda one: one.end_offset)
    written = backup.archive.inventory().written_ms
    for name in segments[first : first + 9]:
        manifests[name] = replace(manifests[name], last_ms=manifests[name].last_ms + jump_ms)
    for count, name in enumerate(segments, start=1):
        to_ms = backup.ms_at(name.end_offset)
        assert count_committed_by(segments, to_ms, written, manifests.__getitem__) == count
        assert count_committed_by(segments, to_ms - 1, written, manifests.__getitem__) == count - 1


def test_a_segment_before_another_was_committed_before_it() -> None:
    backup, manifests = make_backup()
    segments = sorted(manifests, key=lambda one: one.end_offset)
    written = dict(backup.archive.inventory().written_ms)
    written[segments[5]] += 30 * DAY_MS
    to_ms = backup.ms_at(segments[9].end_offset)
    assert count_committed_by(segments, to_ms, written, manifests.__getitem__) == 10


def test_a_copied_backup_has_the_leaders_times() -> None:
    backup, manifests = make_backup()
    segments = sorted(manifests, key=lambda one: one.end_offset)
    written: dict[FileName, int] = dict.fromkeys(
        segments, backup.ms_at(segments[-1].end_offset) + DAY_MS
    )
    to_ms = backup.ms_at(segments[9].end_offset)
    assert count_committed_by(segments, to_ms, written, manifests.__getitem__) == 10
    assert count_committed_by([], to_ms, {}, manifests.__getitem__) == 0
