"""Facts of scenarios about shapes of brokers, as they were found, and how a stated fact holds.

Scenarios state facts as values, as names of outcomes, or in a few words. A `Fact` says itself
whether a stated one holds. Knows no shape and no scenario.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tests.conformance.conformance_report import ABSENT, Mismatch
from tests.conformance.shape_synonyms import fact_forms, part_named, relation_in, size_in

NOT_ASSERTED = ("not asserted", "not stated", "unspecified")
"""Words in place of a value that the source leaves open: they hold of every value."""

Claim: TypeAlias = bool | Callable[[re.Match[str]], bool]
"""Whether words hold; a function looks at the numbers in them."""


class Fact:
    """A fact that was found; subclasses say what may be stated of it."""

    def numbers(self) -> Iterable[int]:
        """Return the numbers that the fact is, of which a relation may be stated."""
        return ()

    def holds(self, stated: object) -> bool:
        raise NotImplementedError


@runtime_checkable
class Lookup(Protocol):
    """Facts that are looked up by the key under which a scenario states them."""

    def find(self, key: str, stated: object) -> Any:
        """Return the fact, `ABSENT` for a key that is not understood."""
        ...

    def known(self) -> list[str]:
        """Return keys that are understood."""
        ...


def normal(text: str) -> str:
    """Return text without case, quotes and double spaces."""
    return " ".join(re.sub(r"[\"'`]", "", text).lower().split())


class Words(Fact):
    """A fact in words: patterns of what may be said, each with its claim."""

    def __init__(self, claims: Mapping[str, Claim]) -> None:
        self._claims = claims

    def holds(self, stated: object) -> bool:
        if not isinstance(stated, str):
            return False
        for pattern, claim in self._claims.items():
            found = re.fullmatch(" ".join(pattern.split()), normal(stated))
            if found is not None and (claim(found) if callable(claim) else claim):
                return True
        return False

    def __repr__(self) -> str:
        said = [pattern for pattern, claim in self._claims.items() if claim is True]
        return f"words such as {said}" if said else f"nothing of {list(self._claims)}"


class Number(Fact):
    """A number: stated as such, as text, in hex, or with its unit behind it."""

    def __init__(self, value: int, unit: str = r"[a-z ]+") -> None:
        self.value = value
        self._unit = unit

    def holds(self, stated: object) -> bool:
        if isinstance(stated, bool):
            return False
        if isinstance(stated, int | float):
            return stated == self.value
        if not isinstance(stated, str):
            return False
        if re.fullmatch(r"0x[0-9a-f]+", stated.lower()):
            return int(stated, 16) == self.value
        if size_in(stated) == self.value:
            return True
        found = re.fullmatch(rf"(-?[\d_]+)(?: {self._unit})?", normal(stated))
        return found is not None and int(found[1]) == self.value

    def __repr__(self) -> str:
        return str(self.value)


class Data(Fact):
    """Bytes: stated as text, in hex, as their number, or as equal to the ones wanted."""

    def __init__(self, data: bytes, wanted: bytes | None = None) -> None:
        self.data = data
        self._wanted = wanted

    def holds(self, stated: object) -> bool:
        if Number(len(self.data), "bytes?").holds(stated):
            return True
        if not isinstance(stated, str):
            return stated is None and not self.data
        if stated.encode() == self.data or _hex_digits(stated) == self.data.hex():
            return True
        if self.data and stated == base64.b64encode(self.data).decode():
            return True
        is_same = self._wanted is not None and self.data == self._wanted
        return is_same and is_word(stated, *EQUAL)

    def __repr__(self) -> str:
        return f"{len(self.data)} bytes {self.data[:40].hex()}"


def _hex_digits(text: str) -> str:
    """Return hex digits without spaces, colons and 0x, in lower case."""
    return re.sub(r"[\s:]", "", text.lower().removeprefix("0x"))


EQUAL = (
    "equal",
    "same",
    "the same",
    "right",
    "unchanged",
    "as written",
    "as stored",
    "as appended",
)
DONE = ("ok", "success", "succeeds", "done", "accepted", "true")
FAILED = ("error", "fails", "failed", "refused", "rejected", "exception", "raises", "illegal")


def is_word(stated: object, *words: str) -> bool:
    return isinstance(stated, str) and normal(stated) in words


class Done(Fact):
    """A step that succeeded, with the value it returned."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def holds(self, stated: object) -> bool:
        if is_word(stated, *DONE) and self.value is not False and self.value is not None:
            return True
        if self.value is None:
            return is_word(stated, *DONE) or stated is True
        return not list(match(stated, self.value, ""))

    def __repr__(self) -> str:
        return "ok" if self.value is None else repr(self.value)


