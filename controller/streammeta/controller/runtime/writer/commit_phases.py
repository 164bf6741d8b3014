"""Phases of a traced write: admitted, decided, flushed, committed.

The flushed phase refers to the leader's own disk. If a majority of others is faster, an entry
commits before the leader has flushed it, and the write has no flushed phase.

Times are taken as the phases end and recorded as spans once the write is answered, so that an
untraced write costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from streammeta.rpc import tracing


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
