"""Protocol of write-ahead logs: what a writer and a recovery need of one, wherever it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from streammeta.storage.object_format.record import RecordBatch


class RecordLog(Protocol):
    """An open log. Positions count records; see `WriteAheadLog` for the meaning of each."""

    @property
    def end(self) -> int:
        """The position behind the last record appended."""
        ...

    @property
    def recovered_end(self) -> int:
        """The position behind the last record that was there when the log was opened."""
        ...

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest encoded record that can ever have room."""
        ...

    def has_room(self, size: int) -> bool:
        """Tell whether records of `size` encoded bytes, all of them, may be appended now."""
        ...

    def append(self, header: bytes, payload: bytes) -> asyncio.Future[None]:
        """Take one encoded record; the result is done when it is durable."""
        ...

    def trim(self, position: int) -> None:
        """Settle all records before `position`: they are not recovered."""
        ...

    def recover(self) -> Iterator[RecordBatch]:
        """Give the records that were there at the opening and are not trimmed, in append order."""
        ...

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | str | None:
        """Keep records that can't be committed; return the place, None without records."""
        ...
