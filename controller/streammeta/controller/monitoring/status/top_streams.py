"""Streams with the most ranges in objects: those that readers pay for, and compaction relieves.

Counted from the map when somebody asks, at most every few seconds, and sorted in a thread.
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
"""Time for which an answer is given again, in seconds."""


def largest(counts: npt.NDArray[np.integer], most: int = TOP) -> Sequence[tuple[int, int]]:
    """Return (stream id, count) of the largest counts above zero, the largest first."""
    places = (
        np.argpartition(counts, -most)[-most:] if len(counts) > most else np.arange(len(counts))
    )
    ordered = places[np.argsort(-counts[places], kind="stable")].tolist()
    return [(place, int(counts[place])) for place in ordered if counts[place] > 0]


class TopStreams:
    """The streams of the last look at the map."""

    def __init__(self, counts: Callable[[], npt.NDArray[np.int32]]) -> None:
        self._counts = counts
        self._known: Sequence[tuple[int, int]] = ()
        self._looked_at = -KEPT_S

    async def known(self) -> Sequence[tuple[int, int]]:
        """Return (stream id, number of ranges) of the largest, at most `KEPT_S` old."""
        now = time.monotonic()
        if now - self._looked_at >= KEPT_S:
            self._looked_at = now
            self._known = await asyncio.to_thread(largest, self._counts())
        return self._known
