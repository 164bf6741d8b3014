"""The map against a slow model of its rules: random histories, undo, checkpoints.

CI runs a fixed set of sequences. `STREAMMETA_MODEL_EXAMPLES=5000` runs that many new ones, of
`STREAMMETA_MODEL_STEPS` steps (50 unless set); a failure prints what reproduces it.

CI runs few. `STREAMMETA_PAIR_SEEDS=1000:4000` runs those seeds, of `STREAMMETA_PAIR_STEPS` steps
(60 unless set). A failure names its seed, the step and what was asked. Every answer is compared at
once, all that can be asked every few steps.
"""

import dataclasses
import os
from collections import Counter
from contextlib import ExitStack
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.requests import CommitStreamSetObject
from streammeta.controller.records.codec import decode_records
from streammeta.controller.records.record import Record
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import RandomRequests
from tests.metadata.small_tables import small_tables

_EXAMPLES = int(os.environ.get("STREAMMETA_MODEL_EXAMPLES", "0"))
_STEPS = int(os.environ.get("STREAMMETA_MODEL_STEPS", "50"))
pytestmark = pytest.mark.timeout(0 if _EXAMPLES else 600)
_SEEDS = st.integers(0, 2**32 - 1)
"""Of one request: hypothesis would take longer to draw its parts than the map to answer it."""


class MapMachine(RuleBasedStateMachine):
    """Draws what a `Pair` is to do."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = ExitStack()
        self._patches.enter_context(small_tables())
        self.pair = Pair()

    def _write(self, request: Any, gap: int = 0) -> None:
        note(f"at {self.pair.now}: {request}")
        self.pair.write(request, self.pair.map.applied_end_offset + gap)

    @initialize(seed=_SEEDS)
    def usual_start(self, seed: int) -> None:
        for request in RandomRequests(Random(seed)).start(self.pair.model):
            self._write(request)

    @rule(seed=_SEEDS, gap=st.sampled_from([0, 0, 0, 2]))
    def write(self, seed: int, gap: int) -> None:
        self._write(RandomRequests(Random(seed)).any(self.pair.model), gap)

    @rule(seed=_SEEDS, count=st.integers(2, 4))
    def write_some(self, seed: int, count: int) -> None:
        """Undo takes back several entries at once more often than it would otherwise."""
        requests = RandomRequests(Random(seed))
        for _ in range(count):
            self._write(requests.any(self.pair.model))

    @rule(step=st.sampled_from([1, 50, 400, 1_100]))
    def wait(self, step: int) -> None:
        self.pair.now += step

    @precondition(lambda self: self.pair.uncommitted)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        self.pair.undo(data.draw(st.integers(0, len(self.pair.uncommitted) - 1)))

    @precondition(lambda self: self.pair.uncommitted)
    @rule(data=st.data())
    def commit_in_the_log(self, data: st.DataObject) -> None:
        self.pair.commit(data.draw(st.integers(1, len(self.pair.uncommitted))))

    @rule()
    def freeze(self) -> None:
        self.pair.freeze()

    @rule()
    def restart(self) -> None:
        self.pair.restart()

    @invariant()
    def both_agree(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        with self._patches:
            self._look_back()

    def _look_back(self) -> None:
        self.pair.check_log()
        self.pair.check_views()
        self.pair.restart()
        self.pair.check()


@pytest.mark.parametrize("examples", [_EXAMPLES or 15, pytest.param(60, marks=pytest.mark.slow)])
def test_the_map_agrees_with_the_slow_model(examples: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=_STEPS,
        derandomize=not _EXAMPLES,
        phases=(Phase.generate, Phase.shrink) if _EXAMPLES else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(MapMachine, settings=chosen)


_FIRST, _LAST = map(int, os.environ.get("STREAMMETA_PAIR_SEEDS", "0:60").split(":"))
_PAIR_STEPS = int(os.environ.get("STREAMMETA_PAIR_STEPS", "60"))
_SEEDS_AT_ONCE = 20
_LOOK_EVERY = 4
_REACH_SEEDS = 60
_MOVES = {"write": 75, "undo": 5, "commit": 5, "freeze": 5, "restart": 2, "wait": 8}


class _History:
    """What happens to one pair, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._requests = RandomRequests(self._rng)
        self.pair = Pair()
        self.last: Any = None
        """What was done last, for whoever reports a failure."""

    def start(self) -> None:
        """Make what a cluster begins with."""
        for request in self._requests.start(self.pair.model):
            self.last = request
            self.pair.write(request)

    def step(self) -> None:
        """Do one thing."""
        rng, pair = self._rng, self.pair
        names, weights = zip(*_MOVES.items(), strict=True)
        (self.last,) = rng.choices(names, weights)
        if self.last == "write":
            self.last = self._requests.any(pair.model)
            pair.write(self.last, pair.map.applied_end_offset + rng.choice((0, 0, 0, 2)))
        elif self.last == "undo" and pair.uncommitted:
            pair.undo(rng.randrange(len(pair.uncommitted)))
        elif self.last == "commit" and pair.uncommitted:
            pair.commit(rng.randint(1, len(pair.uncommitted)))
        elif self.last == "freeze":
            pair.freeze()
        elif self.last == "restart":
            pair.restart()
        elif self.last == "wait":
            pair.now += rng.choice((1, 50, 400, 1_100))

    def end(self) -> None:
        """Look back at all of it."""
        self.last = "the end"
        self.pair.check_log()
        self.pair.check_views()
        self.pair.restart()
        self.pair.check()


