"""Ranges of streams in objects, by object and by stream.

One table row per range. An object's rows are consecutive. For each stream an index lists its rows
by end offset, so that binary search finds the object with an offset, and the rest of the list is
the data after it. Above a stream's start offset, ends grow strictly, because commits continue where
the stream's data ends. The index is derived from the table.

Rows of removed objects are reused, one block for an object of about the same number of ranges. This
module depends on neither objects nor streams.
"""

import bisect

import numpy as np
import numpy.typing as npt

from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api.object_slices import ObjectQueryColumns
from streammeta.controller.metadata.tables import tables
from streammeta.controller.metadata.tables.section_checks import VisibleFrom, check_apart, windows
from streammeta.controller.metadata.tables.stream_index import StreamIndex, bisect_each, range_rows
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Int64Column, Mask
from streammeta.controller.records.record import StreamObjectsCommitted, StreamSetObjectRanges

_RANGE_COLUMNS = {
    "stream_id": np.int32,  # like row numbers: more streams would not fit into memory
    "start_offset": np.int64,
    "end_offset": np.int64,
    "object_id": np.int64,
}
_ORDER = ("stream_id", "end_offset", "object_id")
_PLACE_BITS = 32
_FIRST_ROWS = 4
_FEW_ROWS = 256
"""Maximum length of a list that is scanned at once instead of by bisection."""


