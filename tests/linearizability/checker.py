"""Searches for an order of the operations that explains every answer.

The algorithm is Wing and Gong's search with Lowe's improvements ("Testing for linearizability",
2016): a linked list of invocations and returns from which operations are lifted, and a memory of
configurations that led nowhere. Keys are checked apart, because linearizability is local. Work is
bounded; when the bound is reached the verdict is UNKNOWN, which is no success.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

from tests.linearizability.history import Operation

DEFAULT_BUDGET = 2_000_000
"""Steps of the model for a whole history; some seconds of work."""


class Model(Protocol):
    """What the operations on one key mean; states are hashable values."""

    @property
    def initial(self) -> Any:
        """Return the state before any operation."""

    @property
    def values(self) -> dict[str, type]:
        """Return the classes of requests and answers by name.

        They are dataclasses whose fields are numbers, strings, None and tuples of them.
        """

    def step(self, state: Any, request: Any, answer: Any) -> tuple[bool, Any]:
        """Return whether `answer` is right in `state`, and the state afterwards.

        UNKNOWN is always right: the request does what it would do in this state. A right answer
        that leaves the state as it is here must never change it elsewhere, except to say of an
        unknown part of it what it is; the search relies on it.
        """
        ...

    def is_read(self, request: Any) -> bool:
        """Return whether the request can't change anything."""
        ...

    def order(self, operation: Operation[Any, Any]) -> int | None:
        """Return a number that tells when a completed operation took effect, if its answer does.

        Whatever explains the answers has these operations in the order of their numbers, equal
        ones in any order. Saves the search from finding out by trial.
        """
        ...

    def relevant(self, history: Sequence[Operation[Any, Any]]) -> list[Operation[Any, Any]]:
        """Return one key's operations without ambiguous ones that can't explain any answer."""
        ...


class Verdict(Enum):
    """What is known of a history."""

    LINEARIZABLE = "linearizable"
    NOT_LINEARIZABLE = "not linearizable"
    UNKNOWN = "unknown: the budget was spent before the search ended"


@dataclasses.dataclass(frozen=True, slots=True)
class KeyResult:
    """The verdict on one key."""

    key: str
    verdict: Verdict
    operations: tuple[Operation[Any, Any], ...]
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The verdicts on all keys, in key order."""

    results: tuple[KeyResult, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the worst of the keys' verdicts."""
        verdicts = {result.verdict for result in self.results}
        for verdict in (Verdict.NOT_LINEARIZABLE, Verdict.UNKNOWN):
            if verdict in verdicts:
                return verdict
        return Verdict.LINEARIZABLE

    def smallest(self, verdict: Verdict) -> KeyResult:
        """Return the result with this verdict that has the fewest operations."""
        matching = [result for result in self.results if result.verdict is verdict]
        return min(matching, key=lambda result: len(result.operations))


def check(
    history: Iterable[Operation[Any, Any]],
    model: Model,
    budget: int = DEFAULT_BUDGET,
) -> Report:
    """Judge a history key by key; the keys share the budget, small ones first."""
    by_key: dict[str, list[Operation[Any, Any]]] = {}
    for operation in history:
        by_key.setdefault(operation.key, []).append(operation)
    results = []
    for key in sorted(by_key, key=lambda key: (len(by_key[key]), key)):
        operations = sorted(by_key[key], key=lambda operation: operation.invoked)
        verdict, steps = check_key(operations, model, budget)
        budget -= steps
        results.append(KeyResult(key, verdict, tuple(operations), steps))
    return Report(tuple(sorted(results, key=lambda result: result.key)))


def check_key(
    operations: Sequence[Operation[Any, Any]], model: Model, budget: int
) -> tuple[Verdict, int]:
    """Judge one key's operations; return also how many steps of the model it took."""
    search = _Search(model.relevant(operations), model, budget)
    return search.run(), search.steps


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """The invocation or the return of an operation, in a linked list in the order of time."""

    operation: Operation[Any, Any] | None
    position: int
    is_return: bool = False
    bit: int = 0
    """Of an invocation: its operation's place in the set of those that have been ordered."""
    returns: _Entry | None = None
    """Of an invocation: the return; None if it is ambiguous."""
    order: int | None = None
    """Of an invocation: the model's `order`."""
    before: _Entry | None = None
    after: _Entry | None = None

    def take_out(self) -> None:
        """Unlink it; it keeps its place for `put_back`."""
        assert self.before is not None
        self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before

    def put_back(self) -> None:
        """Undo the latest `take_out` in the list."""
        assert self.before is not None
        self.before.after = self
        if self.after is not None:
            self.after.before = self


@dataclasses.dataclass(slots=True)
class _Choice:
    """An operation given the next place in the order, and how to go on if that was wrong."""

    entry: _Entry
    state_before: Any
    alternatives: Iterator[_Entry]
    is_final: bool
    """It changed nothing, so no order is lost by placing it as early as possible."""


