"""Differences of two metadata copies, entity by entity and field by field. Pure.

An entity is a row of the main section of its kind. Its facts in further sections (ranges, tags,
contents of an object) are compared as a whole. Most of two copies is equal, so columns are compared
at once and only differing rows are examined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.tables.values import ObjectKind, ObjectState, StreamState
from streammeta.shell.state import MetadataCopy
from streammeta.shell.tree import Value

Array: TypeAlias = npt.NDArray[Any]
Section: TypeAlias = Mapping[str, Any]
Row: TypeAlias = Mapping[str, Any]

ROWS_SHOWN = 10
"""Maximum rows of a further section in the text of one entity. More are counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One differing field of an entity. Without a field, only one copy contains the entity."""

    change: str
    """added, removed or changed."""
    id: int
    field: str | None = None
    before: Value | None = None
    after: Value | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Further section about entities, by its displayed field, with the text of a row."""

    field: str
    section: str
    text: Callable[[Row], str]


@dataclass(frozen=True, slots=True)
class _Kind:
    id: str
    section: str
    names: Mapping[str, type[Any]]
    """Columns that are shown by the names of an enum."""
    parts: tuple[_Part, ...]


def _tag(row: Row) -> str:
    return f"{row['key']}={row['value']}"


def _range(row: Row) -> str:
    span = f"{row['start_offset']}..{row['end_offset']}"
    return f"{row['range_index']}: {span} node {row['node_id']} epoch {row['epoch']}"


def _span(row: Row) -> str:
    return f"stream {row['stream_id']}: {row['start_offset']}..{row['end_offset']}"


def _lost(row: Row) -> str:
    return f"{row['start_offset']}..{row['end_offset']}"


def _facts(row: Row) -> str:
    return f"{row['min_timestamp_ms']}..{row['max_timestamp_ms']} crc32c {row['crc32c']}"


KINDS: Mapping[str, _Kind] = {
    "streams": _Kind(
        "stream_id",
        "streams",
        {"state": StreamState},
        (
            _Part("tags", "stream_tags", _tag),
            _Part("ranges", "ranges", _range),
            _Part("lost", "lost_ranges", _lost),
        ),
    ),
    "objects": _Kind(
        "object_id",
        "objects",
        {"state": ObjectState, "kind": ObjectKind},
        (_Part("holds", "object_ranges", _span), _Part("facts", "object_facts", _facts)),
    ),
    "nodes": _Kind(
        "node_id",
        "nodes",
        {},
        (
            _Part("tags", "node_tags", _tag),
            _Part("pending_uploads", "pending_uploads", _span),
        ),
    ),
}
"""Kinds of entities by name. Columns that may contain secrets, `wal_config`, are only compared."""

_HIDDEN = frozenset(("wal_config", "content_digest"))


def differences(kind: str, before: MetadataCopy, after: MetadataCopy) -> list[Difference]:
    """Return the differences of two copies, in the order of ids."""
    described = KINDS[kind]
    old, new = before.sections[described.section], after.sections[described.section]
    old_ids, new_ids = np.asarray(old[described.id]), np.asarray(new[described.id])
    found = [
        *(Difference("added", int(id_)) for id_ in np.setdiff1d(new_ids, old_ids)),
        *(Difference("removed", int(id_)) for id_ in np.setdiff1d(old_ids, new_ids)),
        *_changed_columns(described, old, new),
    ]
    # Parts of added and removed entities are not listed, because the entity itself is.
    both = np.intersect1d(old_ids, new_ids, assume_unique=True)
    for part in described.parts:
        found.extend(_changed_parts(described.id, part, before, after, both))
    return sorted(found, key=lambda one: one.id)


def _changed_columns(kind: _Kind, old: Section, new: Section) -> Iterator[Difference]:
    ids, old_rows, new_rows = np.intersect1d(
        np.asarray(old[kind.id]), np.asarray(new[kind.id]), assume_unique=True, return_indices=True
    )
    # A column that only one version has can't be compared.
    for name in (name for name in old if name in new and name != kind.id):
        if name == "range_count":
            continue  # the ranges themselves are compared
        left, right = _array(old[name])[old_rows], _array(new[name])[new_rows]
        for row in np.flatnonzero(left != right):
            shown = (_show(kind, name, left[row]), _show(kind, name, right[row]))
            yield Difference("changed", int(ids[row]), name, *shown)


def _array(values: Any) -> Array:
    # Columns of strings are lists. As an array of objects they are compared element by element.
    return values if isinstance(values, np.ndarray) else np.array(values, dtype=object)


def _show(kind: _Kind, name: str, value: Any) -> Value | None:
    if name in _HIDDEN:
        return "(not shown)"
    if name in kind.names:
        return str(kind.names[name](int(value)).name)
    if isinstance(value, str):
        return value
    return bool(value) if isinstance(value, np.bool_) else int(value)


def _changed_parts(
    id_column: str, part: _Part, before: MetadataCopy, after: MetadataCopy, among: Array
) -> Iterator[Difference]:
    # A copy of an older version may not have the section.
    old, new = before.sections.get(part.section, {}), after.sections.get(part.section, {})
    changed = np.intersect1d(_ids_that_differ(id_column, old, new), among)
    if not len(changed):
        return
    old_texts, new_texts = (_texts(id_column, part, section, changed) for section in (old, new))
    for id_ in changed.tolist():
        shown = (_join(old_texts.get(id_)), _join(new_texts.get(id_)))
        yield Difference("changed", id_, part.field, *shown)


def _ids_that_differ(id_column: str, old: Section, new: Section) -> Array:
    """Return the ids of rows that only one section contains. A section has no duplicate rows."""
    # Without one of the sections, all rows of the other differ.
    if not old or not new:
        return np.unique(np.asarray((old or new or {id_column: []})[id_column], np.int64))
    columns = [id_column, *(name for name in old if name in new and name != id_column)]
    # Packed rows are compared at once. Rows with strings take the slower way below.
    if all(isinstance(part[name], np.ndarray) for part in (old, new) for name in columns):
        only = np.setxor1d(_pack(old, columns), _pack(new, columns), assume_unique=True)
        return np.unique(only[columns[0]])
    left, right = (set(zip(*(part[name] for name in columns), strict=True)) for part in (old, new))
    return np.array(sorted({int(row[0]) for row in left ^ right}), np.int64)


def _pack(section: Section, columns: list[str]) -> Array:
    rows = np.empty(len(section[columns[0]]), [(name, np.int64) for name in columns])
    for name in columns:
        rows[name] = section[name]
    return rows


def _texts(id_column: str, part: _Part, section: Section, ids: Array) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    if not section:
        return found
    for at in np.flatnonzero(np.isin(np.asarray(section[id_column]), ids)).tolist():
        row = {name: values[at] for name, values in section.items()}
        found.setdefault(int(row[id_column]), []).append(part.text(row))
    return found


def _join(texts: list[str] | None) -> str | None:
    if texts is None:
        return None
    more = len(texts) - ROWS_SHOWN
    return ", ".join(texts[:ROWS_SHOWN]) + (f" and {more} more" if more > 0 else "")
