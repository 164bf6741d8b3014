"""The digest, checkpoints and undo leave out no column of the map.

Equal digests are what members are compared by, so whatever differs must show: each cell of each
section, each row, each place. Sections and columns are found from the view itself.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.sections.frozen import FrozenMetadata, FrozenParts, Section
from streammeta.controller.metadata.tables.shared_views import SharedDictView, WindowView
from streammeta.controller.metadata.tables.tables import TableView
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader
from tests.metadata.rich_history import (
    SEEDS,
    Plain,
    checkpoint,
    histories,
    history,
    picked,
    plain,
    recovering_views,
    width,
)

Sections = dict[str, Section]

_PLACES = {
    "streams.rows": {"past_head"},
    "streams.past_ranges": {"previous"},
    "objects.rows": {"first_range"},
}
"""Columns of tables that say where rows are, not what they hold; they differ between equal maps."""

_ADVICE = "add a request to tests/metadata/rich_history.py or random_requests.py that writes it"


class _GivenSections(FrozenMetadata):
    def __init__(self, given: Sections) -> None:
        super().__init__(1, None)  # type: ignore[arg-type]
        self._given = given

    def sections(self) -> Sections:
        return self._given


# -- what differs by a little


def _other(value: Any) -> Any:
    """Return another value of the same kind, whatever `value` is."""
    if isinstance(value, bool | np.bool_):
        return not value
    if isinstance(value, bytes):
        return value + b"x"
    if isinstance(value, str):
        return value + "x"
    return value - 1 if value > 0 else value + 1


def _with(values: Any, changes: dict[int, Any]) -> Any:
    changed = values.copy() if isinstance(values, np.ndarray) else list(values)
    for row, value in changes.items():
        changed[row] = value
    return changed


def _column_variants(values: Any) -> Iterator[tuple[str, Any]]:
    for row in range(len(values)):
        yield f"row {row} changed", _with(values, {row: _other(values[row])})
    for row in range(len(values) - 1):
        one, two = values[row], values[row + 1]
        yield f"rows {row} and {row + 1} swapped", _with(values, {row: two, row + 1: one})
        if isinstance(one, str | bytes):
            moved = {row: one[:-1], row + 1: one[-1:] + two}
            yield f"end of row {row} moved to the next", _with(values, moved)


def _neighbour_variants(left: Any, right: Any) -> Iterator[tuple[str, Any, Any]]:
    kinds = [getattr(values, "dtype", None) for values in (left, right)]
    for row, (one, two) in enumerate(zip(left, right, strict=True)):
        if isinstance(one, str) and isinstance(two, str):
            shorter, longer = _with(left, {row: one[:-1]}), _with(right, {row: one[-1:] + two})
            yield f"end of row {row} moved right", shorter, longer
        elif kinds[0] is not None and kinds[0] == kinds[1]:
            yield f"row {row} exchanged", _with(left, {row: two}), _with(right, {row: one})


def _section_variants(section: Section) -> Iterator[tuple[str, Section]]:
    names = list(section)
    for name, values in section.items():
        for what, changed in _column_variants(values):
            yield f"{name}: {what}", {**section, name: changed}
    for left, right in itertools.pairwise(names):
        for what, before, two in _neighbour_variants(section[left], section[right]):
            yield f"{left}, {right}: {what}", {**section, left: before, right: two}
    rows = len(section[names[0]])
    for row in range(rows):
        kept = [other for other in range(rows) if other != row]
        yield f"without row {row}", picked(section, kept)
        yield f"row {row} twice", picked(section, [*range(row), row, *range(row, rows)])


@cache
def _rich_sections() -> Sections:
    """Return for each section the one with the most rows in all histories, but at most 12 rows."""
    found: Sections = {}
    for view in _some_views():
        for name, section in view.sections().items():
            if name not in found or width(section) > width(found[name]):
                found[name] = section
    empty = [name for name, section in found.items() if not width(section)]
    assert not empty, f"always empty: {empty}; {_ADVICE}"
    return {
        name: picked(section, list(range(min(12, width(section)))))
        for name, section in found.items()
    }


def _some_views() -> list[FrozenMetadata]:
    views = [view for made in histories() for view in (*made.views[::5], made.views[-1])]
    return [*views, *recovering_views()]


# -- the digest


def test_the_digest_tells_apart_sections_that_differ_in_anything() -> None:
    for name, section in _rich_sections().items():
        before = {name: section}
        seen = {_GivenSections(before).digest(): plain(before)}
        for what, changed in _section_variants(section):
            after = {name: changed}
            found = seen.setdefault(_GivenSections(after).digest(), plain(after))
            assert found == plain(after), f"section {name}, {what}: the digest stays the same"


def test_the_digest_tells_columns_and_sections_apart_by_their_names() -> None:
    sections = _rich_sections()
    digests = {_GivenSections(sections).digest()}
    for name, section in sections.items():
        renamed = {
            f"{column}x" if column == next(iter(section)) else column: values
            for column, values in section.items()
        }
        digests.add(_GivenSections({**sections, name: renamed}).digest())
        digests.add(_GivenSections({k: v for k, v in sections.items() if k != name}).digest())
    assert len(digests) == 1 + 2 * len(sections)


# -- what the map hands over


def _variants(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield a value with one thing in it changed, for each thing in it, and what that is."""
    if value is None:
        return
    if dataclasses.is_dataclass(value):
        yield from _field_variants(value, where)
        return
    for kinds, make in _MAKERS:
        if isinstance(value, kinds):
            yield from make(value, where)
            return
    raise TypeError(
        f"{where} is a {type(value).__name__}: say in _MAKERS how others are made of it"
    )


