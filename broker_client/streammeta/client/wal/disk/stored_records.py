"""Comparison of logged records with the stored ones, for records whose writer is in doubt.

A recovery that was interrupted leaves some of its uploads committed. Whether a stream holds them,
or another process's records at the same offsets, only the records themselves tell.
"""

from __future__ import annotations

from streammeta.client.controllers.controller_client import ControllerClient
from streammeta.client.errors import OffsetTrimmedError, StreamNotFoundError
from streammeta.client.reading.reader import StreamReader
from streammeta.client.resources.resources import ClosedAtExit
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.protocol.base import ObjectStore


class StoredRecords(ClosedAtExit):
    """Reads records of streams to compare them; a reader is made for the first one."""

    def __init__(self, client: ControllerClient, store: ObjectStore, namespace: str) -> None:
        self._place = (client, store, namespace)
        self._reader: StreamReader | None = None

    async def hold(self, record: RecordBatch) -> bool:
        """Return whether the stream holds this record at its offsets, whatever its epoch.

        Raises what reading raises: a record that can't be read is not known to differ.
        """
        if self._reader is None:
            self._reader = StreamReader(*self._place)
        try:
            found = await self._reader.read(record.stream_id, record.base_offset, record.end_offset)
        except (OffsetTrimmedError, StreamNotFoundError):
            return False
        wanted = (record.base_offset, record.count, record.payload)
        return [(one.base_offset, one.count, one.payload) for one in found] == [wanted]

    async def close(self) -> None:
        """Release the reader, if there is one."""
        if self._reader is not None:
            await self._reader.close()
            self._reader = None
