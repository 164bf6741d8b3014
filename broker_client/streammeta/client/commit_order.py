"""The order of batches on their way into the map: submitted one after the other, settled likewise.

Submissions do not wait for answers, so several are under way. When one has to be made anew, those
behind it were judged without it; no other is submitted until all of them are settled.
"""

from __future__ import annotations

import asyncio

from streammeta.client.upload import BatchUpload


class CommitOrder:
    """Lets each batch wait for its turns; `BatchUpload.before` says what it comes after."""

    def __init__(self) -> None:
        self._newest: BatchUpload | None = None
        self._may_submit = asyncio.Event()
        self._may_submit.set()

    async def submission(self, batch: BatchUpload) -> None:
        """Wait until `batch` may be submitted."""
        if batch.before is not None:
            await batch.before.submitted.wait()
        await self._may_submit.wait()

    def submitted(self, batch: BatchUpload) -> None:
        """Let the next one be submitted."""
        self._newest = batch
        batch.submitted.set()

    async def settlement(self, batch: BatchUpload) -> None:
        """Wait until all before `batch` are settled."""
        if batch.before is not None:
            await batch.before.settled.wait()

    def hold(self) -> None:
        """Submit nothing more until all that is submitted is settled."""
        self._may_submit.clear()

    def settled(self, batch: BatchUpload) -> None:
        """Let the next one be settled; `batch` is over, whatever became of it."""
        batch.submitted.set()
        batch.settled.set()
        batch.before = None
        if self._newest is batch:
            self._newest = None
            self._may_submit.set()
