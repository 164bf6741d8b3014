"""Reading a stream to its end, and on as it grows.

Waits for news of the stream instead of asking again and again; only while no news come does it ask
from time to time. Its place is in the tail, not in a call, so a call that is cancelled loses
nothing: the next one goes on where the last batch was handed out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Self

from streammeta.client.reading.map_follower import MapFollower
from streammeta.client.reading.range_reader import Fetched
from streammeta.client.reading.slice_cache import SliceCache
from streammeta.storage.object_format.record import RecordBatch


class NewsWait:
    """Waits for news of one stream; a context, so that the stream is followed meanwhile.

    While the map is followed, news arrive by themselves; otherwise `wait` returns after
    `poll_interval` seconds too.
    """

    def __init__(
        self, slices: SliceCache, follower: MapFollower, stream_id: int, poll_interval: float
    ) -> None:
        self._slices = slices
        self._follower = follower
        self._stream_id = stream_id
        self._poll_interval = poll_interval
        self._context = ExitStack()
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        self._event = self._context.enter_context(self._slices.news(self._stream_id))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        self._event.set()

    def nothing_at(self, offset: int) -> bool:
        """Whether the stream is known to end at `offset`, and news would come if it did not."""
        return self._follower.is_healthy and self._slices.ends_at(self._stream_id, offset)

    async def ready(self) -> None:
        """Wait until news of the stream come, or for the time between two questions."""
        try:
            async with asyncio.timeout(self._poll_interval):
                await self._follower.followed(self._stream_id)
        except TimeoutError:
            return

    def expect(self) -> None:
        """Count as news what comes from now on."""
        self._event.clear()

    async def wait(self) -> None:
        """Return when there are news since `expect`, or may be."""
        while not self._event.is_set():
            try:
                async with asyncio.timeout(self._poll_interval):
                    await self._event.wait()
            except TimeoutError:
                followed = self._follower.continuity(self._stream_id) is not None
                if not (followed and self._follower.is_healthy):
                    return


class StreamTail:
    """An endless iterator over the record batches of one stream from an offset on.

    `close` it, or use it as a context manager, when no more is wanted. Raises what `read` raises;
    after that it may be iterated on, from the same place.
    """

    def __init__(
        self, news: NewsWait, read: Callable[[int], Awaitable[Fetched]], offset: int
    ) -> None:
        self._news = news
        self._read = read
        self._waiting: deque[RecordBatch] = deque()
        self._read_to = offset
        self._position = offset
        self._context = ExitStack()
        self._is_open = False
        self._closed = False

    @property
    def position(self) -> int:
        """The offset behind the last batch that was handed out: where another tail would go on."""
        return self._position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop following the stream; the iteration ends."""
        self._closed = True
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
        """Read what is there; if nothing is, wait for news first."""
        if not self._is_open:
            self._context.enter_context(self._news)
            self._is_open = True
            await self._news.ready()
        self._news.expect()
        if self._news.nothing_at(self._read_to):
            await self._news.wait()
            return
        fetched = await self._read(self._read_to)
        self._waiting.extend(fetched.records)
        self._read_to = fetched.next_offset
        if not fetched.records:
            await self._news.wait()
