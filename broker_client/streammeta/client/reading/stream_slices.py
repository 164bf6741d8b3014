"""What is known of one stream: its bounds, and which objects hold which of its offsets.

Owns how an answer of the map and the changes that follow it fit together. A change may come twice,
or late, after an answer that holds it already; whatever does not fit for certain makes the stream
unknown again, never wrong. Pure: no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.v1 import common_pb2, objects_pb2

UNKNOWN_TIME = -1
UNKNOWN_CRC = -1


@dataclass(frozen=True, slots=True)
class Slice:
    """One object and the offsets `[start_offset, end_offset)` of a stream in it.

    `object_size` is in bytes. No record in the object, of whatever stream, is older than
    `min_timestamp_ms` or newer than `max_timestamp_ms`; `crc32c` is that of all its bytes. What
    nobody said is -1.
    """

    object_id: int
    kind: common_pb2.ObjectKind.ValueType
    start_offset: int
    end_offset: int
    object_size: int
    min_timestamp_ms: int = UNKNOWN_TIME
    max_timestamp_ms: int = UNKNOWN_TIME
    crc32c: int = UNKNOWN_CRC

    @property
    def place(self) -> tuple[int, int, int]:
        """What tells it from all other slices of its stream."""
        return self.object_id, self.start_offset, self.end_offset

    @property
    def is_composite(self) -> bool:
        """Whether the object only links to others."""
        return self.kind == common_pb2.OBJECT_KIND_COMPOSITE


def slice_of(piece: objects_pb2.ObjectSlice) -> Slice:
    """Read one row of an answer."""
    return Slice(
        piece.object_id,
        piece.kind,
        piece.start_offset,
        piece.end_offset,
        piece.object_size,
        piece.min_timestamp_ms if piece.HasField("min_timestamp_ms") else UNKNOWN_TIME,
        piece.max_timestamp_ms if piece.HasField("max_timestamp_ms") else UNKNOWN_TIME,
        piece.crc32c if piece.HasField("crc32c") else UNKNOWN_CRC,
    )


class StreamSlices:
    """The slices known of one stream, in offset order, apart where nothing is known between."""

    __slots__ = ("_slices", "_starts", "end_offset", "start_offset")

    def __init__(self, start_offset: int, end_offset: int) -> None:
        self.start_offset = start_offset
        self.end_offset = end_offset
        self._starts: list[int] = []
        self._slices: list[Slice] = []

    def __len__(self) -> int:
        return len(self._slices)

    def run_from(self, offset: int, limit: int) -> list[Slice]:
        """List at most `limit` slices that follow each other, from the one holding `offset` on."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or self._slices[at].end_offset <= offset:
            return []
        run = [self._slices[at]]
        for one in self._slices[at + 1 : at + limit]:
            if one.start_offset != run[-1].end_offset:
                break
            run.append(one)
        return run

    def learn(self, slices: Sequence[Slice], start_offset: int, end_offset: int) -> None:
        """Take what the map answered: it replaces what was known of the same offsets."""
        self.end_offset = end_offset
        self.trim(start_offset)
        if not slices:
            return
        low, high = self._overlapped(slices[0].start_offset, slices[-1].end_offset)
        self._starts[low:high] = [one.start_offset for one in slices]
        self._slices[low:high] = slices

    def add_committed(self, one: Slice) -> bool:
        """Take the row of a commit; tell whether what is known still holds."""
        if one.end_offset <= self.start_offset:
            return True  # trimmed meanwhile: without effect
        low, high = self._overlapped(one.start_offset, one.end_offset)
        if low < high:
            held = [known.place for known in self._slices[low:high]]
            return held == [one.place]  # else it took the place of others
        joins = low > 0 and self._slices[low - 1].end_offset == one.start_offset
        if joins or one.start_offset == self.end_offset:
            self._starts.insert(low, one.start_offset)
            self._slices.insert(low, one)
            self.end_offset = max(self.end_offset, one.end_offset)
            return True
        return one.end_offset <= self.end_offset

    def trim(self, start_offset: int) -> bool:
        """Take a new first visible offset; what is known always still holds."""
        self.start_offset = max(self.start_offset, start_offset)
        gone = bisect_right(self._starts, self.start_offset)
        if gone and self._slices[gone - 1].end_offset > self.start_offset:
            gone -= 1
        del self._starts[:gone], self._slices[:gone]
        return True

    def close_at(self, end_offset: int) -> bool:
        """Take the end that a close gave the stream; -1: as it is."""
        if end_offset >= 0:
            self.end_offset = end_offset
        return True

    def _overlapped(self, start: int, end: int) -> tuple[int, int]:
        """Places `[low, high)` of the slices that share an offset with `[start, end)`."""
        low = bisect_right(self._starts, start)
        if low and self._slices[low - 1].end_offset > start:
            low -= 1
        return low, max(low, bisect_left(self._starts, end))
