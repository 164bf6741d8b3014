"""State hashes for comparing controllers: of the applied log, and of the metadata at offsets.

The rolling hash chains every applied entry to the previous ones, so it also distinguishes histories
that lead to equal metadata. Undone entries are removed from it. A request for the hash at an offset
ahead of the end waits until the metadata is exactly at that offset. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

import google_crc32c

from streammeta.controller.errors import BusyError, OffsetPassedError
from streammeta.controller.metadata.sections.frozen import FrozenMetadata

LOG_HASH_BYTES = 16
EMPTY_LOG_HASH = bytes(LOG_HASH_BYTES)
"""Rolling hash of an empty log."""

_ENTRY = Struct("<QQQ")

UNKNOWN_LOG_HASH = b""
"""Rolling hash of a log that begins at a checkpoint without one. It stays unknown."""

AHEAD_MAX = 1_000_000
"""Maximum distance of a requested offset above the metadata's end."""

WAITING_MAX = 16
"""Maximum number of pending hashes, each of which will keep a view of the metadata alive."""


@dataclass(frozen=True, slots=True)
class ViewAt:
    """The metadata exactly at an offset, and the rolling hash of the entries below it.

    `committed` is done when all these entries are committed, and None if they already are. It fails
    with `OutcomeUnknownError` when some of them are undone.
    """

    offset: int
    view: FrozenMetadata
    log_hash: bytes
    committed: asyncio.Future[None] | None


class RollingHash:
    """BLAKE2b-128 over (previous hash, offset, length and CRC32C of the payload), entry by entry.

    Numbers are 8 bytes little-endian. Hashing the payload's checksum is twenty times faster than
    hashing the payload, and enough to find replicas that differ because of a defect.
    """

    def __init__(self, value: bytes = EMPTY_LOG_HASH) -> None:
        self.value = value
        self._before: deque[tuple[int, bytes]] = deque()

    def extend(self, offset: int, payload: bytes) -> None:
        """Add the entry at `offset`."""
        # The previous value allows an undo without hashing the log again.
        self._before.append((offset, self.value))
        # A hash of a part of the log would look like another history.
        if self.value != UNKNOWN_LOG_HASH:
            entry = _ENTRY.pack(offset, len(payload), google_crc32c.value(payload))
            self.value = blake2b(self.value + entry, digest_size=LOG_HASH_BYTES).digest()

    def forget_undo(self, end_offset: int) -> None:
        """Drop undo information of entries below `end_offset`."""
        while self._before and self._before[0][0] < end_offset:
            self._before.popleft()

    def undo_to(self, end_offset: int) -> None:
        """Remove every entry at or above `end_offset`."""
        while self._before and self._before[-1][0] >= end_offset:
            _, self.value = self._before.pop()


class AwaitedViews:
    """Views of the metadata requested at offsets ahead of it.

    `freeze` returns the current view and rolling hash.
    """

    def __init__(self, freeze: Callable[[int], ViewAt]) -> None:
        self._freeze = freeze
        self._awaited: list[tuple[int, asyncio.Future[ViewAt]]] = []

    async def at(self, offset: int) -> ViewAt:
        """Return the view at `offset`, which the metadata has not reached.

        Raises:
            BusyError: too many views are pending.
            OffsetPassedError: a snapshot moved the metadata past `offset`.
        """
        # Each view keeps old versions of changed columns in memory.
        if len(self._awaited) >= WAITING_MAX:
            raise BusyError(f"{len(self._awaited)} hashes of the metadata are pending, retry later")
        future: asyncio.Future[ViewAt] = asyncio.get_running_loop().create_future()
        entry = (offset, future)
        self._awaited.append(entry)
        try:
            return await future
        finally:
            if entry in self._awaited:
                self._awaited.remove(entry)

    def freeze_up_to(self, end_offset: int) -> None:
        """Freeze a view for each request that waits for an offset up to `end_offset`.

        Must be called while no entry at or above the awaited offset has been applied: before the
        entry at `end_offset` is applied, and when no more entries below `end_offset` will come.
        """
        if not self._awaited:
            return
        # The list changes in the loop, so matching entries are collected first.
        for offset, future in [entry for entry in self._awaited if entry[0] <= end_offset]:
            self._awaited.remove((offset, future))
            if not future.done():
                future.set_result(self._freeze(offset))

    def reject_below(self, end_offset: int) -> None:
        """Reject requests that wait for an offset below `end_offset`, which was skipped."""
        for offset, future in [entry for entry in self._awaited if entry[0] < end_offset]:
            self._awaited.remove((offset, future))
            if not future.done():
                future.set_exception(OffsetPassedError(offset, end_offset))
                future.exception()  # marked as retrieved, because the caller may be cancelled
