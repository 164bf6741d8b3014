"""Handle of one stream: appends, reads and changes of it through its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

from streammeta.client.api.streams_by_id import StreamsById
from streammeta.client.errors import StreamNotFoundError
from streammeta.client.model import StreamDescription
from streammeta.client.reading.metadata_follower import StreamTail
from streammeta.client.reading.reader import DEFAULT_READ_BYTES
from streammeta.client.reading.time_lookup import Bound, OffsetAtTime, TimestampOf
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.storage.object_format.record import RecordBatch


class Stream(ClosedAtExit):
    """One stream of a client: `create_stream` and `open_stream` accept appends, `stream` reads.

    `id` is the stream's id, `tags` are the tags that it was created with, or empty if the handle
    was made without looking them up. Handles of one stream share their state, so any of them may be
    used. Raises the errors of the client, and `StreamNotOpenedError` for an append, a trim or a
    close of a stream that this client has not open.
    """

    def __init__(self, client: StreamsById, stream_id: int, tags: Mapping[str, str]) -> None:
        self._client = client
        self.id = stream_id
        self.tags = tags

    def __repr__(self) -> str:
        return f"<Stream {self.id} {dict(self.tags)}>"

    @property
    def epoch(self) -> int | None:
        """The epoch with which this client has the stream open, None if it has not."""
        return self._client.epochs.get(self.id)

    @property
    def next_offset(self) -> int:
        """The offset of the next append."""
        return self._client.writer.next_offset(self.id)

    async def describe(self) -> StreamDescription:
        """Return the stream as the controllers know it."""
        async for description in self._client.controllers.describe_streams([self.id]):
            return description
        raise StreamNotFoundError(f"stream {self.id}")

    # -- records

    async def append(
        self, record: bytes | Sequence[bytes], *, timestamp_ms: int | None = None
    ) -> int:
        """Append one record, or a sequence of records together. Return the first one's offset.

        Returns once the records are durable. By default that is when the object with them is
        committed. With a write-ahead log it is when the log has them, and reads show them after the
        next upload, or after `client.flush()`. Concurrent appends share objects and commits. While
        the writer's buffer is full, the call waits. The records of one sequence are committed
        together. If the call is cancelled, its records may still be committed. `timestamp_ms` is
        the time of the records, in ms since 1970.
        """
        if isinstance(record, bytes | bytearray | memoryview):
            payload = cast(bytes, record)
            return await self._client.append(self.id, payload, timestamp_ms=timestamp_ms)
        return await self._client.append_many(self.id, record, timestamp_ms=timestamp_ms)

    async def read(
        self, start: int, end: int | None = None, max_bytes: int = DEFAULT_READ_BYTES
    ) -> list[RecordBatch]:
        """Read committed records that cover `[start, end)`, or its start. At the end: none."""
        return await self._client.read(self.id, start, end, max_bytes)

    def iterate(
        self, start: int | None = None, end: int | None = None
    ) -> AsyncIterator[RecordBatch]:
        """Iterate over committed records from `start` (None: the first visible one) to `end`.

        Without `end` it stops at the end of the committed records when the iteration begins.
        """
        return self._client.iterate(self.id, start, end)

    def __aiter__(self) -> AsyncIterator[RecordBatch]:
        """Iterate from the first visible offset to the present end. See `iterate`."""
        return self.iterate()

    def follow(self, offset: int) -> StreamTail:
        """Iterate from `offset` on without an end, waiting for new records."""
        return self._client.tail(self.id, offset)

    async def offset_at(
        self, timestamp_ms: int, bound: Bound = "lower", *, timestamp_of: TimestampOf
    ) -> OffsetAtTime:
        """Find an offset by time. See `StreamReader.offset_for_timestamp`."""
        return await self._client.reader.offset_for_timestamp(
            self.id, timestamp_ms, bound, timestamp_of=timestamp_of
        )

    # -- changes

    async def trim(self, new_start: int) -> int:
        """Move the first visible offset forward. Return the new one.

        A trim stops at the next offset, so later appends stay visible.
        """
        return (await self._client.trim_streams({self.id: new_start})).require_all()[self.id]

    async def close(self) -> None:
        """Commit the appended records and close the stream, if this client has it open."""
        if self.epoch is not None:
            (await self._client.close_streams([self.id])).require_all()

    async def delete(self) -> None:
        """Close the stream, if this client has it open, and delete it with all its records."""
        await self.close()
        (await self._client.delete_streams([self.id])).require_all()
