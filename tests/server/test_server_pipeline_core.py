"""The state machine of a commit pipeline: its invariants hold whatever callers and commits do."""

from __future__ import annotations

import random

import pytest

from streammeta.controller.rpc.services.pipeline_core import BYTES_AHEAD, ROWS_A_PART, PipelineCore
from streammeta.controller.rpc.services.pipeline_messages import (
    DecidedMessage,
    PipelineMessage,
    RejectedMessage,
)
from tests.kit.seeds import seeds

MESSAGES_AHEAD = 8
SIZES = (1, 100, BYTES_AHEAD // 3, BYTES_AHEAD + 1)
ROWS = (300, 700, ROWS_A_PART // 3, ROWS_A_PART)
LOST = ValueError("rejected")


class PipelineSimulation:
    """A core between a caller, the two tasks that decide messages, and the one that answers."""

    def __init__(self, seed: int, rejections: float) -> None:
        self.rng = random.Random(seed)
        self.core = PipelineCore(MESSAGES_AHEAD)
        self.rejections = rejections
        self.sizes: list[int] = []
        self.taken = 0
        self.answered: list[int | None] = []
        """Sequences of the answered messages."""
        self.rejected: list[int] = []
        """Sequences of the messages that were rejected."""

    def step(self) -> None:
        """Let one event happen, and check the invariants."""
        events = [self.receive, self.receive, self.receive, self.decide, self.answer, self.answer]
        self.rng.choice(events)()
        self.check()

    def receive(self) -> None:
        if self.core.has_room:
            size = self.rng.choice(SIZES)
            self.sizes.append(size)
            self.core.receive(bytes(size), came_ns=len(self.sizes))

    def decide(self) -> None:
        """Decide a batch. A message may be rejected by its content, or by its commits."""
        core = self.core
        if core.rejected is not None or not core.waiting:
            return
        core.begin_batch()
        rows = 0
        while (data := core.take()) is not None:
            assert len(data) == self.sizes[self.taken], "a message was lost or passed another"
            assert rows < ROWS_A_PART, "a batch is too large"
            message = self.parse(self.taken)
            self.taken += 1
            assert core.came_ns == self.taken
            core.add(message)
            rows += message.rows if isinstance(message, PipelineMessage) else 0
        assert core.is_deciding

        decided: list[DecidedMessage | RejectedMessage] = []
        for message in core.batch:
            if self.rng.random() < self.rejections:
                self.rejected.append(message.sequence)
                decided.append(RejectedMessage(message.sequence, LOST))
                break
            decided.append(DecidedMessage(message.sequence, (), (), None))
        core.settle(decided)

    def parse(self, sequence: int) -> PipelineMessage | RejectedMessage:
        if self.rng.random() < self.rejections:
            self.rejected.append(sequence)
            return RejectedMessage(sequence, LOST)
        return PipelineMessage(sequence, (), self.rng.choice(ROWS))

    def answer(self) -> None:
        if self.core.answers:
            message = self.core.answers.popleft()
            assert message is not None
            self.answered.append(message.sequence)
            assert self.core.mark_answered() == self.sizes[len(self.answered) - 1]

    def check(self) -> None:
        core, answered = self.core, len(self.answered)
        assert self.answered == list(range(answered)), "an answer is missing, or passed another"
        unanswered = self.sizes[answered:]
        assert list(core.sizes) == unanswered
        assert len(unanswered) <= MESSAGES_AHEAD
        assert sum(unanswered[:-1]) < BYTES_AHEAD, "too much was read ahead"
        assert core.has_room == (len(unanswered) < MESSAGES_AHEAD and sum(unanswered) < BYTES_AHEAD)
        if self.rejected:
            self.check_end()
        else:
            assert answered + len(core.answers) == self.taken, "a decided message has no answer"

    def check_end(self) -> None:
        """Check that the first rejected message is the last that is answered."""
        last = min(self.rejected)
        assert self.core.rejected is not None
        assert self.core.rejected.sequence == last
        pending = [message.sequence for message in self.core.answers if message is not None]
        assert self.answered + pending == list(range(last + 1)), "an answer follows the end"


@pytest.mark.parametrize("seed", seeds(33, slow=67))
def test_a_pipeline_keeps_its_invariants(seed: int) -> None:
    # Many short runs, because a rejected message ends one.
    for run in range(10):
        print(f"seed {seed}, run {run}")
        simulation = PipelineSimulation(1000 * seed + run, rejections=0.1)
        for _ in range(60):
            simulation.step()
        size = sum(map(len, simulation.core.waiting))
        assert simulation.core.drop_waiting() == size
        assert simulation.core.take() is None


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_a_pipeline_reads_on_while_answers_go_out(seed: int) -> None:
    print(f"seed {seed}")
    simulation = PipelineSimulation(seed, rejections=0)
    for _ in range(400):
        simulation.step()
    while len(simulation.answered) < len(simulation.sizes):
        simulation.decide()
        simulation.answer()
        simulation.check()
    assert simulation.core.has_room


def test_a_pipeline_decides_one_batch_at_once_and_none_after_its_end() -> None:
    core = PipelineCore(MESSAGES_AHEAD)
    core.begin_batch()
    with pytest.raises(AssertionError, match="at once"):
        core.begin_batch()
    core.add(RejectedMessage(None, LOST))
    core.settle([])
    with pytest.raises(AssertionError, match="ended"):
        core.begin_batch()
