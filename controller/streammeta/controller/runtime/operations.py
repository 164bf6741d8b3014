"""What operators ask of a leader and wait for: changes of the voters, a transfer of leadership."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streammeta.controller.ids import EndOffset, NodeId
from streammeta.controller.quorum.events import (
    Event,
    TransferRefused,
    TransferRequested,
    VoterChangeDone,
    VoterChangeRefused,
    VoterChangeRequested,
)
from streammeta.controller.quorum.messages import QuorumError
from streammeta.controller.quorum.voters import ReplicaKey, Voter
from streammeta.controller.runtime.quorum_errors import TransferRefusedError, VoterChangeError
from streammeta.controller.runtime.waiting import WaitingCallers

_TRANSFER = 0
"""There is one transfer at a time; this is its number."""


class Operations:
    """Hands requests to the core by way of `feed`, and its outcomes to who waits."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._changes: WaitingCallers[int, EndOffset] = WaitingCallers()
        self._transfers: WaitingCallers[int, None] = WaitingCallers()
        self._last_change = 0

    async def change_voters(self, change: Voter | ReplicaKey, timeout_ms: int) -> EndOffset:
        """Add a voter or remove one; return the end offset of the committed change.

        Raises:
            VoterChangeError: it was refused, or was not done in time and may still be.
        """
        self._last_change += 1
        change_id = self._last_change
        future = self._changes.expect(change_id)
        self._feed(VoterChangeRequested(change_id, change))
        try:
            return await asyncio.wait_for(future, timeout_ms / 1000)
        except TimeoutError:
            raise VoterChangeError(
                QuorumError.REQUEST_TIMED_OUT,
                f"not committed within {timeout_ms} ms; it may still be: look at who votes",
            ) from None
        finally:
            self._changes.forget(change_id, future)

    async def transfer(self, to: NodeId | None, timeout_ms: int) -> None:
        """Hand leadership over; return when it is gone.

        Raises:
            TransferRefusedError: leadership stays, or had not gone in time.
        """
        if self._transfers:
            raise TransferRefusedError("leadership is being handed over already; wait for the end")
        future = self._transfers.expect(_TRANSFER)
        self._feed(TransferRequested(to))
        try:
            await asyncio.wait_for(future, timeout_ms / 1000)
        except TimeoutError:
            raise TransferRefusedError(
                f"leadership was not handed over within {timeout_ms} ms; it may still be"
            ) from None
        finally:
            self._transfers.forget(_TRANSFER, future)

    def outcome(self, effect: VoterChangeDone | VoterChangeRefused | TransferRefused) -> None:
        """Tell whoever asked what came of it."""
        match effect:
            case VoterChangeDone(change_id=change_id, end_offset=end_offset):
                self._changes.answer(change_id, end_offset)
            case VoterChangeRefused(change_id=change_id, error=error, reason=reason):
                self._changes.fail(change_id, VoterChangeError(error, reason))
            case TransferRefused(reason=reason):
                self._transfers.fail(_TRANSFER, TransferRefusedError(reason))

    def leadership_ended(self) -> None:
        """It is gone, which is what a transfer waits for."""
        self._transfers.answer(_TRANSFER, None)

    def close(self, error: Exception) -> None:
        """Fail all that wait."""
        self._changes.fail_all(error)
        self._transfers.fail_all(error)
