"""Expiry of a broker's tiered storage: segments and index files past every topic's retention.

Each topic has a retention in hours. A segment is deleted once both its newest message and the
segment itself are older, by the store's own time. The store's time bounds its trust in clocks (see
`stamped_time`). The loop runs until it is stopped, and the next check repeats a failed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from streammeta.brokers.rocketmq.cluster.cluster_metadata import MetadataFencedError
from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.key_index_service import KeyIndexService
from streammeta.brokers.rocketmq.message_file import MessageFile
from streammeta.brokers.rocketmq.segments.flat_file import MetadataKeeper
from streammeta.brokers.rocketmq.tiered_view import DELETE_INTERVAL_MS, RESERVED_HOURS
from streammeta.client.errors import NodeFencedError

_REPLACED = (NodeFencedError, MetadataFencedError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """Default retention of messages, and the interval of checks.

    With `check_interval_s` None, segments expire only in calls of `Expiry.expire_due`.
    """

    reserved_hours: int = RESERVED_HOURS
    check_interval_s: float | None = DELETE_INTERVAL_MS / 1000

    def __post_init__(self) -> None:
        """Reject times that delete everything, or checks without a pause."""
        if self.reserved_hours < 1:
            raise ValueError(f"reserved_hours is {self.reserved_hours}, expected at least 1")
        if self.check_interval_s is not None and not self.check_interval_s > 0:
            raise ValueError(f"check_interval_s is {self.check_interval_s}, expected more than 0")


@dataclass(eq=False)
class Expiry:
    """Expiry of one broker's queues and key index. `now_ms` is the store's own time."""

    _files: Mapping[Queue, MessageFile]
    _index: KeyIndexService
    _keeper: MetadataKeeper
    _now_ms: Callable[[], int]
    _retention: Retention
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self) -> None:
        """Check in the background, now and after each interval, until `stop`."""
        interval_s = self._retention.check_interval_s
        if interval_s is not None and self._task is None:
            self._task = asyncio.create_task(self._run(interval_s))

    async def stop(self) -> None:
        """Stop checking. The next process finishes deletions under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def expire_due(self) -> int:
        """Delete expired segments and index files now. Return their number.

        A failing queue does not block the others: its error is logged, and the next check retries
        it. Raises `NodeFencedError` or `MetadataFencedError` if the process was replaced, and other
        errors of the controllers before anything is deleted.
        """
        table, hours, now_ms = self._keeper.table, self._retention.reserved_hours, self._now_ms()
        # Time must not run backwards, even if the clock does.
        table.noted_ms = max(table.noted_ms, now_ms)
        # A replaced process must not delete by an outdated table.
        await self._keeper.prove_owner()

        deleted = 0
        for queue, file in list(self._files.items()):
            before_ms = now_ms - table.reserve_ms(queue.topic, hours)
            # Creation times count too: times of messages come from producers.
            with _log_failure(f"queue {queue.path}"):
                deleted += await file.expire(before_ms, before_ms)

        # An index file has the keys of all topics.
        longest_ms = max(table.reserve_ms(topic, hours) for topic in ("", *table.topics))
        with _log_failure("the key index"):
            deleted += await self._index.expire(now_ms - longest_ms)
        return deleted

    async def _run(self, interval_s: float) -> None:
        while True:
            deleted = 0
            try:
                with _log_failure("tiered storage"):
                    deleted = await self.expire_due()
            except _REPLACED as error:
                _log.error(
                    "expiry of tiered storage stops, as another process replaced this one: %s",
                    error,
                )
                return

            if deleted:
                _log.info("expiry deleted %d segments and index files", deleted)
            await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _log_failure(subject: str) -> Iterator[None]:
    """Log a failure instead of raising it, unless the process was replaced."""
    try:
        yield
    except _REPLACED:
        raise
    except Exception:  # noqa: BLE001 - one queue must not hold up the others
        _log.warning("expiry of %s failed, the next check repeats it", subject, exc_info=True)
