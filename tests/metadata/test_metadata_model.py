"""The map against a slow model of its rules: random histories, undo, checkpoints.

CI runs few. `STREAMMETA_PAIR_SEEDS=1000:4000` runs those seeds, of `STREAMMETA_PAIR_STEPS` steps
(60 unless set). A failure names its seed, the step and what was asked. Every answer is compared at
once, all that can be asked every few steps, or for some seeds after each one.
"""

import dataclasses
import itertools
import os
from collections import Counter
from random import Random
from typing import Any, get_args

import numpy as np
import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api.requests import CommitStreamSetObject
from streammeta.controller.records.codec import decode_records
from streammeta.controller.records.record import Record
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import RandomRequests
from tests.metadata.small_tables import small_tables

pytestmark = pytest.mark.timeout(600)
_FIRST, _LAST = map(int, os.environ.get("STREAMMETA_PAIR_SEEDS", "0:20").split(":"))
_PAIR_STEPS = int(os.environ.get("STREAMMETA_PAIR_STEPS", "60"))
_SEEDS_AT_ONCE = 10
_LOOK_EVERY = 4
_REACH_SEEDS = (136, 128, 131, 118, 33, 0, 106, 115, 27, 85, 9, *range(93))
"""Drawn until every answer was met; the first few meet all of them, until the draws change."""
_MOVES = {"write": 75, "undo": 5, "commit": 5, "freeze": 5, "restart": 2, "recover": 1, "wait": 8}


class _History:
    """What happens to one pair, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._requests = RandomRequests(self._rng)
        self.pair = Pair()
        self.last: Any = None
        """What was done last, for reports of failures."""

    def start(self) -> None:
        self.last = "the start"
        self.pair.begin(self._requests)

    def step(self) -> None:
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
        elif self.last == "recover":
            pair.recover()
        elif self.last == "wait":
            pair.now += rng.choice((1, 50, 400, 1_100))

    def end(self) -> None:
        self.last = "the end"
        self.pair.check_log()
        self.pair.check_views()
        self.pair.restart()
        self.pair.check()


def _run(seed: int) -> None:
    history, step, look_every = _History(seed), -1, _LOOK_EVERY if seed % 4 else 1
    try:
        history.start()
        for step in range(_PAIR_STEPS):
            history.step()
            if step % look_every == 0:
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
    met: Counter[str] = Counter()
    wanted = {code.name: 3 for code in ErrorCode} | {kind.__name__: 3 for kind in get_args(Record)}
    wanted |= {"cuts of a stream": 10}
    with small_tables():
        for seed in _REACH_SEEDS:
            rng = Random(seed)
            pair, requests = Pair(), RandomRequests(rng)
            pair.begin(requests)
            logs: list[Any] = []
            for step in range(_PAIR_STEPS):
                if seed % 4 == 0 and step == _PAIR_STEPS // 2:
                    logs.append(pair.log)
                    pair.recover()
                request = requests.any(pair.model)
                answer = pair.write(request)
                met.update(_codes(answer))
                if answer is not None and _has_several_results_of_a_stream(request):
                    met["cuts of a stream"] += answer.error == 0
                pair.now += rng.choice((0, 0, 0, 50, 400))
            for _, payload in itertools.chain(*logs, pair.log):
                met.update(type(record).__name__ for record in decode_records(payload))
            rare = {name for name, count in wanted.items() if met[name] < count}
            if not rare:
                return
    raise AssertionError(f"hardly ever met: {rare}, of {met}")
