"""Composite objects: a link table that joins several normal objects of one stream.

The link table is u8 magic 0x52, i32 count, and for each linked object i64 id, i32 ordinal of its
first index entry, i16 bucket id. The linked entries are one contiguous range of one stream. Entries
keep their positions inside the linked object, so a composite contains no data. The metadata records
the bytes of the linked blocks as its size. The size of its file comes from the store.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from streammeta.storage.errors import Deviation, Source
from streammeta.storage.object_format import index_block
from streammeta.storage.object_format.record import INT64_MAX

COMPOSITE_TABLE_MAGIC = 0x52

_HEAD = struct.Struct(">Bi")
_LINK = struct.Struct(">qih")
_COUNT_POSITION, _ORDINAL_POSITION = 1, 8


@dataclass(frozen=True, slots=True)
class LinkedObject:
    """A normal object of a composite: its id, bucket and linked entries."""

    object_id: int
    bucket_id: int
    entries: tuple[index_block.IndexEntry, ...]


@dataclass(frozen=True, slots=True)
class CompositeObject:
    """A decoded composite: links in offset order, and the index over all their entries."""

    links: tuple[LinkedObject, ...]
    first_ordinals: tuple[int, ...]
    index: index_block.IndexBlock


def encode_composite(links: Sequence[LinkedObject]) -> bytes:
    """Encode a composite of `links`, in offset order.

    Raises `ValueError` without a link, if a link has no entry, or unless the entries are a
    contiguous range of one stream.
    """
    entries = _checked_entries(links)
    table = [_HEAD.pack(COMPOSITE_TABLE_MAGIC, len(links))]
    ordinal = 0
    for link in links:
        table.append(_LINK.pack(link.object_id, ordinal, link.bucket_id))
        ordinal += len(link.entries)
    head, index = b"".join(table), index_block.encode_index(entries)
    return (
        head
        + index
        + index_block.encode_footer(index_block.Footer(len(head), len(index), composite=True))
    )


def decode_composite(
    data: bytes | memoryview, *, source: str = "composite", noted: list[Deviation] | None = None
) -> CompositeObject:
    """Decode the whole file of a composite.

    Raises `CorruptObjectError`. Deviations are errors unless a list `noted` collects them.
    """
    view, whole = memoryview(data), Source(source, noted=noted)
    footer = index_block.decode_footer(view, len(view), composite=True, source=whole)
    table = _decode_table(view[: footer.index_position], whole)
    of_index = Source(source, footer.index_position)
    index = index_block.decode_index(
        view[footer.index_position : len(view) - index_block.FOOTER_SIZE],
        data_size=None,
        source=of_index,
    )
    # The end of the index closes the last link.
    bounds = [*(ordinal for _, ordinal, _ in table), len(index)]
    _check_bounds(bounds, whole)
    entries = tuple(index)
    fault = _first_break(entries)

    if fault is not None:
        raise of_index.corrupt(
            fault * index_block.INDEX_ENTRY_SIZE,
            f"index entry {fault}",
            _start_of(entries[fault]),
            _end_of(entries[fault - 1]),
        )

    links = tuple(
        LinkedObject(object_id, bucket_id, entries[ordinal:end])
        for (object_id, ordinal, bucket_id), end in zip(table, bounds[1:], strict=True)
    )
    return CompositeObject(links, tuple(bounds[:-1]), index)


def _check_bounds(bounds: Sequence[int], source: Source) -> None:
    """Raise if the first ordinals leave a link without an entry, or an entry without a link."""
    # The ordinal before the first link stands for a link that ends at entry 0.
    wrong = next(
        (i for i, (a, b) in enumerate(pairwise([-1, *bounds])) if b <= a or (i == 0 and b != 0)),
        None,
    )
    if wrong is None:
        return
    link = max(0, min(wrong, len(bounds) - 2))
    raise source.corrupt(
        _HEAD.size + link * _LINK.size + _ORDINAL_POSITION,
        f"first ordinal of link {link}",
        bounds[link],
        f"0 for the first link, ascending, below the {bounds[-1]} entries of the index",
    )


def _checked_entries(links: Sequence[LinkedObject]) -> list[index_block.IndexEntry]:
    if not links or not all(link.entries for link in links):
        raise ValueError("a composite needs at least one link, and each link at least one entry")

    for link in links:
        if not 0 <= link.object_id <= INT64_MAX or not -(2**15) <= link.bucket_id < 2**15:
            raise ValueError(
                f"link is to object {link.object_id} in bucket {link.bucket_id}, expected an id of"
                f" 0..{INT64_MAX} and a bucket of -32768..32767"
            )

    entries = [entry for link in links for entry in link.entries]
    fault = _first_break(entries)
    if fault is not None:
        raise ValueError(
            f"linked entry {fault} is {_start_of(entries[fault])}, expected"
            f" {_end_of(entries[fault - 1])}"
        )

    return entries


def _first_break(entries: Sequence[index_block.IndexEntry]) -> int | None:
    """Return the ordinal of the first entry that does not continue the one before it."""
    for ordinal, (before, after) in enumerate(pairwise(entries), start=1):
        if (after.stream_id, after.start_offset) != (before.stream_id, before.end_offset):
            return ordinal
    return None


def _start_of(entry: index_block.IndexEntry) -> str:
    return f"of stream {entry.stream_id} from offset {entry.start_offset}"


def _end_of(entry: index_block.IndexEntry) -> str:
    return f"stream {entry.stream_id} from offset {entry.end_offset}, where the one before it ends"


def _decode_table(table: memoryview, source: Source) -> list[tuple[int, int, int]]:
    if len(table) < _HEAD.size:
        wanted = f"at least {_HEAD.size} bytes"
        raise source.corrupt(0, "size of the link table", f"{len(table)} bytes", wanted)

    magic, count = _HEAD.unpack_from(table, 0)
    if magic != COMPOSITE_TABLE_MAGIC:
        wanted = f"{COMPOSITE_TABLE_MAGIC:#04x}"
        raise source.corrupt(0, "link table magic", f"{magic:#04x}", wanted)

    if count < 1 or len(table) != _HEAD.size + count * _LINK.size:
        source.deviate(
            _COUNT_POSITION,
            f"link count of a table of {len(table)} bytes",
            count,
            f"at least 1, for {_HEAD.size} bytes and {_LINK.size} for each link",
            # AutoMQ's reader accepts an empty table, so such objects may exist.
            is_allowed=count == 0 and len(table) == _HEAD.size,
        )

    links = list(_LINK.iter_unpack(table[_HEAD.size :]))
    for i, (object_id, _, _) in enumerate(links):
        if object_id < 0:
            where = _HEAD.size + i * _LINK.size
            raise source.corrupt(where, f"object id of link {i}", object_id, "at least 0")

    return links
