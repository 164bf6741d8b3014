"""A map driven as a controller's loop drives it, without the rest of a controller.

Fills a map with streams and objects, and makes commits and reads on it. Times are the caller's.
"""

from typing import Any

import numpy as np

from scripts.benchmarks.committer import OBJECT_BYTES, STEP, LoadError
from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.requests import (
    CommitStreamSetObject,
    CreateStreams,
    GetObjects,
    NewStream,
    ObjectQuery,
    OpenStreams,
    PrepareObjects,
    RegisterNode,
    StreamToOpen,
    WriteRequest,
)
from streammeta.controller.metadata.values import (
    NodeIdentity,
    RangeColumns,
    StreamObjectColumns,
    column,
)
from streammeta.controller.records.codec import encode_records

NODE = NodeIdentity(1_000, 1)
BATCH_MAX = 10_000
NOW_MS = 1_700_000_000_000
TTL_MS = 3_600_000


class MapDriver:
    """A map of one node's streams."""

    def __init__(self, cluster_map: ClusterMap) -> None:
        self.map = cluster_map
        self._requests = 0
        self._prepared: list[int] = []
        self._end_offsets = np.zeros(0, dtype=np.int64)

    def write(self, request: WriteRequest) -> Any:
        """Decide, encode and apply as one log entry, which is committed at once."""
        offset = self.map.applied_end_offset
        decision = self.map.decide(request, NOW_MS, offset)
        if decision.records:
            encode_records(decision.records)
            self.map.apply(offset, decision.records)
            self.map.forget_undo(offset + 1)
        return decision.answer

    def add_streams(self, count: int) -> None:
        """Create and open streams; their ids are 0 and up."""
        if not len(self._end_offsets):
            self.write(RegisterNode(node=NODE))
        for first in range(0, count, BATCH_MAX):
            batch = min(BATCH_MAX, count - first)
            created = self.write(
                CreateStreams(
                    request_id=self._request_id(), node=NODE, streams=(NewStream(),) * batch
                )
            )
            opened = tuple(StreamToOpen(stream_id, 1) for stream_id in created.stream_ids)
            self.write(OpenStreams(node=NODE, streams=opened))
        self._end_offsets = np.zeros(len(self._end_offsets) + count, dtype=np.int64)

    def add_stream_objects(self, count: int) -> None:
        """Commit a stream object of one range to each of the first `count` streams."""
        for first in range(0, count, BATCH_MAX):
            batch = min(BATCH_MAX, count - first)
            streams = np.arange(first, first + batch, dtype=np.int64)
            ends = self._end_offsets[first : first + batch]
            self._require(
                CommitStreamSetObject(
                    node=NODE,
                    object_id=-1,
                    order_id=-1,
                    object_size=0,
                    stream_objects=StreamObjectColumns(
                        object_id=column(self._take_ids(batch)),
                        object_size=column([OBJECT_BYTES] * batch),
                        stream_id=column(streams),
                        stream_epoch=column([1] * batch),
                        start_offset=column(ends.copy()),
                        end_offset=column(ends + STEP),
                    ),
                )
            )
            ends += STEP

    def upload(self, first: int, ranges: int) -> CommitStreamSetObject:
        """Return the commit of a set object with the next range of streams `first` and up."""
        object_id = self._take_ids(1)[0]
        streams = np.arange(first, first + ranges, dtype=np.int64)
        ends = self._end_offsets[first : first + ranges]
        request = CommitStreamSetObject(
            node=NODE,
            object_id=object_id,
            order_id=object_id,
            object_size=OBJECT_BYTES,
            ranges=RangeColumns(
                stream_id=column(streams),
                stream_epoch=column(np.ones(ranges, dtype=np.int64)),
                start_offset=column(ends.copy()),
                end_offset=column(ends + STEP),
            ),
        )
        ends += STEP
        return request

    def read(self, stream_id: int, start_offset: int, limit: int) -> Any:
        """Return what GetObjects answers to one query."""
        return self.map.query(
            GetObjects(queries=(ObjectQuery(stream_id, start_offset, -1, limit),))
        )

    def commit(self, request: CommitStreamSetObject) -> None:
        """Make a commit that `upload` returned."""
        self._require(request)

    def _require(self, request: CommitStreamSetObject) -> None:
        error = self.write(request).error
        if error != ErrorCode.NONE:
            raise LoadError(f"the map answered a commit with error {error!r}")

    def _take_ids(self, count: int) -> list[int]:
        while len(self._prepared) < count:
            answer = self.write(
                PrepareObjects(
                    request_id=self._request_id(), node=NODE, count=BATCH_MAX, ttl_ms=TTL_MS
                )
            )
            first = answer.first_object_id
            self._prepared = [*range(first + BATCH_MAX - 1, first - 1, -1), *self._prepared]
        ids, self._prepared = self._prepared[-count:][::-1], self._prepared[:-count]
        return ids

    def _request_id(self) -> str:
        self._requests += 1
        return f"bench-{self._requests}"
