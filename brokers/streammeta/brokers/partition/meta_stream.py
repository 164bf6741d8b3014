"""MetaStream: the small key-value state of a partition in a separate stream.

Owns replay, the atomic append of several values, and compaction: every live value except the newest
is written again, and superseded records are trimmed. An unreadable record fails the opening.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from streammeta.brokers.partition.errors import MetaStreamClosedError
from streammeta.brokers.partition.meta_map import MetaMap, encode_entry
from streammeta.brokers.partition.streams import Streams
from streammeta.storage.inspection.meta_stream import MetaEntry

_REPLAY_BYTES = 64 * 1024


class MetaStream:
    """Key-value state of one open stream. Create it with `replay`."""

    def __init__(self, streams: Streams, stream_id: int) -> None:
        self._streams = streams
        self._stream_id = stream_id
        self._map = MetaMap()
        self._changing = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def replay(
        cls, streams: Streams, stream_id: int, start_offset: int, end_offset: int
    ) -> MetaStream:
        """Read the values of an open stream with these visible offsets.

        Raises `DamagedPartitionError` for an unreadable record.
        """
        meta = cls(streams, stream_id)
        meta._map.start_offset = meta._map.end_offset = start_offset
        at = start_offset
        while at < end_offset:
            fetched = await streams.fetch(stream_id, at, _REPLAY_BYTES)
            for record in fetched.records:
                meta._map.apply(record.base_offset, record.payload)
            at = fetched.next_offset
        return meta

    def entry(self, key: str) -> MetaEntry | None:
        """Return the newest value of a key, None if it has none."""
        return self._map.entry(key)

    async def put(self, values: Mapping[str, bytes]) -> asyncio.Future[int]:
        """Append values, all of them in one commit. The future is done once they are durable.

        Raises `MetaStreamClosedError` after `close`.
        """
        async with self._changing:
            if self._is_closed:
                raise MetaStreamClosedError("the MetaStream is closed and accepts no values")
            return await self._append([encode_entry(key, raw) for key, raw in values.items()])

    async def compact(self, *, is_forced: bool = False) -> None:
        """Write live values again and trim superseded ones, if that is worth its writes."""
        async with self._changing:
            if self._is_closed:
                raise MetaStreamClosedError("the MetaStream is closed and can't be compacted")
            if is_forced or self._map.is_worth_compacting:
                await self._compact()

    async def close(self) -> None:
        """Compact, and stop accepting changes. The stream stays open for its owner to close."""
        async with self._changing:
            if not self._is_closed:
                await self._compact()
                self._is_closed = True

    async def _compact(self) -> None:
        rewritten = self._map.to_rewrite()
        if rewritten and self._map.has_superseded:
            # The copies must be durable before their originals are trimmed.
            await (await self._append(rewritten))
        first = self._map.first_live_offset
        if first > self._map.start_offset:
            (await self._streams.trim_streams({self._stream_id: first})).require_all()
            self._map.start_offset = first

    async def _append(self, payloads: list[bytes]) -> asyncio.Future[int]:
        offset = self._streams.writer.next_offset(self._stream_id)
        future = await self._streams.writer.append_many(self._stream_id, payloads)
        # The state advances at once: later values may be computed from it before this commit.
        for index, payload in enumerate(payloads):
            self._map.apply(offset + index, payload)
        return future
