"""The bounds of a stream reader."""

from __future__ import annotations

from dataclasses import dataclass, fields

from streammeta.client.arguments import check_int, check_seconds

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """Bounds of a reader; sizes in bytes, times in seconds unless named otherwise.

    A reader holds at most `index_cache_bytes`, `block_cache_bytes` and `read_bytes` together,
    beside what it has handed out and, while `read_streams` is used, `bulk_bytes` and their records.
    A single block that is larger is read all the same, alone.
    """

    index_cache_bytes: int = 64 * _MIB  # indexes kept for the next read
    block_cache_bytes: int = 64 * _MIB  # blocks read ahead or in part
    read_bytes: int = 128 * _MIB  # blocks that are being read, and their records
    readahead_bytes: int = 512 * 1024  # of each reader who goes on where he stopped, at first
    max_readahead_bytes: int = 32 * _MIB  # and at last; never more than half the block cache
    max_slices: int = 100_000  # parts of streams whose objects are remembered
    max_staleness: float = 5.0  # for so long they are believed without news; 0: not at all
    poll_interval: float = 1.0  # who waits for data asks so often while news do not come
    bulk_bytes: int = 64 * _MIB  # blocks that `read_streams` holds at the same time
    fetch_threads: int = 8  # requests to the store at the same time
    request_timeout: float = 30.0  # of one request to the store, with its repetitions
    deadline: float = 60.0  # of one call, unless it names another

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in _MAY_BE_ZERO
            if field.type == "float":
                check_seconds(field.name, value, may_be_zero=may_be_zero)
            else:
                check_int(field.name, value, 0 if may_be_zero else 1)


_MAY_BE_ZERO = frozenset({"block_cache_bytes", "index_cache_bytes", "max_staleness"})
