"""Worlds that sentences act on, and the course of a scenario: each step, its outcome, facts then.

A world has verbs. The course of a scenario answers facts by their keys: of the end, after or before
a step, or as the outcome of a step, whatever the scenario chose to state.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from tests.conformance.conformance_report import ABSENT, Mismatch
from tests.conformance.shape_facts import Done, Fact, Number, Refused, match, normal, not_understood
from tests.conformance.shape_sentences import Clause, clauses_of, ordinal_of
from tests.conformance.shape_synonyms import plain_times

_Method = TypeVar("_Method", bound=Callable[..., Any])


LONGEST_S = 300
"""Time in s that one scenario may take."""


class NotOfferedError(Exception):
    """A scenario is about a feature that the product does not have, and says so."""


def verb(words: str, example: str) -> Callable[[_Method], _Method]:
    """Make a method the meaning of a verb; `words` is a pattern of the forms it has."""

    def mark(method: _Method) -> _Method:
        method.__dict__["verb"] = Verb(method.__name__, re.compile(words, re.IGNORECASE), example)
        return method

    return mark


@dataclass(frozen=True)
class Verb:
    name: str
    words: re.Pattern[str]
    example: str


class World:
    """Things that steps act on. `errors` are those that a step may meet."""

    verbs: ClassVar[Sequence[Verb]] = ()
    errors: ClassVar[tuple[type[Exception], ...]] = (OSError, ValueError)

    def __init_subclass__(cls) -> None:
        found = [
            method.__dict__["verb"]
            for base in cls.__mro__[::-1]
            for method in vars(base).values()
            if callable(method) and "verb" in getattr(method, "__dict__", {})
        ]
        cls.verbs = list({world.name: world for world in found}.values())

    async def facts(self) -> Mapping[str, Any]:
        """Return the facts of now by the keys that scenarios state them under."""
        raise NotImplementedError

    def conditions(self, sentence: str) -> str:
        """Take circumstances out of a sentence that hold for all of it; return the rest."""
        return sentence

    async def calm(self) -> None:
        """End the circumstances of a sentence."""

    @classmethod
    def known(cls) -> list[str]:
        return [candidate.example for candidate in cls.verbs]


@dataclass
class Moment(Fact):
    """A step, its outcome, and the facts after it."""

    verb: str
    text: str
    outcome: Fact
    facts: Mapping[str, Any]
    sentence: int
    said: str = ""
    """The whole sentence, with its circumstances."""

    @property
    def failed(self) -> bool:
        return isinstance(self.outcome, Refused)

    def find(self, key: str, stated: object) -> Any:
        return find_fact(self.facts, key)

    def known(self) -> list[str]:
        return list(self.facts)

    def holds(self, stated: object) -> bool:
        if isinstance(stated, Mapping):
            return not list(match(stated, self, ""))
        if self.outcome.holds(stated):
            return True
        found = (
            re.fullmatch(r"(-?\d+) ([a-z_ ]+)", normal(stated)) if isinstance(stated, str) else None
        )
        if found is None:
            return False
        fact = find_fact(self.facts, found[2].replace(" ", "_"))
        return fact is not ABSENT and Number(int(found[1])).holds(_plain(fact))

    def __repr__(self) -> str:
        return f"{self.outcome!r} of {self.text!r}"


def _plain(fact: Any) -> Any:
    return len(fact) if isinstance(fact, list | tuple) else fact


def find_fact(facts: Mapping[str, Any], key: str) -> Any:
    """Return a fact by its key, by another form of it, or `ABSENT`."""
    for name in (key, f"{key}s", key.removesuffix("s"), key.removeprefix("is_"), f"{key}_count"):
        if name in facts:
            return facts[name]
    return ABSENT


_RELATION = re.compile(
    r"(?:(?P<head>.+?)_)?(?P<relation>after|before|at|since|until|while|during)(?:_(?P<tail>.+))?"
)
_STOP = frozenset(
    re.findall(r"\w+", "the a an of each all every step time times is are was call try it and to")
)
_SAME = {
    "expiry": "expire", "expiration": "expire", "restart": "open", "reopen": "open",
    "reopening": "open", "reload": "open", "recovery": "open", "load": "open", "closing": "close",
    "shutdown": "close", "deletion": "delete", "sealing": "seal", "rolling": "roll",
    "retention": "trim", "retry": "again", "locked": "lock", "puts": "put", "reading": "read",
}  # fmt: skip


@dataclass
class Course:
    """What happened in a scenario, in order."""

    begin: Mapping[str, Any]
    moments: list[Moment] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Facts beside those of the course."""

    @property
    def end(self) -> Mapping[str, Any]:
        return self.moments[-1].facts if self.moments else self.begin

    def sentences(self) -> list[Moment]:
        """Return the last moment of each sentence."""
        return [
            moment
            for at, moment in enumerate(self.moments)
            if at + 1 == len(self.moments) or self.moments[at + 1].sentence != moment.sentence
        ]

    def known(self) -> list[str]:
        steps = dict.fromkeys(moment.verb for moment in self.moments)
        return [
            *self.end,
            *self.extra,
            *(f"{relation}_{step}" for step in steps for relation in ("after", "before")),
            *steps,
        ]

    # ---- facts ----

    def find(self, key: str, stated: object) -> Any:
        """Return the first meaning of a key whose fact holds, or else the first one there is."""
        facts = [fact for fact in self._meanings(key, stated) if fact is not ABSENT]
        holding = (fact for fact in facts if not list(match(stated, fact, "")))
        return next(holding, facts[0] if facts else ABSENT)

    def _meanings(self, key: str, stated: object) -> Iterator[Any]:
        if key in self.extra:
            yield self.extra[key]
            return
        fact = find_fact(self.end, key)
        if fact is not ABSENT:
            yield self._course_of(key, fact, stated)
        bare = re.sub(
            r"_(at_end|in_the_end|finally|left|now)$|^(final|last)_(?=[a-z])|"
            r"_(?:after|in|at|of|by)_(?:each|every)(?:_step|_one)?$",
            "",
            key,
        )
        fact = find_fact(self.end, bare) if bare != key else ABSENT
        if fact is not ABSENT:
            yield self._course_of(bare, fact, stated)
        side = re.fullmatch(r"(.+)_(before|after|first|initially)|(?:initial|new)_(.+)", bare)
        if side is not None and not isinstance(stated, list):
            at = self.end if side[2] == "after" else self.begin
            yield find_fact(at, side[1] or side[3])
        yield self._found_in_course(bare, stated)

    def _found_in_course(self, key: str, stated: object) -> Any:
        found = _RELATION.fullmatch(key)
        if found is not None and found["relation"] in ("after", "before", "since", "until"):
            return self._related(found, stated)
        if normal(key) in ("outcomes", "results", "answers", "each"):
            return self.sentences()
        if normal(key) in ("error", "errors"):
            errors = [moment.outcome for moment in self.moments if moment.failed]
            return errors if isinstance(stated, list) else next(iter(errors), None)
        return self._outcome(key, stated)

    def _course_of(self, key: str, fact: Any, stated: object) -> Any:
        """Return a fact of the end, or its course if a list of as many values is stated."""
        if not isinstance(stated, list) or not list(match(stated, fact, "")):
            return fact
        courses = [
            [find_fact(moment.facts, key) for moment in moments]
            for moments in (self.sentences(), self.moments, *self._of_verbs())
            if len(moments) == len(stated)
        ]
        fitting = [course for course in courses if not list(match(stated, course, ""))]
        is_deeper = isinstance(fact, list | tuple) and not (stated and isinstance(stated[0], list))
        return (fitting or ([] if is_deeper else courses) or [fact])[0]

    def _of_verbs(self) -> Iterator[list[Moment]]:
        for name in dict.fromkeys(moment.verb for moment in self.moments):
            yield [moment for moment in self.moments if moment.verb == name]

    def _related(self, found: re.Match[str], stated: object) -> Any:
        moments, ordinal = self._named(found["tail"] or "")
        if not moments:
            return ABSENT
        if ordinal is not None:
            moments = moments[ordinal - 1 : ordinal] if ordinal > 0 else moments[-1:]
        if found["relation"] in ("before", "until"):
            return self._side(self._facts_before(moments[:1]), found["head"])
        if isinstance(stated, list) and found["head"]:
            sides = [self._side(moment, found["head"]) for moment in moments[-len(stated) :]]
            if sides and not isinstance(sides[-1], list | tuple):
                return sides
        good = [step for step in moments if not step.failed and not step.outcome.holds(False)]
        return self._side((good or moments[-1:])[0], found["head"]) if moments else ABSENT

    def _facts_before(self, moments: list[Moment]) -> Any:
        at = self.moments.index(moments[0]) if moments else 0
        return self.moments[at - 1] if at else Moment("begin", "begin", Done(), self.begin, -1)

    def _side(self, moment: Moment, head: str | None) -> Any:
        return moment if not head else find_fact(moment.facts, head)

    def _outcome(self, key: str, stated: object) -> Any:
        moments, ordinal = self._named(key)
        if not moments:
            return ABSENT
        if ordinal is not None:
            moments = moments[ordinal - 1 : ordinal] if ordinal > 0 else moments[-1:]
        if isinstance(stated, list):
            begin, end = moments[: len(stated)], moments[len(moments) - len(stated) :]
            return begin if not list(match(stated, begin, "")) else end
        if isinstance(stated, Mapping):
            return moments[-1] if moments else ABSENT
        fitting = [moment for moment in moments if moment.holds(stated)]
        return (
            (fitting[-1:] if len(fitting) == len(moments) else moments[-1:])[0]
            if moments
            else ABSENT
        )

    def _named(self, words: str) -> tuple[list[Moment], int | None]:
        """Return the moments that words name, and which of them, if they say it."""
        parts = [part for part in words.lower().split("_") if part and part not in _STOP]
        ordinals = [ordinal_of(part) for part in parts if ordinal_of(part) is not None]
        parts = [part for part in parts if ordinal_of(part) is None and not part.isdigit()]
        if not parts:
            return (self.sentences() if ordinals or not words else []), (ordinals or [None])[0]
        found = [moment for moment in self.moments if all(_names(part, moment) for part in parts)]
        return found, (ordinals or [None])[0]


