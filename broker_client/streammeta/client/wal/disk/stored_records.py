"""Comparison of logged records with stored ones, for records whose writer is unknown.

An interrupted recovery leaves some of its uploads committed. Only the records themselves show
whether a stream contains them, or another process's records at the same offsets.
"""

from __future__ import annotations

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import OffsetTrimmedError, StreamNotFoundError
from streammeta.client.reading.reader import StreamReader
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore


class StoredRecords(ClosedAtExit):
    """Reads records of streams to compare them. The first comparison creates the reader."""

    def __init__(self, client: ControllerClient, store: ObjectStore, namespace: str) -> None:
        self._place = (client, store, namespace)
        self._reader: StreamReader | None = None

    async def contain(self, record: RecordBatch) -> bool:
        """Return whether the stream contains this record at its offsets, under any epoch.

        Raises the errors of reading: an unreadable record is not known to differ.
        """
        if self._reader is None:
            self._reader = StreamReader(*self._place)
        try:
            found = await self._reader.read(record.stream_id, record.base_offset, record.end_offset)
        # Trimmed or deleted records are not needed, so they count as not stored.
        except (OffsetTrimmedError, StreamNotFoundError):
            return False
        wanted = (record.base_offset, record.count, record.payload)
        stored = [(batch.base_offset, batch.count, batch.payload) for batch in found]
        return stored == [wanted]

    async def close(self) -> None:
        """Release the reader, if there is one."""
        if self._reader is not None:
            await self._reader.close()
            self._reader = None
