"""The vocabulary of scenarios about shapes of brokers: which shape a scenario has, and its check.

A shape is chosen by the keys of the input and of the facts, by the class that `source` names where
two fit alike, and never by the scenario's name. What no shape understands is named, with what is
known; the facts that are understood are checked nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.conformance.conformance_report import ABSENT, Mismatch, ScenarioResult
from tests.conformance.not_offered import feature_of
from tests.conformance.scenario_args import REQUIRED, Args
from tests.conformance.shape_facts import Lookup, find_in, match, not_understood
from tests.conformance.shape_synonyms import with_known_keys
from tests.conformance.shape_worlds import Course, NotOfferedError, World, run, sentence_of

VECTORS = Path(__file__).parent.parent / "vectors"
SHAPE_FILES = ("kafka.yaml", "rocketmq.yaml", "pulsar.yaml")

_SECTIONS = ("input", "given")
_REMARKS = ("checked", "notes", "note")
_STEPS = ("first_try", "steps", "then", "change")
_REFERRING = ("as", "like", "same_as", "after", "file", "based_on")
_CASES = frozenset(["cases", "inputs", "calls", "examples"])
"""Keys that list inputs, where a shape does not have them itself."""
CHANGE = "change"
"""Key of what a scenario says about the input of another one that it refers to."""

Scenarios: TypeAlias = Mapping[str, Mapping[str, Any]]
Runner: TypeAlias = Callable[["Given"], Any]


class Given(Args):
    """The input of a scenario, with the facts stated, and the scenarios that it may refer to."""

    def __init__(
        self,
        content: Mapping[str, Any],
        path: str = "input",
        others: Scenarios | None = None,
        stated: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(content, path)
        self.others = others or {}
        self.stated = stated or {}
        """Facts that are stated, by key: a decoder needs the bytes."""

    def nested(self, content: Mapping[str, Any] | None, name: str) -> Given:
        child = Given(content or {}, f"{self.path}.{name}", self.others, self.stated)
        self._nested.append(child)
        return child

    def within(self, name: str, default: Any = REQUIRED) -> Given:
        return self.nested(self.take(name, default), name)

    def each(self, name: str, default: Any = REQUIRED) -> list[Given]:
        listed = self.take(name, default) or []
        return [self.nested(item, f"{name}[{at}]") for at, item in enumerate(listed)]

    def first(self, *names: str, default: Any = None) -> Any:
        """Take the first of some keys that is there."""
        for name in names:
            if self.has(name):
                return self.take(name)
        return default

    def peek(self, name: str) -> Any:
        """Return a key without taking it; None where it is not there."""
        return self._content.get(name)

    def steps(self, world: type[World] | None = None) -> list[Any]:
        """Take the steps of a scenario, under whichever keys they are.

        With a world, keys that are left and are verbs of it are steps too, in their order.
        """
        found: list[Any] = []
        for name in [*self._content]:
            if name in _STEPS:
                value = self.take(name)
                if isinstance(value, str):
                    found += [value] if name == CHANGE else re.split(r";\s*", value)
                elif isinstance(value, list):
                    found += value
            elif world is not None and name not in self._taken and is_step(name, world):
                found += _keyed_steps(name, self.take(name))
        return found


def take_steps(given: Given, world: type[World]) -> list[Any]:
    """Take an input that is nothing but steps, or the steps of an input."""
    return list(given.take("input")) if given.has("input") else given.steps(world)


def is_step(key: str, world: type[World]) -> bool:
    """Whether a key begins with a verb of a world: roll_at, append, expire_before."""
    words = str(key).replace("_", " ")
    return any(verb.words.match(words) for verb in world.verbs)


def _keyed_steps(key: str, value: Any) -> list[str]:
    """Return the steps that a key and its value say: roll_at: 500, expire_before: [1, 3]."""
    words = key.replace("_", " ")
    if isinstance(value, bool) or value is None:
        return [words] if value is not False else []
    is_place = isinstance(value, list) and all(isinstance(item, int) for item in value)
    if isinstance(value, list) and not (is_place and words.startswith("read")):
        return [step for item in value for step in _keyed_steps(key, item)]
    if isinstance(value, Mapping):
        return [f"{words} {' '.join(f'{name} {item}' for name, item in value.items())}"]
    return [f"{words} {tuple(value) if isinstance(value, list) else value}"]


@dataclass(frozen=True)
class Shape:
    """What a scenario may be about. `needs` are sets of keys, of which one must be there.

    They are written "a b | c". `keys` are further ones that an input may have, `facts` is a pattern
    of the keys of facts. `fits` looks at an input that is a list; a list of maps is as many inputs.
    A shape that is not offered has no runner.
    """

    name: str
    run: Runner | None
    needs: str = ""
    facts: str = ".*"
    sources: str = "(?!)"
    keys: str = ""
    fits: Callable[[Sequence[Any], Any], bool] | None = None
    by_facts: str = "(?!)"
    """Pattern of keys of facts that make an input have this shape, whatever its own keys are."""
    world: type[World] | None = None
    """The world that steps act on; keys that are verbs of it, with their values, are steps too."""
    words: str = "(?!)"
    """Pattern of words in steps that speak for this shape where others know the verbs as well."""

    @cached_property
    def key_sets(self) -> list[frozenset[str]]:
        return [frozenset(need.split()) for need in self.needs.split("|") if need]

    @cached_property
    def all_keys(self) -> frozenset[str]:
        return frozenset(self.keys.split()).union(*self.key_sets)


@dataclass
class Answer:
    """Facts by key, and those of a list of cases where a scenario states nothing but a list."""

    facts: Any
    listed: Any = ABSENT
    """`ABSENT` where the facts by key are all there is."""
    mismatches: list[Mismatch] = field(default_factory=list)


def is_shape_scenario(scenario: Mapping[str, Any]) -> bool:
    """Whether a scenario has an input, or steps that are no operations of the controller."""
    steps = scenario.get("steps")
    listed = steps if isinstance(steps, list) else []
    is_controllers = all(isinstance(item, Mapping) and "op" in item for item in listed)
    has_input = any(scenario.get(name) is not None for name in _SECTIONS)
    return (has_input or not is_controllers) and "kind" not in scenario


@cache
def _known_scenarios() -> Scenarios:
    """Return the scenarios of the copied files: others may refer to them."""
    contents = [yaml.safe_load((VECTORS / name).read_text()) for name in SHAPE_FILES]
    return {scenario["name"]: scenario for content in contents for scenario in content["scenarios"]}


# ---- the input ----


def input_of(scenario: Mapping[str, Any], others: Scenarios) -> Any:
    """Return the input with what it takes over of other scenarios."""
    sections = [scenario[name] for name in _SECTIONS if scenario.get(name) is not None]
    value: Any = sections[0] if sections else {}
    for more in sections[1:]:
        value = {**value, **more} if isinstance(value, Mapping) else value
    if isinstance(value, str):
        value = _referred("", value, others)
    if isinstance(value, Mapping):
        value = _with_references(value, others)
    steps = scenario.get("steps")
    if steps is not None:
        value = (
            {**value, "steps": steps}
            if isinstance(value, Mapping)
            else {"input": value, "steps": steps}
        )
    return value


def _with_references(value: Mapping[str, Any], others: Scenarios) -> Mapping[str, Any]:
    merged: dict[str, Any] = {}
    for key, part in value.items():
        refers = key in _REFERRING or (isinstance(part, str) and part.startswith(("as ", "like ")))
        found = _referred(key, part, others) if refers and isinstance(part, str) else None
        if found is not None and key in _REFERRING:
            merged = {**found, **merged}
        elif found is not None and key in found:
            merged |= {name: found[name] for name in (key, CHANGE) if name in found}
        else:
            merged[key] = part
    return merged


def _referred(key: str, text: str, others: Scenarios) -> dict[str, Any] | None:
    """Return the input of the scenario that a text names, and what else the text says."""
    name = next((word for word in re.findall(r"[A-Za-z0-9_]+", text) if word in others), None)
    if name is None:
        return None if key else {"steps": [text]}
    found = input_of(others[name], {key: others[key] for key in others if key != name})
    change = re.sub(
        rf"^(as|like|same as)?\s*\b{name}\b[\s,;:]*(but|with|and)?\s*", "", text.strip()
    )
    content = dict(found) if isinstance(found, Mapping) else {"input": found}
    return {**content, CHANGE: change} if change else content


# ---- choice ----


def choose(
    shapes: Iterable[Shape], value: Any, stated: Any, source: str
) -> tuple[Shape, bool] | None:
    """Return the shape of an input, and whether each of its elements has it; None for no shape."""
    best: tuple[int, Shape, bool] | None = None
    names = set(stated) if isinstance(stated, Mapping) else set[str]()
    for shape in shapes:
        hint = 2 if re.search(rf"\b(?:{shape.sources})\b", source) else 0
        found = _score(shape, value, names, stated)
        if found is not None and (best is None or found[0] + hint > best[0]):
            best = (found[0] + hint, shape, found[1])
    return None if best is None else best[1:]


def _score(shape: Shape, value: Any, names: set[str], stated: Any) -> tuple[int, bool] | None:
    if isinstance(value, list):
        if shape.fits is not None and shape.fits(value, stated):
            return 10 + _facts_score(shape, names), False
        if not value or not all(isinstance(item, Mapping) for item in value):
            return _steps_score(shape, value, names)
        scores = [_map_score(shape, item, set()) for item in value]
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            return _steps_score(shape, value, names)
        return min(known) + _facts_score(shape, names), True
    if not isinstance(value, Mapping):
        return None
    score = _map_score(shape, value, names)
    return None if score is None else (score, False)


def in_words_of(shape: Shape, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an input under the keys and in the units that a shape has."""
    world = shape.world
    known = shape.all_keys | {*_STEPS, *_REMARKS, *_REFERRING}

    def is_known(key: str) -> bool:
        return world is not None and is_step(key, world)

    return with_known_keys(value, known, is_known)


