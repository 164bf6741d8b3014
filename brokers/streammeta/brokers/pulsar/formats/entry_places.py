"""Places of entries of earlier reads, so that a read in the middle of a block begins near it.

An index object names only the first entry of a block, and a block has 64 MiB. The places stay
valid, because an object never changes under its name. Their number is bounded: above it, every
second place is dropped, and new ones are twice as far apart.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

# A read starts at most this far before its entry.
SPACING_BYTES = 64 << 10
MOST_PLACES = 4096


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Place of an entry's head in a data object. `block_end` is the end of its block."""

    entry_id: int
    offset: int
    block_end: int


@dataclass(slots=True)
class EntryPlaces:
    """Places of some entries of one ledger in one object, at least `spacing` bytes apart."""

    spacing: int = SPACING_BYTES
    most: int = MOST_PLACES
    _kept: list[EntryPlace] = field(default_factory=list)
    _noted_at: int = -SPACING_BYTES
    _next: EntryPlace | None = None
    """Place after the last read, where a sequential reader continues."""

    def note(self, entry_id: int, offset: int, block_end: int) -> None:
        """Add a place, unless a known one lies near it."""
        # Checked first: most entries of a sequential read lie near the last place.
        if self._noted_at <= offset < self._noted_at + self.spacing:
            return

        self._noted_at = offset
        at = bisect_right(self._kept, entry_id, key=lambda place: place.entry_id)
        # Only the neighbours can lie within the spacing.
        near = self._kept[max(0, at - 1) : at + 1]
        if any(abs(offset - place.offset) < self.spacing for place in near):
            return

        # Kept in the order of entries for the binary search.
        self._kept.insert(at, EntryPlace(entry_id, offset, block_end))
        if len(self._kept) > self.most:
            # Memory stays bounded, and the places stay evenly spread.
            self._kept = self._kept[::2]
            self.spacing *= 2

    def note_next(self, entry_id: int, offset: int, block_end: int) -> None:
        """Note the place at which a read ended."""
        self._next = EntryPlace(entry_id, offset, block_end)

    def find(self, entry_id: int, from_entry: int) -> EntryPlace | None:
        """Return the nearest place of `from_entry..entry_id`, None if none is known."""
        at = bisect_right(self._kept, entry_id, key=lambda place: place.entry_id)
        known = self._kept[max(0, at - 1) : at]
        # The end of the last read may be nearer than any spaced place.
        known += [] if self._next is None else [self._next]
        # Places of earlier blocks do not help: the read begins in the entry's own block.
        usable = (place for place in known if from_entry <= place.entry_id <= entry_id)
        return max(usable, key=lambda place: place.entry_id, default=None)
