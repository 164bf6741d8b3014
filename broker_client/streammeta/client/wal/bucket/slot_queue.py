"""Queue of one log's slots: which may be uploaded, acknowledged and deleted.

Records are collected in groups. A group becomes a slot when it has a turn. Groups are acknowledged
in the order of their slots, each when all earlier ones are in the bucket too. A slot contains the
sequence of the first slot that the log still needs. Older slots may be deleted once such a slot is
in the bucket, so a reader can tell deleted slots from missing ones. Pure: no I/O, no clock, no
futures. Events come in as calls, and their results are the work to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.storage.object_log.slot import SLOT_HEADER_SIZE, LogName, Slot, SlotKind

AckT = TypeVar("AckT")


@dataclass(slots=True, eq=False)
class SlotGroup(Generic[AckT]):
    """Records that share a slot and its acknowledgement. `end` is the position after the last."""

    ack: AckT
    pieces: list[bytes] = field(default_factory=list)
    count: int = 0
    size: int = SLOT_HEADER_SIZE
    end: int = 0
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class SlotUpload:
    """A slot to create: its bytes, in pieces."""

    sequence: int
    key: str
    pieces: list[bytes]


@dataclass(slots=True)
class _Placed(Generic[AckT]):
    """A slot that was passed on for upload. Its bytes contain `first_needed`."""

    sequence: int
    group: SlotGroup[AckT]
    first_needed: int
    is_stored: bool = False


class SlotQueue(Generic[AckT]):
    """Records of one log after its first slot, which has none.

    Positions count records. `end` is the position after the last appended record. Records below
    `trimmed` are settled.
    """

    def __init__(
        self, log: LogName, log_id: bytes, config: ObjectLogConfig, position: int = 0
    ) -> None:
        self.log = log
        self.log_id = log_id
        self.end = self.trimmed = position
        self._config = config
        self._waiting: deque[SlotGroup[AckT]] = deque()
        self._placed: deque[_Placed[AckT]] = deque()
        self._kept: deque[_Placed[AckT]] = deque()
        # Slot 0 is the claim of the log.
        self._next = 1
        self._durable_below = 1
        self._needed_from = 0
        self.unflushed_bytes = 0
        self.kept_bytes = 0

    # -- appending

    def append(self, pieces: tuple[bytes, ...], ack: AckT) -> SlotGroup[AckT]:
        """Add one encoded record to a group, a new one with `ack` if it fits into none."""
        size = sum(map(len, pieces))
        waiting = self._waiting
        # Only the last group may grow: positions follow the order of appends.
        if waiting and waiting[-1].size + size <= self._config.slot_bytes:
            group = waiting[-1]
        else:
            if waiting:
                waiting[-1].is_due = True
            group = SlotGroup(ack)
            waiting.append(group)
            self._add_bytes(group.size)

        group.pieces += pieces
        group.count += 1
        group.size += size
        self.end += 1
        group.end = self.end
        self._add_bytes(size)
        # A full slot is not delayed by the timer.
        if group.size >= self._config.slot_bytes:
            group.is_due = True
        return group

    def cut(self) -> None:
        """Let all waiting groups be uploaded as soon as they have a turn."""
        for group in self._waiting:
            group.is_due = True

    @property
    def is_idle(self) -> bool:
        """True if all appended records are acknowledged."""
        return not self._waiting and not self._placed

    # -- slots

    def take_uploads(self) -> Iterator[SlotUpload]:
        """Yield the slots of due groups, up to the number that may be in flight."""
        while (
            self._waiting
            and self._waiting[0].is_due
            and self._next - self._durable_below < self._config.parallel_uploads
        ):
            group = self._waiting.popleft()
            placed = _Placed(self._next, group, self.needed_from)
            slot = self._slot(SlotKind.RECORDS, group.count)
            self._next += 1
            self._placed.append(placed)
            self._kept.append(placed)
            # The group's records may have been committed before it got its slot.
            self._forget_settled()
            pieces, group.pieces = slot.encode_around(group.pieces), []
            yield SlotUpload(placed.sequence, self.log.slot_key(placed.sequence), pieces)

    def mark_stored(self, sequence: int) -> list[SlotGroup[AckT]]:
        """Record that a slot is in the bucket and return the groups to acknowledge, in order."""
        for placed in self._placed:
            # The queue has at most `parallel_uploads` slots, so a search is cheap.
            if placed.sequence == sequence:
                placed.is_stored = True
                self._needed_from = max(self._needed_from, placed.first_needed)

        done: list[SlotGroup[AckT]] = []
        while self._placed and self._placed[0].is_stored:
            group = self._placed.popleft().group
            # Only the front advances: an acknowledged record must have no gap before it.
            self._durable_below += 1
            self.unflushed_bytes -= group.size
            done.append(group)
        return done

    def drop(self) -> list[SlotGroup[AckT]]:
        """Remove and return all groups that are not acknowledged, because the log has ended."""
        groups = [*(placed.group for placed in self._placed), *self._waiting]
        self._placed.clear()
        self._waiting.clear()
        self.unflushed_bytes = 0
        return groups

    def seal(self, kind: SlotKind, body: bytes) -> Slot:
        """Build the slot after the last one, with its own body. Call it when idle."""
        slot = self._slot(kind, 0, body)
        self._next += 1
        return slot

    # -- trimming

    @property
    def needed_from(self) -> int:
        """The first needed slot. All slots below are settled, and this process stored them.

        A slot in flight is always needed: another process's seal may be in its place.
        """
        # Kept slots still have unsettled records.
        first = self._kept[0].sequence if self._kept else self._next
        return min(first, self._durable_below)

    @property
    def durable_below(self) -> int:
        """All slots below this are in the bucket."""
        return self._durable_below

    @property
    def past_below(self) -> int:
        """Slots below this may be deleted, because a slot in the bucket says so."""
        return self._needed_from

    def trim(self, position: int) -> None:
        """Settle all records before `position`."""
        if position > self.end:
            raise ValueError(f"position is {position}, expected at most the end, {self.end}")
        self.trimmed = max(self.trimmed, position)
        self._forget_settled()

    def _forget_settled(self) -> None:
        while self._kept and self._kept[0].group.end <= self.trimmed:
            self.kept_bytes -= self._kept.popleft().group.size

    def _add_bytes(self, size: int) -> None:
        self.unflushed_bytes += size
        self.kept_bytes += size

    def _slot(self, kind: SlotKind, count: int, body: bytes = b"") -> Slot:
        return Slot(
            self.log,
            self.log_id,
            self._next,
            self.needed_from,
            self._durable_below,
            kind,
            count,
            body,
        )
