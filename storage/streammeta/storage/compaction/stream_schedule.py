"""When the stream objects of which stream are compacted, and how: a function of times alone.

Owns the intervals and the spreading of streams over them. Whoever drives it says what time it is
and remembers when each stream had its turn; times are in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from streammeta.storage.compaction.stream_objects import StreamCompaction

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 by the golden ratio: multiples of it spread consecutive numbers evenly."""


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Intervals in seconds; every stream is looked at once every `interval_s`.

    Small objects are put together every `small_interval_s`, all of a stream's every
    `large_interval_s`: linked if `composites`, which moves no bytes, copied otherwise, which leaves
    fewer objects. A stream that was opened less than `rest_s` ago is left alone.
    """

    interval_s: float = 60.0
    small_interval_s: float = 600.0
    large_interval_s: float = 3600.0
    rest_s: float = 60.0
    composites: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.interval_s <= self.small_interval_s <= self.large_interval_s:
            raise ValueError(
                f"intervals are {self.interval_s:g}, {self.small_interval_s:g} and"
                f" {self.large_interval_s:g} s, wanted 0 < interval_s <= small_interval_s <="
                " large_interval_s"
            )

    @property
    def kinds(self) -> tuple[StreamCompaction, StreamCompaction, StreamCompaction]:
        """What is done at every look, every small and every large interval."""
        if self.composites:
            return (
                StreamCompaction.PRUNE_LINKS,
                StreamCompaction.GATHER_SMALL,
                StreamCompaction.LINK,
            )
        return (
            StreamCompaction.REMOVE_EXPIRED,
            StreamCompaction.MERGE_SMALL,
            StreamCompaction.MERGE_LARGE,
        )


@dataclass(frozen=True, slots=True)
class StreamTurns:
    """When a stream was opened, as far as it was seen, and when it last had a turn of each kind."""

    opened_s: float
    small_s: float
    large_s: float


def first_turns(stream_id: int, now_s: float, schedule: StreamSchedule) -> StreamTurns:
    """Return the turns of a stream seen for the first time, as if it had had some before.

    Streams are spread over the intervals by their ids, so that not all have their turns at once.
    """
    part = (stream_id * _GOLDEN % 2**64) / 2**64
    return StreamTurns(
        opened_s=now_s,
        small_s=now_s - part * schedule.small_interval_s,
        large_s=now_s - part * schedule.large_interval_s,
    )


def due_kind(turns: StreamTurns, now_s: float, schedule: StreamSchedule) -> StreamCompaction | None:
    """Return what a stream's turn is for, None while it rests after being opened."""
    if now_s - turns.opened_s < schedule.rest_s:
        return None
    every_look, small, large = schedule.kinds
    if now_s - turns.large_s >= schedule.large_interval_s:
        return large
    return small if now_s - turns.small_s >= schedule.small_interval_s else every_look


def after_turn(
    turns: StreamTurns, kind: StreamCompaction, now_s: float, schedule: StreamSchedule
) -> StreamTurns:
    """Return the turns of a stream that had one of this kind now."""
    _, small, large = schedule.kinds
    return StreamTurns(
        turns.opened_s,
        now_s if kind is small else turns.small_s,
        now_s if kind is large else turns.large_s,
    )


def may_have_work(
    kind: StreamCompaction, stream_start: int, spans: Sequence[tuple[int, int]]
) -> bool:
    """Tell whether a compaction could do anything, by the offsets of a stream's objects alone.

    `spans` are the half-open offsets of all stream objects, in order. What is True may still turn
    out to be nothing, what is False can't be anything.
    """
    if any(end <= stream_start for _, end in spans):
        return True
    if kind is StreamCompaction.REMOVE_EXPIRED:
        return False
    if kind is StreamCompaction.PRUNE_LINKS:
        return bool(spans) and spans[0][0] < stream_start
    return any(before[1] == after[0] for before, after in pairwise(spans))
