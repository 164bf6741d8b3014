"""Commits of uploads that were answered, by verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CommitTally:
    """Counts since the start; on the controller's event loop."""

    accepted: int = 0
    refused: int = 0

    def add(self, commits: int, refused: int) -> None:
        """Count answered commits, some of them refused."""
        self.accepted += commits - refused
        self.refused += refused
