"""Delivery to the state machine: committed batches in order, and snapshots in their place.

`Delivery` decides the next step and does no I/O. `Deliverer` executes it: it reads snapshots in a
thread while heartbeats, votes and Fetches continue, and swaps only the finished state on the event
loop. Batches are delivered in pieces, with an event loop turn in between, so a replica that replays
a long log still votes in time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import structlog

from streammeta.controller.errors import InvariantError
from streammeta.controller.fast_dataclass import value
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.journal.journal import Journal
from streammeta.controller.quorum.core import QuorumCore
from streammeta.controller.quorum.log_view import LogView
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.runtime.interfaces import StateMachine
from streammeta.controller.runtime.persistence.quorum_disk import DiskRead, JournalThread

_log = structlog.get_logger(component="quorum")

REPLAYED_AFTER_S = 0.01
"""Pause before a follower replays, in seconds. Replaying several batches together costs less."""

DELIVERY_BYTES = 128 << 10
"""Approximate number of bytes delivered in one turn, small enough not to delay votes."""


@value()
class LoadSnapshot:
    """Replace the state with this snapshot, then call `loaded`. Nothing is delivered meanwhile."""

    snapshot_id: SnapshotId


@value()
class ReadForDelivery:
    """Read batches of the log on disk, then call `was_read`. Nothing is delivered meanwhile."""

    start_offset: EndOffset


@value()
class HandOn:
    """Pass these batches to the state machine. They count as delivered."""

    batches: tuple[Batch, ...]


Step: TypeAlias = LoadSnapshot | ReadForDelivery | HandOn


class Delivery:
    """Progress of the state machine, and the rule for the next step."""

    def __init__(self, newest: SnapshotId | None) -> None:
        """Begin with the newest snapshot on disk, or at offset 0 without one."""
        self.end_offset = EndOffset(0)
        self.epoch = Epoch(0)
        """Epoch of the last batch delivered."""
        self._to_load = newest
        self._is_waiting = False

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot has to replace the state before anything else is delivered."""
        return self._to_load is not None

    def is_caught_up(self, high_watermark: EndOffset) -> bool:
        """Whether everything below `high_watermark` was delivered."""
        return not self.is_loading and self.end_offset >= high_watermark

    def next(self, log: LogView, high_watermark: EndOffset) -> Step | None:
        """Return the next step, or None if there is none or one is in progress."""
        if self._is_waiting:
            return None
        if self._to_load is not None:
            self._is_waiting = True
            return LoadSnapshot(self._to_load)
        if self.end_offset >= high_watermark:
            return None
        batches = log.read(self.end_offset, max_bytes=DELIVERY_BYTES, end=high_watermark)
        if batches is None:
            self._is_waiting = True
            return ReadForDelivery(self.end_offset)
        return self._deliver_batches(batches)

    def was_read(self, batches: Sequence[Batch], high_watermark: EndOffset) -> HandOn | None:
        """Return the next step for the batches that were read, None if a snapshot replaced them."""
        self._is_waiting = False
        # A snapshot was installed during the read, and replaces these batches too.
        if self._to_load is not None:
            return None
        return self._deliver_batches(
            tuple(batch for batch in batches if batch.end_offset <= high_watermark)
        )

    def installed(self, snapshot_id: SnapshotId) -> None:
        """Record that the log now begins at this snapshot's end, above the delivered entries."""
        self._to_load = snapshot_id

    def loaded(self, snapshot_id: SnapshotId) -> None:
        """Record that the state is now this snapshot. A newer one may already be waiting."""
        self._is_waiting = False
        self.end_offset = snapshot_id.end_offset
        self.epoch = snapshot_id.epoch
        if self._to_load == snapshot_id:
            self._to_load = None

    def is_superseded(self, snapshot_id: SnapshotId) -> bool:
        """Whether another snapshot is to be loaded now."""
        return self._to_load != snapshot_id

    def load_abandoned(self) -> None:
        """Record that the snapshot was removed. The newer one in its place is loaded instead."""
        self._is_waiting = False

    def _deliver_batches(self, batches: tuple[Batch, ...]) -> HandOn:
        if not batches or batches[0].base_offset != self.end_offset:
            found = f"one at {batches[0].base_offset}" if batches else "none"
            raise InvariantError(f"the next batch must begin at {self.end_offset}, found {found}")
        self.end_offset = batches[-1].end_offset
        self.epoch = batches[-1].epoch
        return HandOn(batches)


class DeliveryHost(Protocol):
    """The replica that owns the state machine. All calls are made on the event loop."""

    @property
    def is_leader(self) -> bool:
        """Whether the state machine leads."""
        ...

    def enter(self, work: Callable[[], None]) -> None:
        """Run `work` as one of the replica's turns. An exception in it ends the replica."""
        ...


class DeliveryProgress(Protocol):
    """Listener for the progress of delivery, called on the event loop."""

    def on_delivered(self, size: int) -> None:
        """Record `size` bytes of delivered payload."""
        ...

    def on_loaded(self, size: int) -> None:
        """Record that a snapshot file of `size` bytes replaced the state."""
        ...


