"""The log and the checkpoints of this controller, for parts that copy them elsewhere."""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from streammeta.controller.ids import EndOffset, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.runtime.persistence.quorum_disk import DiskRead
from streammeta.controller.runtime.replication.quorum_driver import QuorumDriver


class LogSource:
    """Reads through the driver's disk queue: after earlier writes, before later ones."""

    def __init__(self, driver: QuorumDriver, journal: Journal) -> None:
        self._driver = driver
        self._journal = journal

    async def read(self, start_offset: int, max_bytes: int) -> tuple[Batch, ...]:
        """Return whole batches from an offset on, committed or not. Empty if they were trimmed."""
        future: asyncio.Future[tuple[Batch, ...]] = asyncio.get_running_loop().create_future()

        def done(batches: tuple[Batch, ...]) -> None:
            # The reader may have been cancelled while the disk worked.
            if not future.done():
                future.set_result(batches)

        self._driver.read_disk(DiskRead(EndOffset(start_offset), max_bytes, done))
        return await future

    @property
    def newest_checkpoint(self) -> SnapshotId | None:
        """The newest checkpoint on disk."""
        kept = self._journal.snapshots.kept
        return kept[-1] if kept else None

    def open_checkpoint(self, snapshot_id: SnapshotId) -> BinaryIO:
        """Open a checkpoint, in a thread. Raises FileNotFoundError if it was removed."""
        return self._journal.snapshots.open(snapshot_id)
