"""Gate of new object ids: how far the leader may issue them in its present term.

The lifecycle opens it once the ids are claimed in the bucket; the single writer asks it before a
record that issues ids is replicated. Knows no bucket.
"""

import asyncio
import contextlib

from streammeta.controller.errors import ApiError, ObjectIdsNotReadyError

NO_BOUND = 2**63 - 1
"""Bound of a gate that never refuses."""

READY_WAIT_MS = 1_000
"""Maximum wait of a request for ids at the gate of a new leader, in milliseconds."""


class ObjectIdGate:
    """Bound of issuable ids; closed at first. Used on the event loop only."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        """Set when ids were refused, or when another reason calls for a new claim."""
        self._bound = 0
        self._refusal: ApiError = ObjectIdsNotReadyError("the leader has just taken over")
        self._decided = asyncio.Event()

    @property
    def bound(self) -> int:
        """Bound below which object ids may be issued; 0 means none."""
        return self._bound

    def open(self, below: int) -> None:
        """Let ids below the bound be issued."""
        self._bound = below
        self._refusal = ObjectIdsNotReadyError(f"all ids below {below} are issued")
        self._decided.set()

    def close(self, refusal: ApiError, *, is_final: bool) -> None:
        """Let no ids be issued; waiting requests are refused at once if `is_final`."""
        self._bound = 0
        self._refusal = refusal
        if is_final:
            self._decided.set()
        else:
            self._decided.clear()

    def fail(self, why: str) -> None:
        """Note why no more ids can be claimed at present; claimed ids can be issued."""
        refusal = ObjectIdsNotReadyError(why)
        if self._bound:
            self._refusal = refusal
        else:
            self.close(refusal, is_final=True)

    def check(self, end_id: int) -> None:
        """Raise the refusal unless all ids below `end_id` may be issued."""
        if end_id > self._bound:
            self.wanted.set()
            raise self._refusal

    def problem(self, next_id: int) -> str:
        """Return the reason why the id can't be issued; empty if it can."""
        return "" if next_id < self._bound else str(self._refusal)

    async def decided(self) -> None:
        """Wait until the gate is open or finally closed, at most `READY_WAIT_MS`."""
        if self._decided.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_MS / 1000):
                await self._decided.wait()


def open_gate() -> ObjectIdGate:
    """Return a gate that lets all ids be issued."""
    gate = ObjectIdGate()
    gate.open(NO_BOUND)
    return gate