@dataclass(eq=False)
class Deliverer:
    """Delivers everything committed to the state machine."""

    _host: DeliveryHost
    _progress: DeliveryProgress
    _core: QuorumCore
    _journal: Journal
    _disk: JournalThread
    _state_machine: StateMachine
    _is_installing: bool = field(init=False, default=False)
    _next_turn: asyncio.Handle | None = field(init=False, default=None)
    _is_put_off: bool = field(init=False, default=False)
    """Whether the next turn waits for a pause, and may be run sooner."""
    _loading: asyncio.Task[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        kept = self._journal.snapshots.kept
        self._delivery = Delivery(kept[-1] if kept else None)

    @property
    def end_offset(self) -> EndOffset:
        """Exclusive end of the entries delivered to the state machine."""
        return self._delivery.end_offset

    @property
    def epoch(self) -> Epoch:
        """Epoch of the last batch delivered to the state machine."""
        return self._delivery.epoch

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot will replace the state before anything else is delivered."""
        return self._is_installing or self._delivery.is_loading

    def is_caught_up(self) -> bool:
        """Whether everything committed was delivered."""
        return self._delivery.is_caught_up(self._core.high_watermark)

    def run(self) -> None:
        """Deliver one piece of committed entries, or start the read that it needs."""
        if self._is_installing and self._delivery.is_loading:
            return  # the snapshot may already be removed, and a newer one is coming
        match self._delivery.next(self._core.log, self._core.high_watermark):
            case HandOn() as step:
                self._deliver_batches(step)
                self.run_soon()
            case ReadForDelivery(start_offset=start_offset):
                self._disk.submit(DiskRead(start_offset, DELIVERY_BYTES, self._on_read))
            case LoadSnapshot(snapshot_id=snapshot_id):
                self._begin_loading(snapshot_id)
            case None:
                pass

    def follow(self) -> None:
        """Deliver later, because on a follower the leader first waits for an acknowledgement."""
        self.run_soon(0.0 if self._state_machine.is_awaited else REPLAYED_AFTER_S)

    def run_soon(self, after_s: float = 0.0) -> None:
        """Call `run` in a later event loop turn, if there is anything to deliver then.

        Without `after_s` that is the next turn, even if a later one was planned.
        """
        if self._next_turn is not None:
            if after_s or not self._is_put_off:
                return
            # A caller waits now, so the pause that saved work for the replay ends.
            self._next_turn.cancel()
            self._next_turn = None
        if self.is_caught_up():
            return
        loop = asyncio.get_running_loop()
        self._is_put_off = after_s > 0
        if after_s:
            self._next_turn = loop.call_later(after_s, self._go_on)
        else:
            self._next_turn = loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next_turn = None
        self._host.enter(self.run)

    def install_begins(self) -> None:
        """Record that a snapshot from the leader is about to replace the log on disk."""
        self._is_installing = True

    def install_ended(self, snapshot_id: SnapshotId, *, is_installed: bool) -> None:
        """Record that the snapshot was installed, or rejected without any change."""
        self._is_installing = False
        if is_installed:
            # Only after the log was replaced, because the file is complete then.
            self._delivery.installed(snapshot_id)

    async def stop(self) -> None:
        """Wait for a load in progress and discard its result."""
        if self._loading is not None:
            # The thread reads a file of the journal, which is closed next.
            await asyncio.gather(self._loading, return_exceptions=True)

    def _deliver_batches(self, step: HandOn) -> None:
        self._state_machine.on_committed(step.batches, self._delivery.end_offset)
        self._progress.on_delivered(sum(batch.size for batch in step.batches))

    def _on_read(self, batches: tuple[Batch, ...]) -> None:
        def work() -> None:
            step = self._delivery.was_read(batches, self._core.high_watermark)
            if step is None:
                self.run()
            else:
                self._deliver_batches(step)
                self.run_soon()

        self._host.enter(work)

    def _begin_loading(self, snapshot_id: SnapshotId) -> None:
        # A leader has applied entries above any snapshot, and loading one would undo them.
        if self._host.is_leader:
            raise InvariantError(f"a leader must not load the snapshot {snapshot_id}")
        self._loading = asyncio.get_running_loop().create_task(self._load(snapshot_id))

    async def _load(self, snapshot_id: SnapshotId) -> None:
        try:
            install, size = await asyncio.to_thread(self._read, snapshot_id)
        except Exception as error:  # noqa: BLE001 (an unreadable snapshot ends the process)
            failure = error
            self._host.enter(lambda: self._load_failed(snapshot_id, failure))
        else:
            self._host.enter(lambda: self._exchange(snapshot_id, install, size))

    def _read(self, snapshot_id: SnapshotId) -> tuple[Callable[[], None], int]:
        with self._journal.snapshots.open(snapshot_id) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            return self._state_machine.load(file, snapshot_id), size

    def _exchange(self, snapshot_id: SnapshotId, install: Callable[[], None], size: int) -> None:
        install()
        # In the same turn, so that nobody sees the new state with the old offset.
        self._delivery.loaded(snapshot_id)
        _log.info("snapshot_loaded", end_offset=snapshot_id.end_offset, epoch=snapshot_id.epoch)
        self._progress.on_loaded(size)
        self.run()

    def _load_failed(self, snapshot_id: SnapshotId, error: Exception) -> None:
        if not self._is_installing and not self._delivery.is_superseded(snapshot_id):
            # The newest snapshot is unreadable, and without it the replica has no state.
            raise error
        # A newer snapshot has removed, or is about to remove, the file.
        self._delivery.load_abandoned()
        self.run()