def _map_score(shape: Shape, original: Mapping[str, Any], names: set[str]) -> int | None:
    value = in_words_of(shape, original)
    given = {str(key) for key in value} - set(_REMARKS)
    needed = [len(need) for need in shape.key_sets if need <= given]
    by_facts = any(re.fullmatch(shape.by_facts, name) for name in names)
    if by_facts:
        needed.append(3)
    world = shape.world
    steps = {key for key in given - shape.all_keys if world is not None and is_step(key, world)}
    if len(steps) > 1:
        needed.append(2)
    if not needed:
        return None
    unknown = 0 if by_facts else len(given - shape.all_keys - steps)
    said = [value[key] for key in (*_STEPS, "appends") if key in value]
    own = _words_score(shape, said)
    known = len(given) - 3 * unknown - len(steps)
    renamed = len(given - set(map(str, original)))
    return 3 * max(needed) + known + own - 4 * renamed + _facts_score(shape, names)


def _steps_score(shape: Shape, value: Sequence[Any], names: set[str]) -> tuple[int, bool] | None:
    """Score an input that is a list of steps in words."""
    if shape.world is None or not all(isinstance(item, str | list | Mapping) for item in value):
        return None
    own = _words_score(shape, value)
    return (own + _facts_score(shape, names), False) if own > 1 else None


