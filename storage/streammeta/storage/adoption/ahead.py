"""Objects ahead of the metadata: their index names offsets that the streams have not reached.

Metadata that was rolled back has forgotten later commits. It takes their objects for uncommitted
uploads, although their records were acknowledged. The offsets reveal them, because the streams end
before them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streammeta.storage.object_format.index_block import IndexEntry


def entries_ahead(entries: Iterable[IndexEntry], ends: Mapping[int, int]) -> tuple[IndexEntry, ...]:
    """Return the entries that end after the end offsets of their streams.

    `ends` maps stream ids to end offsets. A deleted stream has no end, so no entry is ahead of it.
    A stream that the metadata has not created yet ends at 0, so all its entries are ahead.
    """
    return tuple(
        entry
        for entry in entries
        if entry.stream_id in ends and entry.end_offset > ends[entry.stream_id]
    )
