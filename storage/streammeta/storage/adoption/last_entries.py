"""Last index entries, by stream, of an object that the metadata does not know.

Reads the end of the object in one or two requests, and no records. `ahead` evaluates the entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from streammeta.storage.errors import Source
from streammeta.storage.object_format import index_block
from streammeta.storage.object_format.composite import decode_composite
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_format.object_reader import ObjectReader, check_length, tail_guess
from streammeta.storage.object_store.protocol.base import ObjectStore

INDEX_BYTES_MAX = 16 << 20
"""Maximum size of an index in bytes: over 400,000 entries, or a link table and its entries."""

_MAGIC_BYTES = 8


@dataclass(frozen=True, slots=True)
class LastEntries:
    """The last entry of each stream in an index.

    The offsets of a `relative` object count from 0. Its commit assigned the same or larger ones, so
    only an entry that is ahead proves anything.
    """

    entries: tuple[IndexEntry, ...] = ()
    relative: bool = False


def read_last_entries(store: ObjectStore, key: str, size: int) -> LastEntries:
    """Return the last entry of each stream in the index of an object of `size` bytes.

    Bytes without the magic of an object at their end have no entries, because no reader can have
    read records from them.

    Raises: ObjectNotFoundError: the object does not exist. CorruptObjectError: the bytes end with
    the magic of an object, but its index is unreadable, or the store returned only a part of the
    bytes. StorageError: the store can't be read.
    """
    if size < index_block.FOOTER_SIZE:
        return LastEntries()

    # Footer and index usually fit one request.
    tail = tail_guess(size, key)
    end = check_length(tail, store.get_range(key, tail.start, tail.end), key)
    # Foreign bytes end with anything. Only the magic makes an unreadable object an error.
    magic = int.from_bytes(end[-_MAGIC_BYTES:], "big")
    if magic in (index_block.NORMAL_MAGIC, index_block.RELATIVE_MAGIC):
        index = _read_index(store, key, size, end)
        return LastEntries(_last_of_streams(index), magic == index_block.RELATIVE_MAGIC)
    if magic == index_block.COMPOSITE_MAGIC:
        _check_length(key, size)
        composite = decode_composite(store.get_range(key), source=key, noted=[])
        return LastEntries(_last_of_streams(composite.index))
    return LastEntries()


def _read_index(store: ObjectStore, key: str, size: int, end: memoryview) -> index_block.IndexBlock:
    reader = ObjectReader(key, size, noted=[], accept_relative=True)
    reader.receive(end)
    if (wanted := reader.needed) is not None:
        _check_length(key, wanted.end - wanted.start)
        reader.receive(store.get_range(key, wanted.start, wanted.end))
    return reader.index


def _check_length(key: str, length: int) -> None:
    if length > INDEX_BYTES_MAX:
        wanted = f"at most {INDEX_BYTES_MAX} bytes"
        raise Source(key).corrupt(0, "size of the index", f"{length} bytes", wanted)


def _last_of_streams(index: index_block.IndexBlock) -> tuple[index_block.IndexEntry, ...]:
    """Return the last entry of each stream in an index sorted by stream and offset."""
    streams = index.columns[0]
    is_last = np.ones(len(streams), dtype=np.bool_)
    is_last[:-1] = streams[1:] != streams[:-1]
    rows = zip(*(column[is_last].tolist() for column in index.columns), strict=True)
    return tuple(index_block.IndexEntry(*row) for row in rows)


# Objects ahead of the metadata: their index names offsets that the streams have not reached.
#
# Metadata that was rolled back has forgotten later commits. It takes their objects for
# uncommitted uploads, although their records were acknowledged. The offsets reveal them, because
# the streams end before them. A relative object reveals less: it is ahead for certain only if it
# has more offsets than its stream. Pure.


def entries_ahead(entries: Iterable[IndexEntry], ends: Mapping[int, int]) -> tuple[IndexEntry, ...]:
    """Return the entries that end after the end offsets of their streams.

    `ends` maps stream ids to end offsets. A deleted stream has no end, so no entry is ahead of it.
    A stream that the metadata has not created yet ends at 0, so all its entries are ahead.
    """
    return tuple(
        entry
        for entry in entries
        if entry.stream_id in ends and entry.end_offset > ends[entry.stream_id]
    )
