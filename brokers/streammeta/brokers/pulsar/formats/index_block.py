"""Index objects: the first entry of every block of a data object, with its place.

V1 describes one ledger and contains BookKeeper's metadata of it. V2 describes the ledgers of a
streaming offload. Source: `OffloadIndexBlockImpl`, `OffloadIndexBlockV2Impl` of Pulsar's jcloud
offloader.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo, LedgerMetadata
from streammeta.storage.errors import PayloadError

MAGIC_V1 = 0xDE47DE47
MAGIC_V2 = 0x3D1FB0BC
_HEAD = struct.Struct(">Iiqq")
_COUNTS = struct.Struct(">ii")
_LEDGER = struct.Struct(">qii")
_ENTRY = struct.Struct(">qiq")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A block: its first entry, its part of the upload, its place in the data object."""

    first_entry: int
    part: int
    offset: int
    header_length: int = 128

    @property
    def data_offset(self) -> int:
        """Place of the first entry in the data object."""
        return self.offset + self.header_length


@dataclass(frozen=True, slots=True)
class LedgerIndex:
    """The blocks of one ledger, in order."""

    entries: tuple[IndexEntry, ...]
    last_entry: int

    def find(self, entry_id: int) -> IndexEntry:
        """Return the block that contains an entry. Raise `IndexError` without one."""
        # The words of the message are the peer's, which its callers compare.
        if entry_id > self.last_entry:
            raise IndexError(f"Entry index: {entry_id} beyond lastEntryId: {self.last_entry}")
        at = bisect_right(self.entries, entry_id, key=lambda entry: entry.first_entry)
        if not at:
            raise IndexError(f"Entry index: {entry_id} before the first block")
        return self.entries[at - 1]

    def ceiling(self, entry_id: int) -> IndexEntry | None:
        """Return the first block that begins at or after an entry, None without one."""
        at = bisect_left(self.entries, entry_id, key=lambda entry: entry.first_entry)
        return self.entries[at] if at < len(self.entries) else None


@dataclass(frozen=True, slots=True)
class IndexBlock:
    """The index of one ledger (V1)."""

    metadata: LedgerMetadata
    data_object_length: int
    header_length: int
    index: LedgerIndex

    def encode(self) -> bytes:
        """Return the bytes of the index object."""
        metadata = self.metadata.encode()
        tail = b"".join(
            (
                _COUNTS.pack(len(self.index.entries), len(metadata)),
                metadata,
                _encode_entries(self.index.entries),
            )
        )
        return _head(MAGIC_V1, self.data_object_length, self.header_length, tail)

    @classmethod
    def decode(cls, data: bytes) -> IndexBlock:
        """Return an index.

        Raises:
            EOFError: the index is cut.
            PayloadError: the bytes are not an index.
        """
        reader = _Reader(data)
        length, header = reader.head(MAGIC_V1)
        count, size = _COUNTS.unpack(reader.take(_COUNTS.size))
        metadata = LedgerMetadata.decode(reader.take(size))
        return cls(
            metadata,
            length,
            header,
            LedgerIndex(reader.entries(count, header), metadata.last_entry),
        )


@dataclass(frozen=True, slots=True)
class StreamingIndexBlock:
    """The index of several ledgers (V2), in the order of their blocks."""

    data_object_length: int
    header_length: int
    ledgers: dict[int, tuple[LedgerInfo, LedgerIndex]]

    def find(self, ledger_id: int, entry_id: int) -> IndexEntry:
        """Return the block that contains an entry. Raise `IndexError` without one."""
        if ledger_id not in self.ledgers:
            raise IndexError(f"ledger {ledger_id} is not in this object")
        return self.ledgers[ledger_id][1].find(entry_id)

    def encode(self) -> bytes:
        """Return the bytes of the index object."""
        parts: list[bytes] = []
        for ledger_id, (info, index) in self.ledgers.items():
            encoded = info.encode()
            parts += (
                _LEDGER.pack(ledger_id, len(index.entries), len(encoded)),
                encoded,
                _encode_entries(index.entries),
            )
        return _head(MAGIC_V2, self.data_object_length, self.header_length, b"".join(parts))

    @classmethod
    def decode(cls, data: bytes) -> StreamingIndexBlock:
        """Return an index.

        Raises:
            EOFError: the index is cut.
            PayloadError: the bytes are not an index.
        """
        reader = _Reader(data)
        length, header = reader.head(MAGIC_V2)
        ledgers = {}
        # The format has no count of ledgers: they follow each other to the end.
        while reader.at < len(data):
            ledger_id, count, size = _LEDGER.unpack(reader.take(_LEDGER.size))
            info = LedgerInfo.decode(reader.take(size))
            # The index does not contain the last entry. It follows from the ledger's count.
            index = LedgerIndex(reader.entries(count, header), info.entries - 1)
            ledgers[ledger_id] = (info, index)

        return cls(length, header, ledgers)


def place_blocks(
    blocks: Iterable[tuple[int, int, int]], header_length: int, offset: int = 0
) -> tuple[IndexEntry, ...]:
    """Return index entries for blocks of first entry, part and size, from `offset` on."""
    found = []
    for first, part, size in blocks:
        found.append(IndexEntry(first, part, offset, header_length))
        offset += size
    return tuple(found)


def _head(magic: int, data_length: int, header_length: int, tail: bytes) -> bytes:
    return _HEAD.pack(magic, _HEAD.size + len(tail), data_length, header_length) + tail


def _encode_entries(entries: Iterable[IndexEntry]) -> bytes:
    return b"".join(_ENTRY.pack(entry.first_entry, entry.part, entry.offset) for entry in entries)


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int = 0

    def take(self, size: int) -> bytes:
        # Damaged counts may be negative or too large.
        if size < 0 or self.at + size > len(self.data):
            raise EOFError(
                f"index ends at byte {len(self.data)}, expected {self.at + size} or more"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def head(self, wanted: int) -> tuple[int, int]:
        magic, size, length, header = _HEAD.unpack(self.take(_HEAD.size))
        if magic != wanted:
            raise PayloadError(0, "Invalid MagicWord: magic", f"{magic:#x}", f"{wanted:#x}")
        # More bytes than the header says are accepted, as in the peer.
        if size > len(self.data):
            raise EOFError(f"index has {len(self.data)} bytes, expected {size}")
        return length, header

    def entries(self, count: int, header: int) -> tuple[IndexEntry, ...]:
        rows = (_ENTRY.unpack(self.take(_ENTRY.size)) for _ in range(count))
        return tuple(IndexEntry(first, part, at, header) for first, part, at in rows)
