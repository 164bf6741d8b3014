"""Chains of a backup: a base and the segments that continue it without a gap.

A base is a checkpoint, or the beginning of the log at offset 0. Segments may overlap, since two
leaders may have written at the same time. Judges names alone; `verification` judges contents. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.storage.cluster_files.backup_files import (
    CheckpointName,
    FileName,
    Inventory,
    SegmentName,
)

KEPT_MIN = 3
"""Newest checkpoints that stay whatever their age."""

JUMPS_MIN = 4
"""Jumps of the bucket's clock within the time to keep that remove no file before that time."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Everything from the base's end on that is there without a gap; `base` None: offset 0."""

    base: CheckpointName | None
    segments: tuple[SegmentName, ...]

    @property
    def start_offset(self) -> int:
        """Lowest offset that can be restored to."""
        return 0 if self.base is None else self.base.end_offset

    @property
    def end_offset(self) -> int:
        """Highest offset that can be restored to."""
        return self.segments[-1].end_offset if self.segments else self.start_offset


def chain_from(base: CheckpointName | None, segments: Sequence[SegmentName]) -> Chain:
    """Return the longest chain of a base, of as few segments as do; `segments` are ascending."""
    end = 0 if base is None else base.end_offset
    taken: list[SegmentName] = []
    best: SegmentName | None = None
    for segment in segments:
        if segment.start_offset > end and best is not None:
            taken.append(best)
            end, best = best.end_offset, None
        if segment.start_offset > end:
            break
        if segment.end_offset > (end if best is None else best.end_offset):
            best = segment
    return Chain(base, (*taken, best) if best is not None else tuple(taken))


def newest_chain(inventory: Inventory) -> Chain | None:
    """Return the chain that reaches furthest, with the newest base of those; None without any."""
    reach = _Reach(inventory.segments)
    bases = [(reach.of(end), end, base) for end, base in _bases(inventory)]
    if not bases:
        return None
    *_, base = max(bases, key=lambda one: one[:2])
    return chain_from(base, inventory.segments)


def chain_to(inventory: Inventory, end_offset: int) -> Chain | None:
    """Return the shortest chain that holds everything below an offset; None if none does."""
    reach = _Reach(inventory.segments)
    fit = [one for one in _bases(inventory) if one[0] <= end_offset <= reach.of(one[0])]
    if not fit:
        return None
    _, base = max(fit, key=lambda one: one[0])
    below = [one for one in inventory.segments if one.start_offset < end_offset]
    return chain_from(base, below)


def spans(inventory: Inventory) -> tuple[tuple[int, int], ...]:
    """Return the offsets that can be restored to, as spans from one to another, both included."""
    reach, found = _Reach(inventory.segments), list[tuple[int, int]]()
    for start, _ in _bases(inventory):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], reach.of(start))
        else:
            found.append((start, reach.of(start)))
    return tuple(found)


def unreachable(inventory: Inventory) -> tuple[SegmentName, ...]:
    """Return the segments that no chain leads up to: what comes before them is missing."""
    reach = _Reach(inventory.segments)
    ends = [end for end, _ in _bases(inventory)]
    found = []
    for segment in inventory.segments:
        at = bisect_right(ends, segment.end_offset) - 1
        if at < 0 or reach.of(ends[at]) < segment.end_offset:
            found.append(segment)
    return tuple(found)


def ages(inventory: Inventory, gap_max_ms: int) -> dict[FileName, int]:
    """Return how long before the newest file each file was written, by the bucket's clock.

    An age is the sum of the gaps between successive files of the log, none counted as more than
    `gap_max_ms` or less than 0: a jump of the clock that stamped the files is one gap.
    """
    found: dict[FileName, int] = {}
    age_ms, later_ms = 0, 0
    for file in sorted(inventory.files, key=lambda one: one.end_offset, reverse=True):
        written_ms = inventory.written_ms[file]
        if found:
            age_ms += min(max(0, later_ms - written_ms), gap_max_ms)
        found[file], later_ms = age_ms, written_ms
    return found


def dispensable(inventory: Inventory, keep_ms: int) -> tuple[FileName, ...]:
    """Return the files that neither a point of the last `keep_ms` needs nor the newest chain.

    A point is restored from the newest checkpoint before it. So the newest checkpoint that is older
    stays, with everything after it, and so do the newest `KEPT_MIN` checkpoints whatever their age.
    """
    newest = newest_chain(inventory)
    if newest is None or len(inventory.checkpoints) < KEPT_MIN:
        return ()

    age_ms = ages(inventory, keep_ms // JUMPS_MIN + 1)
    last_end = min(newest.start_offset, inventory.checkpoints[-KEPT_MIN].end_offset)
    old = [
        one.end_offset
        for one in inventory.checkpoints
        if age_ms[one] > keep_ms and one.end_offset <= last_end
    ]
    keep_from = max(old, default=0)
    return (
        *(one for one in inventory.segments if one.end_offset <= keep_from),
        *(one for one in inventory.checkpoints if one.end_offset < keep_from),
    )


def _bases(inventory: Inventory) -> list[tuple[int, CheckpointName | None]]:
    """Return the end of every base with it, ascending; offset 0 only if a segment begins there."""
    origin: list[tuple[int, CheckpointName | None]] = [
        (0, None) for one in inventory.segments[:1] if one.start_offset == 0
    ]
    return origin + [(one.end_offset, one) for one in inventory.checkpoints]


class _Reach:
    """The union of segments, as spans that neither touch nor overlap."""

    def __init__(self, segments: Sequence[SegmentName]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for segment in segments:
            if self._ends and segment.start_offset <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], segment.end_offset)
            else:
                self._starts.append(segment.start_offset)
                self._ends.append(segment.end_offset)

    def of(self, offset: int) -> int:
        """Return how far segments continue from an offset without a gap."""
        at = bisect_right(self._starts, offset) - 1
        return max(offset, self._ends[at]) if at >= 0 and self._ends[at] >= offset else offset
