"""Histories of random requests after which every column of every section has held something.

Owns how they are made and what they left behind, entry by entry; judges nothing. A new column of
the map needs a request here that writes it, unless `RandomRequests` makes one already.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, TypeAlias

import numpy as np

from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity, column
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import FrozenCheckpoint
from tests.metadata.map_pair import Pair, recovering
from tests.metadata.random_requests import RandomRequests
from tests.metadata.small_world import upload

SEEDS = (22, 15, 0)
_REQUESTS = 150
_FREED_LAST = (NodeIdentity(3_000, 1), NodeIdentity(3_001, 1))
"""Nodes whose ids are free at the end of each history, whatever was drawn."""
_FENCED_LAST = NodeIdentity(3_002, 1)
"""A node that another recovers at the end of each history: only a newer process ends that."""
_DEPARTED_LAST = NodeIdentity(3_003, 1)
"""A node that has departed at the end of each history, and holds a set object."""
_FREED = (NodeIdentity(1_000, 1), NodeIdentity(1_001, 1))

Plain: TypeAlias = dict[str, dict[str, list[Any]]]


def plain(sections: Mapping[str, Mapping[str, Any]]) -> Plain:
    """Return sections as lists, which can be compared."""
    return {
        section: {
            name: values.tolist() if isinstance(values, np.ndarray) else list(values)
            for name, values in columns.items()
        }
        for section, columns in sections.items()
    }


def width(section: Mapping[str, Any]) -> int:
    return len(next(iter(section.values())))


def picked(section: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return a section of these rows, in this order."""
    return {
        name: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows]
        for name, values in section.items()
    }


def checkpoint(view: FrozenMetadata) -> tuple[SnapshotId, io.BytesIO]:
    """Return the checkpoint file of a view, and what it is a checkpoint of."""
    snapshot_id, file = SnapshotId(EndOffset(view.end_offset), Epoch(1)), io.BytesIO()
    point = SnapshotPoint(snapshot_id, ClusterId("c"), VoterSet())
    FrozenCheckpoint(point, view, bytes(16)).write(file)
    return snapshot_id, file


@dataclass(slots=True)
class History:
    """A map with all its entries still undoable."""

    pair: Pair = field(default_factory=Pair)
    ends: list[int] = field(default_factory=list)
    """End of the log before each entry, and behind the last."""
    states: list[Plain] = field(default_factory=list)
    """The sections at each of `ends`."""
    views: list[FrozenMetadata] = field(default_factory=list)
    """Views at each of `ends`."""

    def note(self) -> None:
        """Remember the map as it is now."""
        view = self.pair.map.freeze()
        self.ends.append(self.pair.map.applied_end_offset)
        self.views.append(view)
        self.states.append(plain(view.sections()))

    def write(self, request: Any) -> None:
        """Make a request, and remember what came of it if it changed anything."""
        self.pair.write(request)
        if self.pair.map.applied_end_offset > self.ends[-1]:
            self.note()

    def replay(self, *records: Record) -> None:
        """Replay an entry that no request decides, and remember what came of it."""
        offset, payload = self.pair.map.applied_end_offset, encode_records(records)
        self.pair.map.apply(offset, decode_records(payload))
        self.pair.log.append((offset, payload))
        self.note()


def history(seed: int) -> History:
    """Return a history of its own, to be undone or changed at will."""
    rng = Random(seed)
    requests, made = RandomRequests(rng), History()
    made.note()
    for request in _first_requests(requests, made.pair):
        made.pair.now += 1
        made.write(request)
    for _ in range(_REQUESTS):
        made.pair.now += rng.choice((1, 1, 50, 400))
        made.write(requests.any(made.pair.model))
    for request in _last_requests(made.pair):
        made.write(request)
    for node in _FREED_LAST:
        made.write(r.RegisterNode(node=node))
        made.write(r.UnregisterNode(node=node))
    made.write(r.SetFeatureLevel(level=SUPPORTED.highest))
    for record in _producer_records(made.pair.model.state.next_producer):
        made.replay(record)
    return made


