"""Calls of a client for streams by their ids: batches with an outcome for each, and records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streammeta.client.arguments import check_int_mapping, check_ints
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import StreamNotFoundError, StreamNotOpenedError
from streammeta.client.nodes.session import BrokerSession, OpenedStream, Outcomes, Tags
from streammeta.client.reading.metadata_follower import StreamTail
from streammeta.client.reading.range_reader import Fetched
from streammeta.client.reading.reader import DEFAULT_READ_BYTES, StreamReader
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.client.writing.shared_batches import SHARED_EPOCH
from streammeta.client.writing.shared_writer import SharedWriter
from streammeta.client.writing.writer import StreamWriter
from streammeta.storage.object_format.record import RecordBatch


@dataclass(eq=False, repr=False, kw_only=True)
class StreamsById(ClosedAtExit):
    """The streams of a cluster, some of them opened by this process."""

    controllers: ControllerClient
    reader: StreamReader
    _session: BrokerSession | None = None
    _writer: StreamWriter | None = None
    _shared_writer: SharedWriter | None = None
    _epochs: dict[int, int] = field(default_factory=dict)

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
    def shared_writer(self) -> SharedWriter:
        """The writer to shared streams. Raises `ValueError` without `node_id`."""
        if self._shared_writer is None:
            raise ValueError("node_id is None: this client only reads. Open one with a node_id")
        return self._shared_writer

    @property
    def epochs(self) -> Mapping[int, int]:
        """The epochs of the streams that this client has open, by stream id."""
        return self._epochs

    # -- streams

    async def create_streams(self, tags: Sequence[Tags], *, shared: bool = False) -> list[int]:
        """Create an empty stream for each element of `tags`. Return their ids in order.

        The streams are owned and closed, or with `shared` accept appends of all brokers at once.
        """
        return await self.session.create_streams(tags, shared=shared)

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
        """Move the first visible offset of streams forward and return their new start offsets.

        The streams are open here, or shared. A trim of an open stream stops at its next offset, so
        later appends stay visible. If it covers uncommitted records, it waits until they are
        committed or have failed. A trim above the end of a shared stream is rejected.
        """
        starts = check_int_mapping("new_starts", new_starts, "new start offsets")
        shared = await self._shared_among(starts.keys() - self._epochs.keys())
        epochs = self._epochs_of(starts.keys() - shared)
        ends = {stream_id: self.writer.ends(stream_id) for stream_id in epochs}
        wanted = {
            stream_id: min(start, ends[stream_id][1]) if stream_id in ends else start
            for stream_id, start in starts.items()
        }
        # The controllers can't trim uncommitted records, which would become visible afterwards.
        if any(wanted[stream_id] > committed for stream_id, (committed, _) in ends.items()):
            await self.writer.flush()
        epochs |= dict.fromkeys(shared, SHARED_EPOCH)
        return await self.session.trim_streams(epochs, wanted)

    async def _shared_among(self, stream_ids: Collection[int]) -> set[int]:
        """Return the shared ones among the streams."""
        # No ids would list all streams.
        if not stream_ids:
            return set()
        described = self.controllers.describe_streams(sorted(stream_ids))
        return {stream.stream_id async for stream in described if stream.is_shared}

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
        await self.shared_writer.flush()

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
