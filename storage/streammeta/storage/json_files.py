"""Small files with one JSON object on one line, such as markers, claims and manifests.

A dataclass defines the members and their types, and `version` is added. Unknown members are
ignored, another version is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from streammeta.storage.errors import CorruptObjectError
from streammeta.storage.parsing import DocumentError, parse_json

VERSION = 1
"""Version of these files. Readers reject any other."""

T = TypeVar("T")

_TYPES: Mapping[str, type] = {"int": int, "str": str}


def encode(members: Any) -> bytes:
    """Return the file's bytes for a dataclass of numbers and texts."""
    return json.dumps({"version": VERSION, **asdict(members)}, sort_keys=True).encode() + b"\n"


def decode(cls: type[T], key: str, data: bytes) -> T:
    """Decode a file of the dataclass `cls`.

    Raises:
        CorruptObjectError: the file is invalid or has another version. The error names `key`.
    """
    members = _parse(key, data)
    for field in fields(cls):  # type: ignore[arg-type] # a dataclass
        value = members.get(field.name)
        if type(value) is not _TYPES[str(field.type)]:  # bool is a subclass of int
            raise CorruptObjectError(key, 0, field.name, repr(value), f"of type {field.type}")
    return cls(**{field.name: members[field.name] for field in fields(cls)})  # type: ignore[arg-type]


def _parse(key: str, data: bytes) -> dict[str, Any]:
    try:
        members = parse_json(data)
    except DocumentError as error:
        # JSON errors know the position, errors of encoding or depth do not.
        position = getattr(error.__cause__, "pos", 0)
        raise CorruptObjectError(key, position, "body", f"{data[:40]!r}", "JSON") from error
    if not isinstance(members, dict):
        raise CorruptObjectError(key, 0, "body", f"a {type(members).__name__}", "a JSON object")
    if members.get("version") != VERSION:
        raise CorruptObjectError(key, 0, "version", repr(members.get("version")), str(VERSION))
    return members