def _names(word: str, moment: Moment) -> bool:
    words = re.findall(r"[a-z]+", f"{moment.verb} {moment.text} {moment.said}".lower())
    return any(_stem(word) == _stem(token) for token in words)


def _stem(word: str) -> str:
    """Return a word without its ending and doubled letters: committed, commits, commit."""
    word = _SAME.get(word, _SAME.get(word.removesuffix("s"), word))
    if len(word) > 3:
        word = re.sub(r"(ing|ed|es|s)$", "", word)
    return re.sub(r"(.)\1$", r"\1", word).removesuffix("e")[:6]


# ---- running ----


async def run_steps(world: World, steps: Iterable[Any]) -> Course:
    """Run sentences on a world; a clause that is not understood is noted and left out."""
    course = Course(await world.facts())
    pattern = re.compile(
        "|".join(rf"\b(?:{candidate.words.pattern})\b" for candidate in world.verbs), re.IGNORECASE
    )
    for number, step in enumerate(steps):
        said = plain_times(sentence_of(step))
        sentence = world.conditions(said)
        circumstances = " ".join(word for word in said.split() if word not in sentence.split())
        for clause in clauses_of(sentence, pattern):
            await _run_clause(world, clause, course, number, circumstances)
        await world.calm()
    return course


def sentence_of(step: Any) -> str:
    """Return a step that is a list or a map as a sentence: [append, 3], {roll: 5}."""
    if isinstance(step, Mapping):
        parts = {str(key): value for key, value in step.items() if value is not False}
        counts = [parts.pop(name) for name in ("count", "times", "repeat") if name in parts]
        said = ", ".join(f"{key.replace('_', ' ')} {_word(value)}" for key, value in parts.items())
        return f"{said} {counts[0]} times" if counts else said
    return " ".join(_word(part) for part in step) if isinstance(step, list) else str(step)


