"""Split rule and limits of a commit: which entries become stream objects.

A stream with more bytes than the threshold gets a stream object. So does a run before a gap in a
stream, regardless of its size, because an object contains one contiguous range of a stream. If a
limit is exceeded, the cheapest objects are excluded and the rest is grouped again. Limits are
checked on segments, sums over neighbouring entries of one object and stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streammeta.storage.compaction.entries import Column, EntryTable, Mask
from streammeta.storage.compaction.plan import CompactionLimits, Exclusion, ExclusionReason


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments in the order of their table: by stream and offset.

    A second order, by object within each stream, reduces questions about pairs of an object and a
    stream or run to comparisons of neighbours.

    `object_number` is the object's index in `object_ids`. `entry_count` and `size` are sums over
    the entries of the segment. `by_object` has the numbers of all rows sorted by stream, object and
    offset.
    """

    object_ids: Column
    object_number: Column
    stream_id: Column
    start_offset: Column
    end_offset: Column
    entry_count: Column
    size: Column
    by_object: Column

    @classmethod
    def of_table(cls, table: EntryTable) -> Segments:
        """Sum up a table without overlaps, sorted by stream and offset."""
        object_ids = np.unique(table.object_id)
        is_first = changes(table.stream_id)
        # Limits are per object and stream, so a segment must not span two objects.
        is_first |= changes(table.object_id)
        is_first[1:] |= table.start_offset[1:] != table.end_offset[:-1]
        firsts = np.flatnonzero(is_first)
        stops = np.append(firsts[1:], len(table))[: len(firsts)]
        object_number = object_ids.searchsorted(table.object_id[firsts])
        stream_id = table.stream_id[firsts]

        return cls(
            object_ids,
            object_number,
            stream_id,
            table.start_offset[firsts],
            table.end_offset[stops - 1],
            stops - firsts,
            sums_from(table.size, firsts),
            np.lexsort((object_number, stream_id)),
        )

    def __len__(self) -> int:
        return len(self.stream_id)

    def take(self, is_taken: Mask) -> Segments:
        """Return the rows in the mask, with unchanged object numbers."""
        by_object = self.by_object[is_taken[self.by_object]]
        return Segments(
            self.object_ids,
            self.object_number[is_taken],
            self.stream_id[is_taken],
            self.start_offset[is_taken],
            self.end_offset[is_taken],
            self.entry_count[is_taken],
            self.size[is_taken],
            # New row numbers of the rows that stay.
            (np.cumsum(is_taken) - 1)[by_object],
        )

    def sharing(self) -> Mask:
        """Mark, by object number, the objects that share a stream with another object."""
        is_sharing = np.zeros(len(self.object_ids), dtype=np.bool_)
        streams, objects = self.stream_id[self.by_object], self.object_number[self.by_object]
        is_new = changes(streams) | changes(objects)
        streams, objects = streams[is_new], objects[is_new]
        same = streams[1:] == streams[:-1]
        is_sharing[objects[1:][same]] = True
        is_sharing[objects[:-1][same]] = True
        return is_sharing

    def feeders(self, run_of_segment: Column) -> tuple[Column, Column]:
        """Return each pair of a run and an object with a segment in it, once.

        A run belongs to one stream, and the runs of segments ascend.
        """
        # In this order equal pairs are neighbours, so one comparison removes duplicates.
        runs, objects = run_of_segment[self.by_object], self.object_number[self.by_object]
        is_new = changes(runs) | changes(objects)
        return runs[is_new], objects[is_new]


def changes(column: Column | Mask) -> Mask:
    """Mark the first row, and the rows that differ from the row before."""
    is_change = np.ones(len(column), dtype=np.bool_)
    is_change[1:] = column[1:] != column[:-1]
    return is_change


def sums_from(values: Column, firsts: Column) -> Column:
    """Return the sums of the values from each of these rows up to the next."""
    return np.add.reduceat(values, firsts) if len(firsts) else values[:0]


