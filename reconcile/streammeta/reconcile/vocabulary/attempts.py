"""Attempts of one task: their names, and what other attempts of the same task have begun.

Spark may run a task twice, after a failure or at the same time. Both attempts delete the same keys,
so each has files of its own, and counts a key that the other deleted as deleted by the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streammeta.storage.parsing import parse_json


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of task `task`; `number` is unique among all attempts of the run."""

    task: int
    number: int

    @property
    def name(self) -> str:
        """Beginning of the names of its files."""
        return f"{self._of_task}{self.number:06d}"

    @property
    def _of_task(self) -> str:
        return f"{self.task:05d}-"

    def is_other(self, file: Path) -> bool:
        """Whether a file belongs to another attempt of the same task."""
        return file.name.startswith(self._of_task) and not file.name.startswith(f"{self.name}-")


ONLY_ATTEMPT = Attempt(0, 0)
"""The attempt of an engine that runs everything as one task, once."""


class OtherAttempts:
    """Keys that other attempts of a task began to delete, by their undo records."""

    def __init__(self, undo_folder: Path, attempt: Attempt) -> None:
        self._folder = undo_folder
        self._attempt = attempt
        self._read: set[str] = set()
        self._keys: set[str] = set()

    def look(self) -> None:
        """Read the records that were written since the last look.

        An attempt records a key before it deletes it. So a look that follows the discovery that a
        key is absent sees the record, if an attempt of the task removed it.
        """
        for file in self._folder.glob("*.jsonl"):
            if file.name not in self._read and self._attempt.is_other(file):
                self._read.add(file.name)
                lines = file.read_text().splitlines()
                self._keys.update(parse_json(line)["key"] for line in lines)

    def has_begun(self, key: str) -> bool:
        """Whether another attempt has begun to delete a key, as of the last look."""
        return key in self._keys
