"""Which controller to ask next, and after what wait.

Owns the client's belief about who leads. It is told what each attempt met and answers with the
next step; it does no I/O, reads no clock and draws its jitter from a generator that is given to
it. All calls of a client share one router, so one call's discovery of the leader serves the rest;
each call brings its own count of failures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

LOOK_ROUND = 4
"""Of so many refusals of a leader for now, one is followed by a question to another controller."""

_ROUNDS_WITHOUT_HANGING = 8
"""With the waits between rounds enough for the others to elect a leader."""


class Failure(Enum):
    """What an attempt that may be repeated met."""

    UNREACHABLE = auto()  # no connection, or it broke: this controller may be gone
    TIMED_OUT = auto()  # connected, but no answer in the time of one attempt
    NOT_LEADER = auto()  # answered by a controller that does not lead
    OUTCOME_UNKNOWN = auto()  # it led, and lost leadership while replicating the request
    NOT_NOW = auto()  # it leads and took nothing: a full disk, too much under way, a quota


@dataclass(frozen=True, slots=True)
class LeaderHint:
    """Who leads by the word of a controller; `endpoint` is empty if it does not know."""

    endpoint: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Step:
    """Ask `endpoint` after `wait` seconds."""

    endpoint: str
    wait: float


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with each round over all endpoints, from `initial` to `cap` seconds.

    Each wait is drawn from [half, whole] of that figure, so that clients which lost the same
    leader do not return in step.
    """

    initial: float = 0.01
    cap: float = 0.25

    def wait(self, round_number: int, rng: random.Random) -> float:
        """Return the wait before round `round_number`, 0-based, in seconds."""
        whole = min(self.cap, self.initial * 2.0 ** min(round_number, 30))
        return whole * rng.uniform(0.5, 1.0)


PATIENCE = Backoff(initial=0.05, cap=1.0)
"""Waits after refusals for now: room on a disk takes longer to come than a leader."""


class LeaderRouter:
    """Believes in one leader at a time; after a failure goes by hints, else round the endpoints.

    A hint that names a controller which just failed is ignored until the quorum epoch grows: a
    follower takes longer than a client to notice that its leader is gone. One that hangs costs the
    whole time of an attempt, so for some rounds only the others are asked. A leader that takes
    nothing now is asked again with growing waits, and now and then another one in its place, since
    it may not have heard of the next leader.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        rng: random.Random,
        backoff: Backoff | None = None,
    ) -> None:
        if not endpoints or len(set(endpoints)) != len(endpoints) or not all(endpoints):
            raise ValueError(
                f"endpoints are {list(endpoints)}, wanted one or more different host:port addresses"
            )
        self._endpoints = tuple(endpoints)
        self._rng = rng
        self._backoff = backoff or Backoff()
        self._leader: str | None = None
        self._epoch = -1
        self._suspects: set[str] = set()
        self._hanging: set[str] = set()
        self._turn = rng.randrange(len(self._endpoints))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints given, in order."""
        return self._endpoints

    @property
    def leader(self) -> str | None:
        """The endpoint believed to lead."""
        return self._leader

    def first(self) -> str:
        """Tell where a new call starts: at the believed leader, or anywhere."""
        return self._leader or self._endpoints[self._turn]

    def answered(self, endpoint: str) -> None:
        """`endpoint` answered as the leader."""
        self._leader = endpoint
        self._suspects.discard(endpoint)
        self._hanging.discard(endpoint)

    def failed(
        self,
        endpoint: str,
        failure: Failure,
        failures: int,
        hint: LeaderHint | None = None,
    ) -> Step:
        """Choose the next step of a call whose attempt `failures`, from 1, failed at `endpoint`."""
        if failure is Failure.NOT_NOW:
            return self._put_off(endpoint, failures)
        if failure in (Failure.UNREACHABLE, Failure.TIMED_OUT):
            self._suspects.add(endpoint)
        if failure is Failure.TIMED_OUT:
            self._hanging.add(endpoint)
        hinted = self._accept(endpoint, hint)
        if hinted is None and self._leader != endpoint:
            hinted = self._leader  # another call has found it meanwhile
        if hinted is not None:
            free = failures <= len(self._endpoints)
            return Step(hinted, 0.0 if free else self._pause(failures))
        self._leader = None
        return Step(self._rotate(endpoint, failures), self._pause_in_round(failure, failures))

    def _put_off(self, endpoint: str, failures: int) -> Step:
        wait = PATIENCE.wait(failures - 1, self._rng)
        if self._leader not in (None, endpoint):
            return Step(str(self._leader), wait)
        if failures % LOOK_ROUND == 0:
            return Step(self._rotate(endpoint, failures), wait)
        return Step(endpoint, wait)

    def _accept(self, endpoint: str, hint: LeaderHint | None) -> str | None:
        """Return the endpoint of a hint worth following, which becomes the belief."""
        if hint is None or not hint.endpoint or hint.epoch < self._epoch:
            return None
        if self._epoch < 0:
            self._epoch = hint.epoch  # the first one heard of may be that of the suspects
        if hint.epoch > self._epoch:
            self._epoch = hint.epoch
            self._suspects.clear()
            self._hanging.clear()
        if hint.endpoint in self._suspects or hint.endpoint == endpoint:
            return None
        self._leader = hint.endpoint
        return hint.endpoint

    def _rotate(self, endpoint: str, failures: int) -> str:
        """Return the endpoint after `endpoint`, or in turn when that is not one of ours."""
        if endpoint in self._endpoints:
            self._turn = self._endpoints.index(endpoint)
        awake = [other for other in self._endpoints if other not in self._hanging]
        asks_all = not awake or failures > _ROUNDS_WITHOUT_HANGING * len(self._endpoints)
        for _ in self._endpoints:
            self._turn = (self._turn + 1) % len(self._endpoints)
            if asks_all or self._endpoints[self._turn] in awake:
                break
        return self._endpoints[self._turn]

    def _pause_in_round(self, failure: Failure, failures: int) -> float:
        """No wait while the first round over dead endpoints lasts: one of the others may lead."""
        if failure in (Failure.UNREACHABLE, Failure.TIMED_OUT) and failures < len(self._endpoints):
            return 0.0
        return self._pause(failures)

    def _pause(self, failures: int) -> float:
        return self._backoff.wait((failures - 1) // len(self._endpoints), self._rng)
