"""Replay of a chain: the backup's metadata at an offset, with every byte verified.

Verifies that files match their manifests, that segments continue each other batch by batch, that
overlapping ones agree, and that the metadata at each checkpoint on the way equals the checkpoint's.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from streammeta.controller.backup.chains import Chain
from streammeta.controller.backup.errors import BackupDamagedError
from streammeta.controller.backup.segments import Position, advance_position, decode
from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.records.codec import RecordCodecError, decode_records
from streammeta.controller.runtime.persistence import metadata_checkpoint
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH
from streammeta.controller.snapshot.checkpoint_file import CheckpointError
from streammeta.storage.cluster_files import backup_files


class BackupFiles(Protocol):
    """Files of one backup. A missing one raises BackupDamagedError."""

    def segment(self, name: backup_files.SegmentName) -> tuple[bytes, backup_files.SegmentManifest]:
        """Return a segment and its manifest."""
        ...

    def checkpoint(
        self, name: backup_files.CheckpointName
    ) -> tuple[bytes, backup_files.CheckpointManifest]:
        """Return a checkpoint and its manifest."""
        ...


@dataclass(slots=True)
class Replayed:
    """The metadata at an offset, with the rolling hash and the epoch of the log below it."""

    cluster_metadata: ClusterMetadata
    position: Position
    epoch: int
    last_ms: int
    """Time in ms since 1970 by which everything below the offset was committed."""


def load_checkpoint(
    name: backup_files.CheckpointName, files: BackupFiles
) -> tuple[metadata_checkpoint.LoadedMetadata, backup_files.CheckpointManifest]:
    """Return a checkpoint's metadata, verified against its manifest.

    Raises:
        BackupDamagedError: it is missing, damaged, or differs from its manifest.
    """
    data, manifest = files.checkpoint(name)
    digest = hashlib.sha256(data).hexdigest()
    if (len(data), digest) != (manifest.size, manifest.sha256):
        raise BackupDamagedError(
            name,
            f"has {len(data)} bytes with SHA-256 {digest}, but its manifest says {manifest.size} "
            f"with {manifest.sha256}",
        )

    snapshot_id = SnapshotId(EndOffset(name.end_offset), Epoch(name.epoch))
    try:
        loaded = metadata_checkpoint.read_metadata(io.BytesIO(data), snapshot_id)
    except CheckpointError as error:
        raise BackupDamagedError(name, str(error)) from error

    found = (loaded.log_hash.hex(), loaded.cluster_metadata.state_hash().hex())
    if found != (manifest.log_hash, manifest.state_hash):
        raise BackupDamagedError(
            name, "its hashes of the log and the metadata differ from its manifest"
        )

    return loaded, manifest


def replay(
    chain: Chain,
    files: BackupFiles,
    *,
    end_offset: int | None = None,
    state_hashes: Mapping[int, str] | None = None,
) -> Replayed:
    """Return the metadata of a chain at its end, or at the last batch end up to `end_offset`.

    `state_hashes` are digests of the metadata by offset, and are compared on the way.

    Raises:
        BackupDamagedError: a file is missing or damaged, or two disagree.
    """
    replayed = _base(chain, files)
    for name in chain.segments:
        data, manifest = files.segment(name)
        # Before decoding, because a gap makes the rest of the file useless.
        _check_start(manifest, replayed.position)
        batches = [
            batch
            for batch in decode(data, manifest)
            if batch.base_offset >= replayed.position.end_offset
            and (end_offset is None or batch.end_offset <= end_offset)
        ]
        for batch in batches:
            _apply(replayed.cluster_metadata, batch, name)
            _compare(replayed.cluster_metadata, batch.end_offset, state_hashes or {}, name)
        if batches:
            replayed.position = advance_position(replayed.position, batches)
            replayed.epoch = batches[-1].epoch
            replayed.last_ms = manifest.last_ms
        # A replay that stops within a segment has no hash to compare with.
        at_end = replayed.position.end_offset == manifest.end_offset
        if at_end and replayed.position.log_hash.hex() != manifest.log_hash:
            raise BackupDamagedError(name, "it disagrees with the files before it (log hash)")

    return replayed


def _base(chain: Chain, files: BackupFiles) -> Replayed:
    if chain.base is None:
        return Replayed(ClusterMetadata(), Position(0, EMPTY_LOG_HASH), 0, 0)
    loaded, manifest = load_checkpoint(chain.base, files)
    position = Position(chain.base.end_offset, loaded.log_hash)
    return Replayed(loaded.cluster_metadata, position, chain.base.epoch, manifest.created_ms)


def _check_start(manifest: backup_files.SegmentManifest, before: Position) -> None:
    if manifest.start_offset > before.end_offset:
        raise BackupDamagedError(
            manifest.name, f"offsets from {before.end_offset} on are missing", before.end_offset
        )
    # The hash before an overlapping segment is unknown here. Its end is compared instead.
    is_next = manifest.start_offset == before.end_offset
    if is_next and manifest.log_hash_before != before.log_hash.hex():
        raise BackupDamagedError(manifest.name, "it continues another log than the files before it")


def _apply(cluster_metadata: ClusterMetadata, batch: Batch, name: backup_files.SegmentName) -> None:
    # Control batches belong to the quorum and do not change the metadata.
    if batch.kind is not BatchKind.DATA:
        return
    for index, payload in enumerate(batch.payloads):
        try:
            cluster_metadata.apply(batch.base_offset + index, decode_records(payload))
        except (InvariantError, RecordCodecError) as error:
            raise BackupDamagedError(name, str(error)) from error
    # A backup has committed entries only, and undo information would fill the memory.
    cluster_metadata.forget_undo(batch.end_offset)


def _compare(
    cluster_metadata: ClusterMetadata,
    end_offset: int,
    state_hashes: Mapping[int, str],
    name: backup_files.SegmentName,
) -> None:
    wanted = state_hashes.get(end_offset)
    if wanted is not None and cluster_metadata.state_hash().hex() != wanted:
        raise BackupDamagedError(
            name, f"the metadata at {end_offset} differs from the checkpoint there"
        )
