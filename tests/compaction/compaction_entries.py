"""Index entries of many set objects drawn at random, and bytes that belong to them.

For what is pure in compaction: no map, no bucket. Each byte tells its object and place.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from streammeta.storage.compaction.entries import Entry, EntryTable


@dataclass
class Sources:
    """Entries of readable set objects, and where the streams that exist start."""

    entries: list[Entry] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    @property
    def table(self) -> EntryTable:
        return EntryTable.of_rows(self.entries)

    @property
    def live(self) -> list[Entry]:
        """Entries with something above the start of a stream that exists."""
        return [
            one
            for one in self.entries
            if one.stream_id in self.starts and one.end_offset > self.starts[one.stream_id]
        ]


def random_sources(
    rng: random.Random,
    *,
    objects: int = 12,
    streams: int = 8,
    largest: int = 40,
    gaps: float = 0.15,
    overlaps: float = 0.0,
) -> Sources:
    """Draw entries of at most `largest` bytes; `gaps` and `overlaps` are shares of the ranges."""
    sources = Sources()
    ends: defaultdict[int, int] = defaultdict(int)
    for object_id in range(objects):
        position = 0
        chosen = rng.sample(range(streams), rng.randint(1, streams))
        for stream_id in sorted(chosen):
            at = ends[stream_id]
            if rng.random() < gaps:
                at += rng.randint(1, 9)
            elif rng.random() < overlaps:
                at = max(0, at - rng.randint(1, 3))
            for _ in range(rng.randint(1, 3)):
                end, size = at + rng.randint(1, 5), rng.randint(1, largest)
                sources.entries.append(
                    Entry(object_id, stream_id, at, end, end - at, position, size)
                )
                at, position = end, position + size
            ends[stream_id] = max(at, ends[stream_id])
    for stream_id, end in ends.items():
        if rng.random() < 0.9:
            sources.starts[stream_id] = rng.choice([0, 0, 0, rng.randint(0, end)])
    return sources


def bytes_at(object_id: int, position: int, size: int) -> bytes:
    """What an object holds there."""
    return bytes((object_id * 31 + at * 7) % 251 for at in range(position, position + size))
