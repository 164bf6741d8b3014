"""Restored metadata as the planner of adoptions sees it, read from a copy of the leader's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from streammeta.controller.backup.restoring import STREAM_ID_JUMP
from streammeta.controller.metadata.tables.values import Int64Column, ObjectState
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from streammeta.storage.adoption.model import AdoptedRange, HeldRange, StreamHead

_SPAN = ("stream_id", "start_offset", "end_offset")


@dataclass(frozen=True, slots=True, order=True)
class Missing:
    """Range of an object that the metadata contains and the bucket does not."""

    object_id: int
    stream_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MetadataState:
    """Streams, undecided ids and objects of restored metadata.

    Streams from `next_stream_id` on did not exist at the restored point. `object_ids` are all known
    ids, sorted. `held` are the ranges of objects whose bytes are needed, by id. `links` are the
    objects that a composite links, by its id.
    """

    streams: dict[int, StreamHead]
    next_stream_id: int
    undecided: range
    object_ids: Int64Column
    held: dict[int, list[Missing]]
    links: dict[int, list[int]]

    def is_candidate(self, object_id: int) -> bool:
        """Return whether an object in the bucket may be adopted."""
        if object_id not in self.undecided:
            return False
        place = int(self.object_ids.searchsorted(object_id))
        return place == len(self.object_ids) or self.object_ids[place] != object_id

    def stream_heads(self, present: Set[int]) -> dict[int, StreamHead]:
        """Return the streams with their readable ranges, given the objects in the bucket."""
        linked = {object_id for ids in self.links.values() for object_id in ids}
        held: dict[int, list[HeldRange]] = defaultdict(list)

        for object_id, ranges in self.held.items():
            if object_id in linked:
                continue  # its composite is what streams read
            # A composite is readable only together with all objects that it links.
            is_readable = present >= {object_id, *self.links.get(object_id, ())}
            for part in ranges:
                head = self.streams.get(part.stream_id)
                # Offsets below the start are trimmed and need no object.
                if head is not None and part.end > head.start_offset:
                    start = max(part.start, head.start_offset)
                    held[part.stream_id].append(HeldRange(start, part.end, object_id, is_readable))

        return {
            stream_id: replace(head, held=tuple(sorted(held[stream_id], key=_by_start)))
            for stream_id, head in self.streams.items()
        }


def _by_start(held: HeldRange) -> int:
    return held.start


def read_map_state(copy: BinaryIO) -> MetadataState | None:
    """Read a copy of the metadata. Return None outside of recovery mode.

    Raises:
        CheckpointError: the copy is damaged.
    """
    reader = CheckpointReader(copy, "the copy of the metadata")

    # The section exists in recovery mode only.
    if "recovery" not in reader.entries:
        return None
    objects = reader.columns("objects")
    counters, window = reader.columns("counters"), reader.columns("recovery")
    return MetadataState(
        streams=_streams(reader),
        # The restore skipped these ids, because the old cluster may have issued them.
        next_stream_id=int(counters["next_stream_id"][0]) - STREAM_ID_JUMP,
        undecided=range(int(window["undecided_from"][0]), int(window["undecided_below"][0])),
        object_ids=np.asarray(objects["object_id"], dtype=np.int64),
        held=list_held(objects, reader.columns("object_ranges")),
        links=_links(objects),
    )


def read_object_ids(copy: BinaryIO) -> Int64Column:
    """Return the ids of all objects in a copy of the metadata.

    Raises:
        CheckpointError: the copy is damaged.
    """
    reader = CheckpointReader(copy, "the copy of the metadata")
    return np.asarray(reader.columns("objects")["object_id"], dtype=np.int64)


def list_missing(
    held: Mapping[int, Sequence[Missing]], present: Set[int], adopted: Iterable[AdoptedRange] = ()
) -> Iterator[Missing]:
    """Yield offsets of known objects that neither the bucket nor an adopted range contains."""
    covers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for part in adopted:
        covers[part.stream_id].append((part.start, part.end))

    for object_id, ranges in sorted(held.items()):
        if object_id in present:
            continue
        for missing in ranges:
            # `at` moves along the covers. Offsets before the next one are missing.
            at = missing.start
            for start, end in sorted(covers[missing.stream_id]):
                if at < min(start, missing.end):
                    yield replace(missing, start=at, end=min(start, missing.end))
                at = max(at, end)
            if at < missing.end:
                yield replace(missing, start=at)


def _streams(reader: CheckpointReader) -> dict[int, StreamHead]:
    owed = _list_pending(reader)
    owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for stream_id, start, end, epoch in _rows(reader.columns("ranges"), *_SPAN, "epoch"):
        owners[stream_id].append((start, end, epoch))
    streams = {}
    columns = ("stream_id", "start_offset", "end_offset", "epoch")

    for stream_id, start, end, epoch in _rows(reader.columns("streams"), *columns):
        # Trimmed offsets need no upload.
        spans = [(max(start, low), high, by) for low, high, by in owed[stream_id] if high > start]
        streams[stream_id] = StreamHead(
            end,
            epoch,
            owed=tuple(sorted(spans)),
            start_offset=start,
            owners=tuple(sorted(owners[stream_id])),
        )

    return streams


def _list_pending(reader: CheckpointReader) -> dict[int, list[tuple[int, int, int]]]:
    """Return the pending uploads of nodes by stream, with the epoch of their range."""
    pending = list(_rows(reader.columns("pending_uploads"), "node_id", *_SPAN))
    concerned = {stream_id for _, stream_id, _, _ in pending}
    ranges = [
        row
        for row in _rows(reader.columns("ranges"), "node_id", *_SPAN, "epoch")
        if row[1] in concerned
    ]
    owed: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    for node_id, stream_id, start, end in pending:
        # The range that ends with the upload has the epoch of the owner that must upload it.
        epochs = [
            epoch
            for owner, of_stream, first, last, epoch in ranges
            if (owner, of_stream, last) == (node_id, stream_id, end) and first <= start
        ]
        owed[stream_id].append((start, end, max(epochs, default=-1)))

    return owed


def _links(objects: dict[str, Any]) -> dict[int, list[int]]:
    """Return the objects that each composite links. A linked object names it as its order."""
    links: dict[int, list[int]] = defaultdict(list)
    for object_id, state, composite_id in _rows(objects, "object_id", "state", "order_id"):
        if state == ObjectState.LINKED:
            links[composite_id].append(object_id)
    return dict(links)


def list_held(objects: Mapping[str, Any], ranges: Mapping[str, Any]) -> dict[int, list[Missing]]:
    """Return the ranges of all objects whose bytes the metadata needs, by object."""
    states = np.asarray(objects["state"])
    # Only these states promise that the bytes exist.
    needed = (states == ObjectState.COMMITTED) | (states == ObjectState.LINKED)
    held: dict[int, list[Missing]] = {
        object_id: [] for object_id in np.asarray(objects["object_id"])[needed].tolist()
    }
    for row in _rows(ranges, "object_id", "stream_id", "start_offset", "end_offset"):
        if row[0] in held:
            held[row[0]].append(Missing(*row))
    return held


def _rows(section: Mapping[str, Any], *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(np.asarray(section[name]).tolist() for name in names), strict=True)
