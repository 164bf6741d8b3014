"""Which blocks hold a range of a stream: goes from object to object and through their indexes.

Owns the check that indexes hold what the map says, offset for offset, and the bound on what a plan
takes in memory. Fetches nothing but indexes.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.client.errors import CorruptObjectError
from streammeta.client.object_source import Block, ObjectIndex, ObjectSource
from streammeta.client.reading.byte_budget import all_of
from streammeta.client.reading.lookups import StreamQuery
from streammeta.client.reading.stream_slices import Slice
from streammeta.storage.object_format.index_block import UNLIMITED

NO_BOUND = 1 << 62

RECORD_BYTES = 256
"""What a record takes in memory beside its encoded bytes once it is decoded."""

_INDEXES_AT_ONCE = 8


def cost_of(block: Block) -> int:
    """Bytes that reading a block takes: its own, and those of its records."""
    return block.entry.size + decoded_size(block)


def decoded_size(block: Block) -> int:
    """About what the records of a block take in memory, in bytes."""
    return block.entry.size + RECORD_BYTES * block.entry.record_count


def _payload_from(block: Block, offset: int) -> int:
    """About how much payload a block holds from an offset in it on, in bytes."""
    entry = block.entry
    return (
        entry.payload_size * (entry.end_offset - offset) // (entry.end_offset - entry.start_offset)
    )


class BlockPlanner:
    """Finds blocks through the indexes of `source`.

    With `with_small_objects` the bytes of small objects are fetched together with their indexes.
    """

    def __init__(self, source: ObjectSource, *, with_small_objects: bool = False) -> None:
        self._source = source
        self._with_small_objects = with_small_objects

    async def find(
        self,
        query: StreamQuery,
        slices: Sequence[Slice],
        max_bytes: int = NO_BOUND,
        max_cost: int = NO_BOUND,
    ) -> list[Block]:
        """List the blocks of `[start, end)` of a stream, or of the front of it.

        The list ends when `max_bytes` of payload, or `max_cost` bytes of memory, are spent, but
        not before the first block. Raises `CorruptObjectError`,
        `streammeta.storage.errors.ObjectNotFoundError`.
        """
        blocks: list[Block] = []
        at, left, memory = query.start, max_bytes, max_cost
        done, ahead = 0, 1
        while done < len(slices):
            part = slices[done : done + ahead]
            indexes = await self._indexes(part, query.stream_id)
            for piece, index in zip(part, indexes, strict=True):
                if left <= 0 or (query.end != UNLIMITED and at >= query.end):
                    return blocks
                for block in self._blocks_of(query, piece, index, at, left):
                    memory -= cost_of(block)
                    if blocks and (memory < 0 or left <= 0):
                        return blocks
                    blocks.append(block)
                    left -= _payload_from(block, at)
                    at = block.entry.end_offset
            done, ahead = done + ahead, min(ahead * 2, _INDEXES_AT_ONCE)
        return blocks

    async def _indexes(self, slices: Sequence[Slice], stream_id: int) -> list[ObjectIndex]:
        return await all_of(
            self._source.index(piece, stream_id, with_small_objects=self._with_small_objects)
            for piece in slices
        )

    def _blocks_of(
        self, query: StreamQuery, piece: Slice, index: ObjectIndex, at: int, left: int
    ) -> list[Block]:
        """List the blocks from offset `at` on in one object."""
        end = piece.end_offset if query.end == UNLIMITED else min(query.end, piece.end_offset)
        blocks = index.find(query.stream_id, at, end, left)
        for block in blocks:
            joins = block.entry.start_offset == at
            if not joins and (block is not blocks[0] or at > query.start):
                raise self._mismatch(piece, query, f"a block starts below offset {at}")
            at = block.entry.end_offset
            left -= block.entry.payload_size
        if at < end and left > 0:
            raise self._mismatch(piece, query, f"its index holds nothing at offset {at}")
        return blocks

    def _mismatch(self, piece: Slice, query: StreamQuery, found: str) -> CorruptObjectError:
        return CorruptObjectError(
            self._source.key(piece.object_id),
            piece.object_id,
            query.stream_id,
            f"{found}; the map lists [{piece.start_offset}, {piece.end_offset}) in it",
        )