def _words_score(shape: Shape, steps: Any) -> int:
    """Score steps by the share of them that have a verb of the shape's world, and its words."""
    if shape.world is None or not steps:
        return 0
    flat = [part for step in steps for part in (step if isinstance(step, list) else [step])]
    sentences = [sentence_of(step) for step in flat]
    verbs = [verb.words for verb in shape.world.verbs]
    known = sum(
        any(re.search(rf"\b(?:{verb.pattern})\b", sentence, re.IGNORECASE) for verb in verbs)
        for sentence in sentences
    )
    return 3 * known // len(sentences) + 2 * bool(
        re.search(shape.words, " ".join(sentences), re.IGNORECASE)
    )


def _facts_score(shape: Shape, names: set[str]) -> int:
    known = sum(re.fullmatch(shape.facts, name) is not None for name in names)
    return 2 * known - (len(names) - known)


# ---- the check ----


def check_shape(
    shapes: Sequence[Shape],
    scenario: Mapping[str, Any],
    content: Mapping[str, Any],
    args: Args,
    result: ScenarioResult,
) -> Iterator[Mismatch]:
    """Yield what does not hold of a scenario, and what of it is not understood."""
    args.names()
    listed = content.get("scenarios") or []
    own = {str(item.get("name")): item for item in listed if isinstance(item, Mapping)}
    others = {**_known_scenarios(), **own}
    others.pop(str(scenario.get("name")), None)
    expected = scenario.get("expect")
    derived = _without_remarks(scenario.get("derived"))
    value = input_of(scenario, others)
    stated = expected if expected is not None else derived
    merged = (
        {**derived, **expected}
        if isinstance(expected, Mapping) and isinstance(derived, Mapping)
        else stated
    )

    source = str(scenario.get("source", ""))
    chosen = choose(shapes, value, merged, source)
    cases = _cases_of(value)
    if cases is not None and (chosen is None or not chosen[0].all_keys & _CASES):
        value = cases
        chosen = choose(shapes, value, merged, source)
    found = list[Mismatch]()
    try:
        if chosen is None:
            found.append(_no_shape(shapes, value))
        elif chosen[0].run is None:
            raise NotOfferedError
        else:
            found += _check(*chosen, value, others, expected, derived)
        if any(one.field.startswith("not understood") for one in found) and feature_of(scenario):
            raise NotOfferedError
    except NotOfferedError:
        _not_offered(result)
    else:
        yield from found


