"""The bounds of a compactor of set objects, and what of them could never work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from streammeta.client.arguments import check_kind, check_seconds
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_store.base import MAX_PARTS, MIN_PART_SIZE

MIB = 1024 * 1024

MEMORY_MIN = 16 * MIB
"""With less, parts of the smallest size that stores take would leave no room for blocks."""

BYTES_PER_ENTRY = 320
"""What an index entry of a source costs while it is planned with: columns, their copies, sorting;
and the 36 bytes of its entry in an output."""

SMALL_THINGS = 4 * MIB
"""What threads and requests take besides."""

ALLOCATOR_SHARE = 10
"""One part in so many of the budget is left to the allocator: freed memory that it has not given
back yet, which grows with the thousands of reads of a large group."""


@dataclass(frozen=True, slots=True)
class CompactionConfig:
    """Bounds of a compactor; sizes in bytes, times in seconds unless named otherwise.

    `memory_budget` is all that compaction holds: blocks, parts on their way and indexes. What the
    process has loaded besides, some 80 MB, is not in it. With `overlap` the next blocks are read
    while the last ones are written, each with half of the memory: faster where the store is slow
    to answer, but with about twice the reads.
    """

    memory_budget: int = 200 * MIB
    overlap: bool = False
    read_bytes: int = 16 * MIB  # longest single read
    read_threads: int = 4
    part_bytes: int = 32 * MIB  # of an upload in parts; at most an eighth of the budget
    put_bytes: int = 32 * MIB  # longest object that is uploaded in one request
    write_threads: int = 4
    max_streams: int = 20_000  # ranges of a set object
    max_stream_objects: int = 10_000  # of one commit
    read_rate: float = 0.0  # bytes per second; 0: as fast as it goes
    write_rate: float = 0.0
    ttl_ms: int = 6 * 3_600_000  # how long prepared ids stay valid; a commit must be done by half
    commit_deadline_s: float = 120.0  # how long one commit is repeated
    store_patience_s: float = 60.0  # how long a read or write that the store turns away is repeated
    selection: SelectionConfig = field(default_factory=SelectionConfig)

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        for name in ("read_bytes", "read_threads", "write_threads"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("max_streams", "max_stream_objects"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("read_rate", "write_rate", "store_patience_s", "put_bytes"):
            _check_at_least(name, getattr(self, name), 0)
        check_seconds("commit_deadline_s", self.commit_deadline_s)
        _check_at_least("memory_budget", self.memory_budget, MEMORY_MIN)
        _check_at_least("part_bytes", self.part_bytes, MIN_PART_SIZE)
        if not 1_000 <= self.ttl_ms <= 7 * 24 * 3_600_000:
            raise ValueError(f"ttl_ms is {self.ttl_ms}, wanted 1000..604800000")

    @property
    def part_size(self) -> int:
        """Bytes of a part: `part_bytes`, but not over an eighth of the budget if that is enough."""
        return max(MIN_PART_SIZE, min(self.part_bytes, self.memory_budget // 8))

    @property
    def max_entries(self) -> int:
        """Index entries that may be planned with at a time: a quarter of the budget is theirs."""
        return self.memory_budget // 4 // BYTES_PER_ENTRY

    @property
    def index_cache_bytes(self) -> int:
        """Memory for indexes that are kept for the next cycle."""
        return self.memory_budget // 16

    @property
    def group_limits(self) -> SelectionConfig:
        """The policy, whose groups are no larger than memory and the time of prepared ids allow."""
        most = min(self.selection.max_group_bytes, self.part_size * MAX_PARTS)
        if self.write_rate:
            most = min(most, int(self.write_rate * self.ttl_ms / 4000))
        return replace(
            self.selection,
            max_group_bytes=max(most, MIB),
            max_group_ranges=min(self.selection.max_group_ranges, self.max_entries),
        )

    def buffer_bytes(self, entries: int) -> int:
        """Return what is left for the buffers of blocks beside `entries` index entries."""
        taken = self.index_cache_bytes + self.part_size + entries * BYTES_PER_ENTRY
        taken += SMALL_THINGS + self.memory_budget // ALLOCATOR_SHARE
        return max(self.memory_budget // 4, self.memory_budget - taken)

    def block_bytes(self, entries: int) -> int:
        """Return how many bytes of blocks an iteration may have beside `entries` index entries."""
        left = self.buffer_bytes(entries)
        return left // 2 if self.overlap else left


def _check_at_least(name: str, got: float, least: int) -> None:
    check_kind(name, got, (int, float), f"a number of at least {least}")
    if got < least:
        raise ValueError(f"{name} is {got}, wanted at least {least}")
