"""Acknowledging appends when a local write-ahead log has them, not when they are committed.

Owns which callers wait for which group of the log. Knows nothing of uploads: what is logged goes
its way through the store and the map like everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from streammeta.client.record_log import RecordLog
from streammeta.client.upload_batch import StreamRun
from streammeta.client.write_ahead_log.errors import WriteAheadLogFullError


@dataclass(slots=True, eq=False)
class _Group:
    """Appends that become durable together."""

    durable: asyncio.Future[None]
    waiting: list[tuple[StreamRun, int, asyncio.Future[int]]] = field(default_factory=list)
    logged_bytes: int = 0


class LoggedAcks:
    """Callers that wait for the log.

    `on_durable` is told how many bytes the log holds no longer in memory, `on_broken` why it takes
    no more records.
    """

    def __init__(
        self,
        log: RecordLog,
        on_durable: Callable[[int], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._log = log
        self._on_durable = on_durable
        self._on_broken = on_broken
        self._group: _Group | None = None

    def append(
        self,
        run: StreamRun,
        records: Sequence[tuple[bytes, bytes]],
        base_offset: int,
        ack: asyncio.Future[int],
    ) -> int:
        """Log the encoded `records` of one append; return the bytes the log holds until later."""
        size = 0
        for header, payload in records:
            durable = self._log.append(header, payload)
            group = self._group
            if group is None or group.durable is not durable:
                group = self._group = _Group(durable)
                durable.add_done_callback(partial(self._done, group))
            group.logged_bytes += len(header) + len(payload)
            size += len(header) + len(payload)
        if self._group is not None:
            self._group.waiting.append((run, base_offset, ack))
        return size

    def _done(self, group: _Group, durable: asyncio.Future[None]) -> None:
        error = (
            asyncio.CancelledError("the log was closed")
            if durable.cancelled()
            else durable.exception()
        )
        if isinstance(error, WriteAheadLogFullError):
            for run, base_offset, ack in group.waiting:
                run.add_ack(ack, base_offset)  # not in the log: it waits for its commit
        elif error is None:
            for _, base_offset, ack in group.waiting:
                if not ack.done():
                    ack.set_result(base_offset)
        else:
            for _, _, ack in group.waiting:
                if not ack.done():
                    ack.set_exception(error)
            if isinstance(error, Exception):
                self._on_broken(error)
        self._on_durable(group.logged_bytes)
