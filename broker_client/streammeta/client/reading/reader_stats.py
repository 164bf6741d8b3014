"""What a reader did so far, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReaderStats:
    """Counts since the reader was made; `requests` and bytes are those of the object store."""

    requests: int = 0
    bytes_fetched: int = 0
    indexes_fetched: int = 0
    index_hits: int = 0
    block_hits: int = 0  # blocks that were in memory, or on their way, when they were wanted
    block_misses: int = 0
    blocks_read_ahead: int = 0
    blocks_evicted_unread: int = 0  # read ahead in vain
    metadata_hits: int = 0  # ranges whose objects were known
    lookups: int = 0  # ranges that the map was asked about
    vanished_objects: int = 0  # objects that were gone when they were wanted
    lost_offsets: int = 0  # passed over, because they were given up and will never be there
