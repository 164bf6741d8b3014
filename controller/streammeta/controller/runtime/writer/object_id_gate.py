"""Gate of new object ids: how far the leader may issue them in its current term.

The lifecycle opens the gate once the ids are claimed in the bucket. The single writer checks it
before it replicates a record that issues ids.
"""

import asyncio
import contextlib

from streammeta.controller.errors import ApiError, ObjectIdsNotReadyError

NO_BOUND = 2**63 - 1
"""Bound of a gate that is always open."""

READY_WAIT_MS = 1_000
"""Maximum wait of a request for ids at a new leader's gate, in milliseconds."""


class ObjectIdGate:
    """Bound of issuable ids, initially closed. Used on the event loop only."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        """Set when ids were rejected, or when another reason requires a new claim."""
        self._bound = 0
        self._refusal: ApiError = ObjectIdsNotReadyError("a new leader has just been elected")
        self._decided = asyncio.Event()

    @property
    def bound(self) -> int:
        """Bound below which object ids may be issued, 0 for none."""
        return self._bound

    def open(self, below: int) -> None:
        """Allow ids below the bound."""
        self._bound = below
        self._refusal = ObjectIdsNotReadyError(f"all ids below {below} are issued")
        self._decided.set()

    def close(self, refusal: ApiError, *, is_final: bool) -> None:
        """Allow no ids. With `is_final`, waiting requests are rejected immediately."""
        self._bound = 0
        self._refusal = refusal
        if is_final:
            self._decided.set()
        else:
            # A new leader claims soon, so requests wait a moment for it.
            self._decided.clear()

    def fail(self, why: str) -> None:
        """Record why no more ids can be claimed now. Ids already claimed can be issued."""
        refusal = ObjectIdsNotReadyError(why)
        # A failing bucket must not stop ids that are already claimed there.
        if self._bound:
            self._refusal = refusal
        else:
            self.close(refusal, is_final=True)

    def check(self, end_id: int) -> None:
        """Raise the rejection unless all ids below `end_id` may be issued."""
        if end_id > self._bound:
            # Wakes the lifecycle, which claims more ids.
            self.wanted.set()
            raise self._refusal

    def problem(self, next_id: int) -> str:
        """Return why the id can't be issued, empty if it can."""
        return "" if next_id < self._bound else str(self._refusal)

    async def decided(self) -> None:
        """Wait until the gate is open or finally closed, at most `READY_WAIT_MS`."""
        if self._decided.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_MS / 1000):
                await self._decided.wait()


def open_gate() -> ObjectIdGate:
    """Return a gate that allows all ids."""
    gate = ObjectIdGate()
    gate.open(NO_BOUND)
    return gate