class ObjectRanges:
    """Table of ranges and its index by stream."""

    def __init__(self) -> None:
        self._table = tables.Table(_RANGE_COLUMNS)
        self._index = StreamIndex()
        self._unused = tables.FreeBlocks()

    def __len__(self) -> int:
        """Return the number of rows in use, including the padding of blocks."""
        return len(self._table) - self._unused.rows()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._table.nbytes + self._index.nbytes

    def view(self) -> tables.TableView:
        """Return an immutable view of the table."""
        return self._table.view()

    # ---- rows ----

    def add(
        self,
        object_id: Int64Column,
        range_count: Int64Column,
        ranges: StreamSetObjectRanges | StreamObjectsCommitted,
        undo: tables.Undo,
    ) -> tuple[Int64Column, Int64Column]:
        """Store the ranges of objects and return each object's first row, and each range's row.

        The first `range_count[0]` ranges belong to the first object, and so on.

        The first `range_count[0]` of the ranges are the first object's, and so on.
        """
        # The common cases avoid index vectors: one object, or one range per object.
        if len(range_count) == 1:
            first = self._allocate_one(len(ranges.stream_id), undo)
            rows = np.arange(first, first + len(ranges.stream_id), dtype=np.int64)
            firsts = rows[:1] if len(rows) else np.zeros(1, dtype=np.int64)
            at: slice | Int64Column = rows if len(rows) == 1 else slice(first, first + len(rows))
            owners = object_id
        elif len(range_count) == len(ranges.stream_id):
            at = rows = firsts = self._allocate(range_count, undo)
            owners = object_id
        else:
            firsts = self._allocate(range_count, undo)
            at = rows = range_rows(firsts, range_count)
            owners = np.repeat(object_id, range_count)

        cells = {
            "stream_id": ranges.stream_id,
            "start_offset": ranges.start_offset,
            "end_offset": ranges.end_offset,
            "object_id": owners,
        }
        self._table.write_cells(at, cells)
        return firsts, rows

    def _allocate_one(self, count: int, undo: tables.Undo) -> int:
        size = tables.block_size(count)
        if not size:
            return 0
        reused = self._unused.take(size, 1)
        first = reused.item() if len(reused) else self._table.extend(size).start
        undo.append(lambda: self._unused.give(size, np.array([first])))
        return first

    def _allocate(self, counts: Int64Column, undo: tables.Undo) -> Int64Column:
        sizes = tables.block_rows(counts)
        size = int(sizes[0])
        # Objects of a batch mostly need blocks of the same size.
        if len(sizes) == 1 or np.count_nonzero(sizes == size) == len(sizes):
            firsts = self._blocks(size, len(sizes))
        else:
            firsts = np.zeros(len(sizes), dtype=np.int64)
            for size in np.unique(sizes).tolist():
                alike = np.flatnonzero(sizes == size)
                firsts[alike] = self._blocks(size, len(alike))
        undo.append(lambda: self._unused.give_each(sizes, firsts))
        return firsts

    def _blocks(self, size: int, count: int) -> Int64Column:
        if not size:
            return np.zeros(count, dtype=np.int64)
        reused = self._unused.take(size, count)
        fresh = count - len(reused)
        if not fresh:
            return reused
        start = self._table.extend(fresh * size).start
        added = start + size * np.arange(fresh, dtype=np.int64)
        return np.concatenate((reused, added)) if len(reused) else added

    def release(self, firsts: Int64Column, counts: Int64Column, undo: tables.Undo) -> None:
        """Free the rows of removed objects once the removal is committed."""
        sizes = tables.block_rows(counts)
        # Rows that are reused earlier could not be restored by an undo.
        undo.when_committed.append(lambda: self._unused.give_each(sizes, firsts))

    def columns(
        self, rows: npt.NDArray[np.integer]
    ) -> tuple[Int64Column, Int64Column, Int64Column]:
        """Return (stream ids, starts, ends) of rows."""
        table = self._table
        stream_id = table["stream_id"][rows].astype(np.int64)
        return stream_id, table["start_offset"][rows], table["end_offset"][rows]

    def object_ids(self, rows: npt.NDArray[np.integer]) -> Int64Column:
        """Return the objects of rows."""
        result: Int64Column = self._table["object_id"][rows]
        return result

    # ---- lists by stream ----

    def link_last(self, stream_id: Int64Column, rows: Int64Column, undo: tables.Undo) -> None:
        """Append rows to their streams' lists. Requires at most one row per stream."""
        self._index.append(stream_id, rows, undo)

    def link_many(self, stream_id: Int64Column, rows: Int64Column, undo: tables.Undo) -> None:
        """Insert rows into their streams' lists by end offset.

        A compaction may insert several rows of a stream at once.
        """
        ends, ids = self._table["end_offset"], self._table["object_id"]
        # Rows with equal ends are ordered by object, as `load` orders them.
        order = np.lexsort((ids[rows], ends[rows], stream_id))
        ordered, added = stream_id[order], rows[order]

        first = np.flatnonzero(np.concatenate(([True], np.diff(ordered) > 0)))
        streams = ordered[first]
        several = np.diff(np.append(first, len(ordered)))

        counts, listed = self._index.lists(streams)
        lows = np.repeat(np.cumsum(counts) - counts, several)
        places = self._places(listed, lows, lows + np.repeat(counts, several), added)
        merged = np.insert(listed, places, added)

        self._index.replace(streams, counts + several, merged, undo)

    def _places(
        self,
        listed: npt.NDArray[np.int32],
        lows: Int64Column,
        highs: Int64Column,
        rows: Int64Column,
    ) -> Int64Column:
        """Return the index in `listed` of each row, between its `lows` and its `highs`."""
        ends, ids = self._table["end_offset"], self._table["object_id"]
        # Equal ends are ordered by object id, as everywhere in the index.
        wanted_ends, wanted_ids = ends[rows], ids[rows]

        def is_before(searched: Int64Column, places: Int64Column) -> Mask:
            found = listed[places]
            end, wanted_end = ends[found], wanted_ends[searched]
            before: Mask = (end < wanted_end) | (
                (end == wanted_end) & (ids[found] <= wanted_ids[searched])
            )
            return before

        return bisect_each(lows, highs, is_before)

    def unlink(self, rows: Int64Column, undo: tables.Undo) -> None:
        """Remove rows from their streams' lists. Unlisted rows are ignored."""
        # With a mask over the table, testing a listed row is a single look-up.
        dead = np.zeros(len(self._table), dtype=np.bool_)
        dead[rows] = True
        streams = np.unique(self._table["stream_id"][rows]).astype(np.int64)
        counts, listed = self._index.lists(streams)
        self._keep(streams, counts, listed, ~dead[listed], undo)

    def lists_of(self, streams: Int64Column) -> tuple[Int64Column, npt.NDArray[np.int32]]:
        """Return the length of each stream's list, and the concatenated lists."""
        return self._index.lists(streams)

    def keep_rows(self, streams: Int64Column, kept: Mask, undo: tables.Undo) -> None:
        """Keep in streams' lists only the rows that `kept` marks, one flag per listed row."""
        self._keep(streams, *self._index.lists(streams), kept, undo)

    def _keep(
        self,
        streams: Int64Column,
        counts: Int64Column,
        listed: npt.NDArray[np.int32],
        kept: Mask,
        undo: tables.Undo,
    ) -> None:
        if np.count_nonzero(kept) == len(kept):
            return
        owners = np.repeat(np.arange(len(streams)), counts)
        left = np.bincount(owners[kept], minlength=len(streams))
        self._index.replace(streams, left, listed[kept], undo)

    def counts(self) -> npt.NDArray[np.int32]:
        """Return each stream's number of ranges, by stream id. Missing streams have none."""
        return self._index.lengths()

    def rows_of_stream(self, stream_id: int) -> Int64Column:
        """Return a stream's rows, by end offset."""
        return self._index.rows(stream_id).astype(np.int64)

    def rows_between(
        self, stream_id: int, first: tuple[int, int], end: int, most: int
    ) -> tuple[Int64Column, int]:
        """Return at most `most` rows of a stream in list order, and the next row, or -1.

        They begin at the first row whose place is at least `first`. They end
        before `end`, unless it is -1.
        """
        ends, rows = self._table["end_offset"], self._index.rows(stream_id)
        low = bisect.bisect_left(rows, first, key=self.place_of)
        high = len(rows)
        if end != NONE_ID:
            # The first row that reaches the end is the last one that may begin before it.
            high = min(high, 1 + bisect.bisect_left(rows, end, lo=low, key=ends.item))

        examined = rows[low : min(high, low + most)].astype(np.int64)
        following = int(rows[low + most]) if high - low > most else -1
        if end != NONE_ID:
            examined = examined[self._table["start_offset"][examined] < end]
        return examined, following

    def place_of(self, row: int) -> tuple[int, int]:
        """Return a row's place in its stream's list: its end offset and its object id."""
        return self._table["end_offset"].item(row), self._table["object_id"].item(row)

    def rows_from(
        self, stream_id: int, start: int, end: int, limit: int
    ) -> tuple[Int64Column, Int64Column, Int64Column]:
        """Return (object ids, starts, ends) that contain a stream contiguously from `start` on.

        The first one covers `start`, or the answer is empty. Stops at a gap, after `limit` rows,
        or when `end` is reached. `end` -1 means no end.
        """
        ends = self._table["end_offset"]
        rows = self._index.rows(stream_id)
        if len(rows) <= _FEW_ROWS:
            all_ends = ends.take(rows)
            first = int(all_ends.searchsorted(start, side="right"))
            taken, stops = rows[first : first + limit], all_ends[first : first + limit]
        else:
            first = bisect.bisect_right(rows, start, key=ends.item)
            taken = rows[first : first + limit]
            stops = ends.take(taken)

        starts = self._table["start_offset"].take(taken)
        if not len(taken) or starts.item(0) > start:
            return EMPTY_COLUMN, EMPTY_COLUMN, EMPTY_COLUMN

        # A slice continues the one before it if it begins where that one ends.
        continues = starts[1:] == stops[:-1]
        if end != -1:
            continues &= stops[:-1] < end
        if np.count_nonzero(continues) < len(continues):
            count = 1 + int(continues.argmin())
            taken, starts, stops = taken[:count], starts[:count], stops[:count]
        return self._table["object_id"].take(taken), starts, stops

    def rows_from_each(
        self, asked: ObjectQueryColumns, limits: Int64Column, most: int
    ) -> tuple[Int64Column, Int64Column]:
        """Return the result of `rows_from` for many queries: query numbers, and table rows.

        Rows are sorted by query, then in stream order. Once a query brings the total above `most`
        rows, rows of later queries may be missing.
        """
        counts, lists = self._index.many(asked.stream_id)
        starts, ends = self._table["start_offset"], self._table["end_offset"]

        def is_before(searched: Int64Column, places: Int64Column) -> Mask:
            before: Mask = ends[lists.rows(searched, places)] <= asked.start_offset[searched]
            return before

        at = bisect_each(np.zeros_like(counts), counts, is_before)
        left = np.minimum(limits, counts - at)
        # Rounds double in size: most queries find few rows, and few queries need many rounds.
        window, active = _FIRST_ROWS, np.flatnonzero(left > 0)
        reached = asked.start_offset.copy()
        found_of = np.zeros_like(counts)
        parts: list[tuple[Int64Column, Int64Column]] = []

        while len(active):
            sizes = np.minimum(left[active], window)
            which = np.repeat(active, sizes)
            rows = lists.rows(which, range_rows(at[active], sizes)).astype(np.int64)
            stops = ends[rows]
            firsts = np.cumsum(sizes) - sizes
            before = np.concatenate((stops[:1], stops[:-1]))
            before[firsts] = reached[active]

            limit = asked.end_offset[which]
            fits = (starts[rows] == before) & ((limit == NONE_ID) | (before < limit))
            if not parts:  # a query's first row may begin below its start
                fits[firsts] = starts[rows[firsts]] <= asked.start_offset[active]

            taken = _count_leading(fits, firsts, sizes)
            kept = range_rows(firsts, taken)
            parts.append((which[kept], rows[kept]))
            found_of[active] += taken
            reached[active] = stops[firsts + sizes - 1]
            at[active] += sizes
            left[active] -= sizes
            # A query continues if its whole window fit and the answer still has room for it.
            enough = int(np.cumsum(found_of).searchsorted(most, side="right"))
            active = active[(taken == sizes) & (left[active] > 0) & (active <= enough)]
            window = 2 * window

        which = np.concatenate((EMPTY_COLUMN, *(part[0] for part in parts)))
        rows = np.concatenate((EMPTY_COLUMN, *(part[1] for part in parts)))
        order = np.argsort(which, kind="stable")
        return which[order], rows[order]

    def load(
        self,
        columns: dict[str, Int64Column],
        range_count: Int64Column,
        indexed: Mask,
        visible_from: VisibleFrom,
    ) -> npt.NDArray[np.int32]:
        """Fill an empty table with the ranges of objects and return each object's first row.

        `columns` contains the ranges object by object, `range_count` one entry per object, and
        `indexed` one flag per range: whether it is found by its stream. An object without ranges
        gets row 0. Raises `DamagedMetadataError` if two indexed ranges share a visible offset.
        """
        listed = _order_listed(columns, indexed)
        check_apart(columns, listed, visible_from)

        firsts, total = _first_rows(range_count)
        names = list(_RANGE_COLUMNS)
        # Without padding the columns are adopted as they are.
        if total == len(indexed):
            rows = None
            self._table.load({name: columns[name] for name in names})
        else:
            rows = _rows_of_places(firsts, range_count, len(indexed))
            self._table.load({name: _spread(columns[name], rows, total) for name in names})

        streams = columns["stream_id"]

        def entries(part: slice) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
            places = np.arange(part.start, part.stop) if listed is None else listed[part]
            return streams[places], places if rows is None else rows[places]

        self._index.load(len(indexed) if listed is None else len(listed), entries)
        return firsts


