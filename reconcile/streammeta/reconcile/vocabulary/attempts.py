"""Attempts of a task: their names, and the keys that other attempts began to delete.

Spark may run a task twice, after a failure or at the same time. Both attempts delete the same keys,
so each has separate files, and counts keys deleted by the other attempt as deleted by the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streammeta.storage.parsing import parse_json


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of task `task`. `number` is unique among all attempts of the run."""

    task: int
    number: int

    @property
    def name(self) -> str:
        """Prefix of its file names."""
        return f"{self._of_task}{self.number:06d}"

    @property
    def _of_task(self) -> str:
        return f"{self.task:05d}-"

    def is_other(self, file: Path) -> bool:
        """Return whether a file belongs to another attempt of the same task."""
        return file.name.startswith(self._of_task) and not file.name.startswith(f"{self.name}-")


ONLY_ATTEMPT = Attempt(0, 0)
"""The attempt of an engine that runs everything once, as one task."""


class OtherAttempts:
    """Keys that other attempts of a task began to delete, from their undo records."""

    def __init__(self, undo_folder: Path, attempt: Attempt) -> None:
        self._folder = undo_folder
        self._attempt = attempt
        self._read: set[str] = set()
        self._keys: set[str] = set()

    def look(self) -> None:
        """Read the records written since the last look.

        An attempt records a key before it deletes it. A look after finding a key absent therefore
        sees the record, if an attempt of the task deleted the key.
        """
        for file in self._folder.glob("*.jsonl"):
            # Record files are renamed into place when complete, so each is read once.
            if file.name not in self._read and self._attempt.is_other(file):
                self._read.add(file.name)
                lines = file.read_text().splitlines()
                self._keys.update(parse_json(line)["key"] for line in lines)

    def has_begun(self, key: str) -> bool:
        """Return whether another attempt began to delete a key, as of the last look."""
        return key in self._keys
