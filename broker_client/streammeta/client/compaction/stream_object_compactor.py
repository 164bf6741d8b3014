"""Compaction of the stream objects of streams: one stream and one kind at a time.

Owns the order of the steps: list, remove expired objects, then load, write and commit each group.
It also owns the turns of each stream. Each group has its own commit, so a later failure does not
undo it. An unreadable object is left out of its group. Nothing is deleted here: uncommitted objects
expire, and the controllers delete replaced ones. `shared_streams` chooses the node of a stream
without an owner.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from streammeta.client.compaction.commit import StreamReplacement, commit
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.listing import ListedRange, ListedStream
from streammeta.client.compaction.report import GroupReport, OutputObject, SourceError
from streammeta.client.compaction.runner import FENCED, Compactor, repeat, wall_ms
from streammeta.client.compaction.shared_streams import SharedStreams
from streammeta.client.compaction.stream_object_output import StreamObjectOutput
from streammeta.client.compaction.stream_object_sources import Source, SourceLoader
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import (
    BrokerClientError,
    CompactedObjectsNotFoundError,
    ObjectExpiredError,
    StreamNotFoundError,
)
from streammeta.client.model import NodeIdentity
from streammeta.client.nodes.session import BrokerSession
from streammeta.client.writing.object_ids import ObjectIds
from streammeta.storage.compaction.stream_objects import (
    Group,
    StreamCompaction,
    StreamPlan,
    StreamSchedule,
    StreamTurns,
    after_turn,
    cut_groups,
    due_kind,
    first_turns,
    is_worth_compacting,
    may_have_work,
    plan_stream,
)
from streammeta.storage.errors import StorageError, WrongBucketError
from streammeta.storage.object_store.protocol.base import ObjectStore

ALL_AT_ONCE = (
    StreamCompaction.PRUNE_LINKS,
    StreamCompaction.GATHER_SMALL,
    StreamCompaction.LINK,
)
"""Kinds of a complete compaction of a stream, in order."""

SHARED_INTERVAL_S = 600.0
"""On schedule, the shared streams that the node compacts are looked up once in this time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """A stream's epoch, its turns, and its start at the last clean-up.

    The start is None before the first clean-up, and after a failed turn.
    """

    epoch: int
    turns: StreamTurns
    start_offset: int | None = None


