"""Directory of objects: the table row of every object id.

Ids come from a counter and most objects are short-lived, so ids in use are dense among the newest
and increasingly sparse among older ones. The newest ids index a ring of row numbers directly, which
grows with them up to its limit. When its oldest part is needed again, the surviving ids move to
sorted segments of (id, row) pairs. A segment that is half empty is rewritten, and merged with its
neighbour if both fit into one. Memory therefore depends on the number of existing objects, not on
the ids ever issued, and each id costs a look at one part of the ring or one segment.

An id whose removal may still be undone is hidden: it is not found, but keeps its place. The module
knows only the ids of objects.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import InvariantError
from streammeta.controller.metadata.tables.values import Int64Column

RING_IDS = 1 << 21
"""Maximum number of ids looked up directly, the newest ones."""
PART_IDS = 1 << 15
"""Number of ring ids retired at a time, and the maximum number of pairs in a segment."""

_ABSENT = -1
# And below: row r is hidden as -2 - r, so hiding twice restores it.
_HIDDEN = -2


@dataclass(slots=True, eq=False)
class _Segment:
    """Sorted ids with their rows. `live` rows are not absent."""

    ids: Int64Column
    rows: npt.NDArray[np.int32]
    live: int

    def without_absent(self) -> "_Segment":
        """Return the segment without its dead pairs."""
        kept = self.rows != _ABSENT
        return _Segment(self.ids[kept], self.rows[kept], self.live)

    def with_more(self, ids: Int64Column, rows: npt.NDArray[np.int32]) -> "_Segment":
        """Return the segment extended by live pairs with larger ids."""
        return _Segment(
            np.concatenate((self.ids, ids)),
            np.concatenate((self.rows, rows)),
            self.live + len(ids),
        )


class ObjectDirectory:
    """Rows by object id. `ring_ids` and `part_ids` are powers of two, the latter smaller."""

    def __init__(self, ring_ids: int = RING_IDS, part_ids: int = PART_IDS) -> None:
        self.next_id = 0
        self._ring_max = ring_ids
        self._part = part_ids
        self._ring = np.zeros(part_ids, dtype=np.int32)
        self._mask = part_ids - 1
        self._first = 0  # the ring contains the ids from here up to next_id
        self._segments: list[_Segment] = []
        self._segment_firsts: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        in_ring = min(self.next_id, len(self._ring)) * self._ring.itemsize
        return in_ring + sum(s.ids.nbytes + s.rows.nbytes for s in self._segments)

    # ---- reading ----

    def row(self, object_id: int) -> int:
        """Return an id's row, negative if it does not exist."""
        # Most look-ups are for recent ids.
        if self._first <= object_id < self.next_id:
            return self._ring.item(object_id & self._mask)
        place = bisect.bisect_right(self._segment_firsts, object_id) - 1
        if place < 0 or object_id >= self.next_id:
            return _ABSENT
        segment = self._segments[place]
        at = int(segment.ids.searchsorted(object_id))
        found = at < len(segment.ids) and segment.ids[at] == object_id
        return int(segment.rows[at]) if found else _ABSENT

    def rows(self, object_ids: Int64Column) -> Int64Column:
        """Return ids' rows, negative where an id does not exist."""
        if len(object_ids) == 1:
            return np.array([self.row(object_ids.item())])

        # Ids outside the ring read a wrong slot at first, and are overwritten below.
        in_ring = (object_ids >= self._first) & (object_ids < self.next_id)
        rows: Int64Column = self._ring[object_ids & self._mask].astype(np.int64)
        if np.count_nonzero(in_ring) == len(object_ids):
            return rows

        rows[~in_ring] = _ABSENT
        for segment, asked, at in self._in_segments(np.flatnonzero(~in_ring), object_ids):
            rows[asked] = segment.rows[at]
        return rows

    def from_id(self, first_id: int) -> Iterator[tuple[Int64Column, Int64Column]]:
        """Yield (ids, rows) of the existing ids from `first_id` on, in id order, in parts."""
        place = max(0, bisect.bisect_right(self._segment_firsts, first_id) - 1)
        for segment in self._segments[place:]:
            chosen = (segment.rows >= 0) & (segment.ids >= first_id)
            yield segment.ids[chosen], segment.rows[chosen].astype(np.int64)

        start = max(first_id, self._first)
        while start < self.next_id:
            end = min((start // self._part + 1) * self._part, self.next_id)
            ids, rows = self._live_in_ring(start, end)
            found = rows >= 0
            yield ids[found], rows[found].astype(np.int64)
            start = end

    # ---- changing ----

    def append(self, first_id: int, rows: Int64Column) -> None:
        """Add consecutive ids from `first_id` on, which must be the next id."""
        if first_id != self.next_id:
            raise InvariantError(f"object {first_id} is not the next one, {self.next_id} is")
        for start in range(0, len(rows), self._part):
            chunk = rows[start : start + self._part]
            # Double the ring while it may grow, then evict its oldest part.
            while self.next_id + len(chunk) - self._first > len(self._ring):
                if len(self._ring) < self._ring_max:
                    self._grow()
                else:
                    self._retire()

            # The chunk may wrap around the end of the ring.
            at = self.next_id & self._mask
            room = len(self._ring) - at
            self._ring[at : at + len(chunk)] = chunk[:room]
            self._ring[: max(0, len(chunk) - room)] = chunk[room:]
            self.next_id += len(chunk)

    def insert(self, object_ids: Int64Column, rows: Int64Column) -> None:
        """Add missing ids below the next one, in any order, each once."""
        in_ring = object_ids >= self._first
        self._ring[object_ids[in_ring] & self._mask] = rows[in_ring]
        older = object_ids[~in_ring]
        order = np.argsort(older)
        self._insert_older(older[order], rows[~in_ring][order].astype(np.int32))

    def _insert_older(self, ids: Int64Column, rows: npt.NDArray[np.int32]) -> None:
        """Add sorted ids to the segments they belong to. Split segments that grow too large."""
        while len(ids):
            place = max(0, bisect.bisect_right(self._segment_firsts, int(ids[0])) - 1)
            end = len(ids)
            # The ids up to the next segment's first one belong to this segment.
            if place + 1 < len(self._segments):
                end = int(ids.searchsorted(self._segment_firsts[place + 1]))
            here = _Segment(ids[:end], rows[:end], end)
            if self._segments:
                here = _merge(self._segments[place].without_absent(), here)
                self._drop(place)

            for start in range(0, len(here.ids), self._part):
                part = slice(start, start + self._part)
                cut = _Segment(here.ids[part], here.rows[part], len(here.ids[part]))
                self._segments.insert(place, cut)
                self._segment_firsts.insert(place, int(cut.ids[0]))
                place += 1

            ids, rows = ids[end:], rows[end:]

    def truncate(self, next_id: int) -> None:
        """Remove the newest ids: `next_id` and above."""
        self.next_id = next_id
        if next_id >= self._first:
            return
        # The ring is empty now, and older ids may be left in segments.
        self._first = next_id
        while self._segments and self._segment_firsts[-1] >= next_id:
            self._drop(len(self._segments) - 1)
        if self._segments:
            last = self._segments[-1]
            kept = int(last.ids.searchsorted(next_id))
            rows = last.rows[:kept]
            self._replace(len(self._segments) - 1, _Segment(last.ids[:kept], rows, _live(rows)))

    def toggle(self, object_ids: Int64Column) -> None:
        """Hide visible ids and show hidden ones, each once."""
        # The mapping r -> -2 - r is its own inverse.
        self._put(object_ids, _HIDDEN - self.rows(object_ids))

    def remove(self, object_ids: Int64Column) -> None:
        """Forget existing ids, hidden or not, each once."""
        for segment in self._put(object_ids, np.full(len(object_ids), _ABSENT, dtype=np.int64)):
            self._tidy(segment)

    def _put(self, object_ids: Int64Column, rows: Int64Column) -> list[_Segment]:
        """Overwrite the rows of existing ids and return the segments written."""
        in_ring = object_ids >= self._first
        self._ring[object_ids[in_ring] & self._mask] = rows[in_ring]
        if np.count_nonzero(in_ring) == len(object_ids):
            return []
        written = []
        for segment, asked, at in self._in_segments(np.flatnonzero(~in_ring), object_ids):
            segment.rows[at] = rows[asked]
            segment.live = _live(segment.rows)
            written.append(segment)
        return written

    def load(self, object_ids: Int64Column, next_id: int) -> None:
        """Fill an empty directory with ascending ids. The first has row 0, and so on."""
        self.next_id = next_id
        size = len(self._ring)
        while size < min(next_id, self._ring_max):
            size *= 2
        self._ring = np.zeros(size, dtype=np.int32)
        self._mask = size - 1

        self._first = max(0, next_id - len(self._ring))

        # Ids too old for the ring fill segments.
        older = int(object_ids.searchsorted(self._first))
        for start in range(0, older, self._part):
            end = min(start + self._part, older)
            rows = np.arange(start, end, dtype=np.int32)
            self._add_segment(_Segment(object_ids[start:end].copy(), rows, len(rows)))

        if next_id > self._first:
            # Missing ids must not read as row 0.
            self._ring[: next_id - self._first if self._first == 0 else None] = _ABSENT
        for start in range(older, len(object_ids), self._part):
            places = object_ids[start : start + self._part] & self._mask
            self._ring[places] = np.arange(start, start + len(places), dtype=np.int32)

    # ---- parts ----

    def _live_in_ring(self, start: int, end: int) -> tuple[Int64Column, npt.NDArray[np.int32]]:
        # Both are in one part, and a part never wraps around the end of the ring.
        at = start & self._mask
        rows = self._ring[at : at + end - start]
        live = np.flatnonzero(rows != _ABSENT)
        return live + start, rows[live]

    def _grow(self) -> None:
        """Double the ring. Under the new mask an id has one of its two copies."""
        self._ring = np.concatenate((self._ring, self._ring))
        self._mask = len(self._ring) - 1

    def _retire(self) -> None:
        end = min((self._first // self._part + 1) * self._part, self.next_id)
        ids, rows = self._live_in_ring(self._first, end)
        self._first = end
        if not len(ids):
            return
        if self._segments and len(self._segments[-1].ids) + len(ids) <= self._part:
            self._replace(len(self._segments) - 1, self._segments[-1].with_more(ids, rows))
        else:
            self._add_segment(_Segment(ids, rows, len(ids)))

    def _in_segments(
        self, asked: Int64Column, object_ids: Int64Column
    ) -> Iterator[tuple[_Segment, Int64Column, Int64Column]]:
        """Yield, per segment, which of the asked ids it contains, and their indexes in it."""
        if not self._segments:
            return
        ids = object_ids[asked]
        # A segment contains ids from its first one up to the next segment's.
        places = np.searchsorted(np.array(self._segment_firsts), ids, side="right") - 1

        for place in np.unique(places[places >= 0]).tolist():
            segment = self._segments[place]
            here = np.flatnonzero(places == place)
            at = np.minimum(segment.ids.searchsorted(ids[here]), len(segment.ids) - 1)
            held = segment.ids[at] == ids[here]
            yield segment, asked[here[held]], at[held]

    def _tidy(self, segment: _Segment) -> None:
        """Rewrite a half-empty segment, and merge it with its predecessor if both fit into one."""
        if 2 * segment.live > len(segment.ids):
            return
        place = bisect.bisect_left(self._segment_firsts, int(segment.ids[0]))
        if not segment.live:
            self._drop(place)
            return

        tidied = segment.without_absent()
        # Small neighbours are merged, or removals would leave many tiny segments.
        before = self._segments[place - 1].without_absent() if place else None
        if before is not None and before.live + tidied.live <= self._part:
            self._drop(place)
            place, tidied = place - 1, before.with_more(tidied.ids, tidied.rows)
        self._replace(place, tidied)

    def _add_segment(self, segment: _Segment) -> None:
        self._segments.append(segment)
        self._segment_firsts.append(int(segment.ids[0]))

    def _replace(self, place: int, segment: _Segment) -> None:
        self._segments[place] = segment
        self._segment_firsts[place] = int(segment.ids[0])

    def _drop(self, place: int) -> None:
        del self._segments[place]
        del self._segment_firsts[place]


def _merge(left: _Segment, right: _Segment) -> _Segment:
    """Return one segment with the pairs of two live segments that share no id."""
    ids = np.concatenate((left.ids, right.ids))
    order = np.argsort(ids)
    return _Segment(ids[order], np.concatenate((left.rows, right.rows))[order], len(ids))


def _live(rows: npt.NDArray[np.int32]) -> int:
    return int(np.count_nonzero(rows != _ABSENT))
