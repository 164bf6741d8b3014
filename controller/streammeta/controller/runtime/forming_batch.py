"""What was appended in this turn of the event loop, and will become one batch.

Refuses what can't be taken; knows nothing of leadership or the log.
"""

from __future__ import annotations

from collections.abc import Sequence

from streammeta.controller.quorum.config import QuorumLimits
from streammeta.controller.runtime.quorum_errors import RecordTooLargeError, UncommittedLogFullError

PAYLOAD_OVERHEAD_BYTES = 4


class FormingBatch:
    """Payloads in order, and how many bytes they take."""

    def __init__(self, limits: QuorumLimits) -> None:
        self._limits = limits
        self._payloads: list[bytes] = []
        self._size = 0
        self.base_offset = 0
        """The offset that was promised to the first payload; without payloads it says nothing."""

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, payloads: Sequence[bytes], uncommitted_bytes: int, base_offset: int) -> None:
        """Add payloads, the first at `base_offset` of the log, or none of them.

        Raises:
            RecordTooLargeError: a payload is larger than a batch may be.
            UncommittedLogFullError: too much waits for a majority.
        """
        sizes = [len(payload) + PAYLOAD_OVERHEAD_BYTES for payload in payloads]
        largest = max(sizes, default=0)
        if largest > self._limits.max_batch_bytes:
            raise RecordTooLargeError(
                f"a record of {largest} bytes; at most {self._limits.max_batch_bytes} fit a batch"
            )
        waiting = uncommitted_bytes + self._size
        if waiting and waiting + sum(sizes) > self._limits.max_uncommitted_bytes:
            raise UncommittedLogFullError(
                f"{waiting} bytes wait for a majority of the voters, at most "
                f"{self._limits.max_uncommitted_bytes} may; try again when they have caught up"
            )
        if not self._payloads:
            self.base_offset = base_offset
        self._payloads.extend(payloads)
        self._size += sum(sizes)

    def clear(self) -> None:
        """Forget everything."""
        self._payloads, self._size = [], 0

    def take(self) -> list[tuple[bytes, ...]]:
        """Return everything, in batches as small as the limit wants, and forget it."""
        payloads = self._payloads
        self.clear()
        return _split(payloads, self._limits.max_batch_bytes)


def _split(payloads: Sequence[bytes], max_bytes: int) -> list[tuple[bytes, ...]]:
    """Divide payloads into batches of at most `max_bytes`; each fits one alone."""
    chunks: list[tuple[bytes, ...]] = []
    chunk: list[bytes] = []
    size = 0
    for payload in payloads:
        length = len(payload) + PAYLOAD_OVERHEAD_BYTES
        if chunk and size + length > max_bytes:
            chunks.append(tuple(chunk))
            chunk, size = [], 0
        chunk.append(payload)
        size += length
    if chunk:
        chunks.append(tuple(chunk))
    return chunks