class _Search:
    """Depth-first search for an order of one key's operations.

    Completed and ambiguous operations stand in lists of their own: everywhere the completed ones
    are tried first, because an ambiguous one is needed only where an answer depends on it.
    """

    def __init__(
        self, operations: Sequence[Operation[Any, Any]], model: Model, budget: int
    ) -> None:
        self._model = model
        self._budget = budget
        self._left = sum(operation.returned is not None for operation in operations)
        self._completed, self._ambiguous = _linked(operations)
        self._orders: list[int] = []
        self._give_orders()
        self._placed_in_order = 0
        self._placed = 0
        self._placed_ambiguous = 0
        self._state = model.initial
        self._choices: list[_Choice] = []
        self._visited: set[tuple[int, int, int, Any]] = set()
        self.steps = 0

    def run(self) -> Verdict:
        """Search until every completed operation has a place."""
        candidates = self._candidates()
        while self._left:
            entry = next(candidates, None)
            if entry is None:
                alternatives = self._take_back()
                if alternatives is None:
                    return Verdict.NOT_LINEARIZABLE
                candidates = alternatives
            elif self.steps >= self._budget:
                return Verdict.UNKNOWN
            elif self._place(entry, candidates):
                candidates = self._candidates()
        return Verdict.LINEARIZABLE

    def _give_orders(self) -> None:
        entry = self._completed.after
        while entry is not None:
            if not entry.is_return and entry.operation is not None:
                entry.order = self._model.order(entry.operation)
                if entry.order is not None:
                    self._orders.append(entry.order)
            entry = entry.after
        self._orders.sort()

    def _candidates(self) -> Iterator[_Entry]:
        """Yield the operations that may come next: those invoked before any other's return.

        Stays valid while operations are placed and taken back between two values.
        """
        entry = self._completed.after
        while entry is not None and not entry.is_return:
            if entry.order is None or entry.order == self._orders[self._placed_in_order]:
                yield entry
            entry = entry.after
        deadline = entry.position if entry is not None else 0
        entry = self._ambiguous.after
        while entry is not None and entry.position < deadline:
            yield entry
            entry = entry.after

    def _place(self, entry: _Entry, alternatives: Iterator[_Entry]) -> bool:
        """Give an operation the next place, if its answer fits and it leads somewhere new."""
        operation = entry.operation
        assert operation is not None
        self.steps += 1
        fits, state = self._model.step(self._state, operation.request, operation.answer)
        is_ambiguous = entry.returns is None
        changes = state != self._state
        if not fits or (is_ambiguous and not changes):
            return False
        if not self._visit(entry, state):
            return False
        is_final = not is_ambiguous and not changes
        self._choices.append(_Choice(entry, self._state, alternatives, is_final))
        self._state = state
        self._mark(entry)
        entry.take_out()
        if entry.returns is not None:
            entry.returns.take_out()
            self._left -= 1
        return True

    def _visit(self, entry: _Entry, state: Any) -> bool:
        """Note a configuration; return whether it is new."""
        placed, ambiguous = self._placed, self._placed_ambiguous
        if entry.returns is None:
            ambiguous |= entry.bit
        else:
            placed |= entry.bit
        # Without the ones at the end, which say nothing, the set is as short as the overlap.
        first_missing = (~placed & (placed + 1)).bit_length() - 1
        configuration = (first_missing, placed >> first_missing, ambiguous, state)
        if configuration in self._visited:
            return False
        self._visited.add(configuration)
        return True

    def _mark(self, entry: _Entry) -> None:
        """Note an operation as placed, or as no longer placed."""
        if entry.returns is None:
            self._placed_ambiguous ^= entry.bit
        else:
            self._placed ^= entry.bit
        if entry.order is not None:
            self._placed_in_order += 1 if self._placed & entry.bit else -1

    def _take_back(self) -> Iterator[_Entry] | None:
        """Undo choices up to one that has alternatives, and return these; None if none has."""
        while self._choices:
            choice = self._choices.pop()
            if choice.entry.returns is not None:
                choice.entry.returns.put_back()
                self._left += 1
            choice.entry.put_back()
            self._mark(choice.entry)
            self._state = choice.state_before
            if not choice.is_final:
                return choice.alternatives
        return None


def _linked(operations: Sequence[Operation[Any, Any]]) -> tuple[_Entry, _Entry]:
    """Return the heads of the lists of completed and of ambiguous operations.

    Of equal times invocations come first: the operations overlap.
    """
    events = sorted(
        (time, is_return, number)
        for number, operation in enumerate(operations)
        for is_return, time in enumerate((operation.invoked, operation.returned))
        if time is not None
    )
    completed, ambiguous = _Entry(None, -1), _Entry(None, -1)
    last_completed, last_ambiguous = completed, ambiguous
    invocations: dict[int, _Entry] = {}
    bits = {True: 1, False: 1}
    for position, (_, is_return, number) in enumerate(events):
        entry = _Entry(operations[number], position, is_return=bool(is_return))
        if is_return:
            invocations[number].returns = entry
        else:
            invocations[number] = entry
            entry.bit = bits[operations[number].returned is None]
            bits[operations[number].returned is None] <<= 1
        if operations[number].returned is None:
            last_ambiguous = _link(last_ambiguous, entry)
        else:
            last_completed = _link(last_completed, entry)
    return completed, ambiguous


def _link(last: _Entry, entry: _Entry) -> _Entry:
    last.after, entry.before = entry, last
    return entry
