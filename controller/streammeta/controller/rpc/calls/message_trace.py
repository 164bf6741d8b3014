"""Trace of one message of a commit pipeline: one span in the traces of its callers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from streammeta.controller.runtime.writer.commit_phases import Phases
from streammeta.controller.runtime.writer.submission import Submission

_NAME = "streammeta.v1.ObjectService/CommitPipeline"


class MessageTrace:
    """Phases of a message that somebody traces."""

    def __init__(self, traceparents: Sequence[str], came_ns: int) -> None:
        """Note that its decision begins now."""
        self._traceparents = traceparents
        self._phases = Phases(came_ns)
        self._phases.pass_on("admitted")

    def decided(self, submissions: Sequence[Submission]) -> Self:
        """Note the decision, and the flush of the last submission when it comes."""
        self._phases.pass_on("decided")
        # The log is flushed in order, so the last one covers the others.
        for last in submissions[-1:]:
            last.tell_flushed(partial(self._phases.pass_on, "flushed"))
        return self

    def committed(self, commits: int, rows: int, refused: int, end_offset: int) -> None:
        """Record the message, whose commits are committed now."""
        self._phases.pass_on("committed")
        counts = {"commits": commits, "rows": rows, "refused": refused, "offset": end_offset}
        self._phases.record(_NAME, self._traceparents, counts)