def _not_offered(result: ScenarioResult) -> None:
    """Count a scenario of a feature that the product does not have neither way."""
    result.is_counted = False
    result.deviate(0, "kafka", "kafka-not-offered")


def _cases_of(value: Any) -> list[Any] | None:
    """Return the inputs that a map lists under one key, each with the other keys of the map."""
    if not isinstance(value, Mapping):
        return None
    for name in sorted(_CASES):
        listed = value.get(name)
        if isinstance(listed, list) and listed and all(isinstance(one, Mapping) for one in listed):
            common = {key: item for key, item in value.items() if key != name}
            return [{**common, **item} for item in listed]
        if isinstance(listed, list) and listed and len(value) == 1:
            return listed
    return None


def _without_remarks(derived: Any) -> Any:
    if isinstance(derived, Mapping):
        return {key: item for key, item in derived.items() if key not in _REMARKS} or None
    return derived


def _no_shape(shapes: Sequence[Shape], value: Any) -> Mismatch:
    if isinstance(value, Mapping):
        nearest = max(shapes, key=lambda shape: len(shape.all_keys & set(map(str, value))))
        known = [f"{nearest.name}: {' '.join(sorted(need))}" for need in nearest.key_sets]
        return not_understood(f"input {', '.join(map(str, value))}", known, dict(value))
    return not_understood("input", [one.name for one in shapes if one.fits is not None], value)


def _check(
    shape: Shape, is_each: bool, value: Any, others: Scenarios, expected: Any, derived: Any
) -> Iterator[Mismatch]:
    assert shape.run is not None
    inputs = value if is_each else [value]
    answers = []
    for at, input_ in enumerate(inputs):
        path = f"input[{at}]" if is_each else "input"
        facts = derived if expected is None else expected
        stated = facts[at] if isinstance(facts, list) and at < len(facts) and is_each else facts
        both = {**_map(derived), **_map(stated)}
        content = in_words_of(shape, input_) if isinstance(input_, Mapping) else {"input": input_}
        given = Given(content, path, others, both)
        answer = _answer(run(shape.run(given)))
        yield from answer.mismatches
        for missing in given.unknown():
            yield not_understood(missing.field, shape.all_keys, missing.expected)
        answers.append(answer)
    for section, facts in (("expect", expected), ("derived", derived)):
        if facts is not None:
            yield from _match_answers(facts, answers, is_each, section)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _answer(found: Any) -> Answer:
    answer = found if isinstance(found, Answer) else Answer(found)
    course = answer.facts
    if isinstance(course, Course):
        answer.mismatches += course.mismatches
        if answer.listed is ABSENT:
            answer.listed = course.sentences()
    elif isinstance(course, list) and answer.listed is ABSENT:
        answer.listed = course
    return answer


