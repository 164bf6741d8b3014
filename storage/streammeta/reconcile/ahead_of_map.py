"""Content of candidates: one with records that the map has not reached yet is not to be deleted.

A map that was rolled back has forgotten commits, and what they committed looks like uploads that
nobody committed. No clock and no id tells the two apart, but the index of the object does: it names
offsets at which the map's streams have not arrived. An upload that really was never committed looks
the same, until its stream has gone past it or is deleted.

The index is at the end of an object, so one short read of each candidate and one question to the
leader for many of them are all that this takes. What has no footer is no object of records, by two
equal reads, and has nothing to lose. What has a footer and can't be read is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammeta.reconcile.deletion_order import Candidate, Judged, Outcome
from streammeta.reconcile.leader import LeaderClient
from streammeta.storage.adoption.ahead import entries_ahead
from streammeta.storage.errors import (
    ObjectNotFoundError,
    Source,
    StorageError,
    StoreUnavailableError,
)
from streammeta.storage.object_format.index_block import (
    COMPOSITE_MAGIC,
    FOOTER_SIZE,
    NORMAL_MAGIC,
    IndexBlock,
    IndexEntry,
    decode_footer,
    decode_index,
)
from streammeta.storage.object_format.object_reader import ByteRange, tail_guess
from streammeta.storage.object_store.base import ObjectStore

_READS_AT_ONCE = 16
_READ_TOGETHER = 64
"""Candidates that are read before it is looked whether there is enough to ask for."""

_ENTRIES_A_QUESTION = 50_000
"""Entries that are in memory when the leader is asked for their streams."""

_LARGEST_INDEX = 16 * 1024 * 1024
_MAGIC_SIZE = 8
_MAGICS = (NORMAL_MAGIC, COMPOSITE_MAGIC)

_Columns: TypeAlias = tuple[NDArray[np.int64], ...]
"""The last entry of each stream of an index, as the columns of `IndexBlock`."""


def judge_contents(
    store: ObjectStore, leader: LeaderClient, candidates: Sequence[Candidate], next_stream_id: int
) -> Iterator[Judged]:
    """Judge candidates by what they hold: one that has nothing to lose is `WOULD_DELETE`.

    Streams from `next_stream_id` on, which the plan's map had not issued, count as streams without
    a record, unless the leader knows better: their ends are not reached.

    Raises:
        ControllerError: the leader did not name the ends of streams.
    """
    read: list[tuple[Candidate, _Columns]] = []
    entries = 0
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        for first in range(0, len(candidates), _READ_TOGETHER):
            part = candidates[first : first + _READ_TOGETHER]
            for one, found in zip(part, pool.map(lambda one: _look(store, one), part), strict=True):
                if isinstance(found, Judged):
                    yield found
                else:
                    read.append((one, found))
                    entries += len(found[0])
            if entries >= _ENTRIES_A_QUESTION:
                yield from _compared(leader, read, next_stream_id)
                read, entries = [], 0
    yield from _compared(leader, read, next_stream_id)


def _compared(
    leader: LeaderClient, read: Sequence[tuple[Candidate, _Columns]], next_stream_id: int
) -> Iterator[Judged]:
    """Hold what was read against the ends of the map's streams."""
    if not read:
        return
    named = np.unique(np.concatenate([columns[0] for _, columns in read])).tolist()
    unborn = {stream_id: 0 for stream_id in named if stream_id >= next_stream_id}
    ends = unborn | dict(leader.stream_ends(named))
    for one, columns in read:
        yield _judged(one, columns, ends)


def _judged(one: Candidate, columns: _Columns, ends: Mapping[int, int]) -> Judged:
    for row in zip(*(column.tolist() for column in columns), strict=True):
        for entry in entries_ahead((IndexEntry(*row),), ends):
            return Judged(
                one,
                Outcome.AHEAD_OF_MAP,
                f"it has offsets up to {entry.end_offset} of stream {entry.stream_id}, which ends"
                f" at {ends[entry.stream_id]} in the map",
            )
    return Judged(one, Outcome.WOULD_DELETE)


def _look(store: ObjectStore, one: Candidate) -> _Columns | Judged:
    """Read the last entries of a candidate, or judge it if there are none to be had."""
    try:
        # A store may have sent other bytes than it has, so nothing is foreign at first sight.
        index = _read_index(store, one) or _read_index(store, one)
    except ObjectNotFoundError:
        return Judged(one, Outcome.GONE)
    except StorageError as error:
        is_busy = isinstance(error, StoreUnavailableError) and error.throttled
        detail = f"not deleted, as its index can't be read: {error}"
        return Judged(one, Outcome.FAILED, detail, is_busy)
    return _last_entries(index) if index else Judged(one, Outcome.WOULD_DELETE)


def _read_index(store: ObjectStore, one: Candidate) -> IndexBlock | None:
    """Return the index of a normal object or a composite, None if it is neither."""
    if one.size < FOOTER_SIZE:
        return None
    tail = tail_guess(one.size, one.key)
    data = _read_range(store, one.key, tail)
    if int.from_bytes(data[-_MAGIC_SIZE:], "big") not in _MAGICS:
        return None
    source = Source(one.key, noted=[])  # an index that can be read is read
    footer = decode_footer(data, one.size, composite=None, source=source)
    wanted = ByteRange(footer.index_position, one.size - FOOTER_SIZE)
    if footer.index_size > _LARGEST_INDEX:
        expected = f"at most {_LARGEST_INDEX}"
        raise source.corrupt(0, "size of the index in bytes", footer.index_size, expected)
    if wanted.start < tail.start:
        index = _read_range(store, one.key, wanted)
    else:
        index = data[wanted.start - tail.start : wanted.end - tail.start]
    return decode_index(
        index,
        data_size=None if footer.composite else footer.index_position,
        source=Source(one.key, footer.index_position),
    )


def _read_range(store: ObjectStore, key: str, wanted: ByteRange) -> memoryview:
    """Read a range whole. Raises `StoreUnavailableError` on more or fewer bytes than that."""
    if wanted.start == wanted.end:
        return memoryview(b"")
    data = store.get_range(key, wanted.start, wanted.end)
    if len(data) != wanted.end - wanted.start:
        raise StoreUnavailableError(
            f"the store sent {len(data)} bytes of {key}, wanted {wanted.end - wanted.start}"
        )
    return memoryview(data)


def _last_entries(index: IndexBlock) -> _Columns:
    """The last entry of each stream, which is the one that ends last."""
    streams = index.columns[0]
    is_last = np.append(streams[1:] != streams[:-1], True)
    return tuple(column[is_last] for column in index.columns)
