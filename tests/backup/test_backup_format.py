"""Names, manifests and segments of backups: golden bytes, and a change of any byte is detected."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.chains import newest_chain
from streammeta.controller.backup.errors import BackupDamagedError, BackupDivergedError
from streammeta.controller.backup.segments import Position, Writing, decode, encode, new_segment
from streammeta.controller.backup.verification import verify
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH
from streammeta.storage import json_files
from streammeta.storage.cluster_files.backup_files import (
    CheckpointManifest,
    CheckpointName,
    Folder,
    SegmentManifest,
    SegmentName,
    parse_key,
)
from streammeta.storage.cluster_files.bucket_marker import is_own_key
from streammeta.storage.object_format.object_key import ForeignKey
from streammeta.storage.object_format.object_key import parse_key as parse_object_key
from streammeta.storage.segmented_log import FRAME_HEADER_SIZE
from tests.backup.backup_world import FOLDER, Backup, random_log
from tests.lifecycle.lifecycle_world import RecordingStore

BATCHES = (
    Batch(EndOffset(7), Epoch(2), BatchKind.CONTROL, (b"{}",)),
    Batch(EndOffset(8), Epoch(2), BatchKind.DATA, (b"one", b"")),
    Batch(EndOffset(10), Epoch(5), BatchKind.DATA, (b"two",)),
)
WRITING = Writing(folder=FOLDER, first_ms=10, last_ms=20, feature_level=2, writer_version="0.2.0")
BEFORE = Position(7, EMPTY_LOG_HASH)


def test_a_segment_is_its_batches_byte_for_byte() -> None:
    data, manifest = new_segment(BATCHES, BEFORE, WRITING)
    assert decode(data, manifest) == BATCHES
    assert manifest.sha256 == "b84413e63e90347389744194508356ceb2a42104c78f25f732da25b96114c5f8"
    assert json.loads(json_files.encode(manifest)) == {
        "version": 1,
        "cluster_id": "test",
        "cluster_uuid": FOLDER.cluster_uuid,
        "start_offset": 7,
        "end_offset": 11,
        "first_epoch": 2,
        "last_epoch": 5,
        "first_ms": 10,
        "last_ms": 20,
        "size": 159,
        "sha256": manifest.sha256,
        "log_hash_before": "0" * 32,
        "log_hash": "0632fe66e6466cb373e63d758752f782",
        "feature_level": 2,
        "writer_version": "0.2.0",
    }


def test_equal_batches_are_equal_bytes_whoever_leads() -> None:
    log = random_log(1)
    for earlier, other in zip(log.ends, log.ends[3:], strict=False):
        batches = log.between(earlier, other)
        assert encode(batches, FOLDER.cluster_uuid) == encode(batches, FOLDER.cluster_uuid)
        other_uuid = "00000000-0000-0000-0000-000000000001"
        assert encode(batches, FOLDER.cluster_uuid) != encode(batches, other_uuid)


def test_every_flipped_byte_of_a_segment_is_noticed() -> None:
    data, manifest = new_segment(BATCHES, BEFORE, WRITING)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(BackupDamagedError, match=str(manifest.name)):
            decode(bytes(bad), manifest)
    for end in range(len(data)):
        with pytest.raises(BackupDamagedError):
            decode(data[:end], manifest)


def test_a_manifest_with_another_number_is_noticed() -> None:
    data, manifest = new_segment(BATCHES, BEFORE, WRITING)
    for name in ("start_offset", "end_offset", "first_epoch", "last_epoch", "size"):
        wrong = SegmentManifest(**{**asdict(manifest), name: asdict(manifest)[name] + 1})
        with pytest.raises(BackupDamagedError):
            decode(data, wrong)
    for name in ("log_hash", "log_hash_before", "sha256"):
        with pytest.raises(BackupDamagedError):
            decode(data, SegmentManifest(**{**asdict(manifest), name: "ab" * 16}))


@pytest.mark.parametrize("name", [SegmentName(7, 11), CheckpointName(11, 5)], ids=["log", "map"])
def test_keys_are_read_back_and_no_keys_of_objects(name: SegmentName | CheckpointName) -> None:
    for key, is_manifest in ((FOLDER.key(name), False), (FOLDER.manifest_key(name), True)):
        assert parse_key(key) == (FOLDER, name, is_manifest)
        assert isinstance(parse_object_key(key, "_streammeta_test"), ForeignKey)
        assert not is_own_key(key, "_streammeta_test")


@pytest.mark.parametrize(
    "key",
    [
        f"backup/test/{'-' * 36}/log/00000000000000000007-00000000000000000011.segment",
        "backup/test/log/00000000000000000007-00000000000000000011.segment",
        f"{FOLDER.prefix}log/7-11.segment",
        f"{FOLDER.prefix}log/00000000000000000011-00000000000000000007.segment",
        f"{FOLDER.prefix}log/00000000000000000007-00000000000000000011.segment.json.json",
        f"{FOLDER.prefix}checkpoints/00000000000000000007.checkpoint",
        f"x{FOLDER.prefix}log/00000000000000000007-00000000000000000011.segment",
    ],
)
def test_other_keys_are_foreign(key: str) -> None:
    assert parse_key(key) is None


def test_a_file_without_a_manifest_is_unfinished() -> None:
    backup = Backup(random_log(2))
    first, second, third = backup.log.ends[:3]
    backup.put_segment(first, second)
    backup.put_segment(second, third)
    backup.store.delete_many([FOLDER.manifest_key(SegmentName(second, third))])
    inventory = backup.archive.inventory()
    assert inventory.segments == (SegmentName(first, second),)
    assert inventory.unfinished == (SegmentName(second, third),)


def test_another_cluster_of_the_name_has_a_folder_of_its_own() -> None:
    backup = Backup(random_log(2))
    backup.put_segment(*backup.log.ends[:2])
    other = Archive(backup.store, Folder("test", "00000000-0000-0000-0000-000000000001"))
    assert other.inventory().segments == ()


def test_a_repeat_is_kept_and_other_bytes_under_a_name_are_refused() -> None:
    backup = Backup(random_log(3))
    first, *_, last = backup.log.ends
    batches = backup.log.between(first, last)
    data, manifest = new_segment(batches, backup.log.positions[0], WRITING)
    backup.archive.put(data, manifest)
    before = backup.store.objects()
    backup.archive.put(data, replace(manifest, last_ms=99))
    assert backup.store.objects() == before
    with pytest.raises(BackupDivergedError, match="history"):
        backup.archive.put(data + b"x", manifest)
    assert backup.store.objects() == before


def test_a_manifest_that_is_that_of_another_file_or_no_manifest_is_damage() -> None:
    backup = Backup(random_log(4))
    first, second, third = backup.log.ends[:3]
    backup.put_segment(first, second)
    backup.put_segment(second, third)
    names = backup.archive.inventory().segments
    keys = [FOLDER.manifest_key(name) for name in names]
    backup.store.put(keys[0], backup.store.get_range(keys[1]))
    with pytest.raises(BackupDamagedError, match="manifest"):
        backup.archive.segment(names[0])
    good = store_json(backup, keys[1])
    wrong_hash = json.dumps({**good, "log_hash": "zz"}).encode()
    backup.store.put(keys[1], wrong_hash)
    with pytest.raises(BackupDamagedError, match="hash"):
        backup.archive.segment_manifest(names[1])
    backup.store.put(keys[1], json.dumps(good).encode())
    for bad in (b"", b"{}", b"[]", b'{"version": 2}'):
        backup.store.put(keys[0], bad)
        with pytest.raises(BackupDamagedError, match="manifest"):
            backup.archive.segment_manifest(names[0])
    backup.store.delete_many([FOLDER.key(names[1])])
    with pytest.raises(BackupDamagedError, match="missing"):
        backup.archive.segment(names[1])


def store_json(backup: Backup, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(backup.store.get_range(key))
    return found


def test_a_manifest_is_removed_before_its_file() -> None:
    store = RecordingStore()
    backup = Backup(random_log(5), store)
    backup.put_segment(*backup.log.ends[:2])
    (name,) = backup.archive.inventory().segments
    store.refuses = lambda key: key == FOLDER.manifest_key(name)
    assert backup.archive.delete([name]) == 0
    assert backup.archive.inventory().segments == (name,)
    store.refuses = lambda _: False
    assert backup.archive.delete([name]) == 1
    assert store.requests[-2:] == [(FOLDER.manifest_key(name),), (FOLDER.key(name),)]
    assert backup.store.objects() == {}


def test_manifests_are_of_their_class() -> None:
    _, manifest = new_segment(BATCHES, BEFORE, WRITING)
    assert json_files.decode(SegmentManifest, "k", json_files.encode(manifest)) == manifest


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
    assert [damage.name for damage in damages(backup)] == [elsewhere]