def _count_leading(fits: Mask, firsts: Int64Column, sizes: Int64Column) -> Int64Column:
    """Return the length of each part's leading run that fits. Parts begin at `firsts`."""
    misfits = np.append(np.flatnonzero(~fits), len(fits))
    leading: Int64Column = np.minimum(misfits[misfits.searchsorted(firsts)] - firsts, sizes)
    return leading


def _first_rows(counts: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int32], int]:
    """Return the first row of a block for each of `counts`, 0 if empty, and the total rows."""
    firsts = tables.roomy_zeros(len(counts), np.int32)
    total = 0
    for window in windows(len(counts)):
        some = counts[window]
        sizes = tables.block_rows(some)
        ends = total + np.cumsum(sizes)
        firsts[window] = np.where(some > 0, ends - sizes, 0)
        total = int(ends[-1])
    return firsts, total


def _rows_of_places(
    firsts: npt.NDArray[np.int32], counts: npt.NDArray[np.integer], places: int
) -> npt.NDArray[np.int32]:
    """Return the row of each of the `places` ranges."""
    rows, place = np.empty(places, np.int32), 0
    for window in windows(len(counts)):
        part = range_rows(firsts[window], counts[window])
        rows[place : place + len(part)] = part
        place += len(part)
    return rows


def _spread(values: Int64Column, rows: npt.NDArray[np.int32], size: int) -> tables.Array:
    """Return a column of `size` rows with the values at these rows and zeros elsewhere."""
    column = tables.roomy_zeros(size, values.dtype)
    for window in windows(len(rows)):
        column[rows[window]] = values[window]
    return column


