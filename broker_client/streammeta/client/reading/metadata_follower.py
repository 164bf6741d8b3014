"""Metadata follower: one watch for all streams of a reader, and the tails that wait for it.

Owns the filter of the watch, its position, and whether it is reliable. While few streams are known
the watch is limited to them. A new stream restarts it at its position with a larger filter, so no
change is missed. Many streams, or frequent new ones, are followed without a filter. A watch that
fell too far behind restarts at the present, and the cache is notified of the gap.

Without a healthy watch a tail polls. A tail keeps its own position, so a cancelled call loses no
record. It has no deadline: while no controller leads, or the store fails for a reason that may
pass, it waits and continues from its position.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from typing import Self

from streammeta.client import errors
from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.controllers.metadata_watch import MetadataWatch
from streammeta.client.reading.range_reader import Fetched
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.rpc import tracing
from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import StorageError
from streammeta.storage.object_format.record import RecordBatch
from streammeta.v1 import metadata_pb2

MAX_FILTERED_STREAMS = 1_000
"""Number of streams above which the watch has no filter."""

_GATHERING_S = 0.01  # new streams within this time widen the filter together
_MAX_UNHEARD_WATCHES = 8  # restarts without an answer, after which the filter is dropped
_LAG_CHECK_S = 10.0
_LAG_ALLOWED_S = 3.0
_PAUSES = Backoff(first=0.1, longest=10.0, jitter=0.0)
"""Waits before the metadata is followed again, in seconds."""
_TAIL_PAUSES = Backoff(first=0.1, longest=5.0)
"""Waits before a tail retries a read, in seconds."""

_log = logging.getLogger(__name__)


class MetadataFollower:
    """Follows the metadata for `slices` from the first call of `track` until `close`."""

    def __init__(
        self,
        client: ControllerClient,
        slices: SliceCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._slices = slices
        self._clock = clock
        self._watch: MetadataWatch | None = None
        self._covered: frozenset[int] | None = frozenset()  # None: all streams
        self._continuity = 0
        self._is_following = False
        self._unheard_watches = 0
        self._caught_up_at = float("-inf")
        self._restart = asyncio.Event()
        self._filter_changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def caught_up_at(self) -> float:
        """Time of the clock when the watch last had everything known to be committed."""
        return self._caught_up_at

    @property
    def is_healthy(self) -> bool:
        """True if changes arrive with a bounded lag."""
        return self._is_following and self._clock() - self._caught_up_at <= _LAG_ALLOWED_S

    def continuity(self, stream_id: int) -> int | None:
        """Return the number of the unbroken sequence of changes that the stream's belong to.

        None if the stream is not followed. While the number stays the same, the changes keep an
        answer current that was requested after this call.
        """
        if not self._is_following or (self._covered is not None and stream_id not in self._covered):
            return None
        return self._continuity

    def track(self, stream_id: int) -> None:
        """Follow a stream that `SliceCache.list_tracked` already returns."""
        if self._closed:
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run(), context=tracing.outside())
        elif self._covered is not None and stream_id not in self._covered:
            self._restart.set()

    async def wait_until_followed(self, stream_id: int) -> None:
        """Wait until the changes of a tracked stream arrive, or `close`, without a limit."""
        while self.continuity(stream_id) is None and not self._closed:
            await self._filter_changed.wait()

    def close(self) -> None:
        """Stop following."""
        self._closed = True
        self._filter_changed.set()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        failures = 0
        position: int | None = None
        while True:
            try:
                if position is None:
                    position = await self._get_committed_end()
                    self._continuity += 1
                    # Changes between the two watches are lost, so nothing that is cached can be
                    # trusted.
                    self._slices.on_gap()
                position = await self._follow_from(position)
                failures = 0
                continue
            except errors.BrokerClientError as error:
                _log.warning("watch failed, lookups replace it until the next one: %s", error)
            except Exception:  # noqa: BLE001 - readers continue with lookups after any failure
                _log.exception("watch failed unexpectedly, lookups replace it until the next one")

            self._is_following, position = False, None
            await asyncio.sleep(_PAUSES.wait(failures))
            failures += 1

    async def _get_committed_end(self) -> int:
        """Return an offset below which everything is committed."""
        return (await self._client.describe_cluster()).high_watermark or 0

    async def _follow_from(self, position: int) -> int | None:
        """Follow until the watch must be restarted, at the returned offset or, for None, now."""
        self._restart.clear()
        wanted = self._slices.list_tracked()
        self._unheard_watches += 1
        # Each restart for a new stream starts with a round trip. When they come faster than
        # answers, only a watch of all streams makes progress.
        filtered = (
            len(wanted) <= MAX_FILTERED_STREAMS and self._unheard_watches <= _MAX_UNHEARD_WATCHES
        )
        self._covered = frozenset(wanted) if filtered else None
        watch = self._watch = MetadataWatch(
            self._client,
            from_offset=position,
            kinds=[metadata_pb2.ENTITY_KIND_STREAM],
            stream_ids=sorted(wanted) if filtered else (),
            combine=True,
        )

        self._is_following = True
        self._filter_changed.set()
        self._filter_changed = asyncio.Event()
        following = asyncio.create_task(self._consume(watch))
        restart = asyncio.create_task(self._wait_for_restart())
        others = [restart, asyncio.create_task(self._wait_for_lag())]
        tasks = [following, *others]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return watch.next_offset
            # Raises the error of the watch, if it failed.
            following.result()
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _consume(self, watch: MetadataWatch) -> None:
        """Apply changes and return when no controller has the next ones."""
        async with aclosing(watch.follow()) as events:
            async for change in events:
                if change is not None:
                    self._slices.on_records(change.records)
                self._unheard_watches = 0
                if watch.next_offset >= watch.high_watermark:
                    self._caught_up_at = self._clock()

    async def _wait_for_restart(self) -> None:
        await self._restart.wait()
        await asyncio.sleep(_GATHERING_S)

    async def _wait_for_lag(self) -> None:
        """Return when the watch lags behind the leader's committed offset.

        A controller without a connection to the leader does not know its own lag.
        """
        while True:
            await asyncio.sleep(_LAG_CHECK_S)
            try:
                # Asked of any controller: the watch may be at one that has lost its leader.
                committed = await self._get_committed_end()
            except errors.BrokerClientError:
                continue  # without a leader there is no lag

            await asyncio.sleep(_LAG_ALLOWED_S)
            if self._watch is not None and self._watch.next_offset < committed:
                self._caught_up_at = float("-inf")
                _log.warning(
                    "the watch at %s lags at offset %d, while %d is committed, trying another",
                    self._watch.endpoint,
                    self._watch.next_offset,
                    committed,
                )
                return


class ChangeWait:
    """Waits for changes of one stream. Its context keeps the stream followed.

    Without a healthy watch `wait` also returns after `poll_interval_s`.
    """

    def __init__(
        self, slices: SliceCache, follower: MetadataFollower, stream_id: int, poll_interval_s: float
    ) -> None:
        self._slices = slices
        self._follower = follower
        self._stream_id = stream_id
        self._poll_interval = poll_interval_s
        self._context = ExitStack()
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        self._event = self._context.enter_context(self._slices.watch_changes(self._stream_id))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        self._event.set()

    def is_at_end(self, offset: int) -> bool:
        """Return whether a healthy watch shows that the stream ends at `offset`."""
        return self._follower.is_healthy and self._slices.ends_at(self._stream_id, offset)

    async def ready(self) -> None:
        """Wait until the stream is followed, at most for the poll interval."""
        try:
            async with asyncio.timeout(self._poll_interval):
                await self._follower.wait_until_followed(self._stream_id)
        except TimeoutError:
            return

    def expect(self) -> None:
        """Ignore changes before this call."""
        self._event.clear()

    async def pause(self, seconds: float) -> None:
        """Wait for some time, or until a change of the stream, or until it is not followed.

        A change that ends the pause still counts for `wait`.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return

    async def wait(self) -> None:
        """Return after a change since `expect`, or when one may have been missed."""
        while not self._event.is_set():
            try:
                async with asyncio.timeout(self._poll_interval):
                    await self._event.wait()
            except TimeoutError:
                is_followed = self._follower.continuity(self._stream_id) is not None
                if not (is_followed and self._follower.is_healthy):
                    return


