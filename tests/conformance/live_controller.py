"""A real controller over a log in memory, driven one call at a time.

Every write goes through the loop: decided, encoded, replayed, appended, committed, answered. States
that no request leads to come in as a checkpoint that is written and read again, or as records that
another leader is said to have replicated. Knows nothing of scenarios.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.frozen import FrozenMap
from streammeta.controller.metadata.requests import ReadRequest, WriteRequest
from streammeta.controller.quorum.messages import BatchKind
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record
from streammeta.controller.runtime.controller import MetadataController
from tests.conformance.unchecked import unchecked
from tests.kit.clock import ManualClock
from tests.kit.memory_log import MemoryLog

Answered = TypeVar("Answered")


class LiveController:
    """One leading controller."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.controller = MetadataController(ClusterMap(), clock)
        self.log = MemoryLog(self.controller)
        self.controller.bind(self.log)
        self.log.lead()
        self._seen = len(self.log.batches)

    async def write(self, request: WriteRequest) -> Any:
        """Return the answer once it is committed."""
        return await self.settle(self.controller.write(request))

    async def settle(self, work: Any) -> Any:
        """Run work that writes to the log, committing what it appends until it is done."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            if self.log.committed < self.log.next_offset:
                self.log.commit()
        return (await task).answer if hasattr(task.result(), "answer") else task.result()

    def judge(self, request: WriteRequest) -> tuple[Any, tuple[Record, ...]]:
        """Return the answer and the records the request would have now, changing nothing."""
        decision = self.controller.cluster_map.decide(
            request, self.clock.wall_ms(), self.log.next_offset
        )
        return decision.answer, decision.records

    async def read(self, request: ReadRequest) -> Any:
        """Return the answer to a linearizable read."""
        return (await self.controller.read(request)).answer

    def take_records(self) -> tuple[Record, ...]:
        """Return the records appended since the last call, as they are read from the log."""
        fresh = [batch for batch in self.log.batches[self._seen :] if batch.kind is BatchKind.DATA]
        self._seen = len(self.log.batches)
        return tuple(
            record
            for batch in fresh
            for payload in batch.payloads
            for record in decode_records(payload)
        )

    def freeze(self) -> FrozenMap:
        """Return the map as it is now."""
        return self.controller.cluster_map.freeze()

    def replay(self, records: Sequence[Record]) -> None:
        """Take records in as a follower does, then lead again."""
        self.log.lose_leadership(truncate=False)
        with unchecked():
            self.log.append([encode_records(records)], required_base_offset=self.log.next_offset)
            self.log.lead()

    def load(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Put a map with these sections in the place of the present one."""
        with unchecked():
            self._load(ClusterMap.from_sections(sections, self.log.committed))

    def reload(self) -> tuple[bytes, bytes]:
        """Write a checkpoint and load it; return the map's digest before and after."""
        before = self.freeze().digest()
        with unchecked():
            self._load(self.controller.cluster_map)
        return before, self.freeze().digest()

    def _load(self, cluster_map: ClusterMap) -> None:
        # A checkpoint is made by a controller whose map it is.
        source = MetadataController(cluster_map, self.clock)
        source.bind(self.log)
        self.log.lose_leadership(truncate=False)
        point = self.log.snapshot_point()
        file = BytesIO()
        source.freeze(point)(file)
        file.seek(0)
        self.controller.load(file, point.snapshot_id)()
        self.log.lead()
