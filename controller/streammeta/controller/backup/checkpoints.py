"""Checkpoint files as backup files with their manifests.

One file is also a whole backup of one point, as written by `streammeta backup now`.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import BinaryIO

from streammeta.controller.backup.errors import BackupDamagedError, BackupError
from streammeta.controller.runtime.persistence.metadata_checkpoint import log_hash_of, state_hash_of
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from streammeta.storage.cluster_files.backup_files import (
    CheckpointManifest,
    CheckpointName,
    Folder,
    Inventory,
    SegmentManifest,
    SegmentName,
)


def checkpoint_file(
    file: BinaryIO, folder: Folder, *, created_ms: int, feature_level: int, writer_version: str
) -> tuple[bytes, CheckpointManifest]:
    """Return the bytes of a checkpoint file, and its manifest. Blocks.

    Raises:
        BackupError: the file is damaged.
    """
    data = file.read()
    try:
        reader = CheckpointReader(io.BytesIO(data))
        # A damaged file must not enter the backup, where it would replace older intact ones.
        reader.verify()
        state_hash, log_hash = state_hash_of(reader), log_hash_of(reader)
    except CheckpointError as error:
        raise BackupError(f"a checkpoint can't be backed up: {error}") from error

    manifest = CheckpointManifest(
        cluster_id=folder.cluster_id,
        cluster_uuid=folder.cluster_uuid,
        end_offset=reader.id.end_offset,
        epoch=reader.id.epoch,
        created_ms=created_ms,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        log_hash=log_hash.hex(),
        state_hash=state_hash.hex(),
        feature_level=feature_level,
        writer_version=writer_version,
    )
    return data, manifest


def checkpoint_log_hash(file: BinaryIO) -> bytes:
    """Return the rolling hash of the log below the end of a checkpoint file. Blocks.

    Raises:
        BackupError: the file is damaged.
    """
    try:
        return log_hash_of(CheckpointReader(file))
    except CheckpointError as error:
        raise BackupError(f"a checkpoint can't be compared with the backup: {error}") from error


class SingleFile:
    """Backup that consists of one checkpoint, whose manifest is computed from the file itself."""

    def __init__(self, path: Path) -> None:
        """Read and check the file.

        Raises:
            BackupError: it is not a checkpoint, damaged, or of a cluster without a UUID.
            OSError: it can't be read.
        """
        data = path.read_bytes()
        try:
            reader = CheckpointReader(io.BytesIO(data), path.name)
            cluster_uuid = str(reader.columns("bucket_claim")["cluster_uuid"][0])
        except CheckpointError as error:
            raise BackupError(str(error)) from error
        if not cluster_uuid:
            raise BackupError(
                f"{path.name}: its cluster had no bucket yet, so it contains no objects"
            )
        self.folder = Folder(reader.cluster_id, cluster_uuid)
        # A checkpoint has no time of its own.
        created_ms = path.stat().st_mtime_ns // 1_000_000
        self._data, self._manifest = checkpoint_file(
            io.BytesIO(data), self.folder, created_ms=created_ms, feature_level=0, writer_version=""
        )

    def inventory(self) -> Inventory:
        """Return the inventory: the checkpoint."""
        name = self._manifest.name
        return Inventory((), (name,), (), {name: self._manifest.created_ms})

    def segment(self, name: SegmentName) -> tuple[bytes, SegmentManifest]:
        """Raise BackupDamagedError, because there is no segment."""
        raise BackupDamagedError(name, "there is none in a single file")

    def segment_manifest(self, name: SegmentName) -> SegmentManifest:
        """Raise BackupDamagedError, because there is no segment."""
        raise BackupDamagedError(name, "there is none in a single file")

    def checkpoint(self, name: CheckpointName) -> tuple[bytes, CheckpointManifest]:
        """Return the file and its manifest."""
        return self._data, self.checkpoint_manifest(name)

    def checkpoint_manifest(self, name: CheckpointName) -> CheckpointManifest:
        """Return the manifest of the file."""
        if name != self._manifest.name:
            raise BackupDamagedError(name, f"the file contains {self._manifest.name}")
        return self._manifest
