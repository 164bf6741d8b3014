"""Keys that the bucket refused to delete, each with its own time to try again.

Pure bookkeeping: a key waits longer each time it is refused, with jitter, and no key waits for
another. After several refusals it counts as stuck, which is for people to look at; it is still
tried, rarely. Time comes with the call.
"""

import heapq
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

FIRST_PAUSE_MS = 1_000
"""Pause after the first refusal; doubles with each."""

LONGEST_PAUSE_MS = 600_000
"""Longest pause of a key."""

STUCK_AFTER = 6
"""Refusals after which a key counts as stuck."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How often an object's key was refused, and what the bucket said last."""

    object_id: int
    count: int
    reason: str


class Retries:
    """Refused objects by id."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._refusals: dict[int, Refusal] = {}
        self._due: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._refusals)

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._refusals

    def clear(self) -> None:
        """Forget everything, as when another leader takes over."""
        self._refusals.clear()
        self._due.clear()

    def forget(self, object_ids: Collection[int]) -> None:
        """Their bytes are gone."""
        for object_id in object_ids:
            self._refusals.pop(object_id, None)

    def refuse(self, reasons: Mapping[int, str], now_ms: int) -> tuple[Refusal, ...]:
        """Put refused objects aside; return those that have become stuck now."""
        stuck = []
        for object_id, reason in reasons.items():
            before = self._refusals.get(object_id)
            count = 1 if before is None else before.count + 1
            refusal = self._refusals[object_id] = Refusal(object_id, count, reason)
            bound = min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** min(count - 1, 20))
            pause_ms = int(bound * (0.5 + 0.5 * self._rng.random()))
            heapq.heappush(self._due, (now_ms + pause_ms, object_id, count))
            if count == STUCK_AFTER:
                stuck.append(refusal)
        return tuple(stuck)

    def take_due(self, now_ms: int, limit: int) -> tuple[int, ...]:
        """Return objects whose pause is over, to be tried in one request.

        The more often the first was refused the fewer come with it, down to one: if all keys of a
        request are refused for the sake of one of them, it is found out. Each is returned once;
        `refuse` or `forget` it.
        """
        taken: list[int] = []
        while self._due and self._due[0][0] <= now_ms and len(taken) < limit:
            _, object_id, count = self._due[0]
            refusal = self._refusals.get(object_id)
            if refusal is None or refusal.count != count:
                heapq.heappop(self._due)
                continue
            limit = min(limit, max(1, limit >> count)) if not taken else limit
            heapq.heappop(self._due)
            taken.append(object_id)
        return tuple(taken)

    def postpone(self, object_ids: Collection[int], until_ms: int) -> None:
        """Give back what was taken and not tried, or not judged."""
        for object_id in object_ids:
            refusal = self._refusals.get(object_id)
            if refusal is not None:
                heapq.heappush(self._due, (until_ms, object_id, refusal.count))

    def stuck(self) -> tuple[Refusal, ...]:
        """Return all objects that are stuck, by id."""
        found = (one for one in self._refusals.values() if one.count >= STUCK_AFTER)
        return tuple(sorted(found, key=lambda refusal: refusal.object_id))
