"""Checksums of single blocks, computed from an object whose bytes match its recorded checksum.

The object format has no checksum per block, and the metadata has one for all bytes. So an object is
read once from end to end, in pieces. If all of it matches, so does each block, and its checksum
verifies every later read of that block. Knows nothing of caches and threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.index_block import IndexBlock

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of an object in memory at a time while it is read from end to end."""


@dataclass(frozen=True, slots=True)
class LearnedChecksums:
    """CRC-32C of each block, in the order of the index, and the bytes after the blocks."""

    blocks: array[int]
    tail: bytes


def learn_checksums(
    get: Callable[[int, int], bytes], size: int, index: IndexBlock, crc32c: int, source: str
) -> LearnedChecksums:
    """Read an object with `get`, which returns a range, and compute its blocks' checksums.

    Raises `streammeta.storage.errors.CorruptObjectError` unless all bytes together have the
    checksum `crc32c`.
    """
    whole, block, blocks = ObjectChecksum(), ObjectChecksum(), array("I")
    ends = iter([entry.position + entry.size for entry in index])
    tail = bytearray()
    end = next(ends, None)

    for at in range(0, size, PIECE_BYTES):
        piece = memoryview(get(at, min(at + PIECE_BYTES, size)))
        whole.update(piece)
        while end is not None and end <= at + len(piece):
            block.update(piece[: max(0, end - at)])
            blocks.append(block.value)
            # A block may span several pieces, and a piece several blocks.
            piece, at, block = piece[end - at :], end, ObjectChecksum()  # noqa: PLW2901
            end = next(ends, None)
        if end is None:
            tail += piece
        else:
            block.update(piece)

    whole.verify(crc32c, source=source)
    return LearnedChecksums(blocks, bytes(tail))
