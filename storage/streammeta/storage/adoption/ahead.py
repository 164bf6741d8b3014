"""Objects ahead of a map: their index names offsets that the map's streams have not reached.

A map that was rolled back knows nothing of commits made since. It takes the objects of those
commits for uploads that nobody committed, although their records were acknowledged. Their offsets
tell: a stream of that map ends before them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streammeta.storage.object_format.index_block import IndexEntry


def entries_ahead(entries: Iterable[IndexEntry], ends: Mapping[int, int]) -> tuple[IndexEntry, ...]:
    """Return the entries that end beyond the end offsets of their streams.

    `ends` maps stream ids to end offsets. A stream that was deleted has no end: no entry is ahead
    of it. A stream that the map has not created yet ends at 0, so all its entries are ahead.
    """
    return tuple(
        entry
        for entry in entries
        if entry.stream_id in ends and entry.end_offset > ends[entry.stream_id]
    )