def _word(value: Any) -> str:
    if value is True or value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{str(key).replace('_', ' ')} {_word(one)}" for key, one in value.items())
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)


async def _run_clause(world: World, clause: Clause, course: Course, number: int, said: str) -> None:
    found = _verb_of(world, clause)
    if found is None:
        course.mismatches.append(
            not_understood(f"step {clause.text!r}", world.known(), clause.text)
        )
        return
    clause.take(rf"\b(?:{found.words.pattern})\b")
    try:
        value = getattr(world, found.name)(clause)
        outcome: Fact = as_outcome(await value if inspect.isawaitable(value) else value)
    except world.errors as error:
        outcome = Refused(error, *error_names(error))
    if left := clause.left():
        course.mismatches.append(
            not_understood(f"{' '.join(left)!r} in {clause.text!r}", world.known(), clause.text)
        )
    facts = await world.facts()
    for single in outcome.outcomes if isinstance(outcome, Several) else [outcome]:
        course.moments.append(Moment(found.name, clause.text, single, facts, number, said))


def _verb_of(world: World, clause: Clause) -> Verb | None:
    """Return the verb that comes first in a clause; of two at one place the one listed first."""
    found = [
        (place.start(), at, candidate)
        for at, candidate in enumerate(world.verbs)
        if (place := re.search(rf"\b(?:{candidate.words.pattern})\b", clause.rest, re.IGNORECASE))
    ]
    return min(found, key=lambda candidate_match: candidate_match[:2])[2] if found else None