class StreamObjectCompactor(Compactor):
    """Compacts in the name of `writer`, the process that owns the streams. See `Compactor`.

    Any process may compact shared streams. One stream is compacted at a time, so memory is limited
    to one compaction. `now_ms` returns the time, in ms since 1970.
    """

    def __init__(
        self,
        client: ControllerClient,
        writer: NodeIdentity,
        namespace: str,
        store: ObjectStore,
        config: CompactionConfig | None = None,
        *,
        is_busy: Callable[[], bool] | None = None,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        super().__init__(client, writer, namespace, store, config, is_busy=is_busy)
        session = BrokerSession(client, writer, namespace)
        self._ids = ObjectIds(session, self._config.stream_object_id_ttl_s)
        self._loader = SourceLoader(self._calls, self._key_of, self._config)
        self._output = StreamObjectOutput(self._calls, self._key_of, self._config)
        self._known: dict[int, _Known] = {}
        self._shared = SharedStreams(client, now_ms)
        self._own_shared: list[int] = []
        self._shared_due_s = float("-inf")

    async def plan(self, stream_id: int, kind: StreamCompaction) -> StreamPlan:
        """Return the current plan of a stream, changing nothing."""
        return await self._plan(await self._listing.stream(stream_id), kind)

    async def compact(self, stream_id: int, kind: StreamCompaction) -> GroupReport:
        """Compact the objects of a stream.

        Raises errors that fence the node (`NodeFencedError`, `NodeNotRegisteredError`) or reject
        the bucket (`streammeta.storage.errors.WrongBucketError`), and `StreamNotFoundError`. Any
        other failure ends the compaction of this stream and is in the report.
        """
        return await self._compact_listed(await self._listing.stream(stream_id), kind)

    async def compact_node(
        self, kinds: Sequence[StreamCompaction] = ALL_AT_ONCE
    ) -> AsyncGenerator[GroupReport, None]:
        """Compact the streams that the node owns and its shared ones, with each kind in turn.

        Yields the reports with changes or failures. Raises as `compact`.
        """
        streams = self._list_with(await self._shared.of_node(self._writer.node_id))
        async with aclosing(self._compact_all(streams, kinds)) as reports:
            async for report in reports:
                yield report

    async def compact_shared(
        self, kinds: Sequence[StreamCompaction] = ALL_AT_ONCE
    ) -> AsyncGenerator[GroupReport, None]:
        """Compact all shared streams of the cluster. See `compact_node`."""
        streams = self._listing.list_streams(await self._shared.all())
        async with aclosing(self._compact_all(streams, kinds)) as reports:
            async for report in reports:
                yield report

    async def _compact_all(
        self, streams: AsyncIterator[ListedStream], kinds: Sequence[StreamCompaction]
    ) -> AsyncGenerator[GroupReport, None]:
        async for stream in streams:
            for kind in kinds:
                if not _may_have_work(stream, kind):
                    continue
                report = await self._compact_listed(stream, kind)
                if report.says_anything:
                    yield report
                if report.was_overtaken:
                    break
                if report.has_changed:
                    try:
                        stream = await self._listing.stream(stream.stream_id)  # noqa: PLW2901
                    except StreamNotFoundError:
                        break

    # -- on schedule

    async def run(
        self,
        schedule: StreamSchedule | None = None,
        on_report: Callable[[GroupReport], None] = lambda _: None,
    ) -> None:
        """Look at all streams of `compact_node` every interval of `schedule`, until cancelled.

        Raises errors that fence the node or reject the bucket. Other failures are retried.
        """
        chosen = schedule or StreamSchedule()

        async def cycle(now_s: float) -> None:
            async for report in self.look(now_s, chosen):
                on_report(report)

        await repeat(chosen.interval_s, cycle)

    async def look(self, now_s: float, schedule: StreamSchedule) -> AsyncIterator[GroupReport]:
        """Run each stream's turn that is due at `now_s`. Yield reports with changes or failures."""
        seen: dict[int, _Known] = {}
        # The look-up reads all streams of the cluster, which is too much for every look.
        if now_s >= self._shared_due_s:
            self._own_shared = await self._shared.of_node(self._writer.node_id)
            self._shared_due_s = now_s + SHARED_INTERVAL_S
        async for stream in self._list_with(self._own_shared):
            known = self._known.get(stream.stream_id)
            # A stream that was opened again counts as a new one.
            if known is None or known.epoch != stream.epoch:
                known = _Known(stream.epoch, first_turns(stream.stream_id, now_s, schedule))

            # Streams take their turns at different times, which spreads the load.
            kind = due_kind(known.turns, now_s, schedule)
            report = None
            if kind is not None:
                report = await self._turn(stream, known, kind, schedule)
                start = known.start_offset
                if report is not None and report.error is not None:
                    start = None
                elif kind is schedule.kinds[0]:
                    start = stream.start_offset
                turns = after_turn(known.turns, kind, now_s, schedule)
                known = _Known(known.epoch, turns, start)
            seen[stream.stream_id] = self._known[stream.stream_id] = known
            if report is not None and report.says_anything:
                yield report
        # Streams that are no longer owned are forgotten.
        self._known = seen

    async def _list_with(self, shared: Sequence[int]) -> AsyncIterator[ListedStream]:
        """List the streams that the node owns, then these shared streams."""
        async for stream in self._listing.list_owned(self._writer.node_id):
            yield stream
        async for stream in self._listing.list_streams(shared):
            yield stream

    async def _turn(
        self, stream: ListedStream, known: _Known, kind: StreamCompaction, schedule: StreamSchedule
    ) -> GroupReport | None:
        """Compact, unless it could not change anything."""
        is_every_look = kind is schedule.kinds[0]
        if is_every_look and stream.start_offset == known.start_offset:
            return None  # this kind has new work only after a trim
        return await self._compact_listed(stream, kind) if _may_have_work(stream, kind) else None

    # -- one stream

    async def _compact_listed(self, stream: ListedStream, kind: StreamCompaction) -> GroupReport:
        started = time.monotonic()
        report = GroupReport(kind, stream.stream_id)
        try:
            plan = await self._plan(stream, kind)
            # First: expired objects need no bytes to be moved.
            await self._remove(stream, plan.expired, report)
            for group in plan.groups:
                await self._compact_group(stream, plan, group, report)
        except (*FENCED, WrongBucketError):
            raise
        except (BrokerClientError, StorageError) as error:
            self._end_early(stream, error, report)

        report.seconds = time.monotonic() - started
        return report

    def _end_early(self, stream: ListedStream, error: Exception, report: GroupReport) -> None:
        if stream.is_shared and isinstance(error, CompactedObjectsNotFoundError):
            # Its new objects are for the next cycle.
            _log.info("another node has compacted stream %d: %s", stream.stream_id, error)
            report.was_overtaken = True
            return
        if isinstance(error, ObjectExpiredError):
            self._ids.discard()
        _log.warning("compaction of stream %d ended early: %s", stream.stream_id, error)
        report.fail(error)

    async def _plan(self, stream: ListedStream, kind: StreamCompaction) -> StreamPlan:
        await self._bucket.require()
        objects = await self._listing.stream_objects(_select_objects(stream, kind))
        return plan_stream(objects, stream.start_offset, kind, self._config.group_rules[kind])

    async def _remove(self, stream: ListedStream, expired: Group, report: GroupReport) -> None:
        batch = self._config.expired_batch
        for at in range(0, len(expired), batch):
            objects = expired[at : at + batch]
            await self._commit(StreamReplacement(self._writer, stream, objects), report)
            report.removed_ids.extend(removed.object_id for removed in objects)

    async def _compact_group(
        self, stream: ListedStream, plan: StreamPlan, group: Group, report: GroupReport
    ) -> None:
        """Replace a group with one object, or several if some of it is unusable or too large."""
        rules = self._config.group_rules[plan.kind]
        # A group may be split several times before all of its parts are usable.
        waiting = deque([group])
        while waiting:
            objects = waiting.popleft()
            if not is_worth_compacting(objects, plan.kind, plan.stream_start, rules):
                continue

            loaded = await self._loader.load(stream.stream_id, objects, report.figures)
            if loaded.rest:
                waiting.append(loaded.rest)

            sources = {source.listed.object_id: source for source in loaded.sources}
            unusable = dict(loaded.unusable)
            for part in cut_groups([source.listed for source in loaded.sources], rules):
                if is_worth_compacting(part, plan.kind, plan.stream_start, rules):
                    chosen = [sources[object_.object_id] for object_ in part]
                    try:
                        await self._replace(stream, plan, chosen, report)
                    except SourceError as error:
                        unusable[error.object_id] = error.reason
                        usable = [
                            object_ for object_ in part if object_.object_id != error.object_id
                        ]
                        waiting.extend(cut_groups(usable, rules))
            for object_id, reason in unusable.items():
                _log.warning("object %d is left out of compaction: %s", object_id, reason)
            report.left_out.update(unusable)

    async def _replace(
        self,
        stream: ListedStream,
        plan: StreamPlan,
        sources: Sequence[Source],
        report: GroupReport,
    ) -> None:
        """Write one object from the sources and commit it."""
        composite, start, moved = plan.kind.is_composite, plan.stream_start, report.figures
        links = (
            [link for source in sources for link in source.live_links(start)] if composite else []
        )
        is_pruning = plan.kind is StreamCompaction.PRUNE_LINKS
        if is_pruning and len(links) == sum(len(source.links) for source in sources):
            return  # the trimmed offsets are a part of objects that are still needed

        (object_id,) = (await self._ids.take(1)).ids
        if composite:
            output = await self._output.link(object_id, links, moved)
        else:
            output = await self._output.merge(object_id, sources, start, moved)
        listed = [source.listed for source in sources]
        replacement = StreamReplacement(self._writer, stream, listed, output, composite)
        await self._commit(replacement, report)
        source_ids = tuple(object_.object_id for object_ in listed)
        range_ = output.ranges[0]
        report.made.append(
            OutputObject(object_id, output.written.size, source_ids, range_, composite)
        )

    async def _commit(self, replacement: StreamReplacement, report: GroupReport) -> None:
        await commit(self._client, replacement, self._config.commit_deadline_s)
        report.figures.commits += 1
        report.source_ids.extend(source.object_id for source in replacement.sources)


def _may_have_work(stream: ListedStream, kind: StreamCompaction) -> bool:
    """Return whether a compaction could change anything, by the listed offsets."""
    spans = [(object_.start_offset, object_.end_offset) for object_ in stream.objects]
    return may_have_work(kind, stream.start_offset, spans)


def _select_objects(stream: ListedStream, kind: StreamCompaction) -> Sequence[ListedRange]:
    """Return the objects of which a kind needs more than their offsets."""
    if kind not in (StreamCompaction.REMOVE_EXPIRED, StreamCompaction.PRUNE_LINKS):
        return stream.objects
    expired = sum(object_.end_offset <= stream.start_offset for object_ in stream.objects)
    return stream.objects[: expired + 1]
