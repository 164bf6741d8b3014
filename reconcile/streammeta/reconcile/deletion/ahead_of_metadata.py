"""Protection of candidates whose records are ahead of the metadata.

Metadata that was rolled back has forgotten commits, and their objects look like uncommitted
uploads. Neither clocks nor ids distinguish the two, but the index of the object does: it names
offsets that the metadata's streams have not reached. An upload that was never committed looks the
same until its stream passes it or is deleted.

The index is at the end of an object, so the check takes a short read of each candidate and a call
to the leader for many of them. An object without a footer in two reads contains no records and may
be deleted. An object with a footer that can't be read is kept. The offsets of a relative object
were assigned by its commit, so it is ahead for certain only if it has more offsets than its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.deletion.order import Candidate, Judged, Outcome, failed
from streammeta.storage.adoption.last_entries import entries_ahead, read_last_entries
from streammeta.storage.errors import ObjectNotFoundError, StorageError
from streammeta.storage.object_format.index_block import IndexEntry
from streammeta.storage.object_store.protocol.base import ObjectStore

_READ_TOGETHER = 16
"""Number of candidates that are read concurrently."""

_ENTRIES_A_CALL = 50_000
"""Number of entries in memory at which the leader is asked for their streams."""

_LastEntries: TypeAlias = tuple[IndexEntry, ...]
"""The last entry of each stream in an index."""


def judge_contents(
    store: ObjectStore, leader: LeaderClient, candidates: Sequence[Candidate], next_stream_id: int
) -> Iterator[Judged]:
    """Check candidates by their content. A candidate that may be deleted is `WOULD_DELETE`.

    Streams from `next_stream_id` on did not exist in the plan's metadata. They count as empty
    unless the leader knows them, so their offsets are ahead.

    Raises:
        ControllerError: the leader did not return the streams' ends.
    """
    read: list[tuple[Candidate, _LastEntries]] = []
    entries = 0
    with ThreadPoolExecutor(_READ_TOGETHER) as pool:
        for first in range(0, len(candidates), _READ_TOGETHER):
            part = candidates[first : first + _READ_TOGETHER]
            results = pool.map(lambda candidate: _read_index(store, candidate), part)
            for candidate, found in zip(part, results, strict=True):
                if isinstance(found, Judged):
                    yield found
                else:
                    read.append((candidate, found))
                    entries += len(found)
            if entries >= _ENTRIES_A_CALL:
                yield from _compare(leader, read, next_stream_id)
                read, entries = [], 0

    yield from _compare(leader, read, next_stream_id)


def _compare(
    leader: LeaderClient, read: Sequence[tuple[Candidate, _LastEntries]], next_stream_id: int
) -> Iterator[Judged]:
    """Compare the entries with the ends of the metadata's streams."""
    if not read:
        return
    # Many candidates share streams, so each stream is asked for once.
    named = sorted({entry.stream_id for _, last in read for entry in last})
    # The leader omits streams that do not exist. For future ids that must not mean deleted.
    unborn = {stream_id: 0 for stream_id in named if stream_id >= next_stream_id}
    ends = unborn | dict(leader.stream_ends(named))
    for candidate, last in read:
        yield _judge(candidate, last, ends)


def _judge(candidate: Candidate, last: _LastEntries, ends: Mapping[int, int]) -> Judged:
    ahead = entries_ahead(last, ends)
    if not ahead:
        return Judged(candidate, Outcome.WOULD_DELETE)
    first = ahead[0]
    return Judged(
        candidate,
        Outcome.AHEAD_OF_METADATA,
        f"object has offsets up to {first.end_offset} of stream {first.stream_id}, which ends at"
        f" {ends[first.stream_id]} in the metadata",
    )


def _read_index(store: ObjectStore, candidate: Candidate) -> _LastEntries | Judged:
    """Read the last entries of a candidate, or return its outcome if it has none."""
    try:
        # A store may return wrong bytes once, so one read does not prove that the footer is absent.
        last = read_last_entries(store, candidate.key, candidate.size).entries
        last = last or read_last_entries(store, candidate.key, candidate.size).entries
    except ObjectNotFoundError:
        return Judged(candidate, Outcome.GONE)
    except StorageError as error:
        return failed(candidate, "not deleted, because its index can't be read", error)
    return last or Judged(candidate, Outcome.WOULD_DELETE)
