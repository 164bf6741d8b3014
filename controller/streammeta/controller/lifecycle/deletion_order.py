"""Order and pace of deletion: which objects may be deleted now, and how fast.

`RateLimiter` is the rate, and `RetryQueue` has the pauses of keys that the bucket rejects. Callers
pass the time, and a random generator for the jitter.

`BackupWait`: a cluster restored to the end of its backup must not name objects whose bytes are
deleted. Each object waits for an end of the log at which it was already destroyed, so neither
clocks nor the order of destruction matter.

`InheritedIds` were prepared before this process led, and it may not know their commits. It knows
these ids only from its disk, and a disk can be rolled back to a copy. The bucket's claims show that
only if one of them was made after the copy. A commit of the last seconds leaves no other trace than
its object. Bytes that end like an object prove which offsets they contain. Other bytes prove
nothing, so they stay for a while, in which an operator can notice the rollback. Pure.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import INT64_MAX
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


INHERITED_KEPT_MS = 24 * 3600 * 1000
"""Time for which bytes under such ids stay, by this process's timer, in milliseconds."""

INHERITED_IDS_MAX = 100_000
"""Maximum number of remembered ids. The ids that expire last are omitted."""


class InheritedIds:
    """Ids that were prepared but not committed when this process first led."""

    def __init__(self) -> None:
        self._ids: frozenset[int] = frozenset()
        self._until_ms: int | None = None

    def note_takeover(self, cluster_metadata: ClusterMetadata, now_ms: int) -> None:
        """Remember the prepared ids, only on the first election of this process.

        This process has seen all later prepares itself, and they can't be rolled back without it.
        """
        # Later elections learn nothing new: this process itself applied all entries since the
        # first.
        if self._until_ms is None:
            self._ids = frozenset(cluster_metadata.list_expired(INT64_MAX, INHERITED_IDS_MAX))
            self._until_ms = now_ms + INHERITED_KEPT_MS

    def is_over(self, now_ms: int) -> bool:
        """Whether bytes under inherited ids no longer have to stay."""
        return self._until_ms is None or now_ms >= self._until_ms

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._ids


WAITING_MAX = 20_000
"""Maximum number of waiting objects. Objects destroyed later follow them."""


@dataclass(frozen=True, slots=True)
class _Wait:
    end_offset: int
    since_ms: int


class BackupWait:
    """Objects whose deletion only waits for the backup."""

    def __init__(self, backed_up_end: Callable[[], int]) -> None:
        """`backed_up_end` returns the end of the log in the backup, 0 while it is unknown."""
        self._backed_up_end = backed_up_end
        self._waits: dict[int, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def clear(self) -> None:
        """Remove everything when another leader is elected."""
        self._waits.clear()

    def release_covered(
        self,
        due: Sequence[int],
        metadata_end: int,
        now_ms: int,
        choose: Callable[[Sequence[int]], Sequence[int]],
    ) -> Sequence[int]:
        """Return the due objects that `choose` selects from those in the backup, and forget them.

        The others wait: new ones for `map_end`, the current end of the metadata. Objects that are
        no longer due are removed.
        """
        # All new objects are destroyed at this end of the log, whatever their order.
        known, new = self._waits, _Wait(metadata_end, now_ms)
        self._waits = {key: known.get(key, new) for key in islice(due, WAITING_MAX)}
        # Read after the waits are set, so that a new object is never compared with an older end.
        end = self._backed_up_end()
        taken = choose([key for key, wait in self._waits.items() if wait.end_offset <= end])
        for object_id in taken:
            del self._waits[object_id]
        return taken

    def oldest_ms(self, now_ms: int) -> int:
        """Return how long the first object has waited, 0 without one."""
        return now_ms - min((wait.since_ms for wait in self._waits.values()), default=now_ms)
