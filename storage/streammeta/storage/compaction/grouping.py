"""The split rule and the limits of a commit: which entries become stream objects.

A stream with more bytes than the threshold gets a stream object. So does a run before a gap in a
stream, whatever its size: an object holds one contiguous range of a stream. When a limit is broken,
the objects that are cheapest to leave out are left out, and the rest is grouped anew. Limits are
judged by segments, neighbouring entries of one object and stream summed up once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streammeta.storage.compaction.entries import Column, EntryTable, Mask
from streammeta.storage.compaction.plan import CompactionLimits, Exclusion, ExclusionReason


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments in the order of their table: by stream and offset.

    A second order, by object within each stream, makes every question about pairs of an object and
    something else a comparison of neighbours.

    `object_number` is the place of the object in `object_ids`; `entry_count` and `size` are sums
    over the entries of the segment. `by_object` has the numbers of all rows sorted by stream, then
    object, then offset.
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
        """Sum up a table that is sorted by stream and offset and has no overlap."""
        object_ids = np.unique(table.object_id)
        is_first = changes(table.stream_id)
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
        """Return some rows; object numbers stay what they are."""
        by_object = self.by_object[is_taken[self.by_object]]
        return Segments(
            self.object_ids,
            self.object_number[is_taken],
            self.stream_id[is_taken],
            self.start_offset[is_taken],
            self.end_offset[is_taken],
            self.entry_count[is_taken],
            self.size[is_taken],
            (np.cumsum(is_taken) - 1)[by_object],
        )

    def sharing(self) -> Mask:
        """Tell, by object number, which objects hold a stream that another one holds too."""
        is_sharing = np.zeros(len(self.object_ids), dtype=np.bool_)
        streams, objects = self.stream_id[self.by_object], self.object_number[self.by_object]
        is_new = changes(streams) | changes(objects)
        streams, objects = streams[is_new], objects[is_new]
        same = streams[1:] == streams[:-1]
        is_sharing[objects[1:][same]] = True
        is_sharing[objects[:-1][same]] = True
        return is_sharing

    def feeders(self, run_of_segment: Column) -> tuple[Column, Column]:
        """Return each pair of a run and an object that has a segment in it once.

        A run is of one stream, and a segment's run is never before that of the segment before.
        """
        runs, objects = run_of_segment[self.by_object], self.object_number[self.by_object]
        is_new = changes(runs) | changes(objects)
        return runs[is_new], objects[is_new]


def changes(column: Column | Mask) -> Mask:
    """Mark the rows that differ from the row before, and the first."""
    is_change = np.ones(len(column), dtype=np.bool_)
    is_change[1:] = column[1:] != column[:-1]
    return is_change


def sums_from(values: Column, firsts: Column) -> Column:
    """Return the sum of the values from each of these rows up to the next."""
    return np.add.reduceat(values, firsts) if len(firsts) else values[:0]


_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Groups of neighbouring entries, in the order of streams and offsets.

    `table` has the entries of the objects that were not left out. Group i has the rows
    `[firsts[i], firsts[i + 1])`, the last one all that are left; `is_split[i]` tells whether it
    becomes a stream object.
    """

    table: EntryTable
    firsts: Column
    is_split: Mask
    excluded: tuple[Exclusion, ...]

    def rows(self, group: int) -> tuple[int, int]:
        """Return the half-open range of rows of one group."""
        is_last = group + 1 == len(self.firsts)
        return int(self.firsts[group]), len(self.table) if is_last else int(self.firsts[group + 1])

    def kept_stream_count(self) -> int:
        """Return how many streams stay in the stream set object."""
        counts = np.diff(np.append(self.firsts, len(self.table)))
        is_kept = np.repeat(~self.is_split, counts)
        return len(np.unique(self.table.stream_id[is_kept]))


def objects_sharing_streams(table: EntryTable) -> EntryTable:
    """Return the entries of the objects that hold a stream another one holds too.

    `table` is sorted by stream and offset.
    """
    segments = Segments.of_table(table)
    is_sharing = segments.sharing()
    if is_sharing.all():
        return table
    return table.take(is_sharing[segments.object_ids.searchsorted(table.object_id)])


def group_all(table: EntryTable, limits: CompactionLimits) -> Grouping | None:
    """Group the entries of all objects; None when that breaks a limit.

    `table` is sorted by stream and offset and has no overlaps.
    """
    groups = _Groups(Segments.of_table(table), limits.split_size)
    if _broken_limit(groups, limits, 0) is not None:
        return None
    return Grouping(table, *groups.rows(), ())