# Above every cost, so `argmin` never selects such a row.
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Groups of neighbouring entries, in the order of streams and offsets.

    `table` has the entries of the objects that were not excluded. Group i has the rows
    `[firsts[i], firsts[i + 1])`, and the last group extends to the end. `is_split[i]` says whether
    group i becomes a stream object.
    """

    table: EntryTable
    firsts: Column
    is_split: Mask
    excluded: tuple[Exclusion, ...]

    def rows(self, group: int) -> tuple[int, int]:
        """Return the half-open range of a group's rows."""
        is_last = group + 1 == len(self.firsts)
        return int(self.firsts[group]), len(self.table) if is_last else int(self.firsts[group + 1])

    def kept_stream_count(self) -> int:
        """Return the number of streams that stay in the stream set object."""
        counts = np.diff(np.append(self.firsts, len(self.table)))
        is_kept = np.repeat(~self.is_split, counts)
        return len(np.unique(self.table.stream_id[is_kept]))


def objects_sharing_streams(table: EntryTable) -> EntryTable:
    """Return the entries of the objects that share a stream with another object.

    `table` is sorted by stream and offset.
    """
    segments = Segments.of_table(table)
    is_sharing = segments.sharing()
    if is_sharing.all():
        return table
    return table.take(is_sharing[segments.object_ids.searchsorted(table.object_id)])


def group_all(table: EntryTable, limits: CompactionLimits) -> Grouping | None:
    """Group the entries of all objects. Returns None if that exceeds a limit.

    `table` is sorted by stream and offset and has no overlaps.
    """
    groups = _Groups(Segments.of_table(table), limits.split_size)
    if _broken_limit(groups, limits, 0) is not None:
        return None
    return Grouping(table, *groups.rows(), ())


def group_entries(table: EntryTable, limits: CompactionLimits, *, reserved: int = 0) -> Grouping:
    """Group the entries of some objects, excluding objects until the limits hold.

    `table` is sorted by stream and offset and has no overlaps. If objects were excluded and no two
    of the rest share a stream, the result has no groups. `reserved` is the number of stream objects
    in addition to the split groups, because iterations cut some groups.
    """
    segments = Segments.of_table(table)
    is_kept = np.ones(len(segments.object_ids), dtype=np.bool_)
    excluded: list[Exclusion] = []
    rounds = 0
    groups = _Groups(segments, limits.split_size)

    while (broken := _broken_limit(groups, limits, reserved)) is not None:
        numbers = groups.smallest_split() if broken.is_for_splits else groups.smallest_stream()
        excluded += [
            Exclusion(object_id, broken.reason, broken.detail, rounds)
            for object_id in segments.object_ids[numbers].tolist()
        ]
        rounds += 1
        is_kept[numbers] = False
        left = segments.take(is_kept[segments.object_number])
        # Nothing would be merged, so the rest stays as it is.
        if not left.sharing().any():
            left = segments.take(np.zeros(len(segments), dtype=np.bool_))
        groups = _Groups(left, limits.split_size)

    firsts, is_split = groups.rows()
    if not len(firsts):
        table = table.span(0, 0)
    elif excluded:
        table = table.take(is_kept[segments.object_ids.searchsorted(table.object_id)])

    return Grouping(table, firsts, is_split, tuple(excluded))


