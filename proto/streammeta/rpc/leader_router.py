"""Search for the leader as a state machine: answers and failures in, next endpoint and wait out.

Does no I/O. The caller supplies time and jitter. All calls of a client share one router, so that
one call's discovery of the leader serves the others. Each call has its own search, which counts its
failures. `streammeta.client.parts.ControllerClient` is the asynchronous user,
`streammeta.rpc.blocking_client` the blocking one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from streammeta.rpc.failures import Reason, RpcFailure
from streammeta.storage.backoff import Backoff

LOOK_ROUND = 4
"""Interval of temporary rejections after which another controller is tried."""

LOOK_ROUND_OF_HINTS = 6
"""Interval of failures of a call after which the rotation decides, regardless of hints."""

SUSPICION_S = 3.0
"""Seconds for which a failed controller is suspected, longer than an election."""

_ROUNDS_OF_SUSPICION = 8
"""Rounds after which one call follows hints to suspects, and asks hanging controllers too."""

GIVEN_UP_S_MAX = 2.0
"""Total time that callers wait for a silent controller until it counts as hanging."""

EPOCH_KEPT_S = 10.0
"""Seconds for which hints of earlier epochs are ignored after a later one was seen."""

LEARNED_MAX = 16
"""Maximum number of learned endpoints in the rotation, in addition to the configured ones."""


class FailureKind(Enum):
    """Failures after which the same request may be sent again."""

    UNREACHABLE = auto()  # no connection, or it broke: this controller may be gone
    TIMED_OUT = auto()  # connected, but no answer in the time of one attempt
    NOT_LEADER = auto()  # answered by a controller that does not lead
    OUTCOME_UNKNOWN = auto()  # it led, and lost leadership while replicating the request
    NOT_NOW = auto()  # it leads and took nothing: a full disk, too much under way, a quota


_FINAL_LIMITS = frozenset({"", Reason.LIMIT_EXCEEDED})
"""Reasons of RESOURCE_EXHAUSTED that persist for the same request. No reason comes from the
transport, for the size of a message. Any other resource may be free a moment later.
"""


def kind_of(failure: RpcFailure) -> FailureKind | None:
    """Return how a failure may be followed by another attempt, None if it is final."""
    # The order matters: a reason shows that a controller answered, a bare status may be gRPC's own.
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
    """Leader as a controller knows it. `endpoint` is empty if it knows none."""

    endpoint: str
    epoch: int

    @classmethod
    def of(cls, failure: RpcFailure) -> LeaderHint | None:
        """Return the hint in an error with `Reason.NOT_LEADER`, None without one."""
        epoch = failure.metadata.get("epoch", "")
        # Metadata comes from the network, so the epoch may be any text.
        if failure.reason != Reason.NOT_LEADER or not epoch.isdecimal():
            return None
        return cls(failure.metadata.get("leader_endpoint", ""), int(epoch))


@dataclass(frozen=True, slots=True)
class Step:
    """Next attempt: at `endpoint`, after `wait` seconds."""

    endpoint: str
    wait: float


ELECTION_BACKOFF = Backoff(first=0.01, longest=0.25)
"""Waits between rounds over all endpoints, in seconds."""

REFUSAL_BACKOFF = Backoff(first=0.05, longest=1.0)
"""Waits after temporary rejections, in seconds. Freeing a disk takes longer than an election."""


RETRY_AFTER_S_MAX = 60.0
"""Upper bound of a wait that a controller requests, in seconds."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """Failed controller. `hangs`: it did not answer within the time of an attempt."""

    ends_at: float
    hangs: bool


class LeaderRouter:
    """Belief in one leader at a time. After a failure it follows hints, or rotates.

    `start` is the first endpoint, a random one if it is None. The rotation contains the configured
    endpoints and those learned from hints, from answers and by `learn`. It next asks the endpoint
    whose last failure is the oldest. `clock` returns monotonic seconds.

    A hint that names a controller which just failed is ignored, because a follower notices later
    than a client that its leader is dead. Such a suspicion ends when the quorum epoch grows and
    after `SUSPICION_S`, because an answer may be late, or a connection break, without an election.
    Then one attempt finds out whether the controller answers again. A hanging controller costs the
    whole time of an attempt, so the rotation skips it while it is suspected.

    Hints are followed only up to a bound: one attempt in `LOOK_ROUND_OF_HINTS` goes to the
    rotation. A leader that accepts nothing now is asked again with growing waits, and now and then
    another controller, because the leader may not know its successor. `leader_changes` counts how
    often a different controller answered as the leader.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        rng: random.Random,
        start: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not endpoints or len(set(endpoints)) != len(endpoints) or not all(endpoints):
            raise ValueError(
                f"endpoints are {list(endpoints)}, expected one or more different host:port"
                " addresses"
            )
        self._endpoints = tuple(endpoints)
        self._known = self._endpoints
        self._rng = rng
        self._clock = clock

        self._leader: str | None = None
        self._is_proven = False  # the believed leader has answered, and has not failed since
        self._answered = ""
        self.leader_changes = 0
        self._silent_since: float | None = None

        self._epoch = -1
        self._epoch_heard_at = float("-inf")
        self._suspects: dict[str, _Suspicion] = {}
        self._waited_s: dict[str, float] = {}
        self._failures = 0
        self._last_failures: dict[str, int] = {}
        # A random start spreads the first calls of many clients over the controllers.
        self._turn = (
            rng.randrange(len(self._endpoints)) if start is None else self._endpoints.index(start)
        )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Configured endpoints, in order."""
        return self._endpoints

    @property
    def known(self) -> tuple[str, ...]:
        """Endpoints of the rotation: the configured ones, then those learned."""
        return self._known

    @property
    def leader(self) -> str | None:
        """Endpoint believed to lead."""
        return self._leader

    @property
    def silent_s(self) -> float:
        """Seconds since the first failed call after the leader's last answer, 0 without one."""
        return 0.0 if self._silent_since is None else self._clock() - self._silent_since

    def learn(self, endpoints: Iterable[str]) -> None:
        """Replace the learned endpoints of the rotation with a list of all controllers.

        Empty endpoints are unknown ones. An empty list changes nothing.
        """
        listed = [endpoint for endpoint in endpoints if endpoint]
        if listed:
            self._known = self._endpoints
            # The leader stays known, even if an outdated list omits it.
            for endpoint in (*listed, self._leader):
                self._know(endpoint)

    def first(self) -> str:
        """Return where a new call starts: at the believed leader, or in the rotation."""
        return self._leader or self._next_in_rotation(self._turn, 1)

    def record_answer(self, endpoint: str) -> None:
        """Record that `endpoint` answered as the leader."""
        self._leader = endpoint
        self._is_proven = True
        self._silent_since = None
        self._know(endpoint)
        # As long as the leader answers, hints of earlier epochs stay outdated.
        self._epoch_heard_at = self._clock()
        if endpoint != self._answered:
            # The first leader is not a change.
            self.leader_changes += bool(self._answered)
            self._answered = endpoint
        self._suspects.pop(endpoint, None)
        self._waited_s.pop(endpoint, None)

    def record_miss(self) -> None:
        """Record that a call to the leader has no answer yet."""
        if self._silent_since is None:
            self._silent_since = self._clock()

    def record_timeout(self, endpoint: str, waited_s: float) -> None:
        """Record that a caller waited `waited_s` seconds for `endpoint` and ran out of time.

        Callers with short timeouts never see an attempt time out. The sum of their waits without an
        answer in between is the evidence that the endpoint hangs.
        """
        self._waited_s[endpoint] = self._waited_s.get(endpoint, 0.0) + waited_s
        if self._waited_s[endpoint] >= GIVEN_UP_S_MAX:
            self.record_failure(endpoint, FailureKind.TIMED_OUT, 1)

    def record_failure(
        self,
        endpoint: str,
        failure: FailureKind,
        failures: int,
        hint: LeaderHint | None = None,
    ) -> Step:
        """Choose the next step after `failures` failed attempts, the last at `endpoint`."""
        self._failures += 1
        self._last_failures[endpoint] = self._failures
        # The leader answered, so that neither the belief nor a suspicion changes.
        if failure is FailureKind.NOT_NOW:
            return self._put_off(endpoint, failures)

        if failure in (FailureKind.UNREACHABLE, FailureKind.TIMED_OUT):
            self._suspect(endpoint, hangs=failure is FailureKind.TIMED_OUT)
        # Another call may have found a new leader meanwhile. Then that belief stays.
        if endpoint == self._leader:
            self._leader = None
        hinted = self._accept(endpoint, hint, failures) or self._leader

        # Now and then hints are ignored, in case two controllers name each other.
        if hinted is not None and failures % LOOK_ROUND_OF_HINTS:
            # Hints of the first round are followed at once. Later ones probably lead in a circle.
            free = failures <= len(self._known)
            return Step(hinted, 0.0 if free else self._pause(failures))
        return Step(self._rotate(endpoint, failures), self._pause_in_round(failure, failures))

    def _put_off(self, endpoint: str, failures: int) -> Step:
        wait = REFUSAL_BACKOFF.wait(failures - 1, self._rng.random())
        # Another call has found a new leader.
        if self._leader not in (None, endpoint):
            return Step(str(self._leader), wait)
        if failures % LOOK_ROUND == 0:
            return Step(self._rotate(endpoint, failures), wait)
        return Step(endpoint, wait)

    def _accept(self, endpoint: str, hint: LeaderHint | None, failures: int) -> str | None:
        """Return the endpoint of a hint worth following, which becomes the belief."""
        if hint is None or not hint.endpoint or self._is_outdated(hint, failures):
            return None
        if hint.epoch > self._epoch:
            # A new epoch may have a new leader, so the former one has to answer again.
            self._is_proven = False
            if self._epoch >= 0:  # the suspects may be of the first known epoch
                self._suspects.clear()
        self._epoch, self._epoch_heard_at = hint.epoch, self._clock()

        self._know(hint.endpoint)
        # A hint to its own sender or to a suspect leads nowhere.
        if hint.endpoint == endpoint or self._is_suspected(hint.endpoint, failures):
            return None
        if self._leader is not None and self._is_proven:
            return None  # it has answered, and this hint is of no later epoch
        # The suspicion has expired. One call tries the endpoint, and the others wait for its
        # result.
        if hint.endpoint in self._suspects:
            return self._probe(hint.endpoint)
        self._leader, self._is_proven = hint.endpoint, False
        return hint.endpoint

    def _is_outdated(self, hint: LeaderHint, failures: int) -> bool:
        """Return whether a hint is of an earlier epoch than one seen lately.

        Epochs of a restored cluster restart at 1, so an epoch is only trusted for a while.
        """
        is_recent = self._clock() - self._epoch_heard_at <= EPOCH_KEPT_S
        return hint.epoch < self._epoch and is_recent and not self._ignores_suspicions(failures)

    def _know(self, endpoint: str | None) -> None:
        """Add an endpoint to the rotation. A full rotation drops the oldest learned one."""
        if not endpoint or endpoint in self._known:
            return
        learned = (*self._known[len(self._endpoints) :], endpoint)
        self._known = (*self._endpoints, *learned[-LEARNED_MAX:])
        for memory in (self._suspects, self._waited_s, self._last_failures):
            # Facts about endpoints outside the rotation would only fill memory.
            for forgotten in memory.keys() - set(self._known):
                del memory[forgotten]

    def _suspect(self, endpoint: str, *, hangs: bool) -> None:
        self._suspects[endpoint] = _Suspicion(self._clock() + SUSPICION_S, hangs=hangs)
        # The waits are used up as evidence for this suspicion.
        self._waited_s.pop(endpoint, None)

    def _is_suspected(self, endpoint: str, failures: int) -> bool:
        suspicion = self._suspects.get(endpoint)
        if suspicion is None or self._ignores_suspicions(failures):
            return False
        return self._clock() < suspicion.ends_at

    def _ignores_suspicions(self, failures: int) -> bool:
        """Return whether a call has failed so often that it ignores suspicions."""
        return failures > _ROUNDS_OF_SUSPICION * len(self._known)

    def _probe(self, endpoint: str) -> str:
        """Return the endpoint. A suspect stays suspected meanwhile, so that others don't follow."""
        suspicion = self._suspects.get(endpoint)
        if suspicion is not None:
            self._suspect(endpoint, hangs=suspicion.hangs)
        return endpoint

    def _rotate(self, endpoint: str, failures: int) -> str:
        """Return the endpoint to ask after `endpoint`, which failed."""
        if endpoint in self._known:
            self._turn = (self._known.index(endpoint) + 1) % len(self._known)
        return self._next_in_rotation(self._turn, failures)

    def _next_in_rotation(self, turn: int, failures: int) -> str:
        """Return the endpoint that does not hang and has the oldest failure, ties in turn."""
        known = self._known

        def rank(endpoint: str) -> tuple[int, int]:
            return self._last_failures.get(endpoint, 0), (known.index(endpoint) - turn) % len(known)

        awake = [endpoint for endpoint in known if not self._hangs(endpoint, failures)]
        # If all of them hang, one is asked nevertheless.
        return self._probe(min(awake or known, key=rank))

    def _hangs(self, endpoint: str, failures: int) -> bool:
        return self._is_suspected(endpoint, failures) and self._suspects[endpoint].hangs

    def _pause_in_round(self, failure: FailureKind, failures: int) -> float:
        """Return the wait, zero in the first round over dead endpoints: another may lead."""
        is_silent = failure in (FailureKind.UNREACHABLE, FailureKind.TIMED_OUT)
        if is_silent and failures < len(self._known):
            return 0.0
        return self._pause(failures)

    def _pause(self, failures: int) -> float:
        round_number = (failures - 1) // len(self._known)
        return ELECTION_BACKOFF.wait(round_number, self._rng.random())


