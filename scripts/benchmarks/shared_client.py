"""Commits to shared streams, unary, with and without idempotent producers.

As in `streammeta_client`, but the rows have counts instead of offsets, and the commit assigns the
offsets. Each stream has one batch in a commit.
"""

import time
from typing import ClassVar

from scripts.benchmarks.committer import OBJECT_BYTES, STEP, Connected, Load, id_column
from scripts.benchmarks.protobuf_bytes import length_delimited, number
from scripts.benchmarks.streammeta_client import (
    BATCH_MAX,
    NODE,
    PreparedIds,
    call,
    register_node,
    require,
)
from streammeta.controller.features import SUPPORTED
from streammeta.v1 import admin_pb2, common_pb2, objects_pb2, streams_pb2


class SharedCommitter(Connected):
    """CommitStreamSetObject with shared rows, one call for each commit."""

    is_idempotent: ClassVar[bool] = False
    _CONSTANT = objects_pb2.CommitStreamSetObjectRequest(
        node=NODE, object_size=OBJECT_BYTES, on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL
    ).SerializeToString()

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._columns: list[bytes] = []
        self._sequences = [0] * load.in_flight

    async def open(self) -> None:
        """Raise the level, register the node, create the streams, prepare the objects."""
        await super().open()
        level = admin_pb2.UpdateFeatureLevelRequest(level=SUPPORTED.highest)
        await register_node(self._connection)
        path, answer = "AdminService/UpdateFeatureLevel", admin_pb2.UpdateFeatureLevelResponse
        await call(self._connection, path, level, answer)

        self._prepared = PreparedIds(self._connection)
        ids: list[int] = []
        while (missing := self._load.ranges * self._load.in_flight - len(ids)) > 0:
            ids += await self._create(min(BATCH_MAX, missing))
        size = self._load.ranges
        self._columns = [
            self._constant_columns(sorted(ids[at : at + size])) for at in range(0, len(ids), size)
        ]
        await self._prepared.fetch(self._load.objects)

    async def commit(self, slot: int) -> None:
        """Make the next commit of a slot."""
        object_id = await self._prepared.next()
        rows = self._columns[slot]
        if self.is_idempotent:
            sequences = id_column([self._sequences[slot]] * self._load.ranges)
            rows += length_delimited(5, sequences)
        request = (self._CONSTANT, number(3, object_id), length_delimited(18, rows))
        path = "/streammeta.v1.ObjectService/CommitStreamSetObject"
        received = await self._connection.call(path, b"".join(request))
        answer = objects_pb2.CommitStreamSetObjectResponse.FromString(received)
        require(answer.error, "CommitStreamSetObject")
        self._sequences[slot] += STEP

    def _constant_columns(self, ids: list[int]) -> bytes:
        """Return the fields of SharedRowColumns that are the same in each commit of a slot."""
        counts = length_delimited(2, id_column([STEP] * len(ids)))
        columns = length_delimited(1, id_column(ids)) + counts
        if self.is_idempotent:
            epochs = length_delimited(4, id_column([0] * len(ids)))
            columns += length_delimited(3, id_column(ids)) + epochs
        return columns

    async def _create(self, count: int) -> list[int]:
        request = streams_pb2.CreateStreamsRequest(
            request_id=f"bench-{time.monotonic_ns()}",
            node=NODE,
            streams=[streams_pb2.NewStream(shared=True)] * count,
        )
        path, response = "StreamService/CreateStreams", streams_pb2.CreateStreamsResponse
        created = await call(self._connection, path, request, response)
        require(created.error, "CreateStreams")
        return list(created.stream_ids)


class IdempotentCommitter(SharedCommitter):
    """The same with an idempotent producer for each stream."""

    is_idempotent = True
