"""Phases of a traced write: admitted, decided, flushed, committed.

Flushed is what is on the leader's own disk. A majority of others may be quicker, and commit what
the leader has not flushed: such a write has no phase of that name.

Times are noted as the phases end and recorded as spans once the write is answered, so that a write
that is not traced costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from streammeta.rpc import tracing


class Phases:
    """The phases of one write, from now or from `began_ns` on, in ns since 1970."""

    def __init__(self, began_ns: int | None = None) -> None:
        self._times = [("began", time.time_ns() if began_ns is None else began_ns)]

    def pass_on(self, phase: str) -> None:
        """Note that a phase has ended."""
        self._times.append((phase, time.time_ns()))

    def record(
        self, name: str, traceparents: Sequence[str], attributes: tracing.Attributes
    ) -> None:
        """Record the write and its phases, each from the end of the one before it."""
        tracing.record_phases(name, traceparents, tuple(self._times), attributes)
