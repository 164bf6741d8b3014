"""Compaction of the stream objects of a node's streams: one stream, one kind at a time.

Owns the order of things: list, remove what is expired, then group by group load, make, commit. Each
group is a commit of its own, so what was done stays done whatever comes after. What can't be read
is left out of its group, and the rest is compacted without it. Nothing is deleted here: objects
that were not committed expire, objects that were replaced are the controllers' to delete.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from streammeta.client.bucket_check import BucketCheck
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.compaction.stream_object_commit import StreamObjectCommits
from streammeta.client.compaction.stream_object_config import StreamObjectConfig
from streammeta.client.compaction.stream_object_listing import (
    ListedRange,
    ListedStream,
    StreamObjectListing,
)
from streammeta.client.compaction.stream_object_output import StreamObjectOutput, live_links
from streammeta.client.compaction.stream_object_report import MadeObject, StreamReport
from streammeta.client.compaction.stream_object_sources import (
    CompositeSource,
    NormalSource,
    Source,
    SourceLoader,
    UnusableSourceError,
)
from streammeta.client.controller_client import ControllerClient
from streammeta.client.errors import (
    BrokerClientError,
    NodeFencedError,
    NodeNotRegisteredError,
    ObjectExpiredError,
    StreamNotFoundError,
)
from streammeta.client.object_ids import ObjectIds
from streammeta.client.session import BrokerSession
from streammeta.storage.compaction.stream_objects import (
    Group,
    StreamCompaction,
    StreamPlan,
    cut_groups,
    is_worth_compacting,
    may_have_work,
    plan_stream,
)
from streammeta.storage.errors import StorageError, WrongBucketError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.base import ObjectStore
from streammeta.v1 import common_pb2

ALL_AT_ONCE = (
    StreamCompaction.PRUNE_LINKS,
    StreamCompaction.GATHER_SMALL,
    StreamCompaction.LINK,
)
"""Everything that is to be done for a stream, in this order."""

_log = logging.getLogger(__name__)


class StreamObjectCompactor:
    """Compacts in the name of `writer`, the process that owns the streams.

    `is_busy` tells whether others want the store now, see `StoreCalls`.
    """

    def __init__(
        self,
        client: ControllerClient,
        writer: common_pb2.NodeIdentity,
        namespace: str,
        store: ObjectStore,
        config: StreamObjectConfig | None = None,
        *,
        is_busy: Callable[[], bool] | None = None,
    ) -> None:
        self._config = config or StreamObjectConfig()
        self._writer = writer
        self._bucket = BucketCheck(client, store, namespace)
        self._calls = StoreCalls(store, self._config.pace, is_busy)
        self._listing = StreamObjectListing(client)
        session = BrokerSession(client, writer.node_id, writer.node_epoch, namespace, ())
        self._ids = ObjectIds(session, self._config.ttl_ms / 1000)
        self._commits = StreamObjectCommits(client, writer, self._config.commit_deadline_s)

        def key_of(object_id: int) -> str:
            return key_for(object_id, namespace)

        self._loader = SourceLoader(self._calls, key_of, self._config)
        self._output = StreamObjectOutput(self._calls, key_of, self._config)

    def close(self) -> None:
        """Start no more; nothing may be under way."""
        self._calls.close()

    async def plan(self, stream_id: int, kind: StreamCompaction) -> StreamPlan:
        """Tell what `compact` would do now, changing nothing."""
        return await self._plan(await self._listing.stream(stream_id), kind)

    async def compact(self, stream_id: int, kind: StreamCompaction) -> StreamReport:
        """List a stream's objects and compact them."""
        return await self.compact_listed(await self._listing.stream(stream_id), kind)

    async def compact_listed(self, stream: ListedStream, kind: StreamCompaction) -> StreamReport:
        """Compact the stream objects of a stream that was just listed.

        Raises what bars the node as such (`NodeFencedError`, `NodeNotRegisteredError`) or the
        bucket (`streammeta.storage.errors.WrongBucketError`); any other
        failure ends the compaction of this stream and is in the report.
        """
        report = StreamReport(stream.stream_id, kind)
        try:
            plan = await self._plan(stream, kind)
            await self._remove(stream, [one.object_id for one in plan.expired], report)
            for group in plan.groups:
                await self._compact_group(stream, plan, group, report)
        except (NodeFencedError, NodeNotRegisteredError, WrongBucketError):
            raise
        except (BrokerClientError, StorageError) as error:
            if isinstance(error, ObjectExpiredError):
                self._ids.discard()
            _log.warning("compaction of stream %d ended early: %s", stream.stream_id, error)
            report.error = error
        return report

    async def owned_streams(self) -> AsyncIterator[ListedStream]:
        """List the streams that the writer's node owns."""
        async for stream in self._listing.owned_by(self._writer.node_id):
            yield stream

    async def compact_node(
        self, kinds: Sequence[StreamCompaction] = ALL_AT_ONCE
    ) -> AsyncGenerator[StreamReport, None]:
        """Compact every stream that the node owns, with each kind in turn.

        Reports come as streams are done; those about nothing are left out.
        """
        async for stream in self.owned_streams():
            for kind in kinds:
                if not has_work(stream, kind):
                    continue
                report = await self.compact_listed(stream, kind)
                if report.has_changed or report.left_out or report.error is not None:
                    yield report
                if report.has_changed:
                    try:
                        stream = await self._listing.stream(stream.stream_id)  # noqa: PLW2901
                    except StreamNotFoundError:
                        break

    async def _plan(self, stream: ListedStream, kind: StreamCompaction) -> StreamPlan:
        await self._bucket.passed()
        objects = await self._listing.objects(_concerned(stream, kind))
        return plan_stream(objects, stream.start_offset, kind, self._config.rules[kind])

    async def _remove(
        self, stream: ListedStream, object_ids: Sequence[int], report: StreamReport
    ) -> None:
        batch = self._config.expired_batch
        for at in range(0, len(object_ids), batch):
            some = object_ids[at : at + batch]
            await self._commits.remove(stream, some)
            report.removed_ids.extend(some)

    async def _compact_group(
        self, stream: ListedStream, plan: StreamPlan, group: Group, report: StreamReport
    ) -> None:
        """Make one object of a group; of several, if some of it is unusable or it is too much."""
        rules = self._config.rules[plan.kind]
        waiting = deque([group])
        while waiting:
            objects = waiting.popleft()
            if not is_worth_compacting(objects, plan.kind, plan.stream_start, rules):
                continue
            loaded = await self._loader.load(stream.stream_id, objects, report.transfers)
            if loaded.rest:
                waiting.append(loaded.rest)
            sources = {one.listed.object_id: one for one in loaded.sources}
            unusable = dict(loaded.unusable)
            for part in cut_groups([one.listed for one in loaded.sources], rules):
                if is_worth_compacting(part, plan.kind, plan.stream_start, rules):
                    chosen = [sources[one.object_id] for one in part]
                    try:
                        await self._replace(stream, plan, chosen, report)
                    except UnusableSourceError as error:
                        unusable[error.object_id] = error.reason
                        usable = [one for one in part if one.object_id != error.object_id]
                        waiting.extend(cut_groups(usable, rules))
            for object_id, reason in unusable.items():
                _log.warning("object %d is left out of compaction: %s", object_id, reason)
            report.left_out.update(unusable)

    async def _replace(
        self,
        stream: ListedStream,
        plan: StreamPlan,
        sources: Sequence[Source],
        report: StreamReport,
    ) -> None:
        """Make one object of sources and commit it."""
        composite = plan.kind.is_composite
        links = live_links(sources, plan.stream_start) if composite else []
        if plan.kind is StreamCompaction.PRUNE_LINKS and len(links) == _link_count(sources):
            return  # what is dirty is a part of objects that are still needed
        ((object_id,), moved) = (await self._ids.take(1)).ids, report.transfers
        if composite:
            new = await self._output.link(object_id, links, moved)
        else:
            normal = [one for one in sources if isinstance(one, NormalSource)]
            new = await self._output.merge(object_id, normal, plan.stream_start, moved)
        listed = [one.listed for one in sources]
        await self._commits.replace(stream, object_id, new, listed, composite=composite)
        report.made.append(
            MadeObject(
                object_id,
                composite,
                new.start_offset,
                new.end_offset,
                new.size,
                tuple(one.object_id for one in listed),
            )
        )


def has_work(stream: ListedStream, kind: StreamCompaction) -> bool:
    """Tell whether a compaction could do anything, by what the listing says."""
    spans = [(one.start_offset, one.end_offset) for one in stream.objects]
    return may_have_work(kind, stream.start_offset, spans)


def _concerned(stream: ListedStream, kind: StreamCompaction) -> Sequence[ListedRange]:
    """Return the objects that a kind has to know more of than their offsets."""
    if kind not in (StreamCompaction.REMOVE_EXPIRED, StreamCompaction.PRUNE_LINKS):
        return stream.objects
    expired = sum(one.end_offset <= stream.start_offset for one in stream.objects)
    return stream.objects[: expired + 1]


def _link_count(sources: Sequence[Source]) -> int:
    return sum(len(one.links) for one in sources if isinstance(one, CompositeSource))
