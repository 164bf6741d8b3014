"""Changes of the log as facts: names of records and of their fields, and the values. Pure.

Values of keys are shown by their length. Configurations that may contain secrets are hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from streammeta.controller.errors import ApiError, NewerLogError
from streammeta.controller.records.codec import RecordCodecError, decode_records
from streammeta.shell import events, state

# wal_config may contain access keys. The others mean nothing to people.
_HIDDEN = frozenset(("wal_config", "content_digest", "request_id"))
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


class UnknownChangeError(ApiError):
    """Change that this version can't read."""


def describe_change(change: state.Change) -> Iterator[events.Changed]:
    """Yield the records of a change, in their order.

    Raises:
        UnknownChangeError: a newer version wrote it.
    """
    try:
        records = decode_records(change.records)
    except (RecordCodecError, NewerLogError) as error:
        raise UnknownChangeError(
            f"offset {change.offset}: {error}. Use a version as new as the controllers'"
        ) from error
    for record in records:
        # CamelCase becomes the snake_case of all other output.
        kind = _WORD.sub("_", type(record).__name__).lower()
        yield events.Changed(change.offset, kind, tuple(_facts(record)))


def _facts(record: Any) -> Iterator[tuple[str, events.Fact]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in _HIDDEN or (not np.isscalar(value) and _is_empty(value)):
            continue
        if is_dataclass(value):
            yield from _facts(value)
        # json needs Python's own numbers.
        elif isinstance(value, np.ndarray):
            yield field.name, value.tolist()
        elif field.name == "values":
            yield "value_bytes", [len(item) for item in value]
        elif isinstance(value, tuple):
            yield field.name, [_text(item) for item in value]
        else:
            yield field.name, value


def _is_empty(value: Any) -> bool:
    return not is_dataclass(value) and not len(value)


def _text(item: Any) -> str:
    """Return a key or namespace unchanged, a tag as KEY=VALUE, the tags of a stream in a list."""
    if isinstance(item, str):
        return item
    if item and isinstance(item[0], str):
        return "=".join(item)
    return " ".join(map(_text, item))
