"""Streams with the most ranges in objects: expensive to read, and relieved by compaction.

Counted on request, at most every few seconds, and sorted in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

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
