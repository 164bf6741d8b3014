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

from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.deletion.order import Candidate, Judged, Outcome, failed
from streammeta.storage.adoption.ahead import entries_ahead
from streammeta.storage.adoption.last_entries import read_last_entries
from streammeta.storage.errors import ObjectNotFoundError, StorageError
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_store.protocol.base import ObjectStore

_READ_TOGETHER = 16
"""Candidates that are read at once, before it is looked whether there is enough to ask for."""

_ENTRIES_A_QUESTION = 50_000
"""Entries that are in memory when the leader is asked for their streams."""

_LastEntries: TypeAlias = tuple[IndexEntry, ...]
"""The last entry of each stream of an index."""


def judge_contents(
    store: ObjectStore, leader: LeaderClient, candidates: Sequence[Candidate], next_stream_id: int
) -> Iterator[Judged]:
    """Judge candidates by what they hold: one that has nothing to lose is `WOULD_DELETE`.

    Streams from `next_stream_id` on, which the plan's map had not issued, count as streams without
    a record, unless the leader knows better: their ends are not reached.

    Raises:
        ControllerError: the leader did not name the ends of streams.
    """
    read: list[tuple[Candidate, _LastEntries]] = []
    entries = 0
    with ThreadPoolExecutor(_READ_TOGETHER) as pool:
        for first in range(0, len(candidates), _READ_TOGETHER):
            part = candidates[first : first + _READ_TOGETHER]
            for one, found in zip(part, pool.map(lambda one: _look(store, one), part), strict=True):
                if isinstance(found, Judged):
                    yield found
                else:
                    read.append((one, found))
                    entries += len(found)
            if entries >= _ENTRIES_A_QUESTION:
                yield from _compared(leader, read, next_stream_id)
                read, entries = [], 0

    yield from _compared(leader, read, next_stream_id)


def _compared(
    leader: LeaderClient, read: Sequence[tuple[Candidate, _LastEntries]], next_stream_id: int
) -> Iterator[Judged]:
    """Hold what was read against the ends of the map's streams."""
    if not read:
        return
    named = sorted({entry.stream_id for _, last in read for entry in last})
    unborn = {stream_id: 0 for stream_id in named if stream_id >= next_stream_id}
    ends = unborn | dict(leader.stream_ends(named))
    for one, last in read:
        yield _judged(one, last, ends)


def _judged(one: Candidate, last: _LastEntries, ends: Mapping[int, int]) -> Judged:
    ahead = entries_ahead(last, ends)
    if not ahead:
        return Judged(one, Outcome.WOULD_DELETE)
    first = ahead[0]
    return Judged(
        one,
        Outcome.AHEAD_OF_MAP,
        f"it has offsets up to {first.end_offset} of stream {first.stream_id}, which ends at"
        f" {ends[first.stream_id]} in the map",
    )


def _look(store: ObjectStore, one: Candidate) -> _LastEntries | Judged:
    """Read the last entries of a candidate, or judge it if there are none to be had."""
    try:
        # A store may have sent other bytes than it has, so nothing is foreign at first sight.
        last = read_last_entries(store, one.key, one.size)
        last = last or read_last_entries(store, one.key, one.size)
    except ObjectNotFoundError:
        return Judged(one, Outcome.GONE)
    except StorageError as error:
        return failed(one, "not deleted, as its index can't be read", error)
    return last or Judged(one, Outcome.WOULD_DELETE)
