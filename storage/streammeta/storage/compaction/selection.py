"""Selection of a node's stream set objects for compaction, and their groups.

Owns the trade-off between few objects and few rewritten bytes. It uses the metadata of each object
(size, age, number of ranges) and keeps no state. The planner decides on each stream.

Two rules:

- Neighbours are merged when together they are `growth` times as large as the largest of them, so
  every rewrite moves a byte into an object that much larger. A byte is therefore rewritten about
  log(all / upload) / log(growth) times, regardless of how often compaction runs, as in a
  size-tiered LSM tree (Lucene's `LogByteSizeMergePolicy` merges neighbours for the same reason, to
  keep the order).
- An object that is too large to grow, or older than `split_after_s`, is split: every stream in it
  gets a stream object. Its old neighbours are split with it, so that a stream gets one stream
  object for all of them. Slow streams wait that long because a tiny stream object costs more than a
  range of a stream set object, and each of them has to be compacted again.

Only neighbours in the node's order are grouped. Between other objects a stream has a gap, and a
stream set object must not contain two separate ranges of a stream. The planner would have to put
the pieces into stream objects, however small.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from streammeta.storage.compaction.entries import Column, Mask

MIB = 1 << 20
GIB = 1 << 30

_Span: TypeAlias = tuple[int, int]
"""Neighbouring rows `[start, stop)` of the objects in order."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamSetObjects:
    """Committed stream set objects of a node, in columns of equal length and in any order.

    `order_id` is the object's position among the node's objects, `data_time_ms` the commit time of
    its oldest data in ms since 1970, `object_size` its bytes, `range_count` its stream ranges.
    """

    object_id: Column
    order_id: Column
    data_time_ms: Column
    object_size: Column
    range_count: Column

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int, int, int, int]]) -> StreamSetObjects:
        """Return columns for rows with these five values in this order."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    def __len__(self) -> int:
        return len(self.object_id)

    def sort(self) -> StreamSetObjects:
        """Return the objects by position, each id once. The last row of an id counts."""
        # Reversed, because `unique` returns the first occurrence.
        _, last = np.unique(self.object_id[::-1], return_index=True)
        kept = self._take(len(self) - 1 - last)
        return kept._take(np.lexsort((kept.object_id, kept.order_id)))

    def _take(self, rows: Column) -> StreamSetObjects:
        return StreamSetObjects(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Policy of the selection, sizes in bytes. Raises `ValueError` on bad bounds."""

    growth: float = 8.0
    """A merge is this many times as large as its largest source. 1 merges everything possible."""
    max_set_objects: int = 100
    """The growth is lowered until at most this many mergeable objects remain."""
    max_group_objects: int = 500
    max_group_bytes: int = 32 * GIB
    """Limit of a group, which is one commit. Larger groups give slow streams larger objects."""
    max_group_ranges: int = 200_000
    """Limit of a group's sources. Their indexes are in memory together, and the controller removes
    them in one step, during which it answers no other call (about 0.1 s for this many)."""
    split_size: int = 8 * MIB
    """A stream with more bytes in a merge gets a stream object."""
    split_after_s: float = 24 * 3600.0
    """Age at which an object is split."""
    split_along_s: float = 2 * 3600.0
    """Age at which an object is split together with a neighbour."""

    def __post_init__(self) -> None:
        if not 1 <= self.growth <= 1_000:
            raise ValueError(f"growth is {self.growth}, expected 1..1000")

        for name, least in (
            ("max_set_objects", 1),
            ("max_group_objects", 2),
            ("max_group_bytes", 1),
            ("max_group_ranges", 1),
            ("split_size", 0),
            ("split_along_s", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")

        if self.split_after_s < self.split_along_s:
            raise ValueError(
                f"split_after_s is {self.split_after_s}, expected at least split_along_s,"
                f" {self.split_along_s}"
            )

    @property
    def full_size(self) -> float:
        """Size in bytes above which an object is too large to grow within a group."""
        return self.max_group_bytes / (self.growth + 1)


class GroupKind(enum.StrEnum):
    """Merge neighbours into a stream set object, or split old ones into stream objects."""

    MERGE = "merge"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Group:
    """Stream set objects, neighbours in the node's order, that one compaction replaces.

    A stream with more than `split_size` bytes in them becomes a stream object (0: every stream).
    `object_size` is the sum of their sizes. A merge has at least two objects.
    """

    kind: GroupKind
    object_ids: tuple[int, ...]
    split_size: int
    object_size: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups in the order of processing, and the waiting objects, in the node's order.

    Overdue splits come first, oldest first. Merges follow, smallest first, so that as many objects
    as possible are merged if time runs out.
    """

    groups: tuple[Group, ...]
    waiting: tuple[int, ...]


def select_stream_set_objects(
    objects: StreamSetObjects,
    config: SelectionConfig,
    now_ms: int,
    set_aside: Collection[int] = (),
) -> Selection:
    """Choose the objects to compact at `now_ms`, in ms since 1970.

    `set_aside` are ids whose compaction failed recently. They are in no group and not waiting, and
    no group spans one. No object starves: an object `split_after_s` old is always in a group, and
    at most `max_set_objects` mergeable objects remain, as far as the limits of a group allow.
    """
    ordered = objects.sort()
    # Objects set aside stay in the order, so that no group spans one.
    free = ~np.isin(ordered.object_id, np.array(list(set_aside), dtype=np.int64))
    limits = _Limits(ordered, config)
    # Splits by age come first: they must not wait for merges of the same objects.
    overdue = _overdue_splits(now_ms - ordered.data_time_ms, free, config, limits)
    free = _without(overdue, free)
    overgrown = _size_splits(ordered.object_size, free, config, limits)
    free = _without(overgrown, free)
    merged = _find_merges(ordered.object_size, free, config, limits)
    groups = [
        *(limits.group(GroupKind.SPLIT, span, split_size=0) for span in overdue),
        *(limits.group(GroupKind.SPLIT, span, limits.crumb_size(span)) for span in overgrown),
        *(limits.group(GroupKind.MERGE, span, config.split_size) for span in merged),
    ]
    # Stable, so splits keep the order of age.
    groups.sort(key=lambda group: group.object_size if group.kind is GroupKind.MERGE else 0)

    return Selection(tuple(groups), tuple(ordered.object_id[_without(merged, free)].tolist()))


class _Limits:
    """Cumulative bytes and ranges of the objects, and the limits of a group."""

    def __init__(self, ordered: StreamSetObjects, config: SelectionConfig) -> None:
        self._ids = ordered.object_id
        # Sums of any span in constant time: the difference of two cumulative sums.
        self._bytes = np.concatenate(([0], np.cumsum(ordered.object_size)))
        self._ranges = np.concatenate(([0], np.cumsum(ordered.range_count)))
        self._config = config

    def size(self, span: _Span) -> int:
        """Return the bytes of a span."""
        return int(self._bytes[span[1]] - self._bytes[span[0]])

    def crumb_size(self, span: _Span) -> int:
        """Return a size such that all streams up to it are a small part of a span."""
        ranges = int(self._ranges[span[1]] - self._ranges[span[0]])
        # Streams far below the average together hold at most 1/growth of the bytes.
        return int(self.size(span) / max(ranges, 1) / self._config.growth)

    def cut(self, span: _Span) -> Iterator[_Span]:
        """Cut a span into as few groups as the limits and the order allow.

        A single object over a limit is a group.
        """
        start, stop = span
        while start < stop:
            end = self._end(start, stop)
            yield start, end
            start = end

    def group(self, kind: GroupKind, span: _Span, split_size: int) -> Group:
        """Return the group of a span."""
        ids = tuple(self._ids[span[0] : span[1]].tolist())
        return Group(kind, ids, split_size, self.size(span))

    def _end(self, start: int, stop: int) -> int:
        config = self._config
        by_bytes = self._bytes.searchsorted(self._bytes[start] + config.max_group_bytes, "right")
        by_ranges = self._ranges.searchsorted(
            self._ranges[start] + config.max_group_ranges, "right"
        )
        nearest = min(int(by_bytes) - 1, int(by_ranges) - 1, start + config.max_group_objects, stop)
        # At least one object, so the loop of `cut` advances.
        return max(nearest, start + 1)


def _overdue_splits(
    age_ms: Column, free: Mask, config: SelectionConfig, limits: _Limits
) -> list[_Span]:
    """Return the splits by age, with the old neighbours of each."""
    return [
        group
        for start, stop in _runs(free & (age_ms >= config.split_along_s * 1000))
        if (age_ms[start:stop] >= config.split_after_s * 1000).any()
        for group in limits.cut((start, stop))
    ]


def _size_splits(
    sizes: Column, free: Mask, config: SelectionConfig, limits: _Limits
) -> list[_Span]:
    """Return the splits by size: full objects that fill a group with their neighbours.

    Waiting longer would not make the stream objects larger.
    """
    full = sizes > config.full_size
    groups: list[_Span] = []
    for start, stop in _runs(free):
        first = np.flatnonzero(full[start:stop])
        if not len(first):
            continue
        for span in limits.cut((start + int(first[0]), stop)):
            # With room for the next object, the group could still grow.
            more = int(sizes[span[1]]) if span[1] < stop else 0
            if limits.size(span) + more > config.max_group_bytes:
                groups.append(span)
    return groups


def _find_merges(
    sizes: Column, free: Mask, config: SelectionConfig, limits: _Limits
) -> list[_Span]:
    """Return the merges. The required growth is lowered while too many objects would remain."""
    mergeable = free & (sizes <= config.full_size)
    runs, count = _runs(mergeable), int(np.count_nonzero(mergeable))
    growth = config.growth
    while True:
        groups = [span for run in runs for span in _cut_merges(sizes, run, growth, limits)]
        staying = count - sum(stop - start - 1 for start, stop in groups)
        if growth == 1 or staying <= config.max_set_objects:
            return groups
        # Fewer objects matter more than rewritten bytes once the limit is exceeded.
        growth = max(1.0, growth / 2)


def _cut_merges(sizes: Column, run: _Span, growth: float, limits: _Limits) -> Iterator[_Span]:
    """Cut a run of neighbours into the widest merges that grow their largest object enough.

    If a run does not grow its largest object enough, no part with that object does either. The
    object is excluded and both sides are tried. The remaining bytes shrink by 1/growth each time,
    so the number of rounds stays small.
    """
    waiting = [run]
    while waiting:
        for start, stop in limits.cut(waiting.pop()):
            if stop - start < 2:
                continue
            # The first of equals, so equal inputs give equal groups.
            largest = start + int(sizes[start:stop].argmax())
            if limits.size((start, stop)) >= growth * int(sizes[largest]):
                yield start, stop
            else:
                waiting += [(start, largest), (largest + 1, stop)]


def _without(spans: Iterable[_Span], mask: Mask) -> Mask:
    """Return the mask without the rows of spans."""
    rest = mask.copy()
    for start, stop in spans:
        rest[start:stop] = False
    return rest


def _runs(mask: Mask) -> list[_Span]:
    """Return the half-open runs of rows where the mask is set."""
    # A run begins where the mask rises and ends where it falls.
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
