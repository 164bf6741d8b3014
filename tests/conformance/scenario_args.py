"""Arguments of an operation, taken one by one, so that what nobody took can be named.

Knows nothing of operations; a default is given where a value is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.conformance.conformance_report import Mismatch

_REQUIRED = object()


class ArgumentMissingError(Exception):
    """A scenario leaves out what its operation needs."""


class Args:
    """The fields of one map of a scenario."""

    def __init__(self, content: Mapping[str, Any] | None, path: str = "args") -> None:
        self._content = dict(content or {})
        self._path = path
        self._taken: set[str] = set()
        self._nested: list[Args] = []

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field or its default.

        Raises:
            ArgumentMissingError: it is not there and has no default.
        """
        self._taken.add(name)
        value = self._content.get(name, default)
        if value is _REQUIRED:
            raise ArgumentMissingError(f"{self._path}.{name} is missing")
        return value

    def has(self, name: str) -> bool:
        """Return whether the scenario names the field."""
        return name in self._content

    def nested(self, args: Args) -> None:
        """Let `unknown` look into a field's own fields too."""
        self._nested.append(args)

    def unknown(self) -> Iterator[Mismatch]:
        """Yield the fields nobody took."""
        for args in self._nested:
            yield from args.unknown()
        for name, value in self._content.items():
            if name not in self._taken:
                yield Mismatch(f"{self._path}.{name}", value, "unknown field")
