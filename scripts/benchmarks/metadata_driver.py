"""Metadata driven as a controller's loop drives it, without the rest of a controller.

Fills the metadata with streams and objects, and makes commits and reads. Callers measure the times.
"""

from typing import Any

import numpy as np

from scripts.benchmarks.committer import OBJECT_BYTES, STEP, LoadError
from streammeta.controller.errors import ErrorCode
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.api.requests import (
    CommitStreamSetObject,
    CreateStreams,
    GetObjects,
    NewStream,
    OpenStreams,
    PrepareObjects,
    RegisterNode,
    StreamToOpen,
    WriteRequest,
)
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import (
    NodeIdentity,
    RangeColumns,
    StreamObjectColumns,
    column,
)
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.records.codec import encode_records
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import FrozenCheckpoint
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH

NODE = NodeIdentity(1_000, 1)
BATCH_MAX = 10_000
NOW_MS = 1_700_000_000_000
TOPIC = ("topic", "orders")
TTL_MS = 7 * 24 * 3_600_000


class MetadataDriver:
    """Metadata of one node's streams."""

    def __init__(self, ids_at_a_time: int = BATCH_MAX) -> None:
        """Make empty metadata. `ids_at_a_time` are the object ids that one request prepares."""
        self.metadata = ClusterMetadata()
        self._ids_at_a_time = ids_at_a_time
        self.now_ms = NOW_MS
        self.entries: list[tuple[int, bytes]] | None = None
        """Offset and payload of each log entry, while they are recorded."""
        self._requests = 0
        self._prepared: list[int] = []
        self._end_offsets = np.zeros(0, dtype=np.int64)

    def write(self, request: WriteRequest) -> Any:
        """Decide, encode and apply a request as one log entry, which is committed at once."""
        offset = self.metadata.applied_end_offset
        decision = self.metadata.decide(request, self.now_ms, offset)
        if decision.records:
            payload = encode_records(decision.records)
            if self.entries is not None:
                self.entries.append((offset, payload))
            self.metadata.apply(offset, decision.records)
            self.metadata.forget_undo(offset + 1)
        return decision.answer

    def add_tagged_streams(self, count: int) -> None:
        """Create streams with a common tag and one of their own. Their ids are 0 and up."""
        self.write(RegisterNode(node=NODE))
        for first in range(0, count, BATCH_MAX):
            ids = range(first, min(first + BATCH_MAX, count))
            new = tuple(NewStream((("partition", f"{number}"), TOPIC)) for number in ids)
            self.write(CreateStreams(request_id=self._request_id(), node=NODE, streams=new))

    def add_streams(self, count: int) -> None:
        """Create and open streams. Their ids are 0 and up."""
        if not len(self._end_offsets):
            self.write(RegisterNode(node=NODE))
        for first in range(0, count, BATCH_MAX):
            new = (NewStream(),) * min(BATCH_MAX, count - first)
            request = CreateStreams(request_id=self._request_id(), node=NODE, streams=new)
            created = self.write(request)
            opened = tuple(StreamToOpen(stream_id, 1) for stream_id in created.stream_ids)
            self.write(OpenStreams(node=NODE, streams=opened))
        self._end_offsets = np.zeros(len(self._end_offsets) + count, dtype=np.int64)

    def add_stream_objects(self, count: int) -> None:
        """Commit a stream object of one range to each of the first `count` streams."""
        for first in range(0, count, BATCH_MAX):
            batch = min(BATCH_MAX, count - first)
            ends = self._end_offsets[first : first + batch]
            columns = StreamObjectColumns(
                object_id=column(self.take_ids(batch)),
                object_size=column([OBJECT_BYTES] * batch),
                stream_id=column(np.arange(first, first + batch, dtype=np.int64)),
                stream_epoch=column([1] * batch),
                start_offset=column(ends.copy()),
                end_offset=column(ends + STEP),
            )
            self.commit(
                CommitStreamSetObject(
                    node=NODE, object_id=-1, order_id=-1, object_size=0, stream_objects=columns
                )
            )
            ends += STEP

    def upload(self, first: int, ranges: int) -> CommitStreamSetObject:
        """Return the commit of an SSO with the next range of streams `first` and up."""
        (object_id,) = self.take_ids(1)
        ends = self._end_offsets[first : first + ranges]
        columns = RangeColumns(
            stream_id=column(np.arange(first, first + ranges, dtype=np.int64)),
            stream_epoch=column(np.ones(ranges, dtype=np.int64)),
            start_offset=column(ends.copy()),
            end_offset=column(ends + STEP),
        )
        ends += STEP

        return CommitStreamSetObject(
            node=NODE,
            object_id=object_id,
            order_id=object_id,
            object_size=OBJECT_BYTES,
            ranges=columns,
        )

    def commit(self, request: CommitStreamSetObject) -> None:
        """Make a commit. Raises `LoadError` if it is rejected."""
        answer = self.write(request)
        if answer.error != ErrorCode.NONE:
            raise LoadError(f"a commit was answered with error {answer.error!r}: {answer}")

    def read(self, stream_id: int, start_offset: int, limit: int) -> Any:
        """Return the answer of GetObjects to one query."""
        query = ObjectQuery(stream_id, start_offset, -1, limit)
        return self.metadata.query(GetObjects(queries=(query,)))

    def freeze(self, cluster_id: str = "bench") -> FrozenCheckpoint:
        """Return a checkpoint of the present metadata, to be written."""
        name = SnapshotId(EndOffset(self.metadata.applied_end_offset), Epoch(1))
        point = SnapshotPoint(name, ClusterId(cluster_id), VoterSet(()))
        return FrozenCheckpoint(point, self.metadata.freeze(), EMPTY_LOG_HASH)

    def take_ids(self, count: int) -> list[int]:
        """Return prepared object ids that were not used before, ascending."""
        while len(self._prepared) < count:
            request = PrepareObjects(
                request_id=self._request_id(), node=NODE, count=self._ids_at_a_time, ttl_ms=TTL_MS
            )
            first = self.write(request).first_object_id
            # The next id is the last of the list, since lists are slow at their beginning.
            self._prepared = [
                *range(first + self._ids_at_a_time - 1, first - 1, -1),
                *self._prepared,
            ]
        ids, self._prepared = self._prepared[-count:][::-1], self._prepared[:-count]
        return ids

    def _request_id(self) -> str:
        self._requests += 1
        return f"bench-{self._requests}"
