"""Sentences of scenarios: steps in words, cut into clauses of which each has one verb.

A clause is taken apart piece by piece; words that nothing took, and that mean something, are not
understood. Knows no shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COUNTS = {
    "once": 1, "one": 1, "a": 1, "an": 1, "twice": 2, "two": 2, "both": 2, "thrice": 3, "three": 3,
    "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "twenty": 20, "hundred": 100, "no": 0,
}  # fmt: skip
_ORDINALS = {
    name: number
    for number, names in enumerate(
        [
            ("first", "1st"), ("second", "2nd"), ("third", "3rd"), ("fourth", "4th"),
            ("fifth", "5th"), ("sixth", "6th"), ("seventh",), ("eighth",), ("ninth",), ("tenth",),
        ],
        start=1,
    )
    for name in names
}  # fmt: skip
_WORD = r"(?:{})".format("|".join(sorted(_COUNTS, key=len, reverse=True)))
_NUMBER = re.compile(rf"-?\d[\d_]*|\b{_WORD}\b", re.IGNORECASE)
_UNITS = {"kib": 1024, "mib": 1024**2, "gib": 1024**3, "kb": 1024, "mb": 1024**2, "gb": 1024**3}
_TIMES = re.compile(
    rf"\b(?:(?P<adverb>once|twice|thrice)|(?P<count>\d+|{_WORD}) (?:times|x)\b|x(?P<x>\d+)\b)",
    re.IGNORECASE,
)
_LOOP = re.compile(rf"^\s*(?P<count>\d+|{_WORD}) (?:times|rounds)\s*:\s*", re.IGNORECASE)
_FILLERS = frozenset(
    re.findall(
        r"\w+",
        "a an the it its this that them they then now again once more also and of to from "
        "with by at in on for is are was were be has have been all each every one same "
        "new so as next another still only after before when which there here up bytes "
        "byte message messages record records entry entries item items step try called "
        "call value values segment segments file files flat log store handle",
    )
)
"""Words that mean nothing by themselves where a verb has taken what it needs."""


def number_of(text: str) -> int:
    """Return the value of a number in digits or in words."""
    text = text.strip().lower().replace("_", "")
    return _COUNTS[text] if text in _COUNTS else int(text)


def ordinal_of(word: str) -> int | None:
    """Return 1 for "first"; -1 for "last"; None for other words."""
    word = word.lower()
    return -1 if word in ("last", "newest", "latest") else _ORDINALS.get(word)


def numbers_in(text: str) -> list[int]:
    """Return all numbers in digits or words, in their order."""
    return [number_of(found) for found in _NUMBER.findall(text)]


def size_of(text: str | int) -> int:
    """Return a number of bytes: 5242880, "5 MiB", "128 + 12 * 10"."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d[\d_]*)\s*([kmg]i?b)?(?:ytes?|\s*bytes?)?\s*", text.lower())
    if found is not None:
        return int(found[1]) * _UNITS.get(found[2] or "", 1)
    if re.fullmatch(r"[\d_ ()+*-]+", text):
        return int(_sum(text))
    raise ValueError(f"size is {text!r}, expected a number of bytes")


def _sum(text: str) -> int:
    """Return the value of sums and products of numbers, without brackets."""
    total = 0
    for sign, term in re.findall(r"(^|[+-])\s*([\d_* ]+)", text.strip()):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


def range_of(text: str) -> range | None:
    """Return the numbers of "40..43", both ends included; None for other words."""
    found = re.search(r"(-?\d+)\s*(?:\.\.\.?|to|-|through)\s*(\d+)", text)
    return None if found is None else range(int(found[1]), int(found[2]) + 1)


class Clause:
    """One clause of a sentence, from which a verb takes what it needs."""

    def __init__(self, text: str, index: int = 0) -> None:
        self.text = text.strip()
        self.rest = f" {self.text} "
        self.index = index
        """Number of the round in a loop, from 0."""

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.rest, re.IGNORECASE) is not None

    def take(self, pattern: str) -> re.Match[str] | None:
        """Return what a pattern finds, and take it out of the clause."""
        found = re.search(pattern, self.rest, re.IGNORECASE)
        if found is not None:
            self.rest = f"{self.rest[: found.start()]} {self.rest[found.end() :]}"
        return found

    def skip(self, pattern: str) -> None:
        """Take everything that a pattern finds: words that add nothing to the verb."""
        self.rest = re.sub(
            rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", " ", self.rest, flags=re.IGNORECASE
        )

    def number(self, pattern: str, default: int | None = None) -> int:
        """Take a pattern whose first group is a number; raise `ValueError` if it must be there."""
        found = self.take(pattern)
        if found is not None:
            return number_of(found[1])
        if default is None:
            raise ValueError(f"{self.text!r} names no number like {pattern!r}")
        return default

    def times(self, default: int = 1) -> int:
        """Take how often something is done."""
        found = self.take(_TIMES.pattern)
        if found is None:
            return default
        return number_of(found["adverb"] or found["count"] or found["x"])

    def pair(self) -> tuple[int, int] | None:
        """Take two numbers in brackets: "(500, 200)", "[1, 2]"."""
        found = self.take(r"[(\[]\s*(-?\d+)\s*,\s*(-?\d+)\s*[)\]]")
        return None if found is None else (int(found[1]), int(found[2]))

    def left(self) -> list[str]:
        """Return the words that nothing took and that mean something: no remarks in brackets."""
        rest = re.sub(r"\([^)\d]*\)", " ", self.rest.lower())
        words = re.findall(r"[a-z0-9_]+", rest)
        return [word for word in words if word not in _FILLERS]


def clauses_of(sentence: str, verbs: re.Pattern[str]) -> Iterator[Clause]:
    """Yield the clauses of a sentence; "three times: a, b; c" has a and b three times, then c."""
    loop = _LOOP.match(sentence)
    if loop is not None:
        body, _, after = sentence[loop.end() :].partition(";")
        for index in range(number_of(loop["count"])):
            for text in _split(body, verbs):
                yield Clause(text, index)
        if after.strip():
            yield from clauses_of(after, verbs)
        return
    for text in _split(sentence, verbs):
        yield Clause(text)


def _split(sentence: str, verbs: re.Pattern[str]) -> list[str]:
    """Cut at commas, semicolons, colons and "and", outside of brackets, where a verb follows."""
    parts, depth, start = list[str](), 0, 0
    for at, mark in enumerate(sentence):
        depth += (mark in "([{") - (mark in ")]}")
        if mark in ",;:" and depth == 0 and not _is_inside(sentence, at):
            parts.append(sentence[start:at])
            start = at + 1
    parts.append(sentence[start:])
    found = list[str]()
    for part in parts:
        pieces = [part.strip() for part in re.split(r"\b(?:and then|then|and)\b", part)]
        before = ""
        for at, piece in enumerate(piece for piece in pieces if piece):
            text = f"{before} and {piece}" if before else piece
            before = ""
            if verbs.search(text):
                found.append(text)
            elif at == 0 and any(map(verbs.search, pieces[1:])):
                before = text  # "A and B are stored"
            elif found:
                found[-1] += f", {text}"  # more of the clause before
            else:
                found.append(text)
    return found


def _is_inside(sentence: str, at: int) -> bool:
    """Whether a mark belongs to a time or a number, as in 10:00 or 1,000."""
    return sentence[at - 1 : at].isdigit() and sentence[at + 1 : at + 2].isdigit()
