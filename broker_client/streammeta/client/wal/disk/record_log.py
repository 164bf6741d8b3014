"""Protocol of write-ahead logs for writers and recoveries, on disk or in the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from streammeta.storage.object_format.record import RecordBatch


class RecordLog(Protocol):
    """An open log. Positions count records. See `WriteAheadLog` for the meaning of each."""

    @property
    def end(self) -> int:
        """The position after the last appended record."""
        ...

    @property
    def recovered_end(self) -> int:
        """The position after the last record that existed when the log was opened."""
        ...

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest encoded record that ever fits."""
        ...

    def has_room(self, size: int) -> bool:
        """Return whether records of `size` encoded bytes may all be appended now."""
        ...

    def append(self, header: bytes, payload: bytes) -> asyncio.Future[None]:
        """Append one encoded record. The result is done when it is durable."""
        ...

    def trim(self, position: int) -> None:
        """Settle all records before `position`, so that they are not recovered."""
        ...

    def recover(self) -> Iterator[RecordBatch]:
        """Yield the records that existed at the opening and are not trimmed, in append order."""
        ...

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | str | None:
        """Store records that can't be committed and return the file or key, None for no records."""
        ...
