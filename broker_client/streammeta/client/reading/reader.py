"""Stream reader: ordered, gapless reads of streams, and tails that follow their growth.

Owns the contract with callers. The returned records of a stream are consecutive from the requested
offset on, even if the objects that contain them are replaced meanwhile. Each call ends by its
deadline. Memory stays within the configured limits. The parts are in `streammeta.client.reading`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from streammeta.client import arguments, errors
from streammeta.client.config import ReaderConfig, ReaderStats
from streammeta.client.controllers.bucket_check import BucketCheck
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.reading import lookups
from streammeta.client.reading.block_cache import BlockCache, Cursors
from streammeta.client.reading.block_fetcher import BlockFetcher
from streammeta.client.reading.bulk_reader import BulkReader
from streammeta.client.reading.metadata_follower import ChangeWait, MetadataFollower, StreamTail
from streammeta.client.reading.object_source import ObjectSource
from streammeta.client.reading.range_reader import Fetched, RangeReader
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.client.reading.time_lookup import Bound, OffsetAtTime, TimedStreams, TimestampOf
from streammeta.client.resources.resources import ClosedAtExit, StoreThreads, warn_unclosed
from streammeta.client.resources.tally import TAIL
from streammeta.storage.object_format.index_block import UNLIMITED
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore

DEFAULT_READ_BYTES = 8 * 1024 * 1024

_ResultT = TypeVar("_ResultT")


class StreamReader(ClosedAtExit):
    """Reads streams of the cluster whose objects have `namespace` in their keys.

    Safe for many concurrent calls on one event loop. Use it as an async context manager or call
    `close`. Every call raises `StreamNotFoundError`, `OffsetTrimmedError`, `CorruptObjectError`,
    `MissingObjectError`, `ReadDeadlineError`, `ReaderClosedError`, errors of calls to the
    controllers, and `storage.errors` of the store. The first call checks that the store is the
    cluster's bucket, and raises `storage.errors.WrongBucketError`. `deadline_s` is in seconds.
    """

    def __init__(
        self,
        client: ControllerClient,
        store: ObjectStore,
        namespace: str,
        config: ReaderConfig | None = None,
    ) -> None:
        arguments.check_client(client)
        arguments.check_store(store)
        arguments.check_text("namespace", namespace, "the cluster's namespace, `session.namespace`")
        self._config = config = ReaderConfig() if config is None else config
        arguments.check_kind(
            "config", config, ReaderConfig, "a ReaderConfig, or None for its defaults"
        )
        self._stats = ReaderStats()
        self._tally = client.tally
        self._bucket = BucketCheck(client, store, namespace)
        self._threads = StoreThreads(store, config.fetch_threads, "fetch")
        self._lookups = lookups.Lookups(client)
        self._slices = SliceCache(
            self._lookups, self._stats, config.max_slices, config.max_staleness_s
        )
        # Cache and follower need each other: the one asks for freshness, the other applies changes.
        self._follower = MetadataFollower(client, self._slices)
        self._slices.follow(self._follower)
        self._source = ObjectSource(
            self._threads,
            namespace,
            config.index_cache_bytes,
            config.request_timeout_s,
            self._stats,
            config.verified_bytes,
            received=client.network.received,
        )
        self._blocks = BlockCache(config.block_cache_bytes)
        self._fetcher = BlockFetcher(self._source, self._blocks, self._stats, config.read_bytes)
        # The source and the fetcher need each other, so one is connected afterwards.
        self._source.on_whole = self._fetcher.take_whole
        cursors = Cursors(
            self._blocks,
            self._stats,
            config.readahead_bytes,
            # More than half of the cache would let one reader evict its own prefetched blocks.
            max(1, min(config.max_readahead_bytes, config.block_cache_bytes // 2)),
        )
        self._ranges = RangeReader(
            namespace,
            self._slices,
            self._source,
            self._fetcher,
            cursors,
            self._stats,
            config.read_bytes // 2,
        )
        self._bulk = BulkReader(namespace, self._lookups, self._source, config.bulk_bytes)
        self._timed = TimedStreams(self._lookups, self._source, self._fetcher, self._ranges)
        self._closed = False

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warn_unclosed(
                self,
                "its threads, its watch and the waiting reads",
                "use `async with StreamReader(...)` or `await reader.close()`",
            )

    @property
    def stats(self) -> ReaderStats:
        """Counts of requests to store and controllers, and of hits in memory."""
        return self._stats

    @property
    def held_bytes(self) -> int:
        """Bytes of indexes, blocks and unfinished reads in memory now."""
        return self._source.cache.held_bytes + self._blocks.size + self._fetcher.held_bytes

    async def close(self) -> None:
        """Stop everything. Waiting reads fail with `ReaderClosedError`."""
        self._closed = True
        self._follower.close()
        self._slices.on_gap()  # wakes waiting reads
        self._ranges.close()
        self._lookups.close()
        self._source.close()
        self._fetcher.close()
        self._threads.close()

    async def locate(self, queries: Sequence[lookups.StreamQuery]) -> list[lookups.Located]:
        """Look up many ranges in few calls. The answers are in the order of `queries`.

        `Located.error` is the error of a rejected query.
        """
        asked = arguments.check_items("queries", queries, "a sequence of StreamQuery")
        for index, query in enumerate(asked):
            arguments.check_kind(f"queries[{index}]", query, lookups.StreamQuery, "a StreamQuery")

        answers = await self._lookups.ask_many(asked)
        found: list[lookups.Located] = []
        for query, answer in zip(asked, answers, strict=True):
            located = lookups.located_of(query, answer)
            try:
                lookups.check_located(query, answer)
            except errors.RejectedError as error:
                located = replace(located, error=error)
            found.append(located)
        return found

    async def fetch(
        self,
        stream_id: int,
        offset: int,
        max_bytes: int = DEFAULT_READ_BYTES,
        *,
        min_bytes: int = 1,
        wait_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Fetched:
        """Read from `offset` on. Wait up to `wait_s` for at least `min_bytes` of payload.

        About `max_bytes` of payload are read, at least one batch if there is any, fewer if the
        memory limit requires it. The first batch may begin before `offset`. At the end of the
        stream no batch is returned. Lost offsets are skipped. The deadline does not include
        `wait_s`.
        """
        _check_read(stream_id, offset, None, max_bytes, "offset")
        arguments.check_int("min_bytes", min_bytes)
        arguments.check_seconds("wait_s", wait_s, may_be_zero=True)
        if min_bytes > max_bytes:
            raise ValueError(
                f"fetch of stream {stream_id}: min_bytes is {min_bytes}, expected at most"
                f" max_bytes, {max_bytes}"
            )

        query = lookups.StreamQuery(stream_id, offset)
        fetched = await self._fetch_once(query, max_bytes, deadline_s)
        # The usual read does not wait, and needs no watch.
        if wait_s <= 0 or fetched.payload_bytes >= min_bytes:
            return fetched

        ends_at = asyncio.get_running_loop().time() + wait_s
        with self._watch_changes(stream_id) as changes:
            try:
                async with asyncio.timeout_at(ends_at):
                    await changes.ready()
                while fetched.payload_bytes < min_bytes:
                    changes.expect()
                    if not changes.is_at_end(fetched.next_offset):
                        left = max_bytes - fetched.payload_bytes
                        query = lookups.StreamQuery(stream_id, fetched.next_offset)
                        # Each fetch has the whole deadline, as waiting for data is not part of it.
                        more = await self._fetch_once(query, left, deadline_s)
                        fetched = _join(fetched, more)
                        if more.records:
                            continue
                    async with asyncio.timeout_at(ends_at):
                        await changes.wait()
            except TimeoutError:
                pass
        return fetched

    async def read(
        self,
        stream_id: int,
        start: int,
        end: int | None = None,
        max_bytes: int = DEFAULT_READ_BYTES,
        *,
        deadline_s: float | None = None,
    ) -> list[RecordBatch]:
        """Read record batches that cover `[start, end)`, or its beginning, without a gap.

        Batches are returned whole, so the first may begin before `start` and the last end after
        `end`. About `max_bytes` of payload are read, at least one batch if there is any, and none
        at the stream's end.
        """
        _check_read(stream_id, start, end, max_bytes)
        query = lookups.StreamQuery(stream_id, start, UNLIMITED if end is None else end)
        return (await self._fetch_once(query, max_bytes, deadline_s)).records

    async def iterate(
        self, stream_id: int, start: int | None = None, end: int | None = None
    ) -> AsyncIterator[RecordBatch]:
        """Iterate over a stream from `start` (None: its first visible offset) to `end`.

        Without `end` it stops at the end of the committed records when the iteration begins.
        """
        arguments.check_int("stream_id", stream_id)
        if start is None or end is None:
            first, last = await self._visible_offsets(stream_id)
            start = first if start is None else start
            end = last if end is None else end
        at, end = arguments.check_int("start", start), arguments.check_int("end", end)
        while at < end:
            records = await self.read(stream_id, at, end)
            if not records:
                return
            for record in records:
                yield record
            at = records[-1].end_offset

    def tail(
        self, stream_id: int, offset: int, *, max_bytes: int = DEFAULT_READ_BYTES
    ) -> StreamTail:
        """Iterate over a stream from `offset` on without an end, waiting for new records.

        It also waits, and logs, while no controller leads or the store fails for a reason that may
        pass. All tails of a reader share one watch. About `max_bytes` of payload are read at a
        time.
        """
        _check_read(stream_id, offset, None, max_bytes, "offset")

        def read(at: int) -> Awaitable[Fetched]:
            return self._fetch_once(lookups.StreamQuery(stream_id, at), max_bytes, None)

        return StreamTail(self._watch_changes(stream_id), read, offset, self._note_retry)

    async def read_streams(
        self, stream_ids: Iterable[int]
    ) -> AsyncIterator[tuple[int, list[RecordBatch]]]:
        """Read whole streams, as far as they are committed, in ascending order of id.

        A stream set object contains blocks of many streams, so streams are read in groups of
        neighbouring ids of at most `bulk_bytes`, each object once per group. A larger stream is a
        group alone and is in memory as a whole: use `iterate` for such streams.
        """
        ids = arguments.check_ints("stream_ids", stream_ids, "a sequence of stream ids")
        await self._bucket.require()
        async for stream_records in self._bulk.read(ids):
            yield stream_records

    async def offset_for_timestamp(
        self,
        stream_id: int,
        timestamp_ms: int,
        bound: Bound = "lower",
        *,
        timestamp_of: TimestampOf,
        deadline_s: float | None = None,
    ) -> OffsetAtTime:
        """Find an offset by time, which `timestamp_of` reads from a record, in ms.

        `lower`: the first record that is not older. `upper`: the last one that is not newer. See
        `OffsetAtTime` for the result if there is none, and `reading.time_lookup` for streams whose
        times do not ascend.
        """
        arguments.check_int("stream_id", stream_id)
        arguments.check_int("timestamp_ms", timestamp_ms, -arguments.INT64_MAX)
        arguments.check_callable(
            "timestamp_of", timestamp_of, "a function of a record, its time in ms"
        )
        if bound not in ("lower", "upper"):
            raise ValueError(f"bound is {bound!r}, expected 'lower' or 'upper'")
        return await self._run_bounded(
            lambda: self._timed.find(stream_id, timestamp_ms, bound, timestamp_of),
            f"lookup of time {timestamp_ms} in stream {stream_id}",
            stream_id,
            deadline_s,
        )

    async def _visible_offsets(self, stream_id: int) -> tuple[int, int]:
        """Return the first visible offset and the end of the committed records."""
        (located,) = await self.locate([lookups.StreamQuery(stream_id, 0, limit=1)])
        if located.error is not None and not isinstance(located.error, errors.OffsetTrimmedError):
            raise located.error
        return located.start_offset, located.end_offset

    async def _fetch_once(
        self, query: lookups.StreamQuery, max_bytes: int, deadline_s: float | None
    ) -> Fetched:
        return await self._run_bounded(
            lambda: self._ranges.read(query, max_bytes),
            f"read of stream {query.stream_id}",
            query.stream_id,
            deadline_s,
        )

    def _note_retry(self) -> None:
        self._tally.retries[TAIL] += 1

    def _watch_changes(self, stream_id: int) -> ChangeWait:
        return ChangeWait(self._slices, self._follower, stream_id, self._config.poll_interval_s)

    async def _run_bounded(
        self,
        work: Callable[[], Awaitable[_ResultT]],
        subject: str,
        stream_id: int,
        deadline_s: float | None,
    ) -> _ResultT:
        """Await `work()` until the deadline, or until the reader is closed."""
        seconds = self._config.deadline_s if deadline_s is None else deadline_s
        arguments.check_seconds("deadline_s", seconds)
        if self._closed:
            raise errors.ReaderClosedError(stream_id)

        # Kept to tell this deadline from a `TimeoutError` of the work itself.
        expiry = asyncio.timeout(seconds)
        try:
            async with expiry:
                await self._bucket.require()
                return await work()
        except TimeoutError:
            if expiry.expired():
                raise errors.ReadDeadlineError(subject, seconds) from None
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                # `close` cancelled the work that this call waited for, not the caller's task.
                raise errors.ReaderClosedError(stream_id) from None
            raise


def _check_read(
    stream_id: int, start: int, end: int | None, max_bytes: int, first: str = "start"
) -> None:
    arguments.check_int("stream_id", stream_id)
    arguments.check_int(first, start)
    arguments.check_int("max_bytes", max_bytes, 1)
    if end is not None and arguments.check_int("end", end) <= start:
        raise ValueError(
            f"read of stream {stream_id}: end is {end}, expected more than start, {start}"
        )


def _join(first: Fetched, second: Fetched) -> Fetched:
    records = [*first.records, *second.records]
    return Fetched(records, second.next_offset, second.start_offset, second.end_offset)
