"""Pace of deletion: its rate, and the pauses of keys that the bucket rejects. Pure.

Callers pass the time, and a random generator for the jitter.
"""

import heapq
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from streammeta.storage.backoff import Backoff

# Never zero: an overloaded store must be asked again, to learn that it has recovered.
RATE_MIN = 10.0
"""Minimum rate in objects per second."""

RECOVERY_MS = 60_000
"""Time in milliseconds in which the rate grows from zero to its maximum."""

HALVING_PAUSE_MS = 1_000
"""Milliseconds in which overload counts once, because concurrent calls report the same one."""


class RateLimiter:
    """Token bucket of one second's objects that slows down when the store asks for it.

    Additive increase, multiplicative decrease: each overload of the store halves the rate, at most
    once a second, and it grows back to its maximum within a minute.
    """

    def __init__(self, rate_max: float, now_ms: int) -> None:
        self._rate_max = rate_max
        self._rate = rate_max
        self._tokens = rate_max
        self._now_ms = now_ms
        self._halved_ms = now_ms - HALVING_PAUSE_MS

    @property
    def rate(self) -> float:
        """Current limit in objects per second."""
        return self._rate

    def available(self, now_ms: int) -> int:
        """Return how many objects may be deleted now."""
        self._advance(now_ms)
        return int(self._tokens)

    def take(self, count: int) -> None:
        """Use `count` of the available objects."""
        self._tokens -= count

    def slow_down(self, now_ms: int) -> None:
        """Halve the rate, because the store asked for fewer requests."""
        self._advance(now_ms)
        if now_ms - self._halved_ms >= HALVING_PAUSE_MS:
            self._halved_ms = now_ms
            self._rate = max(min(RATE_MIN, self._rate_max), self._rate / 2)
            # No burst right after an overload.
            self._tokens = min(self._tokens, 0.0)

    def _advance(self, now_ms: int) -> None:
        passed_ms = now_ms - self._now_ms
        self._now_ms = now_ms
        self._rate = min(self._rate_max, self._rate + self._rate_max * passed_ms / RECOVERY_MS)
        # A rate below one must still allow one object.
        room = max(1.0, self._rate)
        self._tokens = min(room, self._tokens + self._rate * passed_ms / 1_000)


RETRY_PAUSES_MS = Backoff(first=1_000, longest=600_000)
"""Pauses of a key after each rejection."""

STUCK_AFTER = 6
"""Number of rejections after which a key counts as stuck."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejections of an object's key: their number, and the bucket's last reason."""

    object_id: int
    count: int
    reason: str


class RetryQueue:
    """Keys that the bucket refused to delete, each with its own time of the next attempt.

    A key waits longer after each rejection, with jitter, and independently of other keys. After
    several rejections it counts as stuck, for operators to examine. It is still retried, rarely.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._refusals: dict[int, Refusal] = {}
        self._due: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._refusals)

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._refusals

    def clear(self) -> None:
        """Remove everything when another leader is elected."""
        self._refusals.clear()
        self._due.clear()

    def forget(self, object_ids: Collection[int]) -> None:
        """Remove objects whose bytes are deleted."""
        for object_id in object_ids:
            self._refusals.pop(object_id, None)

    def refuse(self, reasons: Mapping[int, str], now_ms: int) -> tuple[Refusal, ...]:
        """Queue rejected objects. Returns the objects that have just become stuck."""
        stuck = []
        for object_id, reason in reasons.items():
            before = self._refusals.get(object_id)
            count = 1 if before is None else before.count + 1
            refusal = self._refusals[object_id] = Refusal(object_id, count, reason)
            pause_ms = int(RETRY_PAUSES_MS.wait(count - 1, self._rng.random()))
            # The count identifies the entry. A later rejection makes this one outdated.
            heapq.heappush(self._due, (now_ms + pause_ms, object_id, count))
            if count == STUCK_AFTER:
                stuck.append(refusal)
        return tuple(stuck)

    def take_due(self, now_ms: int, limit: int, *, isolates: bool = True) -> tuple[int, ...]:
        """Return objects whose pause has passed, to be retried in one request.

        With more rejections of the first object fewer others join it, down to none. This isolates a
        key that causes all keys of a request to be rejected, unless `isolates` is False. Each
        object is returned once and must be passed to `refuse` or `forget`.
        """
        taken: list[int] = []
        while self._due and self._due[0][0] <= now_ms and len(taken) < limit:
            _, object_id, count = self._due[0]
            refusal = self._refusals.get(object_id)
            # Outdated entries stay in the heap and are skipped here.
            if refusal is None or refusal.count != count:
                heapq.heappop(self._due)
                continue
            if isolates and not taken:
                limit = min(limit, max(1, limit >> count))
            heapq.heappop(self._due)
            taken.append(object_id)
        return tuple(taken)

    def postpone(self, object_ids: Collection[int], until_ms: int) -> None:
        """Return objects that were not tried, or have no outcome, to the queue."""
        for object_id in object_ids:
            refusal = self._refusals.get(object_id)
            if refusal is not None:
                heapq.heappush(self._due, (until_ms, object_id, refusal.count))

    def some(self, limit: int) -> tuple[Refusal, ...]:
        """Return at most `limit` rejected objects, earliest rejections first."""
        return tuple(islice(self._refusals.values(), limit))

    def stuck(self) -> tuple[Refusal, ...]:
        """Return all stuck objects, by id."""
        found = (refusal for refusal in self._refusals.values() if refusal.count >= STUCK_AFTER)
        return tuple(sorted(found, key=lambda refusal: refusal.object_id))
