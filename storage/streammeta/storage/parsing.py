"""Parsers of JSON and TOML that others wrote: a text that can't be used raises one error.

A text that is nested deeply makes parsers raise `RecursionError`, and makes whatever walks through
its content later do the same; a number of thousands of digits raises a bare `ValueError`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any

DEPTH_MAX = 64
"""Maximum depth of lists and tables in each other."""


class DocumentError(ValueError):
    """A text is no document of its format, or too deep; the message says where or why."""


def parse_json(text: str | bytes, fail: Callable[[str], Exception] = DocumentError) -> Any:
    """Return the content of a JSON text; raises `DocumentError`, or the error that `fail` makes."""
    return _parse(json.loads, text, fail)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; raises `DocumentError`."""
    found: dict[str, Any] = _parse(tomllib.loads, text, DocumentError)
    return found


def _parse(parse: Callable[[Any], Any], text: str | bytes, fail: Callable[[str], Exception]) -> Any:
    too_deep = f"nested more than {DEPTH_MAX} deep; flatten it"
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
    """Return whether lists and tables lie more than `DEPTH_MAX` deep in each other."""
    level = [found]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return False
    return True


def _parts(found: object) -> list[object]:
    """Return the lists and tables right in another."""
    if isinstance(found, dict):
        values = list(found.values())
    elif isinstance(found, list):
        values = found
    else:
        return []
    return [value for value in values if isinstance(value, dict | list)]
