"""Limits of compaction, and its target nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streammeta.client.arguments import check_kind, check_seconds
from streammeta.client.model import NodeIdentity
from streammeta.storage.compaction.copy_plan import CopyRules
from streammeta.storage.compaction.entries import OUTPUT_INDEX_THRESHOLD
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.compaction.stream_objects import GroupRules, StreamCompaction, tiered_rules
from streammeta.storage.object_store.protocol.base import MAX_PARTS, MIN_PART_SIZE

MIB = 1024 * 1024

MEMORY_MIN = 16 * MIB
"""Smallest budget: less would leave no memory for blocks beside parts of the smallest size."""

BYTES_PER_ENTRY = 320
"""Memory per index entry of a source during planning: columns, their copies, sorting, and the 36
bytes of its entry in an output."""

SMALL_THINGS = 4 * MIB
"""Memory of threads and requests."""

ALLOCATOR_SHARE = 10
"""One part in this many of the budget is reserved for freed memory that the allocator keeps. It
grows with the thousands of reads of a large group."""

_POSITIVE = (
    *("read_bytes", "read_threads", "write_threads", "max_streams", "max_stream_objects"),
    *("index_merge_bytes", "max_source_entries", "expired_batch"),
)
_NOT_NEGATIVE = ("read_rate", "write_rate", "store_patience_s", "put_bytes")


@dataclass(frozen=True, slots=True)
class CompactionTarget:
    """A node and the epoch of its newest process, as the controllers know it.

    With `failover` another node compacts the objects of a departed or fenced node. A node compacts
    its own objects without it.
    """

    node_id: int
    node_epoch: int
    failover: bool = False

    @classmethod
    def of(cls, node: NodeIdentity, *, failover: bool = False) -> CompactionTarget:
        """Return the target of a node's identity."""
        return cls(node.node_id, node.node_epoch, failover)

    @property
    def identity(self) -> NodeIdentity:
        """The identity in the commits."""
        return NodeIdentity(self.node_id, self.node_epoch)

    def __str__(self) -> str:
        return f"node {self.node_id} at epoch {self.node_epoch}"


@dataclass(frozen=True, slots=True)
class CompactionConfig:
    """Limits of a compactor. Sizes are in bytes, rates in bytes per second.

    `memory_budget` is all memory for the compaction of stream set objects: blocks, parts in flight
    and indexes, in addition to some 80 MB of the process itself. With `overlap` the next blocks are
    read while the last ones are written, each with half of the memory. That is faster on a slow
    store, at about twice the reads.

    The compaction of stream objects uses `fetched_bytes` for blocks, and some 200 bytes for each of
    `max_source_entries`. Objects up to `whole_object_bytes` are fetched whole, with their index.

    Ids of outputs are prepared for `id_ttl_s` or `stream_object_id_ttl_s`. A commit must be made
    within half of that time.
    """

    # Requests to the store and to the controllers
    read_threads: int = 4
    write_threads: int = 4
    read_rate: float = 0.0  # 0: no limit
    write_rate: float = 0.0
    store_patience_s: float = 60.0  # how long a temporarily rejected request is retried
    commit_deadline_s: float = 120.0  # how long one commit is retried
    # Stream set objects
    memory_budget: int = 200 * MIB
    overlap: bool = False
    read_bytes: int = 16 * MIB  # longest single read
    part_bytes: int = 32 * MIB  # of a multipart upload; at most an eighth of the budget
    put_bytes: int = 32 * MIB  # longest object that is uploaded in one request
    max_streams: int = 20_000  # ranges of a stream set object
    max_stream_objects: int = 10_000  # of one commit
    id_ttl_s: float = 6 * 3600.0
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    # Stream objects
    server_side_copy: bool = True  # False: all bytes are fetched and sent
    copy_part_bytes: int = 512 * MIB  # longest copy inside the store
    fetched_bytes: int = 32 * MIB
    whole_object_bytes: int = 256 * 1024
    index_merge_bytes: int = OUTPUT_INDEX_THRESHOLD
    max_source_entries: int = 200_000
    expired_batch: int = 1_000  # objects removed in one commit
    stream_object_id_ttl_s: float = 3600.0
    group_rules: Mapping[StreamCompaction, GroupRules] = field(default_factory=tiered_rules)

    def __post_init__(self) -> None:
        """Reject contradictory limits."""
        for name in _POSITIVE:
            _check_at_least(name, getattr(self, name), 1)
        for name in _NOT_NEGATIVE:
            _check_at_least(name, getattr(self, name), 0)
        check_seconds("commit_deadline_s", self.commit_deadline_s)
        _check_at_least("memory_budget", self.memory_budget, MEMORY_MIN)
        _check_at_least("part_bytes", self.part_bytes, MIN_PART_SIZE)
        for name in ("id_ttl_s", "stream_object_id_ttl_s"):
            if not 1 <= check_seconds(name, getattr(self, name)) <= 7 * 24 * 3600:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1..604800 seconds")

        if self.expired_batch > 10_000:
            raise ValueError(f"expired_batch is {self.expired_batch}, expected at most 10000")

        missing = [kind.name for kind in StreamCompaction if kind not in self.group_rules]
        if missing:
            raise ValueError(
                f"group_rules has no {', '.join(missing)}, expected rules for every kind"
            )

        self.copy_rules  # noqa: B018 - rejects sizes that leave parts out of their limits

    @property
    def part_size(self) -> int:
        """Bytes of a part: `part_bytes`, but at most an eighth of the budget if that suffices."""
        return max(MIN_PART_SIZE, min(self.part_bytes, self.memory_budget // 8))

    @property
    def max_entries(self) -> int:
        """Index entries of one plan of stream set objects, which use a quarter of the budget."""
        return self.memory_budget // 4 // BYTES_PER_ENTRY

    @property
    def index_cache_bytes(self) -> int:
        """Memory for indexes cached for the next cycle."""
        return self.memory_budget // 16

    @property
    def group_limits(self) -> SelectionConfig:
        """The policy, with groups limited by memory and by the validity of prepared ids."""
        most = min(self.selection.max_group_bytes, self.part_size * MAX_PARTS)
        # A group must be written within the lifetime of its ids.
        if self.write_rate:
            # A quarter of the lifetime leaves time for reads, retries and the commit.
            most = min(most, int(self.write_rate * self.id_ttl_s / 4))
        return replace(
            self.selection,
            max_group_bytes=max(most, MIB),
            max_group_ranges=min(self.selection.max_group_ranges, self.max_entries),
        )

    @property
    def copy_rules(self) -> CopyRules:
        """Layout of a merged stream object in parts."""
        return CopyRules(max_part_bytes=self.copy_part_bytes, fetched_bytes=self.fetched_bytes)

    def buffer_bytes(self, entries: int) -> int:
        """Return the memory left for blocks in addition to `entries` index entries."""
        taken = self.index_cache_bytes + self.part_size + entries * BYTES_PER_ENTRY
        taken += SMALL_THINGS + self.memory_budget // ALLOCATOR_SHARE
        # A quarter is always left, as `max_entries` limits the indexes.
        return max(self.memory_budget // 4, self.memory_budget - taken)

    def block_bytes(self, entries: int) -> int:
        """Return the bytes of blocks of one iteration in addition to `entries` index entries."""
        left = self.buffer_bytes(entries)
        return left // 2 if self.overlap else left


def _check_at_least(name: str, got: float, least: int) -> None:
    check_kind(name, got, (int, float), f"a number of at least {least}")
    if got < least:
        raise ValueError(f"{name} is {got}, expected at least {least}")
