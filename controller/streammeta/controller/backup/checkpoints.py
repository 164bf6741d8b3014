"""A controller's checkpoint file as a backup file with its manifest."""

from __future__ import annotations

import hashlib
import io
from typing import BinaryIO

from streammeta.controller.backup.errors import BackupError
from streammeta.controller.runtime.persistence.metadata_checkpoint import log_hash_of, state_hash_of
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from streammeta.storage.cluster_files.backup_files import CheckpointManifest, Folder


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
