"""Files of a backup in a bucket: keys, manifests and inventories.

    backup/<cluster id>/<cluster UUID>/log/<start, 20 digits>-<end, 20 digits>.segment
    backup/<cluster id>/<cluster UUID>/checkpoints/<end, 20 digits>-<epoch, 10 digits>.checkpoint

Offsets are offsets of the quorum's log, ends exclusive. A segment contains committed entries, a
checkpoint everything below its end. The manifest of a file is its key with `.json` appended. It is
written after its file and removed before it, so a file with a manifest is complete. A file without
one is unfinished and never read. Every put creates an object and none overwrites one, so two
leaders may write at the same time. Keys that do not match these rules are foreign and never
touched.

Contains names and bytes only. `controller.backup` reads and writes the bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streammeta.storage.object_store.protocol.base import ObjectInfo

MANIFEST_SUFFIX = ".json"

_SEGMENT = re.compile(r"log/(\d{20})-(\d{20})\.segment")
_CHECKPOINT = re.compile(r"checkpoints/(\d{20})-(\d{10})\.checkpoint")
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_FOLDER = re.compile(rf"backup/([A-Za-z0-9_-]{{1,64}})/({_UUID})/(.+)")
_HASH = re.compile(r"([0-9a-f]{32})?")


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """Name of a file with the entries `[start_offset, end_offset)` of the log."""

    start_offset: int
    end_offset: int

    def __str__(self) -> str:
        return f"log/{self.start_offset:020}-{self.end_offset:020}.segment"


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Name of a file with the state below `end_offset`, whose last batch has `epoch`."""

    end_offset: int
    epoch: int

    def __str__(self) -> str:
        return f"checkpoints/{self.end_offset:020}-{self.epoch:010}.checkpoint"


FileName = SegmentName | CheckpointName


@dataclass(frozen=True, slots=True, order=True)
class Folder:
    """Location of one cluster's backup. The UUID distinguishes clusters with the same name."""

    cluster_id: str
    cluster_uuid: str

    @property
    def prefix(self) -> str:
        """Prefix of the keys of all files."""
        return f"backup/{self.cluster_id}/{self.cluster_uuid}/"

    def key(self, name: FileName) -> str:
        """Return the key of a file."""
        return f"{self.prefix}{name}"

    def manifest_key(self, name: FileName) -> str:
        """Return the key of a file's manifest."""
        return self.key(name) + MANIFEST_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentManifest:
    """Description of a segment.

    All entries were committed by `last_ms`, and all entries before the segment by `first_ms`, in ms
    since 1970 by the clocks of leaders. `log_hash_before` and `log_hash` are the rolling hash of
    the log at start and end, in hex, or empty if unknown.
    """

    cluster_id: str
    cluster_uuid: str
    start_offset: int
    end_offset: int
    first_epoch: int
    last_epoch: int
    first_ms: int
    last_ms: int
    size: int
    sha256: str
    log_hash_before: str
    log_hash: str
    feature_level: int
    writer_version: str

    @property
    def name(self) -> SegmentName:
        """Name of the segment."""
        return SegmentName(self.start_offset, self.end_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Description of a checkpoint. `state_hash` is the digest of its metadata, in hex."""

    cluster_id: str
    cluster_uuid: str
    end_offset: int
    epoch: int
    created_ms: int
    size: int
    sha256: str
    log_hash: str
    state_hash: str
    feature_level: int
    writer_version: str

    @property
    def name(self) -> CheckpointName:
        """Name of the checkpoint."""
        return CheckpointName(self.end_offset, self.epoch)

    @property
    def last_ms(self) -> int:
        """Time by which its content was committed, as for a segment."""
        return self.created_ms


Manifest = SegmentManifest | CheckpointManifest


def has_good_hashes(manifest: Manifest) -> bool:
    """Return whether each rolling hash in a manifest is well-formed or empty."""
    before = manifest.log_hash_before if isinstance(manifest, SegmentManifest) else ""
    return all(_HASH.fullmatch(log_hash) for log_hash in (manifest.log_hash, before))


@dataclass(frozen=True, slots=True)
class Inventory:
    """Files of one backup in a listing, ascending.

    `segments` and `checkpoints` have a manifest, `unfinished` files do not. `written_ms` is the
    time of each manifest or unfinished file by the bucket's clock, in ms since 1970.
    """

    segments: tuple[SegmentName, ...]
    checkpoints: tuple[CheckpointName, ...]
    unfinished: tuple[FileName, ...]
    written_ms: Mapping[FileName, int]

    @property
    def files(self) -> tuple[FileName, ...]:
        """Checkpoints, then segments."""
        return (*self.checkpoints, *self.segments)


def parse_key(key: str) -> tuple[Folder, FileName, bool] | None:
    """Return folder, file and whether the key is a manifest, or None for a foreign key."""
    # Manifest and file have one pattern, so a key can't match only as a manifest.
    found = _FOLDER.fullmatch(key.removesuffix(MANIFEST_SUFFIX))
    if found is None:
        return None
    name: FileName
    if segment := _SEGMENT.fullmatch(found[3]):
        name = SegmentName(int(segment[1]), int(segment[2]))
        # An empty segment is never written, so the key is foreign.
        if name.start_offset >= name.end_offset:
            return None
    elif checkpoint := _CHECKPOINT.fullmatch(found[3]):
        name = CheckpointName(int(checkpoint[1]), int(checkpoint[2]))
    else:
        return None
    return Folder(found[1], found[2]), name, key.endswith(MANIFEST_SUFFIX)


def inventories(listing: Iterable[ObjectInfo]) -> dict[Folder, Inventory]:
    """Return the inventory of each cluster in a listing of the keys below `backup/`."""
    files: dict[Folder, dict[FileName, set[bool]]] = {}
    written_ms: dict[Folder, dict[FileName, int]] = {}
    for info in listing:
        parsed = parse_key(info.key)
        if parsed is not None:
            folder, name, is_manifest = parsed
            files.setdefault(folder, {}).setdefault(name, set()).add(is_manifest)
            times = written_ms.setdefault(folder, {})
            # The manifest is written last, so its time is the file's time of completion.
            times[name] = max(times.get(name, 0), info.last_modified_ms)
    return {folder: _inventory(files[folder], written_ms[folder]) for folder in sorted(files)}


def _inventory(
    files: Mapping[FileName, set[bool]], written_ms: Mapping[FileName, int]
) -> Inventory:
    # A manifest without its file counts as a file, so that its reader reports the damage.
    described = {name for name, kinds in files.items() if True in kinds}
    return Inventory(
        tuple(sorted(name for name in described if isinstance(name, SegmentName))),
        tuple(sorted(name for name in described if isinstance(name, CheckpointName))),
        tuple(sorted(files.keys() - described, key=str)),
        written_ms,
    )
