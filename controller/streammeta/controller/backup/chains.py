"""Chains of a backup: a base and the segments that continue it without a gap.

A base is a checkpoint, or the beginning of the log at offset 0. Segments may overlap, because two
leaders may have written at the same time. Uses only names, manifests and times, while
`verification` checks contents. Pure.

A point in time is found by the bucket's times, because a leader's clock may have been wrong. A copy
of a backup has other times in its bucket, and then the leaders' times in its manifests decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from streammeta.controller.runtime.replication.log_time import JUMP_MS
from streammeta.storage.cluster_files.backup_files import (
    CheckpointName,
    FileName,
    Inventory,
    SegmentManifest,
    SegmentName,
)

KEPT_MIN = 3
"""Number of newest checkpoints that are kept regardless of their age."""

JUMPS_MIN = 4
"""Clock jumps of the bucket within the retention time that remove no file too early."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Everything from the base's end on without a gap. `base` is None for offset 0."""

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
    """Return the longest chain of a base with the fewest segments. `segments` must ascend."""
    end = 0 if base is None else base.end_offset
    taken: list[SegmentName] = []
    best: SegmentName | None = None
    for segment in segments:
        if segment.start_offset > end and best is not None:
            taken.append(best)
            end, best = best.end_offset, None
        if segment.start_offset > end:
            break
        # Greedy choice of the segment that reaches furthest needs the fewest segments.
        if segment.end_offset > (end if best is None else best.end_offset):
            best = segment
    return Chain(base, (*taken, best) if best is not None else tuple(taken))


def newest_chain(inventory: Inventory) -> Chain | None:
    """Return the chain that reaches furthest, with the newest possible base. None without any."""
    reach = _Reach(inventory.segments)
    bases = [(reach.of(end), end, base) for end, base in _bases(inventory)]
    if not bases:
        return None
    # With equal reach the newest base wins: fewer segments have to be replayed.
    *_, base = max(bases, key=lambda entry: entry[:2])
    return chain_from(base, inventory.segments)


def chain_to(inventory: Inventory, end_offset: int) -> Chain | None:
    """Return the shortest chain that contains everything below an offset, or None."""
    reach = _Reach(inventory.segments)
    fit = [(end, base) for end, base in _bases(inventory) if end <= end_offset <= reach.of(end)]
    if not fit:
        return None
    _, base = max(fit, key=lambda entry: entry[0])
    below = [segment for segment in inventory.segments if segment.start_offset < end_offset]
    return chain_from(base, below)


def list_spans(inventory: Inventory) -> tuple[tuple[int, int], ...]:
    """Return the restorable offsets as spans, with both ends included."""
    reach, found = _Reach(inventory.segments), list[tuple[int, int]]()
    for start, _ in _bases(inventory):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], reach.of(start))
        else:
            found.append((start, reach.of(start)))
    return tuple(found)


def find_unreachable(inventory: Inventory) -> tuple[SegmentName, ...]:
    """Return the segments that no chain reaches, because earlier entries are missing."""
    reach = _Reach(inventory.segments)
    ends = [end for end, _ in _bases(inventory)]
    found = []
    for segment in inventory.segments:
        # The nearest base below suffices: an older one reaches this segment only through it.
        at = bisect_right(ends, segment.end_offset) - 1
        if at < 0 or reach.of(ends[at]) < segment.end_offset:
            found.append(segment)
    return tuple(found)


def file_ages(inventory: Inventory, gap_max_ms: int) -> dict[FileName, int]:
    """Return how long before the newest file each file was written, by the bucket's clock.

    An age is the sum of the gaps between successive files of the log. No gap counts as more than
    `gap_max_ms` or less than 0, so a jump of the clock that stamped the files adds one gap.
    """
    found: dict[FileName, int] = {}
    age_ms, later_ms = 0, 0
    for file in sorted(inventory.files, key=lambda name: name.end_offset, reverse=True):
        written_ms = inventory.written_ms[file]
        if found:
            # A clock that was set back counts as no time, so that files never get older by it.
            age_ms += min(max(0, later_ms - written_ms), gap_max_ms)
        found[file], later_ms = age_ms, written_ms
    return found


def find_dispensable(inventory: Inventory, keep_ms: int) -> tuple[FileName, ...]:
    """Return the files needed neither for a point of the last `keep_ms` nor for the newest chain.

    A point is restored from the newest checkpoint before it. The newest checkpoint older than
    `keep_ms` is therefore kept with everything after it, as are the newest `KEPT_MIN` checkpoints
    of any age.
    """
    newest = newest_chain(inventory)
    if newest is None or len(inventory.checkpoints) < KEPT_MIN:
        return ()

    age_ms = file_ages(inventory, keep_ms // JUMPS_MIN + 1)
    # Neither the newest chain nor the newest checkpoints may lose their base.
    last_end = min(newest.start_offset, inventory.checkpoints[-KEPT_MIN].end_offset)
    old = [
        name.end_offset
        for name in inventory.checkpoints
        if age_ms[name] > keep_ms and name.end_offset <= last_end
    ]
    keep_from = max(old, default=0)
    return (
        *(name for name in inventory.segments if name.end_offset <= keep_from),
        *(name for name in inventory.checkpoints if name.end_offset < keep_from),
    )


def _bases(inventory: Inventory) -> list[tuple[int, CheckpointName | None]]:
    """Return every base with its end, ascending. Offset 0 counts only if a segment begins there."""
    origin: list[tuple[int, CheckpointName | None]] = [
        (0, None) for segment in inventory.segments[:1] if segment.start_offset == 0
    ]
    return origin + [(name.end_offset, name) for name in inventory.checkpoints]


class _Reach:
    """Union of segments, as spans that neither touch nor overlap."""

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


SAMPLE = 9
"""Number of segments whose times by leaders are compared with the bucket's."""


def count_committed_by(
    segments: Sequence[SegmentName],
    to_ms: int,
    written_ms: Mapping[FileName, int],
    manifest_of: Callable[[SegmentName], SegmentManifest],
) -> int:
    """Return how many of the segments, in the order of their ends, were committed by a time."""
    sample = segments[:: max(1, len(segments) // SAMPLE)]
    apart = [abs(written_ms[name] - manifest_of(name).last_ms) for name in sample]
    # The median ignores a few segments that were uploaded late.
    if not apart or median(apart) > JUMP_MS:
        return bisect_right(segments, to_ms, key=lambda name: manifest_of(name).last_ms)

    # A segment was committed before its successors, even if a wrong clock stamped it later.
    newest_first = (written_ms[name] for name in reversed(segments))
    times = list(accumulate(newest_first, min))[::-1]
    return bisect_right(times, to_ms)
