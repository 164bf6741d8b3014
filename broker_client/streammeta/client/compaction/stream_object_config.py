"""The bounds of a compactor of stream objects, and what of them could never work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streammeta.client.compaction.config import CompactionConfig
from streammeta.storage.compaction.copy_plan import CopyRules
from streammeta.storage.compaction.entries import OUTPUT_INDEX_THRESHOLD
from streammeta.storage.compaction.stream_objects import GroupRules, StreamCompaction, rules_for

MIB = 1024 * 1024

_TIERED = (
    StreamCompaction.GATHER_SMALL,
    StreamCompaction.MERGE_SMALL,
    StreamCompaction.MERGE_LARGE,
)


def tiered_rules() -> dict[StreamCompaction, GroupRules]:
    """Return the rules of every kind, those that copy bytes by tiers."""
    return {kind: replace(rules_for(kind), is_tiered=kind in _TIERED) for kind in StreamCompaction}


@dataclass(frozen=True, slots=True)
class StreamObjectConfig:
    """Bounds of a compactor; sizes in bytes, times in seconds unless named otherwise.

    One compaction holds `fetched_bytes` of blocks, and the indexes of a group: some 200 bytes for
    each of `max_entries`. Objects up to `whole_object_bytes` are fetched whole, index and all.
    """

    server_side_copy: bool = True  # False: everything is fetched and sent
    copy_part_bytes: int = 512 * MIB  # most that the store is asked to copy at once
    fetched_bytes: int = 32 * MIB
    whole_object_bytes: int = 256 * 1024
    index_merge_bytes: int = OUTPUT_INDEX_THRESHOLD
    max_entries: int = 200_000
    expired_batch: int = 1_000  # objects removed in one commit
    rules: Mapping[StreamCompaction, GroupRules] = field(default_factory=tiered_rules)
    read_threads: int = 4
    write_threads: int = 4
    read_rate: float = 0.0  # bytes per second; 0: as fast as it goes
    write_rate: float = 0.0
    store_patience_s: float = 60.0  # how long a request that the store turns away is repeated
    ttl_ms: int = 3_600_000  # how long prepared ids stay valid; a commit must be done by half
    commit_deadline_s: float = 120.0  # how long one commit is repeated

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        for name in ("index_merge_bytes", "max_entries", "expired_batch", "commit_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted more than 0")
        if self.expired_batch > 10_000:
            raise ValueError(f"expired_batch is {self.expired_batch}, wanted at most 10000")
        missing = [kind.name for kind in StreamCompaction if kind not in self.rules]
        if missing:
            raise ValueError(f"rules are missing for {', '.join(missing)}; give all kinds some")
        self.copy_rules, self.pace  # noqa: B018 - refuses what it can't be made of

    @property
    def copy_rules(self) -> CopyRules:
        """How new objects are laid out in parts."""
        return CopyRules(max_part_bytes=self.copy_part_bytes, fetched_bytes=self.fetched_bytes)

    @property
    def pace(self) -> CompactionConfig:
        """How requests to the store are made."""
        return CompactionConfig(
            read_threads=self.read_threads,
            write_threads=self.write_threads,
            read_rate=self.read_rate,
            write_rate=self.write_rate,
            store_patience_s=self.store_patience_s,
            ttl_ms=self.ttl_ms,
            commit_deadline_s=self.commit_deadline_s,
        )
