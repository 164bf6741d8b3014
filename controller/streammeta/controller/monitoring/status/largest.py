"""Largest streams and brokers: by ranges in objects, and by bytes.

Streams with the most ranges in objects are expensive to read, and relieved by compaction. They are
counted on request, at most every few seconds, and sorted in a thread. Bytes are found by scans of
the metadata in pieces while callers ask, which yield the event loop between pieces. A pause that
grows with the duration of a scan keeps its share of the time small for any size of metadata.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TOP = 20
"""Number of streams."""

KEPT_S = 10.0
"""Time for which a result is reused, in seconds."""


def largest(counts: npt.NDArray[np.integer], most: int = TOP) -> Sequence[tuple[int, int]]:
    """Return (stream id, count) of the largest positive counts, largest first."""
    places = (
        np.argpartition(counts, -most)[-most:] if len(counts) > most else np.arange(len(counts))
    )
    ordered = places[np.argsort(-counts[places], kind="stable")].tolist()
    return [(place, int(counts[place])) for place in ordered if counts[place] > 0]


class TopStreams:
    """Streams found by the last scan of the metadata."""

    def __init__(self, counts: Callable[[], npt.NDArray[np.int32]]) -> None:
        self._counts = counts
        self._known: Sequence[tuple[int, int]] = ()
        self._looked_at = -KEPT_S

    async def known(self) -> Sequence[tuple[int, int]]:
        """Return (stream id, number of ranges), largest first, at most `KEPT_S` seconds old."""
        now = time.monotonic()
        if now - self._looked_at >= KEPT_S:
            self._looked_at = now
            self._known = await asyncio.to_thread(largest, self._counts())
        return self._known


ROWS_AT_ONCE = 16_384
"""Rows of the metadata that are scanned without a pause."""


"""Minimum time between two scans, in seconds."""

REST = 50
"""Minimum time between two scans, as a multiple of the working time of the previous one."""

WAIT_S = 0.1
"""Time that a caller waits for the first scan, in seconds."""

_Column: TypeAlias = npt.NDArray[np.int64]
Pieces: TypeAlias = Iterator[tuple[_Column, _Column, _Column]]
"""Columns of streams, brokers and sizes of objects. -1 means no stream or no broker."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """(id, bytes) of streams and (id, bytes, objects) of brokers, largest first.

    Bytes of streams count stream objects, bytes of brokers count stream set objects: the
    metadata maps no other objects to brokers.
    """

    streams: Sequence[tuple[int, int]] = ()
    nodes: Sequence[tuple[int, int, int]] = ()


class TopSizes:
    """Sizes found by the last scan of the metadata."""

    def __init__(self, pieces: Callable[[int], Pieces]) -> None:
        """Set up with a function that returns pieces of the given number of rows."""
        self._pieces = pieces
        self._known = Sizes()
        self._next_look = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def known(self) -> Sizes:
        """Return the result of the last scan, and start another one if it is old.

        Waits a moment for a running scan. Before the first one has ended the result is unknown.
        """
        if self._looking is None and time.monotonic() >= self._next_look:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            # wait, unlike wait_for, does not cancel the scan when the time is up.
            await asyncio.wait((self._looking,), timeout=WAIT_S)
        return self._known

    def close(self) -> None:
        """Cancel a running scan."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        sums, worked_s = Sums(), 0.0
        try:
            pieces = self._pieces(ROWS_AT_ONCE)
            is_more = True
            while is_more:
                begun = time.perf_counter()
                piece = next(pieces, None)
                if is_more := piece is not None:
                    sums.add(*piece)
                # Without the sleep: only work on the event loop counts for the pause.
                worked_s += time.perf_counter() - begun
                await asyncio.sleep(0)

            # Sorting millions of streams would block the event loop.
            self._known = await asyncio.to_thread(sums.largest)
        finally:
            # Also after a failed scan, which would fail again at once.
            self._next_look = time.monotonic() + max(KEPT_S, REST * worked_s)
            self._looking = None


class Sums:
    """Sums of bytes by stream, and of bytes and objects by broker."""

    def __init__(self) -> None:
        self._streams = np.zeros(1024, dtype=np.int64)
        self._nodes: dict[int, tuple[int, int]] = {}

    def add(self, streams: _Column, nodes: _Column, sizes: _Column) -> None:
        """Add objects."""
        is_owned = streams >= 0
        owned = streams[is_owned]
        if len(owned):
            if (end := int(owned.max()) + 1) > len(self._streams):
                # Twice the needed length, so that growing costs little in all.
                self._streams = np.pad(self._streams, (0, 2 * end - len(self._streams)))
            np.add.at(self._streams, owned, sizes[is_owned])
        ids, places, counts = np.unique(nodes, return_inverse=True, return_counts=True)
        sums = np.zeros(len(ids), dtype=np.int64)
        np.add.at(sums, places, sizes)
        for node_id, size, count in zip(ids.tolist(), sums.tolist(), counts.tolist(), strict=True):
            if node_id >= 0:
                before = self._nodes.get(node_id, (0, 0))
                self._nodes[node_id] = (before[0] + size, before[1] + count)

    def largest(self) -> Sizes:
        """Return the largest sums."""
        nodes = ((node_id, *both) for node_id, both in self._nodes.items())
        # Ties are broken by id, so that rows keep their order between two scans.
        top = sorted(nodes, key=lambda each: (-each[1], each[0]))[:TOP]
        return Sizes(largest(self._streams), tuple(top))
