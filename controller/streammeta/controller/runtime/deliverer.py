"""Carries out what delivery asks for: hands batches on, reads old ones, loads snapshots.

A snapshot is read in a thread while heartbeats, votes and Fetches go on; only the exchange of the
finished state happens on the event loop. Batches are handed on piece by piece with a turn of the
loop for everything else in between: a replica that replays a long log still votes in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.messages import Batch, SnapshotId
from streammeta.controller.runtime.delivery import (
    DELIVERY_BYTES,
    Delivery,
    HandOn,
    LoadSnapshot,
    ReadForDelivery,
)
from streammeta.controller.runtime.quorum_disk import DiskRead, JournalThread
from streammeta.controller.runtime.state_machine import StateMachine

_log = structlog.get_logger(component="quorum")


class DeliveryHost(Protocol):
    """The replica whose state machine it is; all calls on the event loop."""

    @property
    def is_leader(self) -> bool:
        """Whether the state machine leads."""
        ...

    def enter(self, work: Callable[[], None]) -> None:
        """Do `work` as one of the replica's turns: an exception in it ends the replica."""
        ...


class DeliveryProgress(Protocol):
    """Who is told how far delivery came, on the event loop."""

    def on_delivered(self, size: int) -> None:
        """So many bytes of payload were handed on."""
        ...

    def on_loaded(self) -> None:
        """A snapshot replaced the state."""
        ...


class Deliverer:
    """Keeps the state machine up with what is committed."""

    def __init__(
        self,
        *,
        host: DeliveryHost,
        progress: DeliveryProgress,
        core: QuorumCore,
        journal: Journal,
        disk: JournalThread,
        state_machine: StateMachine,
    ) -> None:
        self._host = host
        self._progress = progress
        self._core = core
        self._journal = journal
        self._disk = disk
        self._state_machine = state_machine
        self._delivery = Delivery(journal.snapshots[-1] if journal.snapshots else None)
        self._is_installing = False
        self._goes_on = False
        self._loading: asyncio.Task[None] | None = None

    @property
    def end_offset(self) -> EndOffset:
        """Exclusive end of what the state machine was given."""
        return self._delivery.end_offset

    @property
    def epoch(self) -> Epoch:
        """Epoch of the last batch the state machine was given."""
        return self._delivery.epoch

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot will replace the state before anything else is delivered."""
        return self._is_installing or self._delivery.is_loading

    def is_caught_up(self) -> bool:
        """Whether everything committed was delivered."""
        return self._delivery.is_caught_up(self._core.high_watermark)

    def run(self) -> None:
        """Deliver a piece of what can be delivered now, and begin what takes longer."""
        if self._is_installing and self._delivery.is_loading:
            return  # what is to be loaded may be gone already; a newer one is coming
        match self._delivery.next(self._core.log, self._core.high_watermark):
            case HandOn() as step:
                self._hand_on(step)
                self._go_on_soon()
            case ReadForDelivery(start_offset=start_offset):
                self._disk.submit(DiskRead(start_offset, DELIVERY_BYTES, self._on_read))
            case LoadSnapshot(snapshot_id=snapshot_id):
                self._begin_loading(snapshot_id)
            case None:
                pass

    def _go_on_soon(self) -> None:
        if not self._goes_on and not self.is_caught_up():
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._host.enter(self.run)

    def install_begins(self) -> None:
        """The log on disk is about to be replaced by a snapshot from the leader."""
        self._is_installing = True

    def install_ended(self, snapshot_id: SnapshotId, *, is_installed: bool) -> None:
        """It was, or the snapshot was refused and nothing changed."""
        self._is_installing = False
        if is_installed:
            self._delivery.installed(snapshot_id)

    async def stop(self) -> None:
        """Wait for a load under way; its result is thrown away."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)

    def _hand_on(self, step: HandOn) -> None:
        self._state_machine.on_committed(step.batches, self._delivery.end_offset)
        self._progress.on_delivered(sum(batch.size for batch in step.batches))

    def _on_read(self, batches: tuple[Batch, ...]) -> None:
        def work() -> None:
            step = self._delivery.was_read(batches, self._core.high_watermark)
            if step is None:
                self.run()
            else:
                self._hand_on(step)
                self._go_on_soon()

        self._host.enter(work)

    def _begin_loading(self, snapshot_id: SnapshotId) -> None:
        if self._host.is_leader:
            raise InvariantError(f"a leader was to load the snapshot {snapshot_id}")
        self._loading = asyncio.get_running_loop().create_task(self._load(snapshot_id))

    async def _load(self, snapshot_id: SnapshotId) -> None:
        try:
            install = await asyncio.to_thread(self._read, snapshot_id)
        except Exception as error:  # noqa: BLE001 (an unreadable snapshot ends the process)
            failure = error
            self._host.enter(lambda: self._load_failed(snapshot_id, failure))
        else:
            self._host.enter(lambda: self._exchange(snapshot_id, install))

    def _read(self, snapshot_id: SnapshotId) -> Callable[[], None]:
        with self._journal.open_snapshot(snapshot_id) as file:
            return self._state_machine.load(file, snapshot_id)

    def _exchange(self, snapshot_id: SnapshotId, install: Callable[[], None]) -> None:
        install()
        self._delivery.loaded(snapshot_id)
        _log.info("snapshot_loaded", end_offset=snapshot_id.end_offset, epoch=snapshot_id.epoch)
        self._progress.on_loaded()
        self.run()

    def _load_failed(self, snapshot_id: SnapshotId, error: Exception) -> None:
        if not self._is_installing and not self._delivery.is_superseded(snapshot_id):
            raise error
        # A newer snapshot has removed, or is about to remove, the file.
        self._delivery.load_abandoned()
        self.run()
