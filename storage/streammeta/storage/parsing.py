"""Parsers of untrusted JSON and TOML that raise a single error.

Deeply nested input makes parsers, and any code that walks the result, raise `RecursionError`. A
number with thousands of digits raises a plain `ValueError`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any

DEPTH_MAX = 64
"""Maximum nesting depth of lists and tables."""


class DocumentError(ValueError):
    """A text is not a valid document, or is nested too deep. The message says where or why."""


def parse_json(text: str | bytes, fail: Callable[[str], Exception] = DocumentError) -> Any:
    """Parse a JSON text. Raises `DocumentError`, or the error that `fail` creates."""
    return _parse(json.loads, text, fail)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text into its tables. Raises `DocumentError`."""
    found: dict[str, Any] = _parse(tomllib.loads, text, DocumentError)
    return found


def _parse(parse: Callable[[Any], Any], text: str | bytes, fail: Callable[[str], Exception]) -> Any:
    too_deep = f"nested more than {DEPTH_MAX} deep. Flatten it"
    try:
        found = parse(text)
    except RecursionError:
        raise fail(too_deep) from None
    except ValueError as error:
        raise fail(str(error)) from error
    if _is_deep(found):
        raise fail(too_deep)
    return found


def _is_deep(found: object) -> bool:
    """Return whether lists and tables are nested more than `DEPTH_MAX` deep."""
    # Level by level, because a recursive walk is what deep nesting breaks.
    level = [found]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return False
    return True


def _parts(found: object) -> list[object]:
    """Return the lists and tables directly inside a value."""
    if isinstance(found, dict):
        values = list(found.values())
    elif isinstance(found, list):
        values = found
    else:
        return []
    return [value for value in values if isinstance(value, dict | list)]
