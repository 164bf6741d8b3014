"""Selection of a node's set objects for compaction, and their groups.

Owns the trade between few objects and few bytes rewritten. It goes by metadata of each object
(size, age, number of ranges) and keeps no state. Knows no index, no clock and no store; the planner
decides on each stream.

Two rules:

- Neighbours are merged when together they are `growth` times as large as the largest of them, so
  every rewrite puts a byte into an object that much larger. A byte is therefore rewritten about
  log(all / upload) / log(growth) times however often one asks, as in a size-tiered LSM tree
  (Lucene's `LogByteSizeMergePolicy` merges neighbours for the same reason: order is kept).
- An object that is too large to grow, or older than `split_after_s`, is split: every stream in it
  gets a stream object. Its neighbours that are old go with it, so that a stream gets one stream
  object for them all. Slow streams wait that long because a tiny stream object costs more than a
  range of a set object, and every one that is made has to be compacted again.

Only neighbours in the node's order are put together. Between objects that are not neighbours a
stream has a gap, and no set object may hold two separate ranges of one stream: the planner would
have to put the pieces into stream objects, however small.
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
class SetObjects:
    """Committed stream set objects of one node, in columns of equal length and in any order.

    `order_id` is the object's place among the node's, `data_time_ms` when its oldest data was
    committed, in ms since 1970, `object_size` its bytes, `range_count` its stream ranges.
    """

    object_id: Column
    order_id: Column
    data_time_ms: Column
    object_size: Column
    range_count: Column

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int, int, int, int]]) -> SetObjects:
        """Make columns of rows that have these five values in this order."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    def __len__(self) -> int:
        return len(self.object_id)

    def in_order(self) -> SetObjects:
        """Sort by place, each id once: of one that is listed twice the last row counts."""
        _, last = np.unique(self.object_id[::-1], return_index=True)
        kept = self._take(len(self) - 1 - last)
        return kept._take(np.lexsort((kept.object_id, kept.order_id)))

    def _take(self, rows: Column) -> SetObjects:
        return SetObjects(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Policy of the selection; sizes in bytes. Raises `ValueError` on bad bounds."""

    growth: float = 8.0
    """A merge is this many times as large as its largest source; 1: merge everything possible."""
    max_set_objects: int = 100
    """The growth is lowered until no more mergeable objects than this stay."""
    max_group_objects: int = 500
    max_group_bytes: int = 32 * GIB
    """Of a group, which is one commit; larger groups give slow streams larger stream objects."""
    max_group_ranges: int = 200_000
    """Of the sources of a group: their indexes are in memory together, and the controller removes
    them in one step, during which it answers nothing else (some 0.1 s for so many)."""
    split_size: int = 8 * MIB
    """A stream with more bytes in a merge gets a stream object."""
    split_after_s: float = 24 * 3600.0
    """Age at which an object is split."""
    split_along_s: float = 2 * 3600.0
    """Age at which an object is split together with a neighbour."""

    def __post_init__(self) -> None:
        if not 1 <= self.growth <= 1_000:
            raise ValueError(f"growth is {self.growth}, wanted 1..1000")

        for name, least in (
            ("max_set_objects", 1),
            ("max_group_objects", 2),
            ("max_group_bytes", 1),
            ("max_group_ranges", 1),
            ("split_size", 0),
            ("split_along_s", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {least} or more")

        if self.split_after_s < self.split_along_s:
            raise ValueError(
                f"split_after_s is {self.split_after_s}, wanted at least split_along_s,"
                f" {self.split_along_s}"
            )

    @property
    def full_size(self) -> float:
        """Bytes from which an object is too large to grow within a group."""
        return self.max_group_bytes / (self.growth + 1)


class GroupKind(enum.StrEnum):
    """Neighbours become one set object, or old ones are dissolved into stream objects."""

    MERGE = "merge"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Group:
    """Set objects, neighbours in the node's order, that one compaction replaces.

    A stream with more than `split_size` bytes in them leaves as a stream object (0: every stream).
    `object_size` is the sum of theirs. A merge has at least two.
    """

    kind: GroupKind
    object_ids: tuple[int, ...]
    split_size: int
    object_size: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups in the order to work them off, and the objects left for later, in the node's order.

    Overdue splits come first, the oldest first; then merges, the smallest first: should time run
    out, most objects are merged.
    """

    groups: tuple[Group, ...]
    waiting: tuple[int, ...]


def select_set_objects(
    objects: SetObjects,
    config: SelectionConfig,
    now_ms: int,
    set_aside: Collection[int] = (),
) -> Selection:
    """Choose what to compact at `now_ms`, in ms since 1970.

    Neither a group nor those left for later have an object of `set_aside`: ids that could not be
    compacted lately. No group reaches across one. No object starves: one `split_after_s` old is
    always in a group, and no more than `max_set_objects` stay that could be merged, as far as the
    limits of a group allow.
    """
    ordered = objects.in_order()
    free = ~np.isin(ordered.object_id, np.array(list(set_aside), dtype=np.int64))
    limits = _Limits(ordered, config)
    overdue = _overdue(now_ms - ordered.data_time_ms, free, config, limits)
    free = _without(overdue, free)
    overgrown = _overgrown(ordered.object_size, free, config, limits)
    free = _without(overgrown, free)
    merged = _merged(ordered.object_size, free, config, limits)
    groups = [
        *(limits.group(GroupKind.SPLIT, span, split_size=0) for span in overdue),
        *(limits.group(GroupKind.SPLIT, span, limits.crumb_size(span)) for span in overgrown),
        *(limits.group(GroupKind.MERGE, span, config.split_size) for span in merged),
    ]
    groups.sort(key=lambda group: group.object_size if group.kind is GroupKind.MERGE else 0)

    return Selection(tuple(groups), tuple(ordered.object_id[_without(merged, free)].tolist()))


class _Limits:
    """The objects' bytes and ranges, summed up, and how far a group of them may reach."""

    def __init__(self, ordered: SetObjects, config: SelectionConfig) -> None:
        self._ids = ordered.object_id
        self._bytes = np.concatenate(([0], np.cumsum(ordered.object_size)))
        self._ranges = np.concatenate(([0], np.cumsum(ordered.range_count)))
        self._config = config

    def size(self, span: _Span) -> int:
        """Return the bytes of a span."""
        return int(self._bytes[span[1]] - self._bytes[span[0]])

    def crumb_size(self, span: _Span) -> int:
        """Return a size such that the streams that have no more are a small part of a span."""
        ranges = int(self._ranges[span[1]] - self._ranges[span[0]])
        return int(self.size(span) / max(ranges, 1) / self._config.growth)

    def cut(self, span: _Span) -> Iterator[_Span]:
        """Cut a span into groups that keep to the limits, the fewest in this order.

        An object that is over a limit all by itself is a group.
        """
        start, stop = span
        while start < stop:
            end = self._end(start, stop)
            yield start, end
            start = end

    def group(self, kind: GroupKind, span: _Span, split_size: int) -> Group:
        """Make a group of a span."""
        ids = tuple(self._ids[span[0] : span[1]].tolist())
        return Group(kind, ids, split_size, self.size(span))

    def _end(self, start: int, stop: int) -> int:
        config = self._config
        by_bytes = self._bytes.searchsorted(self._bytes[start] + config.max_group_bytes, "right")
        by_ranges = self._ranges.searchsorted(
            self._ranges[start] + config.max_group_ranges, "right"
        )
        nearest = min(int(by_bytes) - 1, int(by_ranges) - 1, start + config.max_group_objects, stop)
        return max(nearest, start + 1)


def _overdue(age_ms: Column, free: Mask, config: SelectionConfig, limits: _Limits) -> list[_Span]:
    """Return the splits by age, each with its old neighbours."""
    return [
        group
        for start, stop in _runs(free & (age_ms >= config.split_along_s * 1000))
        if (age_ms[start:stop] >= config.split_after_s * 1000).any()
        for group in limits.cut((start, stop))
    ]


def _overgrown(sizes: Column, free: Mask, config: SelectionConfig, limits: _Limits) -> list[_Span]:
    """Return the splits by size: full objects that fill a group with their neighbours.

    Waiting longer would not make the stream objects any larger.
    """
    full = sizes > config.full_size
    groups: list[_Span] = []
    for start, stop in _runs(free):
        first = np.flatnonzero(full[start:stop])
        if not len(first):
            continue
        for span in limits.cut((start + int(first[0]), stop)):
            more = int(sizes[span[1]]) if span[1] < stop else 0
            if limits.size(span) + more > config.max_group_bytes:
                groups.append(span)
    return groups


def _merged(sizes: Column, free: Mask, config: SelectionConfig, limits: _Limits) -> list[_Span]:
    """Return the merges; the required growth is lowered while too many objects would stay."""
    mergeable = free & (sizes <= config.full_size)
    runs, count = _runs(mergeable), int(np.count_nonzero(mergeable))
    growth = config.growth
    while True:
        groups = [span for run in runs for span in _grown(sizes, run, growth, limits)]
        staying = count - sum(stop - start - 1 for start, stop in groups)
        if growth == 1 or staying <= config.max_set_objects:
            return groups
        growth = max(1.0, growth / 2)


def _grown(sizes: Column, run: _Span, growth: float, limits: _Limits) -> Iterator[_Span]:
    """Cut a run of neighbours into merges, the widest that are large enough for their largest.

    When a run does not make up for its largest object, no part with that object does either: it is
    left out and both sides are looked at. The bytes to look at shrink by 1/growth each time, so
    there are few rounds however many objects there are.
    """
    waiting = [run]
    while waiting:
        for start, stop in limits.cut(waiting.pop()):
            if stop - start < 2:
                continue
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
    """Return where the mask is set, as half-open runs of rows."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
