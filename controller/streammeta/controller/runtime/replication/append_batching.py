"""Batching of appends: callers that wait for a batch, and the payloads of the open batch.

A batch costs every replica about the same regardless of its size, and an additional one after those
in flight would only queue. Callers therefore wait for the next commit and then append in the same
event loop turn, or in the next turns if they are very many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset
from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.quorum.events import Append
from streammeta.controller.runtime.quorum_errors import RecordTooLargeError, UncommittedLogFullError

BATCHES_UNDER_WAY_MAX = 2
"""One batch on the disks and the network, and one queued so that they never become idle."""

GIVEN_PER_TURN = 128
"""Maximum number of waiting callers released in one event loop turn."""


class AppendTurns:
    """Callers that wait for a batch to append to."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._given = 0  # number of waiting callers, from the first, that may continue
        self._is_scheduled = False

    async def wait(self, batches_under_way: int) -> None:
        """Return immediately, or together with all other waiting callers after the next `give`."""
        # Not ahead of callers that already wait.
        if batches_under_way < BATCHES_UNDER_WAY_MAX and not self._waiting:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def give_if(self, batches_under_way: int) -> None:
        """Release all waiting callers if another batch may be in flight."""
        if self._waiting and batches_under_way < BATCHES_UNDER_WAY_MAX:
            self.give()

    def give(self) -> None:
        """Release all waiting callers."""
        # Only those that wait now: a caller that comes back waits for the next batch.
        self._given = len(self._waiting)
        if not self._is_scheduled:
            self._give_some()

    def _give_some(self) -> None:
        self._is_scheduled = False
        awake = 0
        while self._given and awake < GIVEN_PER_TURN:
            turn = self._waiting.popleft()
            self._given -= 1
            if not turn.done():
                turn.set_result(None)
                # Cancelled callers append nothing, so they do not count.
                awake += 1
        if self._given:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._give_some)


PAYLOAD_OVERHEAD_BYTES = 4


class FormingBatch:
    """Payloads appended in this event loop turn, in order, and their size."""

    def __init__(self, limits: QuorumLimits) -> None:
        self._limits = limits
        self._payloads: list[bytes] = []
        self._size = 0
        self.base_offset = 0
        """Offset promised to the first payload. Meaningless without payloads."""

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, payloads: Sequence[bytes], uncommitted_bytes: int, base_offset: int) -> None:
        """Add all payloads, the first at `base_offset` of the log, or none of them.

        Raises:
            RecordTooLargeError: a payload is larger than the batch limit.
            UncommittedLogFullError: too many bytes wait for a majority.
        """
        sizes = [len(payload) + PAYLOAD_OVERHEAD_BYTES for payload in payloads]
        largest = max(sizes, default=0)
        if largest > self._limits.max_batch_bytes:
            most = self._limits.max_batch_bytes
            problem = f"a record has {largest} bytes, and a batch at most {most}"
            raise RecordTooLargeError(problem, "request", most)

        waiting = uncommitted_bytes + self._size
        # A single append of any size is allowed when nothing waits, or it could never succeed.
        if waiting and waiting + sum(sizes) > self._limits.max_uncommitted_bytes:
            raise UncommittedLogFullError(
                f"{waiting} bytes wait for a majority of the voters, and the limit is "
                f"{self._limits.max_uncommitted_bytes}: retry when the voters have caught up"
            )

        if not self._payloads:
            self.base_offset = base_offset
        self._payloads.extend(payloads)
        self._size += sum(sizes)

    def clear(self) -> None:
        """Drop all payloads."""
        self._payloads, self._size = [], 0

    def take(self) -> list[tuple[bytes, ...]]:
        """Return all payloads in batches within the size limit, and clear them."""
        payloads = self._payloads
        if not payloads:
            return []
        self.clear()
        return _split(payloads, self._limits.max_batch_bytes)

    def appends(
        self, *, may_append: Callable[[], bool], log_end: Callable[[], EndOffset]
    ) -> Iterator[Append]:
        """Yield the payloads as appends of the core, each checked against its promised offset.

        Both callbacks are called before each append. An append can end leadership, and then the
        rest is dropped.
        """
        base_offset = self.base_offset
        for payloads in self.take():
            if not may_append():
                return
            if log_end() != base_offset:
                raise InvariantError(
                    f"records were promised offset {base_offset}, but the log ends at {log_end()}"
                )
            base_offset = EndOffset(base_offset + len(payloads))
            yield Append(payloads)


def _split(payloads: Sequence[bytes], max_bytes: int) -> list[tuple[bytes, ...]]:
    """Divide payloads into batches of at most `max_bytes`. Each payload fits into one."""
    chunks: list[tuple[bytes, ...]] = []
    chunk: list[bytes] = []
    size = 0
    for payload in payloads:
        length = len(payload) + PAYLOAD_OVERHEAD_BYTES
        # An entry is never divided, because replicas apply whole payloads.
        if chunk and size + length > max_bytes:
            chunks.append(tuple(chunk))
            chunk, size = [], 0
        chunk.append(payload)
        size += length
    if chunk:
        chunks.append(tuple(chunk))
    return chunks