class LeaderSearch:
    """Search of one call, or of one stream of calls, for the leader.

    `endpoint` is the next one to ask, `tried` contains the last failure at each that failed,
    `refusal` the last reason why the leader accepted nothing. Failures of kinds outside `repeats`
    end the search. With `is_for_leader` False any controller may answer, and failures say nothing
    about the leader.
    """

    def __init__(
        self,
        router: LeaderRouter,
        repeats: Collection[FailureKind] = frozenset(FailureKind),
        *,
        is_for_leader: bool = True,
    ) -> None:
        self._router = router
        self._repeats = repeats
        self._is_for_leader = is_for_leader
        self._failures = 0
        self.endpoint = router.first()
        self.tried: dict[str, RpcFailure] = {}
        self.refusal = ""

    @property
    def is_unreachable(self) -> bool:
        """Whether every endpoint was asked and none was reachable."""
        return all(
            endpoint in self.tried and kind_of(self.tried[endpoint]) is FailureKind.UNREACHABLE
            for endpoint in self._router.known
        )

    @property
    def failures(self) -> dict[str, str]:
        """Failures by endpoint, in words, including the endpoint that is asked now."""
        seen = {endpoint: failure.text for endpoint, failure in self.tried.items()}
        return {self.endpoint: "no answer yet", **seen}

    def record_answer(self) -> None:
        """Record that `endpoint` answered as the leader. The search starts again."""
        self._router.record_answer(self.endpoint)
        self.restart()

    def record_timeout(self, waited_s: float) -> None:
        """Record that the caller waited `waited_s` seconds for `endpoint` and ran out of time."""
        if self._is_for_leader:
            self._router.record_miss()
        self._router.record_timeout(self.endpoint, waited_s)

    def restart(self) -> None:
        """Forget all failures."""
        self._failures = 0
        self.tried.clear()
        self.refusal = ""

    def record_failure(self, failure: RpcFailure) -> float | None:
        """Record that the attempt at `endpoint` failed, and choose the next one.

        Returns the wait before the next attempt, in seconds, None to stop because the same request
        would fail again.
        """
        kind = kind_of(failure)
        if kind is None:
            return None
        if self._is_for_leader:
            self._router.record_miss()

        self._failures += 1
        # The router learns of every failure, also of one that ends this search.
        step = self._router.record_failure(
            self.endpoint, kind, self._failures, LeaderHint.of(failure)
        )
        if kind not in self._repeats:
            return None
        if kind is FailureKind.NOT_NOW:
            self.refusal = failure.reason

        self.tried[self.endpoint] = failure
        self.endpoint = step.endpoint
        if kind is FailureKind.NOT_NOW:
            # The controller's wait is a minimum, with a bound against nonsense.
            return max(step.wait, min(failure.retry_after_s, RETRY_AFTER_S_MAX))

        return step.wait
