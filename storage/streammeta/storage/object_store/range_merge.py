"""Reading many ranges of one object in few requests: neighbours are read together and cut apart.

Owns which ranges are read together. A request costs time whatever its size, and unused bytes cost
bandwidth and memory: so the span of what is read together is limited, and so is the share of it
that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammeta.storage.errors import RangeNotSatisfiableError
from streammeta.storage.object_store.base import ObjectStore, check_range

MAX_SPAN = 4 * 1024 * 1024
MAX_UNUSED = 0.5


@dataclass(frozen=True, slots=True)
class MergedRange:
    """Bytes `[start, end)` of an object that hold the ranges with the indices `members`."""

    start: int
    end: int
    members: tuple[int, ...]


def merge_ranges(
    ranges: Sequence[tuple[int, int]], *, max_span: int = MAX_SPAN, max_unused: float = MAX_UNUSED
) -> list[MergedRange]:
    """Group half-open `ranges`, given in any order, into what is worth one read each, ascending.

    A group of several spans at most `max_span` bytes, of which at most the share `max_unused`
    (0..1) belongs to no range; a range that is larger alone is a group. Every range is in exactly
    one group. Raises `ValueError` unless `0 <= start < end`.
    """
    for start, end in ranges:
        check_range(start, end)
    groups: list[MergedRange] = []
    members: list[int] = []
    first = last = used = 0
    for index in sorted(range(len(ranges)), key=lambda index: ranges[index]):
        start, end = ranges[index]
        span = max(last, end) - first
        used_together = used + max(0, end - max(last, start))
        if members and span <= max_span and span - used_together <= max_unused * span:
            last, used = max(last, end), used_together
            members.append(index)
            continue
        if members:
            groups.append(MergedRange(first, last, tuple(members)))
        first, last, used, members = start, end, end - start, [index]
    if members:
        groups.append(MergedRange(first, last, tuple(members)))
    return groups


def cut_merged(
    merged: MergedRange, ranges: Sequence[tuple[int, int]], data: bytes, key: str
) -> list[bytes]:
    """Cut the `data` of one merged read into its members, in their order.

    As from a read of its own, a range that the object ends in gets fewer bytes, and one that starts
    behind its end raises `RangeNotSatisfiableError`.
    """
    pieces: list[bytes] = []
    for index in merged.members:
        start, end = ranges[index]
        if start - merged.start >= len(data):
            raise RangeNotSatisfiableError(key, start)
        pieces.append(data[start - merged.start : end - merged.start])
    return pieces


def get_ranges(store: ObjectStore, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Read several ranges of one object, in the order given, in as few requests as is sensible.

    Raises what `ObjectStore.get_range` does.
    """
    pieces: list[bytes] = [b""] * len(ranges)
    for merged in merge_ranges(ranges):
        data = store.get_range(key, merged.start, merged.end)
        for index, piece in zip(merged.members, cut_merged(merged, ranges, data, key), strict=True):
            pieces[index] = piece
    return pieces
