"""State machine of the search for the leader: answers and failures in, next endpoint and wait out.

Does no I/O, reads no clock, and draws jitter from the generator it is given. All calls of a client
share one router, so that one call's discovery of the leader serves the rest; each call has its own
search, which counts its failures. `streammeta.client.ControllerClient` is the asynchronous face,
`streammeta.rpc.blocking_client` the blocking one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from streammeta.rpc.failures import Reason, RpcFailure
from streammeta.storage.backoff import Backoff

LOOK_ROUND = 4
"""One in this many refusals for now is followed by an attempt at another controller."""

_ROUNDS_WITHOUT_HANGING = 8
"""Rounds without controllers that hang: long enough for the others to elect a leader."""


class FailureKind(Enum):
    """Failures after which the same request may be sent again."""

    UNREACHABLE = auto()  # no connection, or it broke: this controller may be gone
    TIMED_OUT = auto()  # connected, but no answer in the time of one attempt
    NOT_LEADER = auto()  # answered by a controller that does not lead
    OUTCOME_UNKNOWN = auto()  # it led, and lost leadership while replicating the request
    NOT_NOW = auto()  # it leads and took nothing: a full disk, too much under way, a quota


_FINAL_LIMITS = frozenset({"", Reason.LIMIT_EXCEEDED})
"""Reasons of RESOURCE_EXHAUSTED that the same request meets again; none at all is the transport's,
for the size of a message. Any other resource may be there a moment later."""


def kind_of(failure: RpcFailure) -> FailureKind | None:
    """Return how a failure may be followed by another attempt; None if it is final."""
    match failure.code:
        case grpc.StatusCode.UNAVAILABLE if failure.reason == Reason.NOT_LEADER:
            return FailureKind.NOT_LEADER
        case grpc.StatusCode.UNAVAILABLE if failure.reason:
            return FailureKind.NOT_NOW
        case grpc.StatusCode.RESOURCE_EXHAUSTED if (
            failure.reason == Reason.QUOTA_EXCEEDED and not failure.retry_after_s
        ):
            return None  # waiting makes no room
        case grpc.StatusCode.RESOURCE_EXHAUSTED if failure.reason not in _FINAL_LIMITS:
            return FailureKind.NOT_NOW
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return FailureKind.UNREACHABLE
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return FailureKind.TIMED_OUT
        case grpc.StatusCode.ABORTED if failure.reason == Reason.OUTCOME_UNKNOWN:
            return FailureKind.OUTCOME_UNKNOWN
        case grpc.StatusCode.INTERNAL if not failure.reason:
            return FailureKind.UNREACHABLE  # written by the transport, not by a controller
    return None


@dataclass(frozen=True, slots=True)
class LeaderHint:
    """The leader as a controller knows it; `endpoint` is empty if it knows none."""

    endpoint: str
    epoch: int

    @classmethod
    def of(cls, failure: RpcFailure) -> LeaderHint | None:
        """Return the hint in a refusal with `Reason.NOT_LEADER`; None if there is none."""
        epoch = failure.metadata.get("epoch", "")
        if failure.reason != Reason.NOT_LEADER or not epoch.isdecimal():
            return None
        return cls(failure.metadata.get("leader_endpoint", ""), int(epoch))


@dataclass(frozen=True, slots=True)
class Step:
    """The next attempt: at `endpoint`, after `wait` seconds."""

    endpoint: str
    wait: float


ELECTION_BACKOFF = Backoff(first=0.01, longest=0.25)
"""Waits between rounds over all endpoints, in seconds."""

REFUSAL_BACKOFF = Backoff(first=0.05, longest=1.0)
"""Waits after refusals for now, in seconds: disk space takes longer to come than a leader."""


RETRY_AFTER_S_MAX = 60.0
"""Maximum wait that a controller's word is taken for, in seconds."""