class StreamTail:
    """An endless iterator over the record batches of one stream, from an offset on.

    Use it as an async context manager or `close` it. Raises the errors of `read` that can't pass.
    After an error the iteration may continue from the same position. `on_retry` is called for each
    retried failure.
    """

    def __init__(
        self,
        changes: ChangeWait,
        read: Callable[[int], Awaitable[Fetched]],
        offset: int,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._changes = changes
        self._read = read
        self._on_retry = on_retry
        self._failures = 0
        self._waiting: deque[RecordBatch] = deque()
        self._read_to = offset
        self._position = offset
        self._context = ExitStack()
        self._is_open = False
        self._closed = False

    @property
    def position(self) -> int:
        """The offset after the last returned batch, where another tail would continue."""
        return self._position

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop following the stream. The iteration ends."""
        self._closed = True
        # A closed tail returns no more records, even if they were fetched.
        self._waiting.clear()
        self._context.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RecordBatch:
        if self._closed:
            raise StopAsyncIteration
        while not self._waiting:
            await self._fill()
            if self._closed:
                raise StopAsyncIteration
        record = self._waiting.popleft()
        self._position = record.end_offset
        return record

    async def _fill(self) -> None:
        """Read the next records. At the end of the stream wait for a change first."""
        if not self._is_open:
            # On first use: a tail that is never iterated follows nothing.
            self._context.enter_context(self._changes)
            self._is_open = True
            await self._changes.ready()

        self._changes.expect()
        if self._changes.is_at_end(self._read_to):
            await self._changes.wait()
            return
        try:
            fetched = await self._read(self._read_to)
        except (errors.BrokerClientError, StorageError) as error:
            if not _may_pass(error):
                raise
            await self._pause(error)
            return
        self._note_success()
        self._waiting.extend(fetched.records)
        # After the records are queued, so a cancelled read is repeated and loses nothing.
        self._read_to = fetched.next_offset
        if not fetched.records:
            await self._changes.wait()

    async def _pause(self, error: Exception) -> None:
        wait = _TAIL_PAUSES.wait(self._failures, random.random())
        self._failures += 1
        self._on_retry()
        _log.warning("tail at offset %d failed, retrying in %.3g s: %s", self._read_to, wait, error)
        await self._changes.pause(wait)

    def _note_success(self) -> None:
        if self._failures:
            _log.info("tail continues at offset %d", self._read_to)
        self._failures = 0


def _may_pass(error: errors.BrokerClientError | StorageError) -> bool:
    """Return whether a retry of the same read may succeed."""
    if isinstance(error, StorageError):
        return error.may_pass
    return isinstance(error, errors.ControllerUnavailableError | errors.ReadDeadlineError)
