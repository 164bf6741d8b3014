"""The fields of a scenario, taken one by one, so that what was not taken can be named.

Knows nothing of operations; a default is given where a value is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tests.conformance.conformance_report import Mismatch, ScenarioResult

REQUIRED: Any = object()
_REMARKS = ("name", "source", "notes", "note", "reason")


class ArgumentMissingError(Exception):
    """A scenario leaves out what its operation needs."""


class UnknownFieldsError(Exception):
    """Part of a scenario is in words the runner does not know."""

    def __init__(self, mismatches: list[Mismatch]) -> None:
        super().__init__("unknown fields")
        self.mismatches = mismatches


class Args:
    """The fields of one map of a scenario, or of one map in it."""

    def __init__(self, content: Mapping[str, Any] | None, path: str = "args") -> None:
        self._content = dict(content or {})
        self.path = path
        self._taken: set[str] = set()
        self._nested: list[Args] = []

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field or its default.

        Raises:
            ArgumentMissingError: it is not there and has no default.
        """
        self._taken.add(name)
        value = self._content.get(name, default)
        if value is REQUIRED:
            raise ArgumentMissingError(f"{self.path}.{name} is missing")
        return value

    def within(self, name: str, default: Any = REQUIRED) -> Args:
        """Return the fields of a field that is a map; `unknown` looks into them too."""
        return self.nested(self.take(name, default), name)

    def each(self, name: str, default: Any = REQUIRED) -> Sequence[Args]:
        listed = self.take(name, default) or []
        return [self.nested(item, f"{name}[{at}]") for at, item in enumerate(listed)]

    def nested(self, content: Mapping[str, Any] | None, name: str) -> Args:
        path = name if self.path == "scenario" else f"{self.path}.{name}"
        self._nested.append(Args(content, path))
        return self._nested[-1]

    def has(self, name: str) -> bool:
        return name in self._content

    def names(self) -> list[str]:
        """Take all fields; return what they are called."""
        self._taken.update(self._content)
        return sorted(self._content)

    def pass_over(self) -> None:
        """Take remarks, and derived facts that have no check."""
        self._taken.update(_REMARKS)
        self._taken.update(name for name in self._content if str(name).startswith("derived"))

    def unknown(self) -> Iterator[Mismatch]:
        for args in self._nested:
            yield from args.unknown()
        for name, value in self._content.items():
            if name not in self._taken:
                yield Mismatch(f"{self.path}.{name}", value, "unknown field")


Check: TypeAlias = Callable[[Args, ScenarioResult], Iterable[Mismatch] | None]
"""Yields what does not hold of a scenario as a whole; adds what is of a step to the result."""


def run_entry(
    file: str,
    entry: object,
    op: str,
    check: Check,
    *,
    name: str = "without a name",
    number: int = 0,
) -> ScenarioResult:
    """Run one scenario, or one entry of a table.

    Fields that are not taken make it fail. So does one that breaks the runner; the others go on.
    """
    if not isinstance(entry, Mapping):
        result = ScenarioResult(file, name)
        result.fail(number, op, [Mismatch("scenario", "a map", entry)])
        return result
    result = ScenarioResult(file, str(entry.get("name", name)))
    args = Args(entry, "scenario")
    args.pass_over()
    try:
        result.fail(number, op, check(args, result) or ())
    except UnknownFieldsError as error:
        result.fail(number, op, error.mismatches)
    except Exception as error:  # noqa: BLE001 - see above
        said = f"{type(error).__name__}: {error}"
        result.fail(number, op, [Mismatch("scenario", "no failure", said)])
    result.fail(number, op, args.unknown())
    return result
