"""Schedules of slow, wrong, stale and lost answers: a reachable leader is always found again.

The router runs alone, in virtual time. After the schedule nothing changes any more, not even the
quorum epoch: a leader answers, and at least one endpoint that the client knows leads to it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from streammeta.rpc.leader_router import (
    EPOCH_KEPT_S,
    GIVEN_UP_S_MAX,
    LEARNED_MAX,
    LOOK_ROUND_OF_HINTS,
    SUSPICION_S,
    FailureKind,
    LeaderHint,
    LeaderRouter,
    Step,
)
from tests.kit.seeds import seeds

ATTEMPT_S = 2.0
ATTEMPTS_MAX = 80
"""Attempts within which a call reaches the leader once the weather has settled."""


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """Controllers, what each believes, and what a client meets at them."""

    rng: random.Random
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        size = self.rng.randint(1, 5)
        self.controllers = [f"c{number}:1" for number in range(size)]
        given = self.rng.sample(self.controllers, self.rng.randint(1, size))
        self.router = LeaderRouter(given, self.rng, clock=self.clock)
        self.leader = self.rng.choice(self.controllers)
        self.epoch = self.rng.randint(1, 5)
        self.believed = dict.fromkeys(self.controllers, LeaderHint(self.leader, self.epoch))

    def change(self) -> None:
        """Let something happen: an election, a controller that has not heard of it, a restore."""
        happening = self.rng.random()
        if happening < 0.25:
            self.epoch += 1
            self.leader = self.rng.choice(self.controllers)
        elif happening < 0.28:
            self.epoch = 1
        informed = self.rng.sample(self.controllers, self.rng.randint(0, len(self.controllers)))
        for controller in informed:
            known = self.rng.choice((self.leader, self.leader, ""))
            self.believed[controller] = LeaderHint(known, self.epoch)

    def attempt_in_storm(self, endpoint: str, failures: int) -> Step | None:
        """Return the step after an attempt that may end in any way; None if it is answered."""
        outcome = self.rng.random()
        if outcome < 0.25 and endpoint == self.leader:
            self.router.record_answer(endpoint)
            return None
        if outcome < 0.45:
            self.clock.now += ATTEMPT_S
            return self.router.record_failure(endpoint, FailureKind.TIMED_OUT, failures)
        if outcome < 0.65:
            return self.router.record_failure(endpoint, FailureKind.UNREACHABLE, failures)
        if outcome < 0.75:
            kind = self.rng.choice((FailureKind.OUTCOME_UNKNOWN, FailureKind.NOT_NOW))
            return self.router.record_failure(endpoint, kind, failures)
        hint = self.believed.get(endpoint)
        if outcome < 0.8:
            wrong = self.rng.choice((*self.controllers, "elsewhere:1"))
            hint = LeaderHint(wrong, self.epoch + self.rng.randint(-3, 1))
        return self.router.record_failure(endpoint, FailureKind.NOT_LEADER, failures, hint)

    def storm(self, calls: int) -> None:
        """Make calls while anything may happen."""
        for _ in range(calls):
            endpoint = self.router.first()
            for failures in range(1, self.rng.randint(2, 30)):
                if self.rng.random() < 0.2:
                    self.change()
                step = self.attempt_in_storm(endpoint, failures)
                if step is None:
                    break
                self.clock.now += step.wait
                endpoint = step.endpoint

    def settle(self) -> set[str]:
        """End the storm; return who stays deaf: all but one way to the leader may be."""
        way = self.rng.choice(self.router.known[: len(self.router.endpoints)])
        self.believed[way] = LeaderHint(self.leader, self.epoch)
        others = set(self.controllers) - {way, self.leader}
        return {controller for controller in others if self.rng.random() < 0.5}

    def attempts_until_answered(self, deaf: set[str]) -> int:
        """Return how many attempts a call makes until the leader answers it."""
        endpoint = self.router.first()
        for failures in range(1, 10 * ATTEMPTS_MAX):
            if endpoint == self.leader:
                self.router.record_answer(endpoint)
                return failures
            if endpoint not in self.controllers:
                step = self.router.record_failure(endpoint, FailureKind.UNREACHABLE, failures)
            elif endpoint in deaf:
                self.clock.now += ATTEMPT_S
                step = self.router.record_failure(endpoint, FailureKind.TIMED_OUT, failures)
            else:
                hint = self.believed[endpoint]
                step = self.router.record_failure(endpoint, FailureKind.NOT_LEADER, failures, hint)
            self.clock.now += step.wait
            endpoint = step.endpoint
        raise AssertionError(f"the leader {self.leader} is not found; the last asked is {endpoint}")


@pytest.mark.parametrize("seed", seeds(133, slow=267))
def test_a_call_reaches_a_reachable_leader_in_a_bounded_number_of_attempts(seed: int) -> None:
    world = World(random.Random(seed))
    world.storm(calls=20)
    deaf = world.settle()
    assert world.attempts_until_answered(deaf) <= ATTEMPTS_MAX
    assert world.attempts_until_answered(deaf) == 1, "the next call knows the way"


GIVEN, LEADER = "a:1", "c:3"
HINT = LeaderHint(LEADER, 5)


def found_by_hint(clock: Clock) -> LeaderRouter:
    """Return a router that was given one controller and has found the leader by its hint."""
    router = LeaderRouter([GIVEN], random.Random(0), clock=clock)
    assert router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, HINT).endpoint == LEADER
    router.record_answer(LEADER)
    return router


@pytest.mark.parametrize("kind", [FailureKind.TIMED_OUT, FailureKind.UNREACHABLE])
def test_a_leader_that_failed_once_is_followed_again_without_an_election(kind: FailureKind) -> None:
    clock = Clock()
    router = found_by_hint(clock)
    router.record_failure(LEADER, kind, 1)
    clock.now += SUSPICION_S
    step = router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, HINT)
    assert (step.endpoint, step.wait) == (LEADER, 0.0)


def test_a_suspect_is_probed_by_one_call_and_not_by_all() -> None:
    clock = Clock()
    router = found_by_hint(clock)
    router.record_failure(LEADER, FailureKind.TIMED_OUT, 1)
    clock.now += SUSPICION_S
    asked = [
        router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, HINT).endpoint for _ in range(5)
    ]
    assert asked == [LEADER, GIVEN, GIVEN, GIVEN, GIVEN]
    router.record_answer(LEADER)
    assert router.first() == LEADER


def test_learned_controllers_join_the_rotation() -> None:
    router = LeaderRouter([GIVEN], random.Random(0), clock=Clock())
    router.learn(["", "b:2", LEADER])
    assert router.known == (GIVEN, "b:2", LEADER)
    asked = [router.first()]
    for failures in (1, 2):
        asked.append(router.record_failure(asked[-1], FailureKind.UNREACHABLE, failures).endpoint)
    assert asked == [GIVEN, "b:2", LEADER]


def test_a_new_list_replaces_the_learned_ones_and_keeps_the_given_and_the_leader() -> None:
    router = LeaderRouter([GIVEN], random.Random(0), clock=Clock())
    router.learn(["b:2", LEADER])
    router.record_answer(LEADER)
    router.learn(["d:4"])
    assert router.known == (GIVEN, "d:4", LEADER)
    router.learn([""])
    assert router.known == (GIVEN, "d:4", LEADER), "a list without endpoints says nothing"


def test_hints_do_not_grow_the_rotation_without_a_bound() -> None:
    router = LeaderRouter([GIVEN], random.Random(0), clock=Clock())
    for number in range(10 * LEARNED_MAX):
        router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, LeaderHint(f"x{number}:1", number))
    assert len(router.known) == 1 + LEARNED_MAX
    assert GIVEN in router.known


def test_two_controllers_that_name_each_other_do_not_hide_a_third() -> None:
    router = LeaderRouter(["a:1", "b:1", "c:1"], random.Random(0), "a:1", Clock())
    named = {"a:1": "b:1", "b:1": "a:1"}
    endpoint, asked = "a:1", []
    for failures in range(1, 1 + LOOK_ROUND_OF_HINTS):
        hint = LeaderHint(named[endpoint], 5)
        endpoint = router.record_failure(endpoint, FailureKind.NOT_LEADER, failures, hint).endpoint
        asked.append(endpoint)
    assert asked[-1] == "c:1"


def test_a_stale_hint_does_not_replace_a_leader_that_answers() -> None:
    router = LeaderRouter(["a:1", "b:1", "c:1"], random.Random(0), "a:1", Clock())
    router.record_failure("a:1", FailureKind.NOT_LEADER, 1, LeaderHint("b:1", 5))
    router.record_answer("c:1")
    assert (
        router.record_failure("a:1", FailureKind.NOT_LEADER, 2, LeaderHint("b:1", 5)).endpoint
        == "c:1"
    )
    assert (
        router.record_failure("a:1", FailureKind.NOT_LEADER, 2, LeaderHint("b:1", 6)).endpoint
        == "b:1"
    )


def test_the_first_epochs_of_a_restored_cluster_are_believed_after_a_while() -> None:
    clock = Clock()
    router = LeaderRouter([GIVEN], random.Random(0), clock=clock)
    router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, LeaderHint("b:2", 70))
    router.record_failure("b:2", FailureKind.UNREACHABLE, 2)
    hint = LeaderHint(LEADER, 1)
    assert router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, hint).endpoint != LEADER
    clock.now += EPOCH_KEPT_S + 1
    assert router.record_failure(GIVEN, FailureKind.NOT_LEADER, 1, hint).endpoint == LEADER


def test_a_leader_that_hangs_is_left_although_no_caller_waits_for_a_whole_attempt() -> None:
    router = LeaderRouter(["a:1", "b:1"], random.Random(0), "a:1", Clock())
    router.record_answer("a:1")
    router.record_timeout("a:1", GIVEN_UP_S_MAX / 2)
    assert router.first() == "a:1", "a caller in a hurry proves nothing"
    router.record_answer("a:1")
    router.record_timeout("a:1", GIVEN_UP_S_MAX / 2)
    assert router.first() == "a:1", "there was an answer in between"
    router.record_timeout("a:1", GIVEN_UP_S_MAX / 2)
    assert router.first() == "b:1"


def test_the_silence_of_the_leader_counts_from_the_first_failure_to_the_next_answer() -> None:
    clock = Clock()
    router = found_by_hint(clock)
    assert router.silent_s == 0.0
    for _ in range(3):
        router.record_miss()
        clock.now += 5.0
    assert router.silent_s == 15.0
    router.record_answer(LEADER)
    assert router.silent_s == 0.0
