"""Errors of backups: each names the file, the problem, and the next step."""

from __future__ import annotations

from streammeta.storage.cluster_files.backup_files import FileName, SegmentName


class BackupError(Exception):
    """A backup can't be used for the requested operation."""


class BackupDamagedError(BackupError):
    """A backup file is missing, damaged, or disagrees with another one.

    Points up to `offset` can be restored without it.
    """

    def __init__(self, name: FileName, problem: str, offset: int | None = None) -> None:
        self.name = name
        self.problem = problem
        start = name.start_offset if isinstance(name, SegmentName) else name.end_offset
        self.offset = start if offset is None else offset
        super().__init__(
            f"{name}: {problem} (points up to offset {self.offset} can be restored without it)"
        )


class BackupDivergedError(BackupError):
    """The backup contains another history than the log of the controller that continues it."""
