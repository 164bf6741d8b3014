"""A look at blocks that were read, before they are written again under a new name.

What is copied as it is would carry damage along, and give it a fresh checksum. This is no proof of
every byte, which the format has no checksum for; it finds what is usual: bytes of another object,
of another place, or zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streammeta.storage.compaction.entries import Column, EntryTable
from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.object_format.data_block import BLOCK_HEADER_SIZE, BLOCK_MAGIC
from streammeta.storage.object_format.record import RECORD_MAGIC

_STREAM_ID = slice(BLOCK_HEADER_SIZE + 1, BLOCK_HEADER_SIZE + 9)
_BASE_OFFSET = slice(BLOCK_HEADER_SIZE + 17, BLOCK_HEADER_SIZE + 25)
_HEAD_SIZE = BLOCK_HEADER_SIZE + 25
_ENTRIES_AT_A_TIME = 16 * 1024


class DamagedBlockError(CorruptObjectError):
    """A block is not what the index of its object says."""

    def __init__(
        self, object_id: int, source: str, position: int, what: str, *, found: str, expected: str
    ) -> None:
        self.object_id = object_id
        super().__init__(source, position, what, found=found, expected=expected)


def check_blocks(
    buffer: memoryview, places: Column, entries: EntryTable, key_of: Callable[[int], str]
) -> None:
    """Hold the first record of each entry, whose bytes begin at `places`, against the entry.

    Raises `DamagedBlockError` naming the source (`key_of` its id) and position of the first that is
    not of the stream and offset that the index promises.
    """
    octets = np.frombuffer(buffer, dtype=np.uint8)
    for start in range(0, len(entries), _ENTRIES_AT_A_TIME):
        some = entries.span(start, start + _ENTRIES_AT_A_TIME)
        at = places[start : start + _ENTRIES_AT_A_TIME]
        heads = octets[at[:, None] + np.arange(_HEAD_SIZE)]
        streams, offsets = _numbers(heads[:, _STREAM_ID]), _numbers(heads[:, _BASE_OFFSET])
        faults = (
            (heads[:, 0] != BLOCK_MAGIC)
            | (heads[:, BLOCK_HEADER_SIZE] != RECORD_MAGIC)
            | (streams != some.stream_id)
            | (offsets != some.start_offset)
        )
        if faults.any():
            number = int(faults.argmax())
            entry = some.row(number)
            raise DamagedBlockError(
                entry.object_id,
                key_of(entry.object_id),
                entry.position,
                "start of a block",
                found=heads[number].tobytes().hex(),
                expected=f"the first record of stream {entry.stream_id} at offset"
                f" {entry.start_offset}, as in the index",
            )


def _numbers(octets: NDArray[np.uint8]) -> Column:
    """Read a column of big-endian 64-bit numbers."""
    return np.ascontiguousarray(octets).view(">i8").astype(np.int64)[:, 0]