class Refused(Fact):
    """A step that was refused: stated by the error's name, its kind, or a part of its message."""

    def __init__(self, error: Exception | None, *names: str) -> None:
        code = getattr(error, "code", "")
        self.error = error
        self.names = {normal(str(name)) for name in (code, *names) if name}

    def holds(self, stated: object) -> bool:
        if stated is False:
            return self.error is None
        if not isinstance(stated, str):
            return False
        head, _, quoted = stated.partition('"')
        if quoted and normal(quoted) not in normal(str(self.error)):
            return False
        head = normal(re.sub(r"\(.*\)", "", head).rstrip(": "))
        if head in FAILED or (bool(quoted) and not head):
            return True
        return squeezed(head) in {squeezed(name) for name in self.names}

    def __repr__(self) -> str:
        return f"refused ({', '.join(sorted(self.names))}): {self.error}"


def squeezed(name: str) -> str:
    """Return an error's name without its package, case, joints and the ending of its kind."""
    bare = re.sub(r"^(?:an? |the )?(?:throws|raises|fails with|error|refused with) ", "", name)
    bare = re.sub(r"[^a-z0-9]", "", bare.rpartition(".")[2].lower())
    return re.sub(r"(exception|error)$", "", bare) or bare


class AnyOf(Fact):
    """A fact of which several things may be stated."""

    def __init__(self, *facts: Any) -> None:
        self._facts = facts

    def holds(self, stated: object) -> bool:
        return any(not list(match(stated, fact, "")) for fact in self._facts)

    def alternatives(self) -> tuple[Any, ...]:
        return self._facts

    def __repr__(self) -> str:
        return " or ".join(repr(fact) for fact in self._facts)


