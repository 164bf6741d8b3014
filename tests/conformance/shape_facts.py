"""Facts of scenarios about shapes of brokers, as they were found, and how a stated fact holds.

Scenarios state facts as values, as names of outcomes, or in a few words. A `Fact` says itself
whether a stated one holds. Knows no shape and no scenario.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tests.conformance.conformance_report import ABSENT, Mismatch

NOT_ASSERTED = ("not asserted", "not stated", "unspecified")
"""Words in place of a value that the source leaves open: they hold of every value."""

Claim: TypeAlias = bool | Callable[[re.Match[str]], bool]
"""Whether words hold; a function looks at the numbers in them."""


class Fact:
    """A fact that was found; subclasses say what may be stated of it."""

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
            found = re.fullmatch(normal_pattern(pattern), normal(stated))
            if found is not None and (claim(found) if callable(claim) else claim):
                return True
        return False

    def __repr__(self) -> str:
        said = [pattern for pattern, claim in self._claims.items() if claim is True]
        return f"words such as {said}" if said else f"nothing of {list(self._claims)}"


def normal_pattern(pattern: str) -> str:
    return " ".join(pattern.split())


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
        if stated.encode() == self.data or stated == self.data.hex():
            return True
        is_same = self._wanted is not None and self.data == self._wanted
        return is_same and is_word(stated, *EQUAL)

    def __repr__(self) -> str:
        return f"{len(self.data)} bytes {self.data[:40].hex()}"


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
        head = normal(re.sub(r"\(.*\)|exception$", "", head, flags=re.IGNORECASE).rstrip(": "))
        return head in self.names or head in FAILED or (bool(quoted) and not head)

    def __repr__(self) -> str:
        return f"refused ({', '.join(sorted(self.names))}): {self.error}"


class AnyOf(Fact):
    """A fact of which several things may be stated."""

    def __init__(self, *facts: Any) -> None:
        self._facts = facts

    def holds(self, stated: object) -> bool:
        return any(not list(match(stated, fact, "")) for fact in self._facts)

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
    elif isinstance(stated, str) and is_word(stated, *NOT_ASSERTED):
        return
    elif isinstance(found, Fact):
        if not found.holds(stated):
            yield Mismatch(path, stated, found)
    elif isinstance(stated, list) and isinstance(found, list | tuple):
        if len(stated) != len(found):
            yield Mismatch(path, stated, list(found))
            return
        for at, (wanted, one) in enumerate(zip(stated, found, strict=True)):
            yield from match(wanted, one, f"{path}[{at}]")
    elif not _is_equal(stated, found):
        yield Mismatch(path, stated, found)


def _match_keys(
    stated: Mapping[Any, Any], found: Lookup | Mapping[Any, Any], path: str
) -> Iterator[Mismatch]:
    for key, value in stated.items():
        if isinstance(found, Mapping):
            fact = found.get(key, found.get(str(key), ABSENT))
            known: Iterable[str] = map(str, found)
        else:
            fact, known = found.find(str(key), value), found.known()
        if fact is ABSENT:
            yield not_understood(f"{path}.{key}", known, value)
        else:
            yield from match(value, fact, f"{path}.{key}")


def _is_equal(stated: object, found: object) -> bool:
    if isinstance(stated, bool) is not isinstance(found, bool):
        return False
    if isinstance(found, int) and isinstance(stated, str) and not isinstance(found, bool):
        return Number(found).holds(stated)
    if isinstance(found, bytes):
        return Data(found).holds(stated)
    if isinstance(found, str) and isinstance(stated, str):
        return normal(found) == normal(stated)
    if found == [] and is_word(stated, "none", "nothing", "empty"):
        return True
    return stated == found or (found is None and is_word(stated, "none", "nothing", "null"))


def not_understood(what: str, known: Iterable[str], value: object) -> Mismatch:
    """Return the mismatch of a key, or of words, that the vocabulary does not have."""
    said = ", ".join(sorted(set(known)))
    return Mismatch(
        f"not understood: {what.lstrip('.')} (known: {said})",
        "words of tests/conformance/README.md",
        value,
    )