def group_entries(table: EntryTable, limits: CompactionLimits, *, reserved: int = 0) -> Grouping:
    """Group the entries of some objects, leaving objects out until the limits hold.

    `table` is sorted by stream and offset and has no overlaps. There are no groups when objects had
    to be left out and no two of the rest share a stream. `reserved` is by how many stream objects
    there will be more than split groups, as some are cut.
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
    """The groups that segments make, and what each of them is fed by."""

    def __init__(self, segments: Segments, split_size: int) -> None:
        self._segments = segments
        is_first = changes(segments.stream_id)
        is_first[1:] |= segments.start_offset[1:] != segments.end_offset[:-1]
        self._run_of_segment = np.cumsum(is_first) - 1
        firsts = np.flatnonzero(is_first)
        self._run_entries = sums_from(segments.entry_count, firsts)
        streams = segments.stream_id[firsts]
        is_before_gap = np.zeros(len(firsts), dtype=np.bool_)
        is_before_gap[:-1] = streams[1:] == streams[:-1]
        self.is_split = is_before_gap | (sums_from(segments.size, firsts) > split_size)
        self._starts_group = changes(self.is_split) | self.is_split

    def rows(self) -> tuple[Column, Mask]:
        """Return the first row of each group, and whether it is split off."""
        run_firsts = np.cumsum(self._run_entries) - self._run_entries
        return run_firsts[self._starts_group], self.is_split[self._starts_group]

    def smallest_split(self) -> Column:
        """Return the numbers of the objects that feed the split group cheapest to do without.

        That is the one of the fewest entries; of several, the one whose objects feed the fewest
        groups in sum; of several, the first.
        """
        runs, objects = self._segments.feeders(self._run_of_segment)
        is_split = self.is_split[runs]
        feeds = self._counts(objects[is_split]) + self._counts(
            self._kept_feeders(runs[~is_split], objects[~is_split])
        )
        entries = np.where(self.is_split, self._run_entries, _NEVER)
        is_candidate = entries == entries.min()
        cost = np.where(is_candidate, self._cost(runs, feeds[objects]), _NEVER)
        return _where(objects, runs, int(cost.argmin()))

    def smallest_stream(self) -> Column:
        """Return the numbers of the objects that feed the kept stream cheapest to do without.

        That is the stream whose objects hold the fewest kept streams in sum; of several, the first.
        """
        runs, objects = self._segments.feeders(self._run_of_segment)
        is_kept = ~self.is_split[runs]
        runs, objects = runs[is_kept], objects[is_kept]
        cost = self._cost(runs, self._counts(objects)[objects])
        cost[self.is_split] = _NEVER
        return _where(objects, runs, int(cost.argmin()))

    def _kept_feeders(self, runs: Column, objects: Column) -> Column:
        """Return an object as often as there are groups of several streams that it feeds."""
        group_of_run = np.cumsum(self._starts_group) - 1
        count = len(self._segments.object_ids)
        return np.unique(group_of_run[runs] * count + objects) % count

    def _counts(self, objects: Column) -> Column:
        return np.bincount(objects, minlength=len(self._segments.object_ids))

    def _cost(self, runs: Column, costs: Column) -> Column:
        """Return by run the sum of what its objects cost."""
        sums = np.bincount(runs, weights=costs, minlength=len(self.is_split))
        return sums.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Broken:
    """A limit that does not hold. `is_for_splits`: fewer split groups would help."""

    reason: ExclusionReason
    detail: str
    is_for_splits: bool


def _broken_limit(groups: _Groups, limits: CompactionLimits, reserved: int) -> _Broken | None:
    splits = int(groups.is_split.sum())
    streams = len(groups.is_split) - splits
    made = splits + reserved if splits else 0
    if made > limits.max_stream_objects:
        reason, limit = ExclusionReason.TOO_MANY_STREAM_OBJECTS, limits.max_stream_objects
        count = f"{made} stream objects"
    elif streams > limits.max_streams:
        reason, limit = ExclusionReason.TOO_MANY_STREAMS, limits.max_streams
        count = f"a stream set object of {streams} streams"
    elif made + streams > limits.max_rows:
        reason, limit = ExclusionReason.TOO_MANY_ROWS, limits.max_rows
        count = f"{made} stream objects beside {streams} streams"
    else:
        return None

    detail = (
        f"with it the commit would make {count}, wanted at most {limit}; it is left for a commit of"
        " fewer objects, or for a higher limit"
    )
    is_for_splits = reason is ExclusionReason.TOO_MANY_STREAM_OBJECTS or (
        reason is ExclusionReason.TOO_MANY_ROWS and splits > streams
    )
    return _Broken(reason, detail, is_for_splits)


def _where(values: Column, keys: Column, wanted: int) -> Column:
    """Return the values whose key is the one wanted."""
    found: Column = values[keys == wanted]
    return found