class LeaderRouter:
    """Belief in one leader at a time; after a failure it follows hints, else rotates.

    `start` is the endpoint that is asked first, a random one if it is None.

    A hint that names a controller which just failed is ignored until the quorum epoch grows: a
    follower takes longer than a client to notice that its leader is gone. One that hangs costs the
    whole time of an attempt, so for some rounds only the others are asked. A leader that takes
    nothing now is asked again with growing waits, and now and then another one in its place, since
    it may not have heard of the next leader. `leader_changes` counts how often another one answered
    as the leader than before.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        rng: random.Random,
        start: str | None = None,
    ) -> None:
        if not endpoints or len(set(endpoints)) != len(endpoints) or not all(endpoints):
            raise ValueError(
                f"endpoints are {list(endpoints)}, wanted one or more different host:port addresses"
            )
        self._endpoints = tuple(endpoints)
        self._rng = rng
        self._leader: str | None = None
        self._answered = ""
        self.leader_changes = 0
        self._epoch = -1
        self._suspects: set[str] = set()
        self._hanging: set[str] = set()
        self._turn = (
            rng.randrange(len(self._endpoints)) if start is None else self._endpoints.index(start)
        )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints given, in order."""
        return self._endpoints

    @property
    def leader(self) -> str | None:
        """The endpoint believed to lead."""
        return self._leader

    def first(self) -> str:
        """Return where a new call starts: at the believed leader, or anywhere."""
        return self._leader or self._endpoints[self._turn]

    def answered(self, endpoint: str) -> None:
        """Note that `endpoint` answered as the leader."""
        self._leader = endpoint
        if endpoint != self._answered:
            self.leader_changes += bool(self._answered)
            self._answered = endpoint
        self._suspects.discard(endpoint)
        self._hanging.discard(endpoint)

    def failed(
        self,
        endpoint: str,
        failure: FailureKind,
        failures: int,
        hint: LeaderHint | None = None,
    ) -> Step:
        """Choose the next step of a call whose attempt `failures`, from 1, failed at `endpoint`."""
        if failure is FailureKind.NOT_NOW:
            return self._put_off(endpoint, failures)
        if failure in (FailureKind.UNREACHABLE, FailureKind.TIMED_OUT):
            self._suspects.add(endpoint)
        if failure is FailureKind.TIMED_OUT:
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
        wait = REFUSAL_BACKOFF.wait(failures - 1, self._rng.random())
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

    def _pause_in_round(self, failure: FailureKind, failures: int) -> float:
        """Return the wait: none within the first round over dead endpoints, another may lead."""
        if failure in (FailureKind.UNREACHABLE, FailureKind.TIMED_OUT) and failures < len(
            self._endpoints
        ):
            return 0.0
        return self._pause(failures)

    def _pause(self, failures: int) -> float:
        round_number = (failures - 1) // len(self._endpoints)
        return ELECTION_BACKOFF.wait(round_number, self._rng.random())


class LeaderSearch:
    """The way of one call, or of one stream of calls, to the leader.

    `endpoint` is the one to ask next, `tried` has the last failure at each that failed, `refusal`
    the last reason for which the leader took nothing. Failures of kinds outside `repeats` end it.
    """

    def __init__(
        self, router: LeaderRouter, repeats: Collection[FailureKind] = frozenset(FailureKind)
    ) -> None:
        self._router = router
        self._repeats = repeats
        self._failures = 0
        self.endpoint = router.first()
        self.tried: dict[str, RpcFailure] = {}
        self.refusal = ""

    @property
    def is_unreachable(self) -> bool:
        """Whether every endpoint was asked and none could be reached."""
        return all(
            endpoint in self.tried and kind_of(self.tried[endpoint]) is FailureKind.UNREACHABLE
            for endpoint in self._router.endpoints
        )

    @property
    def failures(self) -> dict[str, str]:
        """The failures by endpoint, in words, including the endpoint that is asked now."""
        seen = {endpoint: failure.text for endpoint, failure in self.tried.items()}
        return {self.endpoint: "no answer yet", **seen}

    def answered(self) -> None:
        """Note that `endpoint` answered as the leader; the search begins anew."""
        self._router.answered(self.endpoint)
        self.restart()

    def restart(self) -> None:
        """Forget the failures so far."""
        self._failures = 0
        self.tried.clear()
        self.refusal = ""

    def failed(self, failure: RpcFailure) -> float | None:
        """Note that the attempt at `endpoint` failed, and move on to the next.

        Returns the wait before the next attempt, in seconds; None to give up: the same request
        would fail again.
        """
        kind = kind_of(failure)
        if kind is None:
            return None
        self._failures += 1
        step = self._router.failed(self.endpoint, kind, self._failures, LeaderHint.of(failure))
        if kind not in self._repeats:
            return None
        if kind is FailureKind.NOT_NOW:
            self.refusal = failure.reason
        self.tried[self.endpoint] = failure
        self.endpoint = step.endpoint
        if kind is FailureKind.NOT_NOW:
            return max(step.wait, min(failure.retry_after_s, RETRY_AFTER_S_MAX))
        return step.wait
