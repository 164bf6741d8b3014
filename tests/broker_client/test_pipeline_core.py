"""The state machine of a commit pipeline: its invariants hold whatever the stream does."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from streammeta.client import errors
from streammeta.client.commits.core import MESSAGES_IN_FLIGHT, PipelineCore
from streammeta.client.commits.messages import (
    COMMITTED,
    Outcome,
    Pending,
    PendingCommit,
    PendingUpload,
    Upload,
)
from streammeta.v1 import objects_pb2
from streammeta.v1.common_pb2 import ERROR_CODE_NONE, NodeIdentity
from tests.kit.seeds import seeds

_NODE = NodeIdentity(node_id=7, node_epoch=1)
_ANSWER_S = 3.0
_LATE = errors.ControllerUnavailableError("CommitPipeline", 2.0, {})


@dataclass
class PipelineSimulation:
    """A core, its callers, a stream that breaks at any time, and an idempotent controller."""

    rng: random.Random
    core: PipelineCore = field(default_factory=lambda: PipelineCore(_NODE, _ANSWER_S))
    now: float = 0.0
    pending: list[Pending] = field(default_factory=list)
    outcomes: dict[int, object] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    applied: list[int] = field(default_factory=list)
    wire: deque[objects_pb2.CommitPipelineRequest] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    is_rejected: bool = False

    def step(self) -> None:
        """Let one event happen, and check the invariants."""
        self.now += self.rng.random()
        events = [self.submit, self.submit, self.write, self.write, self.decide, self.decide]
        events += [self.receive, self.receive, self.cancel, self.break_stream]
        self.rng.choice(events)()
        self.check()

    def submit(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            number = len(self.pending)
            expires = self.now + self.rng.choice((2.0, 1_000.0))
            pending: Pending
            if self.rng.random() < 0.3:
                request = objects_pb2.CommitStreamSetObjectRequest(node=_NODE, object_id=number)
                pending = PendingCommit(request, lambda answer: answer.error, None, expires)
            else:
                pending = PendingUpload.of(Upload(number, 1, [1], [0], [1]), None, expires)
            if self.rng.random() < 0.05:
                self.bad.add(number)
            self.pending.append(pending)
            self.core.submit(pending)

    def cancel(self) -> None:
        if self.pending:
            number = self.rng.randrange(len(self.pending))
            if number not in self.outcomes:
                self.cancelled.add(number)
            self.core.cancel(self.pending[number])

    def write(self) -> None:
        data = self.core.next_message(self.now)
        if data is not None and not self.is_rejected:
            self.wire.append(objects_pb2.CommitPipelineRequest.FromString(data))

    def decide(self) -> None:
        """Let the controller decide the next message, or reject it and all after it."""
        if not self.wire:
            return
        message = self.wire.popleft()
        ids = [commit.object_id for commit in message.commits] + [*message.uploads.object_id]
        assert ids, "an empty message was written"
        if not self.bad.isdisjoint(ids):
            self.is_rejected = True
            self.wire.clear()
            return
        self.applied += [number for number in ids if number not in self.applied]
        answer = objects_pb2.CommitPipelineResponse(sequence=message.sequence)
        for _ in message.commits:
            answer.commits.add(error=ERROR_CODE_NONE)
        self.answers.append(answer.SerializeToString())

    def receive(self) -> None:
        if self.answers:
            self.deliver(self.core.receive(self.answers.popleft(), self.now))
        elif self.is_rejected:
            self.disconnect()
            self.deliver(self.core.reject(errors.InvalidRequestError("CommitPipeline")))

    def break_stream(self) -> None:
        if self.rng.random() < 0.5:
            self.disconnect()
            self.deliver(self.core.expire(self.now, _LATE))

    def disconnect(self) -> None:
        """Lose messages and answers in transit. Some messages may still be decided."""
        for _ in range(self.rng.randrange(len(self.wire) + 1)):
            self.decide()
        self.wire.clear()
        self.answers.clear()
        self.is_rejected = False
        self.core.disconnect()

    def deliver(self, outcomes: list[Outcome]) -> None:
        numbers = {id(pending): number for number, pending in enumerate(self.pending)}
        for pending, outcome in outcomes:
            number = numbers[id(pending)]
            assert number not in self.outcomes, f"commit {number} has two outcomes"
            assert number not in self.cancelled, f"commit {number} was cancelled"
            self.outcomes[number] = outcome

    def check(self) -> None:
        waiting = len(self.pending) - len(self.outcomes) - len(self.cancelled)
        assert self.core.open == waiting
        placed = [item for item in self.core._pending() if item.is_open]
        order = {id(pending): number for number, pending in enumerate(self.pending)}
        numbers = [order[id(item)] for item in placed]
        assert numbers == sorted(set(numbers)), "commits left the order of submission"
        assert len(numbers) == waiting, "a commit is in no place, or in two"
        assert self.applied == sorted(self.applied), "commits were decided out of order"
        assert self.core._written <= MESSAGES_IN_FLIGHT
        assert (self.core.answer_due is not None) == (self.core._written > 0)
        for number, outcome in self.outcomes.items():
            if outcome in (COMMITTED, ERROR_CODE_NONE):
                assert number in self.applied
            elif isinstance(outcome, errors.RejectedError):
                assert number in self.bad, f"commit {number} failed for another's fault"
            else:
                assert self.pending[number].expires <= self.now, f"commit {number} had time"

    def finish(self) -> None:
        """Let the stream work until nothing is left to send."""
        while not self.core.is_idle:
            self.write()
            self.decide()
            self.receive()
            self.check()


@pytest.mark.parametrize("seed", seeds(50, slow=100))
def test_every_commit_has_one_outcome_in_order(seed: int) -> None:
    simulation = PipelineSimulation(random.Random(seed))
    for _ in range(150):
        simulation.step()
    simulation.finish()
    done = simulation.outcomes.keys() | simulation.cancelled
    assert done == set(range(len(simulation.pending)))


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_the_end_fails_every_open_commit(seed: int) -> None:
    simulation = PipelineSimulation(random.Random(seed))
    for _ in range(40):
        simulation.step()
    error = errors.WriterClosedError("the end")
    waiting = simulation.core.open
    outcomes = simulation.core.end(error)
    assert [outcome for _, outcome in outcomes] == [error] * waiting
    assert simulation.core.is_idle
    assert simulation.core.rejection is error


def test_a_failure_of_the_caller_fails_every_commit() -> None:
    simulation = PipelineSimulation(random.Random(1))
    simulation.submit()
    simulation.write()
    simulation.disconnect()
    error = errors.UnsupportedError("CommitPipeline")
    outcomes = simulation.core.reject(error)
    assert {outcome for _, outcome in outcomes} == {error}
    assert len(outcomes) == len(simulation.pending)


def test_an_answer_to_a_message_of_the_stream_before_is_a_violation() -> None:
    """A message in flight is not answered on a stream to which it was not yet written."""
    simulation = PipelineSimulation(random.Random(1))
    simulation.submit()
    simulation.write()
    simulation.decide()
    simulation.core.disconnect()
    with pytest.raises(errors.ProtocolViolationError):
        simulation.core.receive(simulation.answers[0], 0.0)


def test_the_timeout_restarts_with_each_answer() -> None:
    simulation = PipelineSimulation(random.Random(1))
    for now in (1.0, 2.0):
        simulation.now = now
        simulation.submit()
        simulation.write()
    assert simulation.core.answer_due == 1.0 + _ANSWER_S
    simulation.decide()
    simulation.now = 3.5
    simulation.receive()
    assert simulation.core.answer_due == 3.5 + _ANSWER_S
