"""Answers to scenarios about shapes of brokers, whose facts are values or short sentences.

A runner takes the scenario's input and returns facts. Where the scenarios say a fact in words, the
fact is `Said`: the words that hold of what was found. Knows no shape.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias

from tests.conformance.conformance_report import Mismatch, ScenarioResult, compare
from tests.conformance.scenario_args import Args

Runner: TypeAlias = Callable[[Any], Any | Awaitable[Any]]
"""Takes the input of a scenario (`Args` if it is a map); returns facts by section."""

_REMARKS = ("checked", "notes")


class Said:
    """A fact in words: equal to each of `words` that holds."""

    def __init__(self, **words: bool) -> None:
        self._words = {word.replace("_", " "): holds for word, holds in words.items()}

    @classmethod
    def of(cls, words: Mapping[str, bool]) -> Said:
        said = cls()
        said._words = {" ".join(word.split()): holds for word, holds in words.items()}
        return said

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._words.get(" ".join(other.split()), False)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"what is said by {[word for word, holds in self._words.items() if holds]}"


def check_answer(
    runner: Runner, others: Mapping[str, Any], args: Args, _: ScenarioResult
) -> Iterator[Mismatch]:
    """Yield what does not hold of a scenario's `expect`, and of what it derives.

    `others` are the inputs of all scenarios of the file by name: an input may name one.
    """
    given = _given(args, others)
    facts = runner(given)
    if inspect.isawaitable(facts):
        facts = asyncio.run(_awaited(facts))
    expected = args.take("expect", {})
    derived = args.take("derived", {})
    yield from compare(expected, facts.get("expect", {}), "expect")
    if isinstance(derived, Mapping):
        derived = {key: value for key, value in derived.items() if key not in _REMARKS}
    yield from compare(derived, facts.get("derived", {}), "derived")


def _given(args: Args, others: Mapping[str, Any]) -> Any:
    value = args.take("input", {})
    if isinstance(value, str):  # the input of another scenario, with a change said in words
        value = others.get(value.split()[0], value)
    if not isinstance(value, Mapping):
        return value
    named = {key: others.get(one, one) for key, one in value.items() if isinstance(one, str)}
    return args.nested({**value, **named}, "input")


async def _awaited(facts: Awaitable[Any]) -> Any:
    return await facts
