"""Appended changes: the conditions for returning their answers, their phases and their counts.

A traced write is admitted, decided, flushed, committed. The flushed phase refers to the leader's
own disk. If a majority of others is faster, an entry commits before the leader has flushed it, and
the write has no flushed phase. Times are taken as the phases end and recorded as spans once the
write is answered, so that an untraced write costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streammeta.controller.metadata.api.answers import Answer
from streammeta.controller.runtime.interfaces import ReplicatedLog
from streammeta.controller.runtime.writer.bucket_permits import MarkerLease
from streammeta.controller.timings import Times
from streammeta.rpc import tracing


@dataclass(eq=False)
class Submission:
    """Mutations that were decided and appended together, and the wait for their commit."""

    answers: Sequence[Answer]
    offset: int
    _waiting: asyncio.Future[None] | None
    _log: ReplicatedLog
    _lease: MarkerLease | None
    """The answers require it to be valid, if there is one."""
    _is_proven: bool
    """Whether the commit itself proves that this node led."""

    def tell_flushed(self, told: Callable[[], None]) -> None:
        """Call `told` when everything is on this node's disk, if it leads until then."""
        self._log.tell_flushed(self.offset, told)

    async def committed(self) -> None:
        """Return when the answers may be returned.

        Raises:
            NotLeaderError: this node did not lead when it decided.
            OutcomeUnknownError: leadership or the lease was lost before the commit.
        """
        if not self._is_proven:
            # The last mutation appended nothing, so no commit proves that this node led.
            await self._log.read_barrier()
        if self._waiting is not None:
            await self._waiting
        if self._lease is not None:
            self._lease.require_for_answer()


class Phases:
    """Phases of one write, starting now or at `began_ns` (ns since 1970)."""

    def __init__(self, began_ns: int | None = None) -> None:
        self._times = [("began", time.time_ns() if began_ns is None else began_ns)]

    def pass_on(self, phase: str) -> None:
        """Record the end of a phase."""
        self._times.append((phase, time.time_ns()))

    def record(
        self, name: str, traceparents: Sequence[str], attributes: tracing.Attributes
    ) -> None:
        """Record the write and its phases, each starting at the end of the previous one."""
        tracing.record_phases(name, traceparents, tuple(self._times), attributes)


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
