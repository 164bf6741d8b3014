"""A broker's whole client in one object: from endpoints and bucket to append, read, tail, compact.

Composes the parts of this package and owns the order in which they are opened and closed. The parts
are accessible for everything that the short calls do not cover, and can be used without the facade.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from streammeta.client.api.background_compaction import BackgroundCompaction
from streammeta.client.api.client_config import StreamClientConfig
from streammeta.client.api.node_parts import (
    find_registered_log,
    open_log,
    open_session,
    open_writer,
)
from streammeta.client.api.stream import Stream
from streammeta.client.arguments import (
    INT32_MAX,
    check_int,
    check_int_mapping,
    check_ints,
    check_store,
)
from streammeta.client.compaction.config import CompactionTarget
from streammeta.client.compaction.report import CompactionReport, GroupReport
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.client.config import UploadObserver
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import StreamNotFoundError, StreamNotOpenedError
from streammeta.client.nodes.session import BrokerSession, OpenedStream, Outcomes, Tags
from streammeta.client.reading.metadata_follower import StreamTail
from streammeta.client.reading.range_reader import Fetched
from streammeta.client.reading.reader import DEFAULT_READ_BYTES, StreamReader
from streammeta.client.resources.opening import opening
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.client.resources.tally import ClientMetrics, snapshot
from streammeta.client.wal.bucket.failover import FailoverReport, FailoverWorker
from streammeta.client.wal.bucket.log import ObjectLog
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.client.wal.disk.recovery import RecoveryReport
from streammeta.client.writing.writer import StreamWriter
from streammeta.storage.object_format.record import RecordBatch
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


@dataclass(eq=False, repr=False)
class StreamClient(ClosedAtExit):
    """A broker's client of one cluster. Create it with `open`, and `close` it.

    Safe for many concurrent calls on one event loop. A client opened without `node_id` only reads.
    `controllers`, `store` and `reader` are its parts. Use the reader for lookups by time, reads of
    many streams, and statistics. `recovery` is the report on the write-ahead log at the opening,
    None without a log. `background_compaction` is None if disabled. Every call raises subclasses of
    `BrokerClientError`, of `StorageError` for failures of the bucket, and `TypeError` or
    `ValueError` for wrong arguments.
    """

    controllers: ControllerClient
    store: ObjectStore
    reader: StreamReader
    _writer: StreamWriter | None
    _log: WriteAheadLog | ObjectLog | None
    _session: BrokerSession | None
    _config: StreamClientConfig
    _epochs: dict[int, int]
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
            controllers = ControllerClient(
                endpoints,
                deadline_s=config.deadline_s,
                tls=tls,
                network_rate=config.network_rate,
            )
            await closing.enter_async_context(controllers)

            session = writer = log = failovers = None
            namespace = await controllers.object_namespace()
            # Before the registration, which fences the node's running process.
            await BucketCheck(controllers, store, namespace).look_once()
            if node_id is not None:
                check_int("node_id", node_id, 0, INT32_MAX)
                session = await open_session(controllers, node_id, node_epoch, tags, config)
                log = await open_log(session, store, config, closing)
                # A new log gets its id when it is opened, after the registration.
                if config.wal_directory is not None:
                    await session.register_log(await find_registered_log(config), tags)
                writer = await open_writer(session, store, log, config, observer, closing)
                failovers = FailoverWorker(session, store, writer.heartbeat)
                await closing.enter_async_context(failovers)

            reader = StreamReader(controllers, store, namespace, config.reader)
            await closing.enter_async_context(reader)
            inherited = () if session is None else session.inherited
            epochs = {stream.stream_id: stream.epoch for stream in inherited}
            parts = (controllers, store, reader, writer, log, session)
            client = cls(*parts, config, epochs, closing)
            client._failovers = failovers
            if writer is not None and config.has_log:
                client.recovery = await writer.recover()
            closing.callback(client._close_compactors)
            if writer is not None and config.compaction_interval_s is not None:
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
    def session(self) -> BrokerSession:
        """The registered process. Raises `ValueError` on a client without `node_id`."""
        if self._session is None:
            raise ValueError("node_id is None: this client only reads. Open one with a node_id")
        return self._session

    @property
    def writer(self) -> StreamWriter:
        """The writer: futures instead of waiting. Raises `ValueError` without `node_id`."""
        if self._writer is None:
            raise ValueError("node_id is None: this client only reads. Open one with a node_id")
        return self._writer

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
            buffered_bytes=0 if writer is None else writer.buffered_bytes,
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

    @property
    def epochs(self) -> Mapping[int, int]:
        """The epochs of the streams that this client has open, by stream id."""
        return self._epochs

    async def create_stream(self, tags: Tags | None = None, /, **more: str) -> Stream:
        """Create a stream with these tags and open it: `create_stream(topic="orders")`."""
        all_tags = {**(tags or {}), **more}
        (stream_id,) = await self.create_streams([all_tags])
        (await self.open_streams({stream_id: 0})).require_all()
        return Stream(self, stream_id, all_tags)

    async def open_stream(self, stream_id: int) -> Stream:
        """Open a stream for this node, under its next epoch, and accept appends to it.

        Another owner must have closed it before. Opening a stream again clears the failure of an
        earlier write. Raises `StreamNotFoundError`, `StreamNotClosedError` and others for a
        rejected stream, and `ValueError` for a stream with appends in flight: `flush` first.
        """
        (await self.open_streams([stream_id])).require_all()
        return self.stream(stream_id)

    def stream(self, stream_id: int) -> Stream:
        """Return the handle of a stream without a call, for example to read it."""
        return Stream(self, check_int("stream_id", stream_id), {})

    async def create_streams(self, tags: Sequence[Tags]) -> list[int]:
        """Create a closed, empty stream for each element of `tags`. Return their ids in order."""
        return await self.session.create_streams(tags)

    async def open_streams(
        self, streams: Iterable[int] | Mapping[int, int]
    ) -> Outcomes[OpenedStream]:
        """Open streams for this node and accept appends to them.

        `streams` are stream ids, or stream ids with the stream epochs to open them with. Without
        an epoch a stream gets the next larger one, which also clears the failure of an earlier
        write. Raises `ValueError` for a stream with appends in flight: `flush` first.
        """
        if isinstance(streams, Mapping):
            epochs = check_int_mapping("streams", streams, "stream epochs")
            missing: set[int] = set()
        else:
            ids = check_ints("streams", streams, "a sequence of stream ids")
            epochs = {
                stream_id: 0 if epoch is None else epoch + 1
                for stream_id, epoch in (await self._read_epochs(ids)).items()
            }
            # Described streams exist, so the others are reported without a call.
            missing = set(ids) - epochs.keys()

        # Before the open: a new epoch would make the appends in flight fail.
        self.writer.require_attachable(epochs)
        outcomes = await self.session.open_streams(epochs)
        self.writer.attach(outcomes.done.values())
        self._epochs |= {stream.stream_id: stream.epoch for stream in outcomes.done.values()}
        for stream_id in missing:
            outcomes.failed[stream_id] = StreamNotFoundError(f"opening stream {stream_id}")
        return outcomes

    async def close_streams(self, stream_ids: Iterable[int]) -> Outcomes[None]:
        """Commit the appended records of open streams, and close them."""
        epochs = self._epochs_of(stream_ids)
        await self.writer.flush()
        outcomes = await self.session.close_streams(epochs)
        self.writer.detach(list(outcomes.done))
        for stream_id in outcomes.done:
            # Failed streams stay open, and may be closed again.
            del self._epochs[stream_id]
        return outcomes

    async def delete_streams(self, stream_ids: Iterable[int]) -> Outcomes[None]:
        """Delete closed streams with all their records. A missing stream counts as deleted."""
        ids = check_ints("stream_ids", stream_ids, "a sequence of stream ids")
        epochs = await self._read_epochs(ids)
        outcomes = await self.session.delete_streams(epochs)
        outcomes.done.update(dict.fromkeys(set(ids) - epochs.keys()))
        return outcomes

    async def trim_streams(self, new_starts: Mapping[int, int]) -> Outcomes[int]:
        """Move the first visible offset of open streams forward and return their new start offsets.

        A trim stops at the stream's next offset, so later appends stay visible. If it covers
        uncommitted records, it waits until they are committed or have failed.
        """
        starts = check_int_mapping("new_starts", new_starts, "new start offsets")
        epochs = self._epochs_of(list(starts))
        ends = {stream_id: self.writer.ends(stream_id) for stream_id in starts}
        wanted = {stream_id: min(start, ends[stream_id][1]) for stream_id, start in starts.items()}
        # The controllers can't trim uncommitted records, which would become visible afterwards.
        if any(start > ends[stream_id][0] for stream_id, start in wanted.items()):
            await self.writer.flush()
        return await self.session.trim_streams(epochs, wanted)

    async def _read_epochs(self, stream_ids: Sequence[int]) -> dict[int, int | None]:
        """Return the epochs of existing streams, None for one that was never opened."""
        # No ids would list all streams.
        if not stream_ids:
            return {}
        described = self.controllers.describe_streams(stream_ids)
        return {stream.stream_id: stream.epoch async for stream in described}

    def _epochs_of(self, stream_ids: Iterable[int]) -> dict[int, int]:
        ids = check_ints("stream_ids", stream_ids, "a sequence of stream ids")
        for stream_id in ids:
            if stream_id not in self._epochs:
                raise StreamNotOpenedError(f"stream {stream_id}", detail="not opened here")
        return {stream_id: self._epochs[stream_id] for stream_id in ids}

    # -- records

    async def append(
        self, stream_id: int, payload: bytes, count: int = 1, *, timestamp_ms: int | None = None
    ) -> int:
        """Append a record of `count` offsets and return its base offset once it is durable.

        Concurrent appends share objects and commits. `writer.append` returns a future instead.
        """
        future = await self.writer.append(stream_id, payload, count, timestamp_ms=timestamp_ms)
        return await future

    async def append_many(
        self, stream_id: int, payloads: Sequence[bytes], *, timestamp_ms: int | None = None
    ) -> int:
        """Append a record of one offset for each payload. Return the first offset once durable."""
        future = await self.writer.append_many(stream_id, payloads, timestamp_ms=timestamp_ms)
        return await future

    async def flush(self) -> None:
        """Upload the appended records now, and wait until they are committed or have failed."""
        await self.writer.flush()

    async def read(
        self,
        stream_id: int,
        start: int,
        end: int | None = None,
        max_bytes: int = DEFAULT_READ_BYTES,
    ) -> list[RecordBatch]:
        """Read record batches that cover `[start, end)`, or its start. See `StreamReader.read`."""
        return await self.reader.read(stream_id, start, end, max_bytes)

    async def fetch(
        self,
        stream_id: int,
        offset: int,
        max_bytes: int = DEFAULT_READ_BYTES,
        *,
        min_bytes: int = 1,
        wait_s: float = 0.0,
    ) -> Fetched:
        """Read from `offset` on, waiting up to `wait_s` for data. See `StreamReader.fetch`."""
        return await self.reader.fetch(
            stream_id, offset, max_bytes, min_bytes=min_bytes, wait_s=wait_s
        )

    def iterate(
        self, stream_id: int, start: int | None = None, end: int | None = None
    ) -> AsyncIterator[RecordBatch]:
        """Iterate over a stream from `start` (None: its first visible offset) to `end`."""
        return self.reader.iterate(stream_id, start, end)

    def tail(
        self, stream_id: int, offset: int, *, max_bytes: int = DEFAULT_READ_BYTES
    ) -> StreamTail:
        """Iterate over a stream from `offset` on, waiting for new records."""
        return self.reader.tail(stream_id, offset, max_bytes=max_bytes)

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