class Keyed(Fact):
    """Facts by key; some keys are patterns, whose groups a function turns into the fact."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        patterns: Mapping[str, Callable[[re.Match[str]], Any]] | None = None,
    ) -> None:
        self._facts = facts
        self._patterns = patterns or {}

    def find(self, key: str, stated: object) -> Any:
        if key in self._facts:
            return self._facts[key]
        for pattern, fact in self._patterns.items():
            found = re.fullmatch(pattern, key)
            if found is not None:
                return fact(found)
        return ABSENT

    def known(self) -> list[str]:
        return [*self._facts, *self._patterns]

    def holds(self, stated: object) -> bool:
        return not list(match(stated, self, ""))


def match(stated: object, found: Any, path: str) -> Iterator[Mismatch]:
    """Yield what of a stated fact does not hold of the one found.

    Of a map only the stated keys are looked at; lists are equal element by element.
    """
    if isinstance(stated, Mapping) and isinstance(found, Lookup | Mapping):
        yield from _match_keys(stated, found, path)
    elif isinstance(stated, Mapping) and isinstance(found, list | tuple):
        yield from _match_parts(stated, found, path)
    elif is_word(stated, *NOT_ASSERTED) or (
        isinstance(stated, str) and _has_relation(stated, found)
    ):
        return
    elif isinstance(found, Fact):
        if not found.holds(stated):
            yield Mismatch(path, stated, found)
    elif isinstance(stated, list) and isinstance(found, list | tuple):
        if len(stated) != len(found):
            yield Mismatch(path, stated, list(found))
            return
        for at, (wanted, actual) in enumerate(zip(stated, found, strict=True)):
            yield from match(wanted, actual, f"{path}[{at}]")
    elif not _is_equal(stated, found):
        yield Mismatch(path, stated, found)


def _has_relation(stated: str, found: Any) -> bool:
    """Whether words state a relation to a number, such as ">= 3", that a found fact has."""
    relation = relation_in(stated)
    return relation is not None and any(relation(number) for number in _numbers_of(found))


def _numbers_of(found: Any) -> Iterator[int]:
    """Yield the number that a fact is, or how many things it has."""
    if isinstance(found, AnyOf):
        for alternative in found.alternatives():
            yield from _numbers_of(alternative)
    elif isinstance(found, Done | Number):
        yield from _numbers_of(found.value)
    elif isinstance(found, Data):
        yield len(found.data)
    elif isinstance(found, list | tuple | bytes):
        yield len(found)
    elif isinstance(found, Fact):
        yield from found.numbers()
    elif isinstance(found, int) and not isinstance(found, bool):
        yield found


def _match_parts(stated: Mapping[Any, Any], found: Sequence[Any], path: str) -> Iterator[Mismatch]:
    """Match parts of a list by name: {min: 0, end: 5} of [0, 0, 5], {count: 3}."""
    for name, value in stated.items():
        try:
            yield from match(value, part_named(found, str(name)), f"{path}.{name}")
        except LookupError:
            yield Mismatch(f"{path}.{name}", value, list(found))


def _match_keys(
    stated: Mapping[Any, Any], found: Lookup | Mapping[Any, Any], path: str
) -> Iterator[Mismatch]:
    for key, value in stated.items():
        fact = find_in(found, str(key), value)
        if fact is not ABSENT:
            yield from match(value, fact, f"{path}.{key}")
        elif isinstance(value, Mapping):
            yield from _match_keys(value, _Group(str(key), found), f"{path}.{key}")
        else:
            known = map(str, found) if isinstance(found, Mapping) else found.known()
            yield not_understood(f"{path}.{key}", known, value)


def find_in(found: Lookup | Mapping[Any, Any], key: str, stated: object) -> Any:
    """Return the fact of a key, of another form of it, or of one level deeper; `ABSENT` for none.

    Of several forms that are there, the first one that holds wins.
    """
    exact = _look_up(found, key, stated)
    if exact is not ABSENT or key.isdigit():
        return exact
    facts = [
        fact
        for name in dict.fromkeys(fact_forms(key))
        if (fact := _look_up(found, name, stated)) is not ABSENT
    ]
    holding = [fact for fact in facts if not list(match(stated, fact, ""))]
    return (holding or facts or [_deeper(found, key, stated)])[0]


def _look_up(found: Lookup | Mapping[Any, Any], key: str, stated: object) -> Any:
    if isinstance(found, Mapping):
        number = int(key) if key.isdigit() else key
        return found.get(key, found.get(number, ABSENT))
    return found.find(key, stated)


def _deeper(found: Lookup | Mapping[Any, Any], key: str, stated: object) -> Any:
    """Return the fact that a key such as `context_end_offset` names inside of `context`."""
    words = key.split("_")
    for at in range(len(words) - 1, 0, -1):
        head, tail = "_".join(words[:at]), "_".join(words[at:])
        outer = _look_up(found, head, stated)
        if isinstance(outer, Mapping):
            inner = find_in(outer, tail, stated)
            if inner is not ABSENT:
                return inner
        elif isinstance(outer, list | tuple) and not isinstance(stated, list):
            try:
                return part_named(outer, tail)
            except LookupError:
                continue
    return ABSENT


class _Group:
    """Facts that a scenario gathers under a key, each of which may have that key in its name."""

    def __init__(self, name: str, found: Lookup | Mapping[Any, Any]) -> None:
        self._name = name
        self._found = found

    def find(self, key: str, stated: object) -> Any:
        for name in (f"{self._name}_{key}", f"{key}_{self._name}", f"{key}_in_{self._name}"):
            fact = find_in(self._found, name, stated)
            if fact is not ABSENT:
                return fact
        is_plain = self._name in GROUPS
        return find_in(self._found, key, stated) if is_plain else ABSENT

    def known(self) -> list[str]:
        found = self._found
        return list(map(str, found)) if isinstance(found, Mapping) else found.known()


GROUPS = (
    "result", "state", "facts", "end", "at_end", "finally", "then", "afterwards", "file", "segment",
    "queue", "log", "header", "block", "entry", "index", "message", "managed_ledger", "store",
)  # fmt: skip
"""Keys that gather facts and say nothing else of them."""


def _is_equal(stated: object, found: object) -> bool:
    if isinstance(stated, bool) is not isinstance(found, bool):
        return False
    if is_word(stated, "none", "nothing", "empty") and found in ([], 0, b""):
        return found is not False
    if isinstance(found, int) and isinstance(stated, str) and not isinstance(found, bool):
        return Number(found).holds(stated)
    if isinstance(found, bytes):
        return Data(found).holds(stated)
    if isinstance(found, str) and isinstance(stated, str):
        return normal(found) == normal(stated)
    return stated == found or (found is None and is_word(stated, "none", "nothing", "null"))


def not_understood(what: str, known: Iterable[str], value: object) -> Mismatch:
    """Return the mismatch of a key, or of words, that the vocabulary does not have."""
    said = ", ".join(sorted(set(known)))
    return Mismatch(
        f"not understood: {what.lstrip('.')} (known: {said})",
        "words of tests/conformance/README.md",
        value,
    )
