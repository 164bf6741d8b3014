"""A real controller over a log in memory, driven one call at a time.

Every write goes through the loop: decided, encoded, replayed, appended, committed, answered. States
that no request leads to come in as a checkpoint that is written and read again, or as records that
another leader is said to have replicated. Those may be states that no map of ours can be in:
records of another vocabulary say what one row is from now on, so between two of them streams lack
their range or objects their owner, and sizes are negative. The checks that refuse such states are
left out while they are loaded; `tests/metadata` tests them. Knows nothing of scenarios.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from streammeta.controller.lifecycle.broker_sessions import NodeState, Sessions, SupervisedNode
from streammeta.controller.metadata.api.requests import ReadRequest, WriteRequest
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.decisions.record_checks import RecordChecks
from streammeta.controller.metadata.registries import object_ranges
from streammeta.controller.metadata.sections import restore
from streammeta.controller.metadata.sections.frozen import FrozenMetadata
from streammeta.controller.metadata.sections.rules import SectionChecker
from streammeta.controller.quorum.messages import BatchKind
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import Record
from streammeta.controller.runtime.writer.controller import Answered, MetadataController
from tests.conformance.map_rows import MetadataRows
from tests.kit.memory_log import MemoryLog
from tests.kit.waiting import ManualClock

_CHECKS = (
    (SectionChecker, "check"),
    (RecordChecks, "check"),
    (restore, "check_ends"),
    (object_ranges, "check_apart"),
)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Leave the checks of what is loaded and replayed out."""
    with ExitStack() as patches:
        for owner, name in _CHECKS:
            patches.enter_context(patch.object(owner, name, lambda *_: None))
        yield


class LiveController:
    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock(0)
        self.controller = MetadataController(ClusterMetadata(), self.clock)
        self.log = MemoryLog(self.controller)
        self.controller.bind(self.log)
        self.log.lead()
        self._seen = len(self.log.batches)

    async def write(self, request: WriteRequest) -> Any:
        return (await self._committing(self.controller.write(request))).answer

    def commit(self) -> None:
        if self.log.committed < self.log.next_offset:
            self.log.commit()

    def judge(self, request: WriteRequest) -> tuple[Any, tuple[Record, ...]]:
        """Return the answer and the records the request would have now, changing nothing."""
        decision = self.controller.cluster_metadata.decide(
            request, self.clock.wall_ms(), self.log.next_offset
        )
        return decision.answer, decision.records

    async def read(self, request: ReadRequest) -> Any:
        return (await self._committing(self.controller.read(request))).answer

    async def _committing(self, call: Coroutine[Any, Any, Answered]) -> Answered:
        """Wait for a call, and commit meanwhile what it or a sweep beside it has appended."""
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.sleep(0)
            self.commit()
        return task.result()

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

    def freeze(self) -> FrozenMetadata:
        return self.controller.cluster_metadata.freeze()

    def rows(self) -> MetadataRows:
        return MetadataRows(self.freeze().sections())

    @contextmanager
    def edited(self) -> Iterator[MetadataRows]:
        """Give the map as rows; load them as they are when the block ends."""
        rows = self.rows()
        yield rows
        self.load(rows.sections())

    def replay(self, records: Sequence[Record]) -> None:
        """Take records in as a follower does, then lead again."""
        self.log.lose_leadership(truncate=False)
        with _unchecked():
            self.log.append([encode_records(records)], required_base_offset=self.log.next_offset)
            self.log.lead()

    def load(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        with _unchecked():
            self.log.load(ClusterMetadata.from_sections(sections, self.log.committed), self.clock)

    def reload(self) -> tuple[bytes, bytes]:
        """Write a checkpoint and load it; return the map's digest before and after."""
        before = self.freeze().digest()
        with _unchecked():
            self.log.load(self.controller.cluster_metadata, self.clock)
        return before, self.freeze().digest()


HEARD = SupervisedNode(0, 1)
SILENT = SupervisedNode(1, 1)
NODES = (HEARD, SILENT)
DEFAULT_WINDOW_MS = 30_000


class OverloadWorld:
    """Sessions on a time of their own, which runs on while the controller stands still."""

    def __init__(self, window_ms: int = DEFAULT_WINDOW_MS) -> None:
        self._sessions = Sessions(window_ms)
        self._now_ms = 0
        self._was_overloaded = False
        self._sessions.lead(self._now_ms)
        self._sessions.tick(self._now_ms, NODES)

    def advance(self, ms: int) -> None:
        """Let time pass, with the looks at the sessions that belong to it."""
        end_ms = self._now_ms + ms
        while self._now_ms < end_ms:
            self._now_ms = min(end_ms, self._now_ms + self._sessions.tick_ms)
            self._sessions.tick(self._now_ms, NODES)

    def overload(self) -> None:
        """Hear no node for so long that the controller doubts itself."""
        self._was_overloaded = True
        for node in NODES:
            self._sessions.heartbeat(node.node_id, node.node_epoch, self._now_ms)
        while not self._sessions.is_in_doubt:
            self.advance(self._sessions.tick_ms)

    def success(self) -> None:
        self._sessions.heartbeat(HEARD.node_id, HEARD.node_epoch, self._now_ms)

    def is_overload(self) -> bool:
        """Return whether the silent broker goes on unfenced."""
        if not self._was_overloaded:
            return False
        if self._sessions.is_in_doubt:
            return True
        ahead = copy.deepcopy(self._sessions)
        ahead.tick(self._now_ms + 1, NODES)
        return ahead.state(SILENT.node_id) is not NodeState.FENCED
