"""Errors of backups: each names the file, what is wrong with it, and what to do."""

from __future__ import annotations

from streammeta.storage.cluster_files.backup_files import FileName, SegmentName


class BackupError(Exception):
    """A backup can't be used as it was to be."""


class BackupDamagedError(BackupError):
    """A file of a backup is missing, damaged, or disagrees with another one.

    Points up to `offset` can be restored without it.
    """

    def __init__(self, name: FileName, problem: str, offset: int | None = None) -> None:
        self.name = name
        self.problem = problem
        start = name.start_offset if isinstance(name, SegmentName) else name.end_offset
        self.offset = start if offset is None else offset
        super().__init__(
            f"{name}: {problem}; a point up to offset {self.offset} can be restored without it"
        )


class BackupDivergedError(BackupError):
    """The backup holds another history than the log of the controller that was to continue it."""