class _Groups:
    """Groups of segments, and the objects that feed each of them."""

    def __init__(self, segments: Segments, split_size: int) -> None:
        self._segments = segments
        is_first = changes(segments.stream_id)
        is_first[1:] |= segments.start_offset[1:] != segments.end_offset[:-1]
        self._run_of_segment = np.cumsum(is_first) - 1
        firsts = np.flatnonzero(is_first)
        self._run_entries = sums_from(segments.entry_count, firsts)
        streams = segments.stream_id[firsts]
        is_before_gap = np.zeros(len(firsts), dtype=np.bool_)
        # A stream set object contains one contiguous range of a stream, and the last range stays in
        # it.
        is_before_gap[:-1] = streams[1:] == streams[:-1]
        self.is_split = is_before_gap | (sums_from(segments.size, firsts) > split_size)
        # Kept runs next to each other form one group, split runs one group each.
        self._starts_group = changes(self.is_split) | self.is_split

    def rows(self) -> tuple[Column, Mask]:
        """Return the first row of each group, and whether the group is split off."""
        run_firsts = np.cumsum(self._run_entries) - self._run_entries
        return run_firsts[self._starts_group], self.is_split[self._starts_group]

    def smallest_split(self) -> Column:
        """Return the numbers of the objects that feed the cheapest split group.

        The cheapest group has the fewest entries. Ties are broken by the sum of groups that its
        objects feed, then by order.
        """
        runs, objects = self._segments.feeders(self._run_of_segment)
        is_split = self.is_split[runs]
        feeds = self._counts(objects[is_split]) + self._counts(
            self._kept_feeders(runs[~is_split], objects[~is_split])
        )
        entries = np.where(self.is_split, self._run_entries, _NEVER)
        is_candidate = entries == entries.min()
        cost = np.where(is_candidate, self._cost(runs, feeds[objects]), _NEVER)
        return _select(objects, runs, int(cost.argmin()))

    def smallest_stream(self) -> Column:
        """Return the numbers of the objects that feed the cheapest kept stream.

        The objects of the cheapest stream contain the fewest kept streams in total. Ties are broken
        by order.
        """
        runs, objects = self._segments.feeders(self._run_of_segment)
        is_kept = ~self.is_split[runs]
        runs, objects = runs[is_kept], objects[is_kept]
        cost = self._cost(runs, self._counts(objects)[objects])
        cost[self.is_split] = _NEVER
        return _select(objects, runs, int(cost.argmin()))

    def _kept_feeders(self, runs: Column, objects: Column) -> Column:
        """Return each object once for every group of kept streams that it feeds."""
        group_of_run = np.cumsum(self._starts_group) - 1
        count = len(self._segments.object_ids)
        # A pair as one number: `unique` on numbers is faster than on rows.
        return np.unique(group_of_run[runs] * count + objects) % count

    def _counts(self, objects: Column) -> Column:
        return np.bincount(objects, minlength=len(self._segments.object_ids))

    def _cost(self, runs: Column, costs: Column) -> Column:
        """Return the sum of the objects' costs, by run."""
        sums = np.bincount(runs, weights=costs, minlength=len(self.is_split))
        return sums.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Broken:
    """An exceeded limit. `is_for_splits` says whether fewer split groups would help."""

    reason: ExclusionReason
    detail: str
    is_for_splits: bool


def _broken_limit(groups: _Groups, limits: CompactionLimits, reserved: int) -> _Broken | None:
    splits = int(groups.is_split.sum())
    streams = len(groups.is_split) - splits
    # Without a split group nothing can be cut into further stream objects.
    made = splits + reserved if splits else 0
    if made > limits.max_stream_objects:
        reason, limit = ExclusionReason.TOO_MANY_STREAM_OBJECTS, limits.max_stream_objects
        count = f"{made} stream objects"
    elif streams > limits.max_streams:
        reason, limit = ExclusionReason.TOO_MANY_STREAMS, limits.max_streams
        count = f"a stream set object of {streams} streams"
    elif made + streams > limits.max_rows:
        reason, limit = ExclusionReason.TOO_MANY_ROWS, limits.max_rows
        count = f"{made} stream objects and {streams} streams"
    else:
        return None

    detail = (
        f"commit with this object would create {count}, expected at most {limit}. It waits for a"
        " commit of fewer objects or a higher limit"
    )
    is_for_splits = reason is ExclusionReason.TOO_MANY_STREAM_OBJECTS or (
        reason is ExclusionReason.TOO_MANY_ROWS and splits > streams
    )
    return _Broken(reason, detail, is_for_splits)


def _select(values: Column, keys: Column, wanted: int) -> Column:
    """Return the values with the wanted key."""
    found: Column = values[keys == wanted]
    return found
