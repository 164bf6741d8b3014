"""Interface of streams for a partition log, implemented by `streammeta.client.StreamClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from streammeta.client import Fetched, OpenedStream, Outcomes


class Appender(Protocol):
    """Appends with futures that are done once the record is durable."""

    def next_offset(self, stream_id: int) -> int:
        """Return the offset of the next append to the stream."""

    async def append(
        self,
        stream_id: int,
        payload: bytes,
        count: int = 1,
        *,
        timestamp_ms: int | None = None,
        max_timestamp_ms: int | None = None,
    ) -> asyncio.Future[int]:
        """Append one record of `count` offsets."""

    async def append_many(
        self, stream_id: int, payloads: Sequence[bytes], *, timestamp_ms: int | None = None
    ) -> asyncio.Future[int]:
        """Append a record of one offset for each payload, all in one commit."""


class Streams(Protocol):
    """Streams of one node: created, opened at an epoch, read, trimmed, closed."""

    @property
    def writer(self) -> Appender:
        """Appender for all streams."""

    async def create_streams(self, tags: Sequence[Mapping[str, str]]) -> list[int]:
        """Create closed, empty streams."""

    async def open_streams(self, streams: Mapping[int, int]) -> Outcomes[OpenedStream]:
        """Open streams at the given epochs."""

    async def close_streams(self, stream_ids: Iterable[int]) -> Outcomes[None]:
        """Commit all appends, and close streams."""

    async def trim_streams(self, new_starts: Mapping[int, int]) -> Outcomes[int]:
        """Move the first visible offsets of open streams forward, and return the new starts."""

    async def fetch(self, stream_id: int, offset: int, max_bytes: int = ...) -> Fetched:
        """Read records from `offset` on, none at the end of the stream."""
