"""Counts of answered commits of uploads, by result and duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streammeta.controller.timings import Times


@dataclass(slots=True)
class CommitTally:
    """Counts since the start, on the controller's event loop.

    Durations run from the decision of a message or call until its commit.
    """

    accepted: int = 0
    refused: int = 0
    accepted_times: Times = field(default_factory=Times, compare=False)
    refused_times: Times = field(default_factory=Times, compare=False)

    def add(self, commits: int, refused: int, took_s: float) -> None:
        """Count commits answered together after `took_s` seconds, `refused` of them rejected."""
        if accepted := commits - refused:
            self.accepted += accepted
            # Commits of one message share its duration, so they are added at once.
            self.accepted_times.add(took_s, accepted)
        if refused:
            self.refused += refused
            self.refused_times.add(took_s, refused)

    @property
    def times(self) -> Sequence[int]:
        """Commits by duration class, both accepted and rejected, as in `Times`."""
        both = zip(self.accepted_times.counts, self.refused_times.counts, strict=True)
        return [accepted + refused for accepted, refused in both]
