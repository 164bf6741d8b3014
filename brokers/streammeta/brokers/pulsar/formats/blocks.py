"""Blocks of a data object: a header of 128 bytes, whole entries, and padding up to the length.

An entry never spans blocks. A reader sees padding as a negative length, and continues with the next
block. Source: `DataBlockHeaderImpl` and `BlockAwareSegmentInputStreamImpl` of Pulsar.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streammeta.storage.errors import PayloadError

_HEADER = struct.Struct(">Iqqq")
_STREAMING_HEADER = struct.Struct(">Iqqqq")
_ENTRY = struct.Struct(">iq")
HEADER_SIZE = 128
ENTRY_HEADER_SIZE = _ENTRY.size
# Position of the id in an entry's head, after the length.
_ID_AT = 4
MAGIC = 0xFBDBABCB
STREAMING_MAGIC = 0x26A66D32
PADDING = bytes.fromhex("fedcdead")
DEFAULT_MAX_BLOCK_SIZE = 64 << 20
MIN_BLOCK_SIZE = 5 << 20
"""Smallest part of an upload that S3 accepts, in bytes. Only the last may be smaller."""


class EntryTooLargeError(ValueError):
    """An entry does not fit into an empty block."""

    def __init__(self, entry_id: int, size: int, block_size: int) -> None:
        super().__init__(
            f"entry {entry_id} has {size} bytes, expected at most"
            f" {block_size - HEADER_SIZE - ENTRY_HEADER_SIZE} in blocks of {block_size}. Raise"
            " max_block_size"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a ledger."""

    entry_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Header of a block. Only blocks of streaming offload have a ledger id."""

    block_length: int
    first_entry_id: int
    ledger_id: int | None = None

    def encode(self) -> bytes:
        """Return the 128 bytes."""
        fields = (HEADER_SIZE, self.block_length, self.first_entry_id)
        if self.ledger_id is None:
            return _HEADER.pack(MAGIC, *fields).ljust(HEADER_SIZE, b"\0")
        # Headers are filled with zeros up to their fixed size.
        packed = _STREAMING_HEADER.pack(STREAMING_MAGIC, *fields, self.ledger_id)
        return packed.ljust(HEADER_SIZE, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> BlockHeader:
        """Return a header of either kind.

        Raises:
            EOFError: there are fewer than 128 bytes.
            PayloadError: they are not a header.
        """
        if len(data) < HEADER_SIZE:
            raise EOFError(f"block header has {len(data)} bytes, expected {HEADER_SIZE}")

        magic, size, length, first, ledger_id = _STREAMING_HEADER.unpack_from(data)
        if magic not in (MAGIC, STREAMING_MAGIC):
            raise PayloadError(0, "magic of the data block", f"{magic:#x}", f"{MAGIC:#x}")
        if size != HEADER_SIZE:
            raise PayloadError(4, "header length", size, HEADER_SIZE)

        return cls(length, first, ledger_id if magic == STREAMING_MAGIC else None)


@dataclass(frozen=True, slots=True)
class Block:
    """Encoded block. `end_entry` is the id of the last entry, -1 without entries."""

    data: bytes
    first_entry: int
    end_entry: int
    entries: int
    entry_bytes: int
    padding: int


def decode_entry_header(data: bytes) -> tuple[int, int]:
    """Return length and id of an entry, -1 for both if the bytes are padding or too few."""
    if len(data) < ENTRY_HEADER_SIZE:
        return -1, -1
    length, entry_id = _ENTRY.unpack_from(data)
    # Padding reads as a negative length.
    return (length, entry_id) if length >= 0 else (-1, -1)


def entry_length(head: bytes, wanted: int, room: int) -> int | None:
    """Return the length of the entry at the start of `head`, None if it is not the wanted one.

    `head` contains two entry heads, or the `room` that is left of the block. An entry without data
    counts only if the next entry, padding or the end follows, because zeros look like an empty
    entry 0.
    """
    length, entry_id = decode_entry_header(head)
    if entry_id != wanted or length > room - ENTRY_HEADER_SIZE:
        return None
    # Zeros decode as an empty entry 0, so an empty entry needs a second sign.
    return length if length or _is_followed(head, ENTRY_HEADER_SIZE, wanted, room) else None


def find_entry(window: bytes, wanted: int, room: int) -> tuple[int, int] | None:
    """Return position and length of an entry after bytes that are not an entry, or None.

    `window` contains the first bytes of the `room` that is left of the block. Among several
    matching heads, the first one followed by the next entry, padding or the end counts, or else the
    first. Damage in the entry's own head is not skipped, because its data may look like another
    head.
    """
    length, entry_id = decode_entry_header(window)
    is_own_length = entry_id == wanted and length > room - ENTRY_HEADER_SIZE
    is_own_id = length >= 0 and _is_followed(window, ENTRY_HEADER_SIZE + length, wanted, room)
    if is_own_length or is_own_id:
        return None

    found = None
    # The id is searched for, because lengths are unknown.
    pattern = struct.pack(">q", wanted)
    at = window.find(pattern, _ID_AT) - _ID_AT
    while at >= 0:
        length, _ = decode_entry_header(window[at : at + ENTRY_HEADER_SIZE])
        end = at + ENTRY_HEADER_SIZE + length
        # An entry never crosses the end of its block, so other matches are data.
        if length > 0 and end <= room:
            if _is_followed(window, end, wanted, room):
                return at, length
            # A fallback if no candidate is followed by a valid head.
            found = found or (at, length)
        at = window.find(pattern, at + 1 + _ID_AT) - _ID_AT
    return found


def _is_followed(window: bytes, end: int, entry_id: int, room: int) -> bool:
    """Whether the end of the block, padding or the next entry begins where an entry ends."""
    # The window may end inside of the next head.
    rest = window[end : end + ENTRY_HEADER_SIZE]
    length, following = decode_entry_header(rest)
    is_padding = rest[:4] == PADDING[: len(rest)] != b""
    return end == room or is_padding or (length >= 0 and following == entry_id + 1)


def block_size(max_size: int, entries_left: int, bytes_left: int) -> int:
    """Return the length of the next block: the remaining bytes, or the maximum."""
    return min(max_size, ENTRY_HEADER_SIZE * entries_left + bytes_left + HEADER_SIZE)


def encode_block(
    entries: Iterable[Entry], size: int, first_entry: int, ledger_id: int | None = None
) -> Block:
    """Return a block of this length with as many entries as fit, in their order."""
    parts = [BlockHeader(size, first_entry, ledger_id).encode()]
    room, end, count, total = size - HEADER_SIZE, -1, 0, 0
    for entry in entries:
        wanted = ENTRY_HEADER_SIZE + len(entry.data)
        # Entries keep their order, so a smaller one further on must not fill the gap.
        if wanted > room:
            break
        parts += (_ENTRY.pack(len(entry.data), entry.entry_id), entry.data)
        room, end, count, total = room - wanted, entry.entry_id, count + 1, total + len(entry.data)

    # The last repetition of the padding may be cut.
    parts.append((PADDING * (room // len(PADDING) + 1))[:room])
    return Block(b"".join(parts), first_entry, end, count, total, room)


def encode_blocks(
    entries: Sequence[Entry], max_size: int = DEFAULT_MAX_BLOCK_SIZE
) -> Iterator[Block]:
    """Yield the blocks of consecutive entries.

    Raises:
        EntryTooLargeError: an entry does not fit into any block. Nothing is yielded then.
    """
    # All sizes are checked first, so that no partial result is yielded.
    for entry in entries:
        if len(entry.data) + ENTRY_HEADER_SIZE + HEADER_SIZE > max_size:
            raise EntryTooLargeError(entry.entry_id, len(entry.data), max_size)

    at, left = 0, sum(len(entry.data) for entry in entries)
    while at < len(entries):
        size = block_size(max_size, len(entries) - at, left)
        block = encode_block(entries[at:], size, entries[at].entry_id)
        at, left = at + block.entries, left - block.entry_bytes
        yield block


def decode_block(data: bytes) -> Iterator[Entry]:
    """Yield the entries of a block.

    Raises:
        EOFError: the block is cut.
        PayloadError: the bytes are not a block.
    """
    header = BlockHeader.decode(data)
    if len(data) < header.block_length:
        raise EOFError(f"block has {len(data)} bytes, expected {header.block_length}")

    at = HEADER_SIZE
    while at + 4 <= header.block_length:
        (length,) = struct.unpack_from(">i", data, at)
        # Padding: the rest of the block has no entries.
        if length < 0:
            return
        end = at + ENTRY_HEADER_SIZE + length
        if end > header.block_length:
            raise PayloadError(at, "entry length", length, f"an end in {header.block_length}")
        (_, entry_id) = _ENTRY.unpack_from(data, at)
        yield Entry(entry_id, bytes(data[at + ENTRY_HEADER_SIZE : end]))
        at = end
