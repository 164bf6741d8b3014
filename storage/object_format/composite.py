"""Composite objects: a link table that presents several normal objects of one stream as one.

Owns the link table (u8 magic 0x52, i32 count, and for each linked object i64 id, i32 ordinal of its
first index entry, i16 bucket id) and the rule that the linked entries are one unbroken range of one
stream. Entries keep their positions inside the linked object, so a composite holds no data. Its
recorded size is the bytes of the linked blocks, not of the file: fetch the file whole.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from storage.errors import CorruptObjectError
from storage.object_format.footer import FOOTER_SIZE, Footer, decode_footer, encode_footer
from storage.object_format.index_block import IndexBlock, IndexEntry, decode_index, encode_index

COMPOSITE_TABLE_MAGIC = 0x52

_HEAD = struct.Struct(">Bi")
_LINK = struct.Struct(">qih")


@dataclass(frozen=True, slots=True)
class LinkedObject:
    """One normal object of a composite: its id, its bucket, and which of its entries are linked."""

    object_id: int
    bucket_id: int
    entries: tuple[IndexEntry, ...]


@dataclass(frozen=True, slots=True)
class CompositeObject:
    """A decoded composite: links in offset order, and the index over all their entries."""

    links: tuple[LinkedObject, ...]
    first_ordinals: tuple[int, ...]
    index: IndexBlock

    @property
    def retained_size(self) -> int:
        """Bytes of all linked blocks: the size that metadata records for the composite."""
        return self.index.data_size

    def link_of(self, ordinal: int) -> LinkedObject:
        """Find the linked object that holds the blocks of index entry `ordinal`."""
        return self.links[bisect_right(self.first_ordinals, ordinal) - 1]


def encode_composite(links: Sequence[LinkedObject]) -> bytes:
    """Encode a composite of `links`, which are in offset order.

    Raises `ValueError` when there is no link, a link has no entry, or the entries are not one
    unbroken range of one stream.
    """
    entries = _checked_entries(links)
    table = [_HEAD.pack(COMPOSITE_TABLE_MAGIC, len(links))]
    ordinal = 0
    for link in links:
        table.append(_LINK.pack(link.object_id, ordinal, link.bucket_id))
        ordinal += len(link.entries)
    head, index = b"".join(table), encode_index(entries)
    return head + index + encode_footer(Footer(len(head), len(index), composite=True))


def decode_composite(data: bytes | memoryview, *, source: str = "composite") -> CompositeObject:
    """Read the whole file of a composite. Raises `CorruptObjectError`."""
    view = memoryview(data)
    footer = decode_footer(view, len(view), composite=True, source=source)
    table = _decode_table(view[: footer.index_position], source)
    index = decode_index(
        view[footer.index_position : len(view) - FOOTER_SIZE],
        data_size=None,
        source=source,
        origin=footer.index_position,
    )
    entries = tuple(index)
    bounds = [*(ordinal for _, ordinal, _ in table), len(entries)]
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise CorruptObjectError(
            source,
            _HEAD.size,
            f"first ordinals are {bounds[:-1]}, wanted ascending from 0, below {len(entries)}",
        )
    links = tuple(
        LinkedObject(object_id, bucket_id, entries[ordinal:end])
        for (object_id, ordinal, bucket_id), end in zip(table, bounds[1:], strict=True)
    )
    fault = _continuity_fault(entries)
    if fault is not None:
        raise CorruptObjectError(source, footer.index_position, fault)
    return CompositeObject(links, tuple(bounds[:-1]), index)


def _checked_entries(links: Sequence[LinkedObject]) -> list[IndexEntry]:
    if not links or not all(link.entries for link in links):
        raise ValueError("a composite needs at least one link, and each link at least one entry")
    entries = [entry for link in links for entry in link.entries]
    fault = _continuity_fault(entries)
    if fault is not None:
        raise ValueError(fault)
    return entries


def _continuity_fault(entries: Sequence[IndexEntry]) -> str | None:
    for before, after in pairwise(entries):
        if (after.stream_id, after.start_offset) != (before.stream_id, before.end_offset):
            return (
                f"linked entry of stream {after.stream_id} starts at {after.start_offset}, wanted"
                f" stream {before.stream_id} at {before.end_offset}"
            )
    return None


def _decode_table(table: memoryview, source: str) -> list[tuple[int, int, int]]:
    if len(table) < _HEAD.size:
        raise CorruptObjectError(source, 0, f"link table has {len(table)} bytes, wanted at least 5")
    magic, count = _HEAD.unpack_from(table, 0)
    if magic != COMPOSITE_TABLE_MAGIC:
        raise CorruptObjectError(
            source, 0, f"link table magic is {magic:#04x}, wanted {COMPOSITE_TABLE_MAGIC:#04x}"
        )
    if count < 1 or len(table) != _HEAD.size + count * _LINK.size:
        raise CorruptObjectError(
            source,
            1,
            f"link count is {count} in a table of {len(table)} bytes, wanted at least 1"
            f" and {_HEAD.size} + {_LINK.size} for each",
        )
    links = list(_LINK.iter_unpack(table[_HEAD.size :]))
    for i, (object_id, _, _) in enumerate(links):
        if object_id < 0:
            raise CorruptObjectError(
                source, _HEAD.size + i * _LINK.size, f"linked object id is {object_id}, wanted >= 0"
            )
    return links
