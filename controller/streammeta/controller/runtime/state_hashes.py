"""Hashes by which members of a cluster are compared: of the log replayed, of the map at offsets.

The rolling hash chains every replayed entry to those before it, so it also tells apart histories
that lead to equal maps. It goes back with entries that are undone. Who asks for the map's hash at
an offset that lies ahead waits here for the moment when the map is exactly as of there.

Runs on the event loop; knows what the map is only by the view that it is given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import google_crc32c

from streammeta.controller.errors import BusyError, OffsetPassedError
from streammeta.controller.metadata.frozen import FrozenMap

LOG_HASH_BYTES = 16
EMPTY_LOG_HASH = bytes(LOG_HASH_BYTES)
"""The rolling hash of no entries."""

UNKNOWN_LOG_HASH = b""
"""That of a log whose beginning is a checkpoint without one; it stays unknown."""

AHEAD_MAX = 1_000_000
"""How many offsets ahead of the map's end a hash may be asked for."""

WAITING_MAX = 16
"""How many hashes may be waited for, each of which will hold a view of the map."""


@dataclass(frozen=True, slots=True)
class ViewAt:
    """The map exactly as of an offset, and the rolling hash of the entries below it.

    `committed` is done when all these entries are, None if they are already; it fails with
    `OutcomeUnknownError` when some of them are undone.
    """

    offset: int
    view: FrozenMap
    log_hash: bytes
    committed: asyncio.Future[None] | None


class RollingHash:
    """BLAKE2b-128 over (hash before, offset, length and CRC32C of the payload), entry by entry.

    Numbers are 8 bytes little-endian. Payloads go in by their checksum, which is twenty times
    faster and enough to find members that differ by a defect.
    """

    def __init__(self, value: bytes = EMPTY_LOG_HASH) -> None:
        self.value = value
        self._before: deque[tuple[int, bytes]] = deque()

    def extend(self, offset: int, payload: bytes) -> None:
        """Take the entry at `offset`."""
        self._before.append((offset, self.value))
        if self.value != UNKNOWN_LOG_HASH:
            chained = blake2b(self.value, digest_size=LOG_HASH_BYTES)
            for number in (offset, len(payload), google_crc32c.value(payload)):
                chained.update(number.to_bytes(8, "little"))
            self.value = chained.digest()

    def forget_undo(self, end_offset: int) -> None:
        """Entries below `end_offset` can't be undone any more."""
        while self._before and self._before[0][0] < end_offset:
            self._before.popleft()

    def undo_to(self, end_offset: int) -> None:
        """Take back every entry at or above `end_offset`."""
        while self._before and self._before[-1][0] >= end_offset:
            _, self.value = self._before.pop()


class AwaitedViews:
    """Views of the map that were asked for at offsets ahead of it.

    `freeze` returns the view and the rolling hash as they are now.
    """

    def __init__(self, freeze: Callable[[int], ViewAt]) -> None:
        self._freeze = freeze
        self._awaited: list[tuple[int, asyncio.Future[ViewAt]]] = []

    async def at(self, offset: int) -> ViewAt:
        """Return the view at `offset`, which the map has not reached.

        Raises:
            BusyError: too many wait already.
            OffsetPassedError: a snapshot took the map beyond `offset`.
        """
        if len(self._awaited) >= WAITING_MAX:
            raise BusyError(
                f"{len(self._awaited)} hashes of the map are waited for; try again later"
            )
        future: asyncio.Future[ViewAt] = asyncio.get_running_loop().create_future()
        entry = (offset, future)
        self._awaited.append(entry)
        try:
            return await future
        finally:
            if entry in self._awaited:
                self._awaited.remove(entry)

    def reached(self, end_offset: int) -> None:
        """Freeze for whoever waits for an offset up to `end_offset`.

        To be called whenever no entry at or above what is waited for has been replayed: before an
        entry at `end_offset` is, and when nothing below `end_offset` is to come any more.
        """
        if not self._awaited:
            return
        for offset, future in [entry for entry in self._awaited if entry[0] <= end_offset]:
            self._awaited.remove((offset, future))
            if not future.done():
                future.set_result(self._freeze(offset))

    def passed(self, end_offset: int) -> None:
        """Refuse whoever waits for an offset below `end_offset`: the map has skipped it."""
        for offset, future in [entry for entry in self._awaited if entry[0] < end_offset]:
            self._awaited.remove((offset, future))
            if not future.done():
                future.set_exception(OffsetPassedError(offset, end_offset))
                future.exception()  # the caller may have gone; that is no news then