def _order_listed(columns: dict[str, Int64Column], chosen: Mask) -> Int64Column | None:
    """Return the chosen ranges' places, by stream, then end offset, then object.

    None if that is every range in its present order.
    """
    if np.count_nonzero(chosen) == len(chosen) and _are_in_order(columns):
        return None
    listed = np.flatnonzero(chosen)
    # Sorting numbers is several times faster than sorting pairs, so pack both into one.
    for window in windows(len(listed)):
        streams = columns["stream_id"][listed[window]].astype(np.int64)
        listed[window] |= streams << _PLACE_BITS

    if np.count_nonzero(listed[1:] < listed[:-1]):
        listed.sort()
    listed &= (1 << _PLACE_BITS) - 1

    _order_ends(columns, listed)
    return listed


def _are_in_order(columns: dict[str, Int64Column]) -> bool:
    for window in windows(len(columns["stream_id"]), overlap=1):
        streams, ends, ids = (columns[name][window] for name in _ORDER)
        above = (ends[1:] > ends[:-1]) | ((ends[1:] == ends[:-1]) & (ids[1:] >= ids[:-1]))
        above = (streams[1:] > streams[:-1]) | ((streams[1:] == streams[:-1]) & above)
        if np.count_nonzero(above) < len(above):
            return False
    return True


def _order_ends(columns: dict[str, Int64Column], listed: Int64Column) -> None:
    """Order the places of each stream, which are adjacent, by end offset, then object.

    Objects mostly continue their streams in id order, so few places move.
    """
    moved: list[Int64Column] = []
    for window in windows(len(listed), overlap=1):
        streams, ends, ids = (columns[name][listed[window]] for name in _ORDER)
        late = (ends[1:] < ends[:-1]) | ((ends[1:] == ends[:-1]) & (ids[1:] < ids[:-1]))
        late &= streams[1:] == streams[:-1]
        if np.count_nonzero(late):
            moved.append(np.unique(streams[1:][late]))

    names = np.concatenate((EMPTY_COLUMN, *moved))
    if not len(names):
        return

    # Sort only the streams in which some place moves.
    affected = np.flatnonzero(np.isin(columns["stream_id"][listed], names))
    streams, ends, ids = (columns[name][listed[affected]] for name in _ORDER)
    listed[affected] = listed[affected][np.lexsort((ids, ends, streams))]
