"""Content of a MetaStream: the newest value of each key, and the rules of compaction.

Owns the frame of a record (u8 magic 0, i32 key length, key in UTF-8, value) and the bytes of the
values PARTITION and PRODUCER_SNAPSHOTS. Unknown keys are preserved.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from streammeta.brokers.partition.errors import DamagedPartitionError
from streammeta.storage.errors import PayloadError
from streammeta.storage.inspection import meta_stream

PARTITION = "PARTITION"
LOG = "LOG"
PRODUCER_SNAPSHOTS = "PRODUCER_SNAPSHOTS"
LEADER_EPOCHS = "LEADER_EPOCH_CHECKPOINT"

COMPACT_SHARE = 0.6
"""Share of superseded records from which compaction is worth its writes."""

_FRAME = struct.Struct(">Bi")
_SNAPSHOT = struct.Struct(">qi")


def encode_entry(key: str, value: bytes) -> bytes:
    """Return the payload of a record."""
    name = key.encode()
    return _FRAME.pack(meta_stream.META_MAGIC, len(name)) + name + value


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Value PARTITION: offsets, and whether the owner closed the log cleanly."""

    start_offset: int = 0
    cleaner_offset: int = 0
    recovery_offset: int = 0
    is_clean: bool = False

    def encode(self) -> bytes:
        """Return the value's JSON."""
        value = {
            "s": self.start_offset,
            "c": self.cleaner_offset,
            "r": self.recovery_offset,
            "cs": self.is_clean,
        }
        return json.dumps(value, separators=(",", ":")).encode()


def encode_snapshots(snapshots: Mapping[int, bytes]) -> bytes:
    """Return the value PRODUCER_SNAPSHOTS of snapshots, each keyed by its next offset."""
    rows = [_SNAPSHOT.pack(at, len(raw)) + raw for at, raw in sorted(snapshots.items())]
    return bytes([meta_stream.SNAPSHOTS_MAGIC]) + b"".join(rows)


class MetaMap:
    """Newest record of each key with its offset, and the number of all records."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[int, meta_stream.MetaEntry]] = {}
        self.start_offset = 0
        self.end_offset = 0

    def apply(self, offset: int, payload: bytes) -> None:
        """Apply the record at `offset`. Raises `DamagedPartitionError` if it is unreadable."""
        try:
            entry = meta_stream.decode_meta_entry(payload)
        except PayloadError as error:
            raise DamagedPartitionError(
                f"record {offset} of a MetaStream is unreadable: {error}. Keep its object,"
                " and restore it from a copy of the bucket"
            ) from error
        self.live[entry.key] = (offset, entry)
        self.end_offset = max(self.end_offset, offset + 1)

    def entry(self, key: str) -> meta_stream.MetaEntry | None:
        """Return the newest record of a key."""
        found = self.live.get(key)
        return None if found is None else found[1]

    @property
    def is_worth_compacting(self) -> bool:
        """Whether most of the records are superseded."""
        count = self.end_offset - self.start_offset
        return count > 0 and (count - len(self.live)) / count >= COMPACT_SHARE

    @property
    def has_superseded(self) -> bool:
        """Whether there are superseded records."""
        return self.end_offset - self.start_offset > len(self.live)

    def to_rewrite(self) -> list[bytes]:
        """Return the records to append again: all live ones except the newest."""
        # The newest record stays where it is: rewriting it would not free anything before it.
        by_offset = sorted(self.live.values(), key=lambda found: found[0])
        return [encode_entry(entry.key, entry.raw) for _, entry in by_offset[:-1]]

    @property
    def first_live_offset(self) -> int:
        """Offset below which all records are superseded."""
        return min((offset for offset, _ in self.live.values()), default=self.end_offset)
