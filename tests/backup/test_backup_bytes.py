"""Every byte of a segment and every field of a manifest counts: no change of one goes unseen."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest

from streammeta.controller.backup.chains import newest_chain
from streammeta.controller.backup.errors import BackupDamagedError
from streammeta.controller.backup.segments import decode
from streammeta.controller.backup.verification import verify
from streammeta.storage import json_files
from streammeta.storage.cluster_files.backup_files import (
    CheckpointManifest,
    SegmentManifest,
    SegmentName,
)
from streammeta.storage.segmented_log import FRAME_HEADER_SIZE
from tests.backup.backup_world import FOLDER, Backup, random_log

TOLD_ONLY = {"first_ms", "last_ms", "created_ms", "feature_level", "writer_version"}
"""Fields that describe a file and prove nothing."""


@pytest.fixture
def backup() -> Backup:
    """Return a backup of two segments with a checkpoint between them, and one of the middle."""
    made = Backup(random_log(6, batch_count=12))
    ends = made.log.ends
    made.put_segment(ends[0], ends[6])
    made.put_checkpoint(ends[6])
    made.put_segment(ends[6], ends[-1])
    return made


def damages(backup: Backup) -> tuple[BackupDamagedError, ...]:
    return verify(backup.archive.inventory(), backup.archive, is_all=True).damages


def test_each_byte_of_a_segment_is_covered_by_more_than_its_digest(backup: Backup) -> None:
    """Header and body of every batch: found even where the manifest has the changed digest."""
    name = backup.archive.inventory().segments[0]
    data, manifest = backup.archive.segment(name)
    assert len(data) > 3 * FRAME_HEADER_SIZE
    decode(data, manifest)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        fitting = replace(manifest, sha256=hashlib.sha256(flipped).hexdigest())
        for described in (manifest, fitting):
            with pytest.raises(BackupDamagedError):
                decode(bytes(flipped), described)


def test_a_segment_that_is_cut_or_goes_on_is_found(backup: Backup) -> None:
    data, manifest = backup.archive.segment(backup.archive.inventory().segments[0])
    for changed in (data[:-1], data[: len(data) // 2], b"", data + data, data + b"\0"):
        size, digest = len(changed), hashlib.sha256(changed).hexdigest()
        with pytest.raises(BackupDamagedError):
            decode(changed, replace(manifest, size=size, sha256=digest))


@pytest.mark.parametrize("kind", [SegmentManifest, CheckpointManifest])
def test_each_field_of_a_manifest_is_compared(backup: Backup, kind: type[Any]) -> None:
    inventory, archive = backup.archive.inventory(), backup.archive
    name = next(
        one for one in inventory.files if isinstance(one, SegmentName) is (kind is SegmentManifest)
    )
    manifest: Any = (
        archive.segment_manifest(name)
        if isinstance(name, SegmentName)
        else archive.checkpoint_manifest(name)
    )
    key = FOLDER.manifest_key(name)
    good = backup.store.get_range(key)
    for field in fields(kind):
        if field.name in TOLD_ONLY:
            continue
        value = getattr(manifest, field.name)
        other = value + 1 if isinstance(value, int) else _other(value)
        backup.store.put(key, json_files.encode(replace(manifest, **{field.name: other})))
        assert damages(backup), field.name
        backup.store.put(key, good)
    assert damages(backup) == ()


def _other(text: str) -> str:
    """Return a text of the same kind, with its first character changed."""
    return ("1" if text[0] == "0" else "0") + text[1:]


def test_segments_that_are_doubled_or_overlap_are_good_while_they_agree(backup: Backup) -> None:
    ends, store = backup.log.ends, backup.store
    chain = newest_chain(backup.archive.inventory())
    assert chain is not None
    backup.put_segment(ends[0], ends[6])
    for start, end in ((0, 3), (2, 8), (5, 7), (0, len(ends) - 1)):
        backup.put_segment(ends[start], ends[end])
    assert damages(backup) == ()
    doubled, elsewhere = SegmentName(ends[0], ends[6]), SegmentName(ends[1], ends[6])
    store.put(FOLDER.key(elsewhere), store.get_range(FOLDER.key(doubled)))
    assert damages(backup) == (), "a file without a manifest is not there yet"
    store.put(FOLDER.manifest_key(elsewhere), store.get_range(FOLDER.manifest_key(doubled)))
    assert [one.name for one in damages(backup)] == [elsewhere]
