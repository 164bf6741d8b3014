"""The map against a slow model of its rules, over random commands, undo at any point included.

CI runs a fixed set of sequences. `STREAMMETA_MODEL_EXAMPLES=5000` runs that many new ones, of
`STREAMMETA_MODEL_STEPS` steps (50 unless set); a failure prints what reproduces it.
"""

import os
from contextlib import ExitStack
from random import Random
from typing import Any

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
