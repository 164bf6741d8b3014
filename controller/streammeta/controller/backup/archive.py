"""One cluster's backup in a bucket: put, read, list and delete files with their manifests.

A file is put before its manifest and removed after it, so a manifest always has its file. All calls
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from streammeta.controller.backup.errors import BackupDamagedError, BackupDivergedError
from streammeta.storage import json_files
from streammeta.storage.cluster_files import backup_files
from streammeta.storage.errors import CorruptObjectError, ObjectExistsError, ObjectNotFoundError
from streammeta.storage.object_store.protocol.base import ObjectStore

M = TypeVar("M", backup_files.SegmentManifest, backup_files.CheckpointManifest)


class Archive:
    """The folder of one cluster in a store. See `storage.object_store` for the store's errors."""

    def __init__(self, store: ObjectStore, folder: backup_files.Folder) -> None:
        self._store = store
        self.folder = folder

    def inventory(self) -> backup_files.Inventory:
        """List the files in the folder."""
        found = backup_files.inventories(self._store.list_objects(self.folder.prefix))
        # A backup that has not begun is an empty one and no error.
        return found.get(self.folder, backup_files.Inventory((), (), (), {}))

    # -- reading

    def segment(self, name: backup_files.SegmentName) -> tuple[bytes, backup_files.SegmentManifest]:
        """Return a segment and its manifest. Raises BackupDamagedError if one is missing."""
        manifest = self.segment_manifest(name)
        return self._read(name, self.folder.key(name)), manifest

    def checkpoint(
        self, name: backup_files.CheckpointName
    ) -> tuple[bytes, backup_files.CheckpointManifest]:
        """Return a checkpoint and its manifest. Raises BackupDamagedError if one is missing."""
        manifest = self.checkpoint_manifest(name)
        return self._read(name, self.folder.key(name)), manifest

    def segment_manifest(self, name: backup_files.SegmentName) -> backup_files.SegmentManifest:
        """Return a segment's manifest. Raises BackupDamagedError if it is missing or damaged."""
        return self._manifest(backup_files.SegmentManifest, name)

    def checkpoint_manifest(
        self, name: backup_files.CheckpointName
    ) -> backup_files.CheckpointManifest:
        """Return a checkpoint's manifest. Raises BackupDamagedError if it is missing or damaged."""
        return self._manifest(backup_files.CheckpointManifest, name)

    # -- writing

    def put(self, data: bytes | memoryview, manifest: backup_files.Manifest) -> None:
        """Put a file, then its manifest. An equal file that already exists is kept.

        Raises:
            BackupDivergedError: a different file of this name exists.
        """
        name = manifest.name
        try:
            self._store.put(self.folder.key(name), data, if_absent=True)
        except ObjectExistsError:
            # A repeated upload, or another leader's of the same entries, writes equal bytes.
            self._require_equal(name, data)
        try:
            body = json_files.encode(manifest)
            self._store.put(self.folder.manifest_key(name), body, if_absent=True)
        except ObjectExistsError:
            pass  # only its times may differ

    def delete(self, names: Sequence[backup_files.FileName]) -> int:
        """Delete files, manifests first. Returns the number of deleted files."""
        refused = self._store.delete_many(self.folder.manifest_key(name) for name in names).failed
        # A file whose manifest remains must stay, or the manifest would name a missing file.
        bare = [name for name in names if self.folder.manifest_key(name) not in refused]
        return len(self._store.delete_many(self.folder.key(name) for name in bare).deleted)

    # -- parts

    def _require_equal(self, name: backup_files.FileName, data: bytes | memoryview) -> None:
        if self._store.get_range(self.folder.key(name)) != data:
            raise BackupDivergedError(
                f"{name}: the backup has a different file of this name: another history of the "
                "cluster writes to it. Set a separate --backup-store for this cluster"
            )

    def _manifest(self, cls: type[M], name: backup_files.FileName) -> M:
        key = self.folder.manifest_key(name)
        data = self._read(name, key)
        try:
            manifest = json_files.decode(cls, key, data)
        except CorruptObjectError as error:
            raise BackupDamagedError(name, f"manifest: {error.problem}") from error

        # A file copied to another name or folder would restore a wrong history.
        if (manifest.name, manifest.cluster_id, manifest.cluster_uuid) != (
            name,
            self.folder.cluster_id,
            self.folder.cluster_uuid,
        ):
            raise BackupDamagedError(
                name,
                f"its manifest describes {manifest.name} of cluster {manifest.cluster_id!r}",
            )

        if not backup_files.has_good_hashes(manifest):
            raise BackupDamagedError(name, "its manifest has an invalid log hash")

        return manifest

    def _read(self, name: backup_files.FileName, key: str) -> bytes:
        try:
            return self._store.get_range(key)
        except ObjectNotFoundError:
            raise BackupDamagedError(name, f"{key!r} is missing") from None
