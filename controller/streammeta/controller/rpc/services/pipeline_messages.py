"""Messages of a commit pipeline: read, decided, and rejected ones, and their traces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self, TypeAlias, cast

import numpy as np

from streammeta.controller.metadata.api import answers
from streammeta.controller.metadata.api.requests import CommitStreamSetObject, CommitUploads
from streammeta.controller.rpc.codec.wire_columns import (
    commit_stream_set_object_out,
    uploads_out,
)
from streammeta.controller.runtime.writer.submission import Phases, Submission
from streammeta.v1 import columns_pb2 as pb

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


PipelineCommit: TypeAlias = CommitStreamSetObject | CommitUploads


class PipelineMessage(NamedTuple):
    """A message that was read: commits to be decided in order, `rows` of work in all."""

    sequence: int
    commits: Sequence[PipelineCommit]
    rows: int
    with_effects: Sequence[tuple[int, pb.PackedCommitStreamSetObjectRequest]] = ()
    """Commits that put values or trim streams, each with its place."""
    trace: MessageTrace | None = None

    @property
    def uploads(self) -> CommitUploads | None:
        """Its uploads, which come last."""
        # Parsing puts uploads after the commits, as the contract decides them last.
        last = self.commits[-1] if self.commits else None
        return last if isinstance(last, CommitUploads) else None


class DecidedMessage(NamedTuple):
    """A message whose commits are decided and appended."""

    sequence: int
    submissions: Sequence[Submission]
    commits: Sequence[answers.Answer]
    uploads: answers.Answer | None
    with_effects: Sequence[tuple[int, pb.PackedCommitStreamSetObjectRequest]] = ()
    decided_at: float = 0.0
    """Time of the decision, in seconds of `time.perf_counter`."""
    trace: MessageTrace | None = None

    def verdicts(self) -> tuple[int, int]:
        """Return (commits, rejected commits)."""
        commits = cast(Sequence[answers.CommitStreamSetObjectAnswer], self.commits)
        calls, refused = len(commits), sum(1 for answer in commits if answer.error)
        if self.uploads is not None:
            uploads = cast(answers.CommitUploadsAnswer, self.uploads)
            calls += len(uploads.errors)
            refused += int(np.count_nonzero(uploads.errors))
        return calls, refused

    def tally(self) -> tuple[int, int, int, int]:
        """Return (commits, rows, rejected commits, end of the log that contains them)."""
        calls, refused = self.verdicts()
        commits = cast(Sequence[answers.CommitStreamSetObjectAnswer], self.commits)
        rows = sum(
            len(answer.range_errors) + len(answer.stream_object_errors) for answer in commits
        )
        rows += sum(len(answer.shared.errors) for answer in commits if answer.shared is not None)
        if self.uploads is not None:
            rows += len(cast(answers.CommitUploadsAnswer, self.uploads).range_errors)

        # An answer is valid as of the last of its entries.
        end = max((submission.offset for submission in self.submissions), default=-1)
        return calls, rows, refused, end

    async def response(self) -> bytes:
        """Return the encoded answer once all commits are committed.

        It is encoded while they are not.
        """
        response = pb.PackedCommitPipelineResponse(sequence=self.sequence)
        if self.uploads is not None:
            uploads_out(cast(answers.CommitUploadsAnswer, self.uploads), response.uploads)
        for answer in self.commits:
            commit = commit_stream_set_object_out(cast(answers.CommitStreamSetObjectAnswer, answer))
            response.commits.append(commit)
        # Before the wait, so that encoding overlaps the flush and the round trip of the followers.
        encoded = response.SerializeToString()

        for submission in self.submissions:
            await submission.committed()
        if self.trace is not None:
            self.trace.committed(*self.tally())
        return encoded


class RejectedMessage(NamedTuple):
    """A message that ends the stream. `sequence` is None if it could not be read."""

    sequence: int | None
    error: Exception

    async def response(self) -> bytes:
        """Raise the error."""
        raise self.error


Outcome: TypeAlias = DecidedMessage | RejectedMessage