def _field_variants(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        for what, changed in _variants(getattr(value, field.name), f"{where}.{field.name}"):
            yield what, dataclasses.replace(value, **{field.name: changed})


def _member_variants(value: enum.Enum, where: str) -> Iterator[tuple[str, Any]]:
    yield where, next(member for member in type(value) if member is not value)


def _item_variants(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    for index, item in enumerate(value):
        inner = f"{where}[{index if isinstance(value, tuple) else ''}]"
        for what, changed in _variants(item, inner):
            make = getattr(value, "_make", type(value))  # a named tuple takes its fields singly
            yield what, make((*value[:index], changed, *value[index + 1 :]))


def _window_variants(value: WindowView[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    for what, changed in _item_variants(list(value), where):
        yield what, WindowView({0: changed}, 0, len(changed))


def _dictionary_variants(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    for what, changed in _item_variants(list(value.items()), where):
        yield what, SharedDictView([dict(changed)], len(changed))


def _set_variants(value: frozenset[Any], where: str) -> Iterator[tuple[str, Any]]:
    for item in sorted(value):
        yield where, value - {item}


def _array_variants(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    for row in range(len(value)):
        yield where, _with(value, {row: _other(value[row])})


def _scalar_variants(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    yield where, _other(value)


def _table_variants(table: TableView, where: str) -> Iterator[tuple[str, TableView]]:
    names = list(table._arrays)
    columns = {name: table.column(name) for name in names}
    for name in names:
        if name in _PLACES.get(where, ()):
            continue
        for row in range(len(table)):
            changed = {**columns, name: _with(columns[name], {row: _other(columns[name][row])})}
            yield f"{where}.{name}", TableView(changed, len(table))


_MAKERS: tuple[tuple[Any, Callable[[Any, str], Iterator[tuple[str, Any]]]], ...] = (
    (enum.Enum, _member_variants),
    (TableView, _table_variants),
    (SharedDictView, _dictionary_variants),
    (WindowView, _window_variants),
    (frozenset, _set_variants),
    ((tuple, list), _item_variants),
    (np.ndarray, _array_variants),
    ((bool, int, str, bytes), _scalar_variants),
)


def _digest(parts: FrozenParts) -> bytes | None:
    try:
        return FrozenMetadata(1, parts).digest()
    except (IndexError, ValueError, KeyError):
        return None  # no map could be like that


def _names_held(value: Any, name: str) -> set[str]:
    """Return what a part is called, or each of its fields if it has some."""
    if not dataclasses.is_dataclass(value):
        return {name}
    return {f"{name}.{field.name}" for field in dataclasses.fields(value)}


def _is_part(what: str, name: str) -> bool:
    return what == name or what.startswith((f"{name}.", f"{name}["))


def test_whatever_the_map_hands_over_is_in_the_digest() -> None:
    """The sections themselves leave nothing out; unused rows of tables, which exist, may differ."""
    names = [field.name for field in dataclasses.fields(FrozenParts)]
    held: set[str] = set()
    is_seen: dict[str, bool] = {}
    for parts in (view._parts for view in _some_views()):
        before = FrozenMetadata(1, parts).digest()
        for name in names:
            held |= _names_held(getattr(parts, name), name)
            for what, changed in _variants(getattr(parts, name), name):
                if not is_seen.get(what):
                    after = _digest(dataclasses.replace(parts, **{name: changed}))
                    is_seen[what] = after not in (None, before)
    empty = {name for name in held if not any(_is_part(what, name) for what in is_seen)}
    assert not empty, f"empty in every history: {empty}; {_ADVICE}"
    unseen = sorted(what for what, changed in is_seen.items() if not changed)
    assert not unseen, f"changes that change no digest: {unseen}"


# -- checkpoint files


def test_every_column_has_held_more_than_one_value() -> None:
    """Else what is lost on the way could come back by luck."""
    values: dict[tuple[str, str], set[Any]] = {}
    for view in _some_views():
        for section, columns in plain(view.sections()).items():
            for name, cells in columns.items():
                values.setdefault((section, name), set()).update(cells)
    poor = sorted(".".join(where) for where, found in values.items() if len(found) < 2)
    assert not poor, f"always the same or empty: {poor}; {_ADVICE}"


def test_a_checkpoint_file_holds_every_cell() -> None:
    sections = _rich_sections()
    for name, section in sections.items():
        for column, values in section.items():
            changed = _with(values, {0: _other(values[0])})
            given = {**sections, name: {**section, column: changed}}
            _, file = checkpoint(_GivenSections(given))
            read = plain(CheckpointReader(file).sections())
            assert {key: read[key] for key in given} == plain(given), f"{name}.{column}"


def test_a_map_from_a_checkpoint_file_has_every_section_as_it_was() -> None:
    for view in _some_views():
        snapshot_id, file = checkpoint(view)
        loaded = read_metadata(file, snapshot_id).cluster_metadata
        _same(loaded, plain(view.sections()), "loaded")


# -- undo


@pytest.mark.parametrize("seed", SEEDS)
def test_undo_brings_every_section_back(seed: int) -> None:
    made = history(seed)
    for end, state in zip(reversed(made.ends[:-1]), reversed(made.states[:-1]), strict=True):
        made.pair.map.undo_to(end)
        _same(made.pair.map, state, f"undone to {end}")


def test_every_section_is_changed_and_undone() -> None:
    """Cells that are overwritten, and rows that come and go: all must have been undone above."""
    changed: set[tuple[str, str]] = set()
    for made in histories():
        for before, after in itertools.pairwise(made.states):
            changed |= {
                (section, name)
                for section, columns in after.items()
                for name, cells in columns.items()
                if cells != before.get(section, {}).get(name)  # a level may have added it
            }
    known = {
        (name, column)
        for name, section in _rich_sections().items()
        if name != "recovery"  # comes with a restore, and goes as a whole: see adoption's tests
        for column in section
    }
    assert changed == known, f"never changed: {sorted(known - changed)}; {_ADVICE}"


def _same(cluster_metadata: ClusterMetadata, state: Plain, what: str) -> None:
    found = plain(cluster_metadata.freeze().sections())
    assert list(found) == list(state)
    for section, columns in state.items():
        for name, cells in columns.items():
            assert found[section][name] == cells, f"{what}: {section}.{name}"
