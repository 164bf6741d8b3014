"""The task of a broker that keeps the stream objects of its streams few, large and alive.

Owns the memory of when each stream had its turn; when the next is due, `stream_schedule` says. One
stream is compacted at a time, so the memory that it takes is that of one compaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor, has_work
from streammeta.client.compaction.stream_object_listing import ListedStream
from streammeta.client.compaction.stream_object_report import StreamReport
from streammeta.client.errors import BrokerClientError, NodeFencedError, NodeNotRegisteredError
from streammeta.storage.compaction.stream_objects import (
    StreamCompaction,
    StreamSchedule,
    StreamTurns,
    after_turn,
    due_kind,
    first_turns,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a stream: its epoch, its turns, and where it started when cleaned up.

    That is None if it was not yet, or if its last turn failed.
    """

    epoch: int
    turns: StreamTurns
    start_offset: int | None = None


class StreamObjectLoop:
    """Compacts the streams of one node for as long as it runs.

    `on_report` hears of every compaction that changed something or could not be done.
    """

    def __init__(
        self,
        compactor: StreamObjectCompactor,
        schedule: StreamSchedule | None = None,
        on_report: Callable[[StreamReport], None] = lambda _report: None,
    ) -> None:
        self._compactor = compactor
        self._schedule = schedule or StreamSchedule()
        self._on_report = on_report
        self._known: dict[int, _Known] = {}

    async def run(self) -> None:
        """Look at all streams every interval, until cancelled.

        Raises what bars the node; what fails for any other reason is tried again at the next look.
        """
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                async for report in self.look(begun):
                    self._on_report(report)
            except (NodeFencedError, NodeNotRegisteredError):
                raise
            except BrokerClientError as error:
                _log.warning("stream objects were not compacted, it is tried again: %s", error)
            await asyncio.sleep(max(0.0, begun + self._schedule.interval_s - loop.time()))

    async def look(self, now_s: float) -> AsyncIterator[StreamReport]:
        """Give every stream the turn that is due at `now_s`; yield what came of it."""
        seen: dict[int, _Known] = {}
        async for stream in self._compactor.owned_streams():
            known = self._recognised(stream, now_s)
            kind = due_kind(known.turns, now_s, self._schedule)
            report = await self._turn(stream, known, kind)
            if kind is not None:
                known = self._after(stream, known, kind, report, now_s)
            seen[stream.stream_id] = self._known[stream.stream_id] = known
            if report is not None:
                yield report
        self._known = seen

    def _recognised(self, stream: ListedStream, now_s: float) -> _Known:
        """Return what is known of a stream; one that was opened again is a new one."""
        known = self._known.get(stream.stream_id)
        if known is None or known.epoch != stream.epoch:
            turns = first_turns(stream.stream_id, now_s, self._schedule)
            known = _Known(stream.epoch, turns)
        return known

    def _after(
        self,
        stream: ListedStream,
        known: _Known,
        kind: StreamCompaction,
        report: StreamReport | None,
        now_s: float,
    ) -> _Known:
        start = known.start_offset
        if report is not None and report.error is not None:
            start = None
        elif kind is self._schedule.kinds[0]:
            start = stream.start_offset
        return _Known(known.epoch, after_turn(known.turns, kind, now_s, self._schedule), start)

    async def _turn(
        self, stream: ListedStream, known: _Known, kind: StreamCompaction | None
    ) -> StreamReport | None:
        """Compact, unless it is plain that nothing would come of it."""
        if kind is None or not has_work(stream, kind):
            return None
        every_look = self._schedule.kinds[0]
        if kind is every_look and stream.start_offset == known.start_offset:
            return None  # what is done at every look, only a trim makes necessary
        report = await self._compactor.compact_listed(stream, kind)
        is_news = report.has_changed or report.left_out or report.error is not None
        return report if is_news else None
