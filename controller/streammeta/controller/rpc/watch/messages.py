"""Encoded Watch messages, cut and encoded once for all watches with the same selection.

Watches that keep up stand at the same offsets, so a message is found by its first offset. Recent
messages and decoded entries are cached within a limit. A lagging watch has its own messages
encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from streammeta.controller.metadata.api.answer_budget import ENTRY_BYTES_MAX
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record
from streammeta.controller.records.selection import EntryIndex, Selection, select
from streammeta.controller.runtime.writer.change_feed import Change, ChangeFeed
from streammeta.v1 import metadata_pb2 as pb

EXAMINED_MAX = 256
"""Maximum number of log entries that one message covers."""

COMBINED_BYTES = 1 << 20
"""Size from which on a message takes no further entry."""

KEPT_BYTES = 16 << 20
"""Cache size for encoded messages, and again for decoded entries, in bytes."""

_KEPT_OVERHEAD_BYTES = 256
_INDEX_FROM = 4
"""Number of selections above which an entry is indexed instead of matched with every selection."""

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class Group:
    """Watches with equal selections, which receive equal messages from equal offsets."""

    selection: Selection
    combines: bool
    """True if one message may carry the changes of several entries."""
    members: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """A message, None if it would be empty, and the end offset of the entries it covers."""

    message: bytes | None
    next_offset: int
    needs_snapshot: bool = False
    """Whether the next change exceeds a message and needs a snapshot."""


class WatchMessages:
    """Messages of one feed."""

    def __init__(self, changes: ChangeFeed) -> None:
        self._changes = changes
        self._groups: dict[tuple[Selection, bool], Group] = {}
        self._batches: _Recent[tuple[Group, int], Batch] = _Recent()
        self._entries: _Recent[int, _Entry] = _Recent()

    def join(self, selection: Selection, *, combines: bool) -> Group:
        """Add a watch to its group, until `leave`."""
        group = self._groups.setdefault((selection, combines), Group(selection, combines))
        group.members += 1
        return group

    def leave(self, group: Group) -> None:
        """Remove a watch from its group."""
        group.members -= 1
        if not group.members:
            del self._groups[group.selection, group.combines]

    def following(self, group: Group, from_offset: int) -> Batch:
        """Return the batch that begins at `from_offset`, which the feed must still hold."""
        key = (group, from_offset)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._gather(group, from_offset)
            if batch.next_offset > from_offset or batch.needs_snapshot:
                self._batches.put(key, batch, len(batch.message or b""))
        return batch

    def progress(self, next_offset: int, *, snapshot_required: bool = False) -> bytes:
        """Return a message without changes: all below `next_offset` have been sent."""
        return self._encode(next_offset, b"", snapshot_required=snapshot_required)

    def _gather(self, group: Group, from_offset: int) -> Batch:
        cursor = self._changes.cursor(from_offset)
        parts: list[bytes] = []
        size, next_offset = 0, from_offset
        needs_snapshot = False
        for _ in range(EXAMINED_MAX):
            change = cursor.advance()
            records = b"" if change is None else self._cut(change, group.selection)
            if size + len(records) > ENTRY_BYTES_MAX:
                needs_snapshot = not parts and next_offset == from_offset
                break
            next_offset = cursor.next_offset
            if change is None:
                break
            if records:
                parts.append(records)
                size += len(records)
                if not group.combines or size >= COMBINED_BYTES:
                    break

        # Record sets are joined as the repeated field that they are.
        message = self._encode(next_offset, b"".join(parts)) if parts else None
        return Batch(message, next_offset, needs_snapshot)

    def _encode(
        self, next_offset: int, records: bytes, *, snapshot_required: bool = False
    ) -> bytes:
        return encode_message(
            pb.WatchResponse(
                offset=next_offset - 1,
                high_watermark=self._changes.end_offset,
                records=records,
                snapshot_required=snapshot_required,
            )
        )

    def _cut(self, change: Change, selection: Selection) -> bytes:
        if selection.is_everything:
            return change.payload
        entry = self._entries.get(change.offset)
        if entry is None:
            entry = _Entry(change.payload)
            self._entries.put(change.offset, entry, len(change.payload))
        return entry.cut(selection, is_indexed=len(self._groups) >= _INDEX_FROM)


def encode_message(response: pb.WatchResponse) -> bytes:
    """Return the bytes of a message."""
    return response.SerializeToString()


class _Entry:
    """A log entry, decoded once for all selections."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._records = decode_records(payload)
        self._index: EntryIndex | None = None
        self._last_cut: tuple[Selection, bytes] | None = None
        """Of the selection asked for last: watches of one selection come one after the other."""

    def cut(self, selection: Selection, *, is_indexed: bool) -> bytes:
        """Return the selected records as a RecordSet, empty if there are none."""
        if self._last_cut is not None and self._last_cut[0] is selection:
            return self._last_cut[1]
        if is_indexed:
            self._index = self._index or EntryIndex(self._records)
            if not self._index.may_concern(selection):
                return b""
        cut = _cut(self._payload, self._records, selection)
        self._last_cut = (selection, cut)
        return cut


def _cut(payload: bytes, records: Sequence[Record], selection: Selection) -> bytes:
    chosen = select(records, selection)
    if chosen is None:
        return b""
    unchanged = len(chosen) == len(records) and all(map(_is, chosen, records))
    return payload if unchanged else encode_records(chosen)


def _is(one: object, other: object) -> bool:
    return one is other


class _Recent(Generic[Key, Value]):
    """Cache of values by key, which evicts the oldest above `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._values: dict[Key, tuple[Value, int]] = {}
        self._bytes = 0

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, None if it was evicted."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Add a value of `size` bytes under a new key."""
        self._values[key] = (value, size + _KEPT_OVERHEAD_BYTES)
        self._bytes += size + _KEPT_OVERHEAD_BYTES
        while self._bytes > KEPT_BYTES and len(self._values) > 1:
            _, oldest_size = self._values.pop(next(iter(self._values)))
            self._bytes -= oldest_size
