"""A broker's whole client in one object: from endpoints and bucket to append, read, tail, compact.

Composes the parts of this package and owns the order in which they are opened and closed. The parts
are accessible for everything that the short calls do not cover, and can be used without the facade.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal, Self, overload

from streammeta.client.api.background_compaction import BackgroundCompaction
from streammeta.client.api.client_config import StreamClientConfig
from streammeta.client.api.key_values import KeyValues
from streammeta.client.api.node_parts import NodeParts, open_node
from streammeta.client.api.shared_stream import SharedStream
from streammeta.client.api.stream import Stream
from streammeta.client.api.streams_by_id import StreamsById
from streammeta.client.api.watch import ChangeKind, Watch
from streammeta.client.arguments import (
    INT32_MAX,
    check_int,
    check_store,
)
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.compaction.report import CompactionReport, GroupReport
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.client.config import UploadObserver
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.nodes.session import OpenedStream, Tags
from streammeta.client.reading.reader import StreamReader
from streammeta.client.resources.opening import opening
from streammeta.client.resources.tally import ClientMetrics, snapshot
from streammeta.client.wal.bucket.failover import FailoverReport, FailoverWorker
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.client.wal.disk.recovery import RecoveryReport
from streammeta.storage.object_store.opening import open_object_store
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.tls.files import TlsFiles


@dataclass(frozen=True, slots=True)
class NodeCompaction:
    """One cycle of compaction: stream set objects of each node, and the node's own streams.

    The first of `set_objects` is the node itself, the others are departed nodes that the
    controllers assigned to it. `streams` contains only streams with work.
    """

    set_objects: tuple[CompactionReport, ...]
    streams: tuple[GroupReport, ...]


@dataclass(eq=False, repr=False, kw_only=True)
class StreamClient(StreamsById):
    """A broker's client of one cluster. Create it with `open`, and `close` it.

    Safe for many concurrent calls on one event loop. A client opened without `node_id` only reads.
    `controllers`, `store` and `reader` are its parts. Use the reader for lookups by time, reads of
    many streams, and statistics. `recovery` is the report on the write-ahead log at the opening,
    None without a log. `background_compaction` is None if disabled. Every call raises subclasses of
    `BrokerClientError`, of `StorageError` for failures of the bucket, and `TypeError` or
    `ValueError` for wrong arguments.
    """

    store: ObjectStore
    _log: WriteAheadLog | ObjectLog | None
    _config: StreamClientConfig
    _closing: AsyncExitStack
    _compacting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _compactors: tuple[SetObjectCompactor, StreamObjectCompactor] | None = None
    _failovers: FailoverWorker | None = None
    background_compaction: BackgroundCompaction | None = None
    recovery: RecoveryReport | None = None

    @classmethod
    @opening
    async def open(
        cls,
        endpoints: Sequence[str],
        bucket: str | ObjectStore,
        *,
        node_id: int | None = None,
        node_epoch: int | None = None,
        tags: Tags | None = None,
        observer: UploadObserver | None = None,
        tls: TlsFiles | None = None,
        config: StreamClientConfig | None = None,
    ) -> Self:
        """Connect to the controllers at `endpoints` (HOST:PORT) and the cluster's bucket.

        `bucket` is an address, `s3://bucket?options` or `file:///absolute/directory`, or a store.
        With `tls` the controllers are called over TLS with the broker's certificate. With a
        `node_id` the process registers as that node, and older processes of the node are fenced.
        `node_epoch` must grow with each start. By default it is the time in ms, or above the
        registered epoch if that is ahead of this machine's clock. Streams that an earlier process
        of the node left open are taken over, and records of a write-ahead log are uploaded: see
        `inherited` and `recovery`.

        Raises `BucketNotFoundError` or `WrongBucketError` for another bucket than the cluster's,
        before the process registers, `NodeEpochExpiredError` when a newer process of the node has
        registered, and the errors of opening and recovering a write-ahead log.
        """
        config = StreamClientConfig() if config is None else config
        # Before any connection: a wrong argument must fail without a side effect.
        store = open_object_store(bucket) if isinstance(bucket, str) else bucket
        check_store(store)
        config.check_node(node_id)
        async with AsyncExitStack() as closing:
            rate, deadline_s = config.network_rate, config.deadline_s
            controllers = ControllerClient(
                endpoints, deadline_s=deadline_s, tls=tls, network_rate=rate
            )
            await closing.enter_async_context(controllers)

            namespace = await controllers.object_namespace()
            # Before the registration, which fences the node's running process.
            await BucketCheck(controllers, store, namespace).look_once()
            node = NodeParts()
            if node_id is not None:
                process = (check_int("node_id", node_id, 0, INT32_MAX), node_epoch, tags)
                node = await open_node(controllers, store, process, config, observer, closing)

            reader = StreamReader(controllers, store, namespace, config.reader)
            await closing.enter_async_context(reader)
            client = cls(
                controllers=controllers,
                reader=reader,
                store=store,
                _session=node.session,
                _writer=node.writer,
                _shared_writer=node.shared_writer,
                _epochs=node.epochs,
                _log=node.log,
                _config=config,
                _closing=closing,
                _failovers=node.failovers,
            )
            if node.writer is not None and config.has_log:
                client.recovery = await node.writer.recover()
            closing.callback(client._close_compactors)
            if node.writer is not None and config.compaction_interval_s is not None:
                client._compact_in_background(config.compaction_interval_s, closing)
            # From here on `close` owns the parts. A failure before this line closes them here.
            client._closing = closing.pop_all()
            return client

    async def close(self, *, close_streams: bool = False) -> None:
        """Upload and commit the appended records, then stop every part.

        Streams stay open for the node's next process, unless `close_streams` is set: then other
        nodes can open them at once. Raises the first failure to close a stream, after all parts
        have stopped.
        """
        try:
            if close_streams and self._epochs:
                (await self.close_streams(list(self._epochs))).require_all()
        finally:
            await self._closing.aclose()

    def _compact_in_background(self, interval_s: float, closing: AsyncExitStack) -> None:
        background = BackgroundCompaction(self.compact, interval_s)
        closing.push_async_callback(background.close)
        background.start()
        self.background_compaction = background

    def _close_compactors(self) -> None:
        for compactor in self._compactors or ():
            compactor.close()
        self._compactors = None

    # -- the parts

    @property
    def kv(self) -> KeyValues:
        """Keys and values that the brokers of the cluster share."""
        return KeyValues(self.controllers)

    def watch(
        self,
        kinds: Collection[ChangeKind] = (),
        *,
        stream_ids: Sequence[int] = (),
        key_prefixes: Iterable[tuple[str, str]] = (),
        from_offset: int | None = None,
    ) -> Watch:
        """Iterate over changes of the metadata: `async with client.watch(["key"]) as changes`.

        Without `kinds` it has all of them. `stream_ids` and `key_prefixes`, of namespace and
        prefix, limit the changes of streams and of keys.
        """
        return Watch(
            self.controllers,
            kinds,
            stream_ids=stream_ids,
            key_prefixes=key_prefixes,
            from_offset=from_offset,
        )

    @property
    def inherited(self) -> tuple[OpenedStream, ...]:
        """Streams that an earlier process of the node left open. They accept appends at once."""
        return self.session.inherited

    @property
    def failovers(self) -> tuple[FailoverReport, ...]:
        """Results of this process's failovers of other nodes, oldest first."""
        return () if self._failovers is None else tuple(self._failovers.reports)

    def metrics(self) -> ClientMetrics:
        """Return this client's counters. It is cheap enough to call at any time."""
        log, writer = self._log, self._writer
        # The two kinds of log have different counters.
        on_disk = log if isinstance(log, WriteAheadLog) else None
        in_bucket = log if isinstance(log, ObjectLog) else None
        return snapshot(
            self.controllers.tally,
            self.reader.stats,
            store=self.store.metrics(),
            buffered_bytes=sum(
                part.buffered_bytes for part in (writer, self._shared_writer) if part is not None
            ),
            oldest_unsettled_s=0.0 if writer is None else writer.oldest_age_s,
            leader_changes=self.controllers.router.leader_changes,
            leader_silent_s=self.controllers.router.silent_s,
            log_bytes=(on_disk.flushed_bytes if on_disk is not None else 0)
            + (in_bucket.slot_bytes if in_bucket is not None else 0),
            log_flushes=0 if on_disk is None else on_disk.flushes,
            log_slots=0 if in_bucket is None else in_bucket.slots,
            log_used_bytes=0 if log is None else log.used_bytes,
            log_limit_bytes=0 if log is None else log.max_bytes,
        )

    # -- streams

    async def find_streams(self, tags: Tags | None = None, /, **more: str) -> list[Stream]:
        """Return the streams that have all of these tags, by id: `find_streams(topic="orders")`."""
        found = self.controllers.find_streams({**(tags or {}), **more})
        return [
            (SharedStream if stream.is_shared else Stream)(self, stream.stream_id, stream.tags)
            async for stream in found
        ]

    @overload
    async def create_stream(
        self, tags: Tags | None = None, /, *, shared: Literal[False] = False, **more: str
    ) -> Stream: ...
    @overload
    async def create_stream(
        self, tags: Tags | None = None, /, *, shared: Literal[True], **more: str
    ) -> SharedStream: ...
    async def create_stream(
        self, tags: Tags | None = None, /, *, shared: bool = False, **more: str
    ) -> Stream:
        """Create a stream with these tags and open it: `create_stream(topic="orders")`.

        With `shared` the stream needs no open, and every broker may append to it.
        """
        all_tags = {**(tags or {}), **more}
        (stream_id,) = await self.create_streams([all_tags], shared=shared)
        if shared:
            return SharedStream(self, stream_id, all_tags)
        (await self.open_streams({stream_id: 0})).require_all()
        return Stream(self, stream_id, all_tags)

    async def open_stream(self, stream_id: int) -> Stream:
        """Open a stream for this node, under its next epoch, and accept appends to it.

        Another owner must have closed it before. Opening a stream again clears the failure of an
        earlier write. Raises `StreamNotFoundError`, `StreamNotClosedError`,
        `StreamKindMismatchError` for a shared stream, others for a rejected stream, and
        `ValueError` for a stream with appends in flight: `flush` first.
        """
        (await self.open_streams([stream_id])).require_all()
        return self.stream(stream_id)

    @overload
    def stream(self, stream_id: int, *, shared: Literal[False] = False) -> Stream: ...
    @overload
    def stream(self, stream_id: int, *, shared: Literal[True]) -> SharedStream: ...
    def stream(self, stream_id: int, *, shared: bool = False) -> Stream:
        """Return the handle of a stream without a call, for example to read it.

        Only a handle with `shared` can append to a shared stream.
        """
        kind = SharedStream if shared else Stream
        return kind(self, check_int("stream_id", stream_id), {})

    # -- compaction

    async def compact(self) -> NodeCompaction:
        """Run one cycle of compaction: stream set objects, then the node's stream objects.

        Only one cycle runs at a time, background cycles included. Failures of a group or stream are
        in the reports. Raises `NodeFencedError` when a newer process of the node has registered.
        """
        async with self._compacting:
            return await self._compact()

    async def _compact(self) -> NodeCompaction:
        session, heartbeat = self.session, self.writer.heartbeat
        if self._compactors is None:
            place = (self.controllers, session.node, session.namespace, self.store)
            self._compactors = (
                SetObjectCompactor(*place, self._config.compaction),
                StreamObjectCompactor(*place, self._config.compaction),
            )
        set_objects, stream_objects = self._compactors
        own = CompactionTarget.of(session.node)
        departed = [CompactionTarget.of(node, failover=True) for node in heartbeat.compactions]
        # One after the other: the memory budget covers one node.
        reports = [await set_objects.run_once(target) for target in (own, *departed)]
        streams = [report async for report in stream_objects.compact_node()]
        return NodeCompaction(tuple(reports), tuple(streams))