@dataclass
class Several(Fact):
    """Outcomes of one clause that does something more than once."""

    outcomes: Sequence[Fact]

    def holds(self, stated: object) -> bool:
        return not list(match(stated, list(self.outcomes), ""))


def as_outcome(value: Any) -> Fact:
    return value if isinstance(value, Fact) else Done(value)


_NAMES_OF_ERRORS = {
    "PartitionClosed": "KafkaStorage NotLeaderOrFollower IllegalState Closed StreamClosed",
    "MetaStreamClosed": "IllegalState Closed StreamClosed Fenced",
    "NotAppendable": "UnsupportedOperation NonAppendableLedgerOffloader OffloadNotSupported",
    "NoSuchLedger": "NoSuchLedgerExists NoSuchLedgerExistsOnMetadataServer BKNoSuchLedgerExists",
    "NoSuchBlob": "KeyNotFound NoSuchKey NotFound FileNotFound",
    "OffloadReadHandleClosed": "ManagedLedgerOffloadReadHandleClosed HandleClosed",
    "IncorrectParameter": "BKIncorrectParameter",
    "ManagedLedgerFenced": "Fenced BadVersion",
    "VersionConflict": "BadVersion",
    "OffloadInProgress": "ManagedLedgerOffloadInProgress ConcurrentOffload",
    "OffloadConflict": "OffloadInProgress",
    "NoSegment": "IllegalState FileSegmentNotFound NoSuchFile",
    "ChunkLayout": "Runtime IllegalState",
    "IllegalOffset": "ILLEGAL_OFFSET TieredStore",
    "SegmentSealed": "SEGMENT_SEALED TieredStore",
    "SegmentRead": "ILLEGAL_PARAM TieredStore IllegalArgument",
    "SegmentWrite": "IO_ERROR TieredStore",
    "OutOfOrderSequence": "OutOfOrderSequenceNumber OUT_OF_ORDER_SEQUENCE_NUMBER",
    "InvalidProducerEpoch": "INVALID_PRODUCER_EPOCH ProducerFenced",
    "OffsetOutOfRange": "OFFSET_OUT_OF_RANGE",
    "CorruptBatch": "CorruptRecord CorruptMessage InvalidRecord CORRUPT_MESSAGE",
    "InvalidBatch": "InvalidRecord CorruptRecord INVALID_RECORD",
    "BatchTooLarge": "RecordTooLarge RecordBatchTooLarge MESSAGE_TOO_LARGE",
    "InvalidTimestamp": "INVALID_TIMESTAMP",
    "Segment": "Kafka IllegalState IllegalArgument",
}
"""Names that other products have for an error, by our name without its ending."""


def error_names(error: Exception) -> Iterator[str]:
    """Yield names under which a scenario may state an error."""
    name = type(error).__name__.removesuffix("Error")
    yield name
    yield from _NAMES_OF_ERRORS.get(name, "").split()
    if isinstance(error, OSError):
        yield from ("io error", "io", "oserror")
    if "Blob" in name:
        yield from ("that of the store", "error of the store", "store", "ContainerNotFound")
    if isinstance(error, EOFError):
        yield from ("end of file error", "end of file", "eof", "end of stream")
    if isinstance(error, IndexError):
        yield from ("indexoutofbounds", "out of bounds")
    if isinstance(error, ValueError):
        yield from ("illegalargument", "illegal argument", "illegal_param")


async def attempt(call: Awaitable[Any], *errors: type[Exception]) -> Fact:
    """Return the outcome of a call."""
    expected = errors or (OSError, ValueError)
    try:
        return as_outcome(await call)
    except expected as error:
        return Refused(error, *error_names(error))


def run(awaitable: Any) -> Any:
    """Run what a shape returned, if it has to be awaited."""

    async def waited() -> Any:
        async with asyncio.timeout(LONGEST_S):  # a scenario that waits for ever fails alone
            return await awaitable

    return asyncio.run(waited()) if inspect.isawaitable(awaitable) else awaitable
