"""What a writer needs of a local write-ahead log, whatever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from streammeta.storage.object_format.record import RecordBatch


class RecordLog(Protocol):
    """An open log of encoded records; all calls come from one event loop and never block it.

    Positions grow with what is appended and mean nothing else.
    """

    @property
    def end(self) -> int:
        """The position behind the last record appended."""
        ...

    @property
    def recovered_end(self) -> int:
        """The position behind the last record of `recover`."""
        ...

    @property
    def max_record_bytes(self) -> int:
        """The largest record, header included, that there can ever be room for."""
        ...

    def has_room(self, size: int) -> bool:
        """Tell whether `size` bytes of records may be appended now.

        That changes only by `trim` and when the future of an append is done. Raises what broke
        the log, if it is broken.
        """
        ...

    def append(self, header: bytes, payload: bytes) -> asyncio.Future[None]:
        """Add a record, header and payload as `streammeta.storage.object_format.record` has them.

        The future is shared by all records that become durable together, and done when they are;
        such futures are done in order. Raises what broke the log, if it is broken.
        """
        ...

    def trim(self, position: int) -> None:
        """Forget records that end at or below `position`: they need not be recovered."""
        ...

    def recover(self) -> Iterable[RecordBatch]:
        """Give what the log held when it was opened, in the order of the appends."""
        ...

    async def set_aside(self, records: Iterable[RecordBatch], reason: str) -> Path | None:
        """Keep, in a file beside the log, records that can't be committed, before they are trimmed.

        The result is the file, None without records.
        """
        ...