def _run(seed: int) -> None:
    history, step = _History(seed), -1
    try:
        history.start()
        for step in range(_PAIR_STEPS):
            history.step()
            if step % _LOOK_EVERY == 0:
                history.pair.check()
        history.end()
    except Exception as error:
        raise AssertionError(f"seed {seed}, step {step}, {history.last}: {error!r}") from error


@pytest.mark.parametrize("first", range(_FIRST, _LAST, _SEEDS_AT_ONCE))
def test_map_and_model_agree_all_along(first: int) -> None:
    with small_tables():
        for seed in range(first, min(first + _SEEDS_AT_ONCE, _LAST)):
            _run(seed)


def _codes(answer: Any) -> set[str]:
    """Return the names of all error codes in an answer."""
    if isinstance(answer, ErrorCode):
        return {answer.name}
    if isinstance(answer, tuple):
        return {name for item in answer for name in _codes(item)}
    if not dataclasses.is_dataclass(answer):
        return set()
    found: set[str] = set()
    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if field.name.endswith("errors") and isinstance(value, np.ndarray):
            found.update(ErrorCode(code).name for code in value.tolist())
        else:
            found |= _codes(value)
    return found


def _has_several_results_of_a_stream(request: Any) -> bool:
    if not isinstance(request, CommitStreamSetObject) or not len(request.compacted_object_ids):
        return False
    streams = [*request.ranges.stream_id.tolist(), *request.stream_objects.stream_id.tolist()]
    return len(set(streams)) < len(streams)


def test_histories_meet_every_answer_and_every_record() -> None:
    """What the draws never reach is not tested by any of these histories."""
    codes: Counter[str] = Counter()
    records: Counter[str] = Counter()
    several = 0
    with small_tables():
        for seed in range(_REACH_SEEDS):
            rng = Random(seed)
            pair, requests = Pair(), RandomRequests(rng)
            for request in requests.start(pair.model):
                pair.write(request)
            for _ in range(_PAIR_STEPS):
                request = requests.any(pair.model)
                answer = pair.write(request)
                codes.update(_codes(answer))
                several += _has_several_results_of_a_stream(request) and answer.error == 0
                pair.now += rng.choice((0, 0, 0, 50, 400))
            for _, payload in pair.log:
                records.update(type(record).__name__ for record in decode_records(payload))
    expected = {code.name for code in ErrorCode}
    rare = {name for name in expected if codes[name] < 3}
    assert not rare, f"hardly ever answered: {rare}, of {codes}"
    rare = {kind.__name__ for kind in get_args(Record) if records[kind.__name__] < 3}
    assert not rare, f"hardly ever recorded: {rare}, of {records}"
    assert several >= 10, f"compactions that cut a stream: {several}"