def _match_answers(
    facts: Any, answers: list[Answer], is_each: bool, section: str
) -> Iterator[Mismatch]:
    if not is_each and _are_rows(facts, answers[0]):
        for at, row in enumerate(facts):
            yield from match(row, _Row(answers[0].facts, at, len(facts)), f"{section}[{at}]")
    elif not is_each:
        found = _Columns(answers[0]) if isinstance(facts, Mapping) else answers[0].listed
        if found is ABSENT:
            found = answers[0].facts
        if isinstance(found, list) and found and not isinstance(facts, list | Mapping):
            found = found[-1]  # one word for the outcome of the last step
        yield from match(facts, found, section)
    elif isinstance(facts, Mapping):
        for key, value in facts.items():
            yield from match(
                value, [_find(answer.facts, key, value) for answer in answers], f"{section}.{key}"
            )
    elif not isinstance(facts, list) or len(facts) != len(answers):
        yield Mismatch(section, facts, f"{len(answers)} facts")
    else:
        for at, (value, answer) in enumerate(zip(facts, answers, strict=True)):
            is_map = isinstance(value, Mapping)
            found = answer.facts if is_map or answer.listed is ABSENT else answer.listed
            yield from match(value, found, f"{section}[{at}]")


def _are_rows(facts: Any, answer: Answer) -> bool:
    """Whether a list states, row by row, facts that are lists by themselves."""
    is_listed = answer.listed is not ABSENT or not isinstance(answer.facts, Lookup | Mapping)
    return (
        not is_listed
        and isinstance(facts, list)
        and bool(facts)
        and all(isinstance(row, Mapping) for row in facts)
    )


class _Columns:
    """Facts by key; a key that only the listed cases have is the list of theirs."""

    def __init__(self, answer: Answer) -> None:
        facts = answer.facts
        self._facts = facts if isinstance(facts, Lookup | Mapping) else {}
        self._rows = answer.listed if isinstance(answer.listed, list) else []

    def find(self, key: str, stated: object) -> Any:
        found = find_in(self._facts, key, stated)
        if found is not ABSENT or not isinstance(stated, list) or not self._rows:
            return found
        column = [_find(row, key, stated) for row in self._rows if isinstance(row, Lookup)]
        return column if column and ABSENT not in map(_as_key, column) else ABSENT

    def known(self) -> list[str]:
        found = self._facts
        return list(map(str, found)) if isinstance(found, Mapping) else found.known()


def _as_key(fact: Any) -> Any:
    return ABSENT if fact is ABSENT else None


class _Row:
    """Facts of one of several cases whose facts are lists, by key."""

    def __init__(self, facts: Any, at: int, count: int) -> None:
        self._facts = facts
        self._at = at
        self._count = count

    def find(self, key: str, stated: object) -> Any:
        for name in (key, f"{key}s"):
            found = find_in(self._facts, name, [stated] * self._count)
            if isinstance(found, list | tuple) and len(found) == self._count:
                return found[self._at]
        return ABSENT

    def known(self) -> list[str]:
        found = self._facts
        return list(map(str, found)) if isinstance(found, Mapping) else found.known()


def _find(facts: Any, key: str, stated: Any) -> Any:
    """Return the fact of one of several inputs that a list under a key states."""
    found = facts if isinstance(facts, Lookup) else _map(facts)
    for name in (key, key.removesuffix("s")):
        fact = find_in(found, name, stated)
        if fact is not ABSENT:
            return fact
    return ABSENT
