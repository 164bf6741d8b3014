"""Encoded Watch messages, cut and encoded once for all watches with the same selection.

Watches that keep up stand at the same offsets, so a message is found by its first offset. Recent
messages and decoded entries are cached within a limit. A lagging watch has its own messages
encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from streammeta.controller.metadata.api.answer_budget import ENTRY_BYTES_MAX
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.selection import EntryIndex, Selection, select
from streammeta.controller.rpc.watch.typed_changes import encode_changes
from streammeta.controller.runtime.writer.change_feed import Change, ChangeFeed
from streammeta.v1 import metadata_pb2 as pb

EXAMINED_MAX = 256
"""Maximum number of log entries that one message covers."""

TYPED_BYTES_MAX = ENTRY_BYTES_MAX + (192 << 10)
"""Maximum size of the changes in one message, in bytes.

The typed form of an entry may be larger than its records: each of up to 10,000 keys has a version.
"""

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
    is_typed: bool = False
    """True if messages have changes instead of records."""
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
        self._groups: dict[tuple[Selection, bool, bool], Group] = {}
        self._batches: _Recent[tuple[Group, int], Batch] = _Recent()
        self._entries: _Recent[int, _Entry] = _Recent()

    def join(self, selection: Selection, *, combines: bool, is_typed: bool = False) -> Group:
        """Add a watch to its group, until `leave`."""
        key = (selection, combines, is_typed)
        group = self._groups.setdefault(key, Group(*key))
        group.members += 1
        return group

    def leave(self, group: Group) -> None:
        """Remove a watch from its group."""
        group.members -= 1
        if not group.members:
            del self._groups[group.selection, group.combines, group.is_typed]

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
        size_max = TYPED_BYTES_MAX if group.is_typed else ENTRY_BYTES_MAX
        needs_snapshot = False
        for _ in range(EXAMINED_MAX):
            change = cursor.advance()
            part = b"" if change is None else self._cut(change, group)
            if size + len(part) > size_max:
                needs_snapshot = not parts and next_offset == from_offset
                break
            next_offset = cursor.next_offset
            if change is None:
                break
            if part:
                parts.append(part)
                size += len(part)
                if not group.combines or size >= COMBINED_BYTES:
                    break

        if not parts:
            return Batch(None, next_offset, needs_snapshot)
        # Record sets, and messages with changes, are joined as the repeated fields that they are.
        joined = b"".join(parts)
        if group.is_typed:
            return Batch(self._encode(next_offset, b"") + joined, next_offset)
        return Batch(self._encode(next_offset, joined), next_offset)

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

    def _cut(self, change: Change, group: Group) -> bytes:
        """Return the selected part of an entry, as a RecordSet or as a message with changes."""
        if group.selection.is_everything and not group.is_typed:
            return change.payload
        entry = self._entries.get(change.offset)
        if entry is None:
            entry = _Entry(change)
            self._entries.put(change.offset, entry, len(change.payload))
        is_indexed = len(self._groups) >= _INDEX_FROM
        return entry.cut(group.selection, is_indexed=is_indexed, is_typed=group.is_typed)


def encode_message(response: pb.WatchResponse) -> bytes:
    """Return the bytes of a message."""
    return response.SerializeToString()


class _Entry:
    """A log entry, decoded once for all selections."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._records = decode_records(change.payload)
        self._index: EntryIndex | None = None
        self._last_cut: tuple[Selection, bool, bytes] | None = None
        """Of the selection asked for last: watches of one selection come one after the other."""

    def cut(self, selection: Selection, *, is_indexed: bool, is_typed: bool) -> bytes:
        """Return the selected records, empty if there are none.

        They are a RecordSet, or if `is_typed` a message with changes.
        """
        last = self._last_cut
        if last is not None and last[0] is selection and last[1] == is_typed:
            return last[2]
        if is_indexed:
            self._index = self._index or EntryIndex(self._records)
            if not self._index.may_concern(selection):
                return b""
        cut = self._encode_typed(selection) if is_typed else self._encode_records(selection)
        self._last_cut = (selection, is_typed, cut)
        return cut

    def _encode_typed(self, selection: Selection) -> bytes:
        chosen = select(self._records, selection) or ()
        return encode_message(pb.WatchResponse(changes=encode_changes(self._change.offset, chosen)))

    def _encode_records(self, selection: Selection) -> bytes:
        chosen = select(self._records, selection)
        if chosen is None:
            return b""
        unchanged = len(chosen) == len(self._records) and all(map(_is, chosen, self._records))
        return self._change.payload if unchanged else encode_records(chosen)


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
