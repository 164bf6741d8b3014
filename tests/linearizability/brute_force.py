"""The definition of linearizability, tried out on every order of a few operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tests.linearizability.checker import Model
from tests.linearizability.history import Operation


def is_linearizable(operations: Sequence[Operation[Any, Any]], model: Model) -> bool:
    """Whether some order of all completed and some ambiguous operations explains the answers."""
    return any(
        _respects_time(order) and _explains(order, model)
        for chosen in _choices(operations)
        for order in itertools.permutations(chosen)
    )


def _choices(operations: Sequence[Operation[Any, Any]]) -> Iterator[list[Operation[Any, Any]]]:
    completed = [op for op in operations if op.returned is not None]
    ambiguous = [op for op in operations if op.returned is None]
    for count in range(len(ambiguous) + 1):
        for chosen in itertools.combinations(ambiguous, count):
            yield [*completed, *chosen]


def _respects_time(order: Sequence[Operation[Any, Any]]) -> bool:
    return not any(
        later.returned is not None and later.returned < earlier.invoked
        for earlier, later in itertools.combinations(order, 2)
    )


def _explains(order: Sequence[Operation[Any, Any]], model: Model) -> bool:
    state = model.initial
    for operation in order:
        fits, state = model.step(state, operation.request, operation.answer)
        if not fits:
            return False
    return True
