"""Slots of one log on their way into the bucket: which may be uploaded, acknowledged, deleted.

Records are gathered into groups, a group becomes a slot when it has a turn, and groups are
acknowledged in the order of their slots, each when all before it are in the bucket too. A slot says
from which one on the log is needed; older ones may be deleted once a slot that says so is in the
bucket, so a finder of the log can tell what was deleted from what is missing. Pure: no I/O, no
clock, no futures; what it is told comes in by calls, what is to be done goes out as their results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from streammeta.client.wal.bucket.config import ObjectLogConfig
from streammeta.storage.object_log.slot import SLOT_HEADER_SIZE, Slot, SlotKind
from streammeta.storage.object_log.slot_keys import LogName

AckT = TypeVar("AckT")


@dataclass(slots=True, eq=False)
class SlotGroup(Generic[AckT]):
    """Records that share a slot, and what is acknowledged with them; `end` is behind the last."""

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
    """A slot that was handed out; `first_needed` is what it says."""

    sequence: int
    group: SlotGroup[AckT]
    first_needed: int
    is_stored: bool = False


class SlotQueue(Generic[AckT]):
    """The records of one log behind its first slot, which has none.

    Positions count records: `end` is behind the last one appended, and those below `trimmed` are
    settled.
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
        self._next = 1
        self._durable_below = 1
        self._needed_from = 0
        self.unflushed_bytes = 0
        self.kept_bytes = 0

    # -- appending

    def append(self, pieces: tuple[bytes, ...], ack: AckT) -> SlotGroup[AckT]:
        """Take one encoded record into a group, a new one with `ack` if none has room for it."""
        size = sum(map(len, pieces))
        waiting = self._waiting
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
        if group.size >= self._config.slot_bytes:
            group.is_due = True
        return group

    def cut(self) -> None:
        """Let everything that waits go as soon as it has a turn."""
        for group in self._waiting:
            group.is_due = True

    @property
    def is_idle(self) -> bool:
        """True if all that was appended is acknowledged."""
        return not self._waiting and not self._placed

    @property
    def has_waiting(self) -> bool:
        """True if something waits for its turn."""
        return bool(self._waiting)

    # -- slots

    def take_uploads(self) -> Iterator[SlotUpload]:
        """Give slots to groups that are due, as many as may be under way."""
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
            self._forget_settled()  # it may have been committed before it got its slot
            pieces, group.pieces = slot.encode_around(group.pieces), []
            yield SlotUpload(placed.sequence, self.log.slot_key(placed.sequence), pieces)

    def stored(self, sequence: int) -> list[SlotGroup[AckT]]:
        """Note that a slot is in the bucket; return what is acknowledged by that, in order."""
        for placed in self._placed:
            if placed.sequence == sequence:
                placed.is_stored = True
                self._needed_from = max(self._needed_from, placed.first_needed)
        done: list[SlotGroup[AckT]] = []
        while self._placed and self._placed[0].is_stored:
            group = self._placed.popleft().group
            self._durable_below += 1
            self.unflushed_bytes -= group.size
            done.append(group)
        return done

    def drop(self) -> list[SlotGroup[AckT]]:
        """Forget all that is not acknowledged, and return it: the log has ended."""
        groups = [*(placed.group for placed in self._placed), *self._waiting]
        self._placed.clear()
        self._waiting.clear()
        self.unflushed_bytes = 0
        return groups

    def seal(self, kind: SlotKind, body: bytes) -> Slot:
        """Make the slot behind the last one, with a body of its own; call it when idle."""
        slot = self._slot(kind, 0, body)
        self._next += 1
        return slot

    # -- trimming

    @property
    def needed_from(self) -> int:
        """The first slot that is needed: all below it are settled, and were stored by this process.

        None that is under way is ever past: in its place there may be the seal of another.
        """
        first = self._kept[0].sequence if self._kept else self._next
        return min(first, self._durable_below)

    @property
    def durable_below(self) -> int:
        """All slots below this are in the bucket."""
        return self._durable_below

    @property
    def past_below(self) -> int:
        """Slots below this may be deleted: one in the bucket says that they are past."""
        return self._needed_from

    def trim(self, position: int) -> None:
        """Settle all records before `position`."""
        if position > self.end:
            raise ValueError(f"position is {position}, wanted at most the end, {self.end}")
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
