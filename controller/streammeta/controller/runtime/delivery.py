"""Decides what the state machine is given next: a snapshot, or committed batches in order.

Knows how far delivery came and whether a snapshot must be loaded first. Reads no file, owns no
thread: the caller does what `next` says, and tells when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch
from streammeta.controller.quorum.log_view import LogView
from streammeta.controller.quorum.messages import Batch, SnapshotId

DELIVERY_BYTES = 128 << 10
"""About as much is read and handed on at once: little enough for votes to wait for it."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Replace the state by this snapshot, then call `loaded`; nothing is delivered meanwhile."""

    snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class ReadForDelivery:
    """Read batches of the log on disk, then call `was_read`; nothing is delivered meanwhile."""

    start_offset: EndOffset


@dataclass(frozen=True, slots=True)
class HandOn:
    """Give these batches to the state machine; they count as delivered."""

    batches: tuple[Batch, ...]


Step: TypeAlias = LoadSnapshot | ReadForDelivery | HandOn


class Delivery:
    """How far the state machine has come; `end_offset` is exclusive, as all ends are."""

    def __init__(self, newest: SnapshotId | None) -> None:
        """Begin with the newest snapshot on disk, or at offset 0 if there is none."""
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
        """Return what to do now, or None if there is nothing to do or something is under way."""
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
        return self._hand_on(batches)

    def was_read(self, batches: Sequence[Batch], high_watermark: EndOffset) -> HandOn | None:
        """Take what `ReadForDelivery` found; None if a snapshot has taken its place meanwhile."""
        self._is_waiting = False
        if self._to_load is not None:
            return None
        return self._hand_on(
            tuple(batch for batch in batches if batch.end_offset <= high_watermark)
        )

    def installed(self, snapshot_id: SnapshotId) -> None:
        """The log now begins at this snapshot's end, beyond what was delivered."""
        self._to_load = snapshot_id

    def loaded(self, snapshot_id: SnapshotId) -> None:
        """The state is that of the snapshot which `next` named; a newer one may be waiting."""
        self._is_waiting = False
        self.end_offset = snapshot_id.end_offset
        self.epoch = snapshot_id.epoch
        if self._to_load == snapshot_id:
            self._to_load = None

    def is_superseded(self, snapshot_id: SnapshotId) -> bool:
        """Whether another snapshot is to be loaded by now."""
        return self._to_load != snapshot_id

    def load_abandoned(self) -> None:
        """The snapshot is gone: the newer one that took its place is loaded instead."""
        self._is_waiting = False

    def _hand_on(self, batches: tuple[Batch, ...]) -> HandOn:
        if not batches or batches[0].base_offset != self.end_offset:
            found = f"one at {batches[0].base_offset}" if batches else "none"
            raise InvariantError(f"a batch at {self.end_offset} is to be delivered, found {found}")
        self.end_offset = batches[-1].end_offset
        self.epoch = batches[-1].epoch
        return HandOn(batches)