def _producer_records(first_id: int) -> Iterator[Record]:
    """Have producers come, write more than is remembered, begin new epochs, and expire."""
    pairs = ((0, 900), (1, 7), (0, 8), (2, 2**40))
    yield rec.ProducerIdsIssued(first_producer_id=first_id, count=100)
    for number in range(1, 8):
        rows = [(*pair, 3, 10 * number, 10) for pair in pairs[:number]]
        yield batches(*rows, now_ms=5_000 + 10 * number)
    yield batches((0, 900, 4, 0, 1), (0, 900, 4, 1, 7), (1, 7, 3, 80, 2), now_ms=6_000)
    yield rec.ProducersExpired(stream_id=column([0]), producer_id=column([8]))
    yield rec.ProducerIdsIssued(first_producer_id=first_id + 100, count=2**33)


def batches(
    *rows: tuple[int, int, int, int, int], now_ms: int = 5_000
) -> rec.ProducerBatchesCommitted:
    """Return the record of batches: stream, producer, epoch, first sequence, record count."""
    streams, producers, epochs, firsts, counts = zip(*rows, strict=True)
    return rec.ProducerBatchesCommitted(
        committed_at_ms=now_ms,
        stream_id=column(streams),
        producer_id=column(producers),
        producer_epoch=column(epochs),
        first_sequence=column(firsts),
        record_count=column(counts),
        start_offset=column([now_ms + place for place in range(len(rows))]),
    )


def _last_requests(pair: Pair) -> Iterator[Any]:
    """Have a node depart that holds an object, and one be fenced that has lost uploads."""
    node, stream_id = _DEPARTED_LAST, pair.model.state.next_stream
    object_id = pair.model.state.next_object
    yield r.RegisterNode(node=node, process_id="last")
    yield r.CreateStreams(request_id="departed", node=node, streams=(r.NewStream(),))
    yield r.OpenStreams(node=node, streams=(r.StreamToOpen(stream_id, 1),))
    yield r.PrepareObjects(request_id="departed", node=node, count=1, ttl_ms=60_000)
    yield upload(object_id, (stream_id, 0, 5), node=node)
    yield r.CloseStreams(node=node, streams=(r.StreamToClose(stream_id, 1),))
    yield r.UnregisterNode(node=node)

    node, first = _FENCED_LAST, pair.model.state.next_stream
    yield r.RegisterNode(node=node, process_id="last", tags=(("rack", "b"),))
    yield r.CreateStreams(request_id="lost", node=node, streams=(r.NewStream(), r.NewStream()))
    both = (first, first + 1)
    yield r.OpenStreams(node=node, streams=tuple(r.StreamToOpen(stream, 1) for stream in both))
    closed = tuple(r.StreamToClose(stream_id, 1, end_offset=5) for stream_id in both)
    yield r.CloseStreams(node=node, streams=closed)
    yield r.AbandonUploads(node_id=node.node_id, stream_ids=(first,), close_streams_of_epoch=1)
    yield r.AbandonUploads(node_id=node.node_id)

    again = NodeIdentity(node.node_id, 2)
    yield r.RegisterNode(node=again)
    yield r.OpenStreams(node=again, streams=(r.StreamToOpen(first, 2),))
    yield r.ReleaseStreams(node=again)
    yield r.GetOpeningStreams(node=again, failover=True)


def _first_requests(requests: RandomRequests, pair: Pair) -> Iterator[Any]:
    for node in _FREED:
        yield r.GetNextNodeId(request_id=f"next {node.node_id}")
        yield r.RegisterNode(node=node)
    for node in _FREED:
        yield r.UnregisterNode(node=node)
    yield from requests.start(pair.model)


def recovering_views() -> list[FrozenMetadata]:
    """Return views of maps in recovery mode, which no history comes to by requests."""
    (last, *_) = histories()
    view = last.views[-1]
    next_id = last.pair.map.next_object_id
    windows = ((next_id - 3, next_id + 20), (next_id, next_id + 9))
    return [
        ClusterMetadata.from_sections(recovering(view.sections(), window), view.end_offset).freeze()
        for window in windows
    ]


def histories() -> tuple[History, ...]:
    """Return the histories of all seeds, made once; they must not be changed."""
    return tuple(map(shared_history, SEEDS))


shared_history = cache(history)
"""Return the history of a seed, made once; it must not be changed."""
