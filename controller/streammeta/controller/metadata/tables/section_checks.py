"""Checks of checkpoint sections before they are loaded: columns, order, references.

Owns the kinds of rules and the form of their errors. The rules themselves are in `section_rules`.
Sections are checked in the order of loading, so a rule may refer to earlier ones. Each rule is a
few vector operations over columns, in windows of rows that fit into the processor's cache, or over
whole columns if rows are compared with distant ones.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import DamagedMetadataError
from streammeta.controller.metadata.tables.values import Int64Column, Mask

Columns: TypeAlias = Mapping[str, Int64Column]
"""A section. Columns of texts are lists, and rules do not compute with them."""
Loaded: TypeAlias = Mapping[str, Columns]
"""Sections by name: the one being checked, and the earlier ones."""


VisibleFrom: TypeAlias = Callable[[npt.NDArray[np.integer]], Int64Column]
"""Maps stream ids to the first visible offset of each."""

WINDOW_ROWS = 1 << 16


def windows(rows: int, overlap: int = 0) -> Iterator[slice]:
    """Yield slices that cover `rows` rows, each beginning with the `overlap` rows before it."""
    for start in range(0, rows, WINDOW_ROWS):
        yield slice(max(0, start - overlap), min(start + WINDOW_ROWS, rows))


def repeat_in_parts(
    values: npt.NDArray[Any], counts: npt.NDArray[np.integer]
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield each value as often as counted, in parts, with the first index of each part.

    Repeating holds the interpreter's lock, so small parts let other threads run in between.
    """
    place = 0
    for rows in windows(len(values)):
        part = np.repeat(values[rows], counts[rows])
        yield place, part
        place += len(part)


class Rule(Protocol):
    """A rule that a section must satisfy."""

    @property
    def is_local(self) -> bool:
        """Whether rows are compared only with the row before them."""
        ...

    def check(self, section: str, loaded: Loaded) -> None:
        """Raise `DamagedMetadataError` for the first row that breaks the rule."""
        ...


def require(
    section: str, field: str, good: Mask | bool, values: Any, wanted: str, first_row: int = 0
) -> None:
    """Raise for the first false row of `good`, whose first element is row `first_row`."""
    if np.count_nonzero(good) < np.size(good):
        row = int(np.argmin(good)) + first_row
        raise DamagedMetadataError(section, row, field, values[row], wanted)


class OneRow:
    """The section has exactly one row."""

    is_local = False

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        field, values = next(iter(loaded[section].items()))
        if len(values) != 1:
            raise DamagedMetadataError(section, -1, field, f"{len(values)} rows", "one row")


@dataclass(frozen=True, slots=True)
class Between:
    """Each value of a column is in `[low, high]`. A counter as `high` is an exclusive bound."""

    field: str
    low: int
    high: int | str
    is_local: ClassVar[bool] = True

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        values = np.asarray(loaded[section][self.field])
        if not len(values):
            return

        # A range check by extremes needs no mask. A mask is made only to find the bad row.
        high, wanted = self.high, f"{self.low} to {self.high}"
        if isinstance(high, str):
            wanted = f"{self.low} or more, and below {high}"
            high = int(loaded["counters"][high][0]) - 1
        if values.min() < self.low or values.max() > high:
            good = (values >= self.low) & (values <= high)
            require(section, self.field, good, values, wanted)


@dataclass(frozen=True, slots=True)
class Ascending:
    """Rows are sorted by these columns, and unique."""

    fields: tuple[str, ...]
    is_local: ClassVar[bool] = True

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        columns: list[Any] = [loaded[section][name] for name in self.fields]
        if len(columns[0]) < 2:
            return
        # Texts have no vector comparison that equals Python's order.
        numeric = all(isinstance(values, np.ndarray) for values in columns)
        above = _numbers_ascend(columns) if numeric else _rows_ascend(columns)
        if np.count_nonzero(above) < len(above):
            shown = (
                list(zip(*map(_as_list, columns), strict=True)) if len(columns) > 1 else columns[0]
            )
            wanted = "above the row before: rows are sorted and unique"
            require(section, ", ".join(self.fields), above, shown, wanted, 1)


def _numbers_ascend(columns: Sequence[npt.NDArray[np.int64]]) -> Mask:
    *first, last = columns
    above: Mask = last[1:] > last[:-1]
    for values in reversed(first):
        above = (values[1:] > values[:-1]) | ((values[1:] == values[:-1]) & above)
    return above


def _rows_ascend(columns: Sequence[Sequence[Any]]) -> Mask:
    rows = list(zip(*columns, strict=True))
    return np.array([low < high for low, high in itertools.pairwise(rows)], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Unique:
    """Rows are unique in these columns."""

    fields: tuple[str, ...]
    is_local: ClassVar[bool] = False

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        columns = [loaded[section][name] for name in self.fields]
        rows = list(zip(*(_as_list(values) for values in columns), strict=True))
        # The set decides at once. The loop below only finds the row to report.
        if len(set(rows)) == len(rows):
            return

        seen: set[Any] = set()
        good = np.ones(len(rows), dtype=np.bool_)
        for index, row in enumerate(rows):
            good[index] = row not in seen
            seen.add(row)
        require(section, ", ".join(self.fields), good, rows, "in one row only")


@dataclass(frozen=True, slots=True)
class Refers:
    """A column refers to rows of another section by that section's first column, which is sorted.

    `only` selects the rows that must refer. None means all. The target may be the section itself if
    `is_local` is set.
    """

    field: str
    target: str
    only: Callable[[Columns], Mask] | None = None
    is_local: bool = True

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        columns, target = loaded[section], loaded[self.target]
        key = next(iter(target))
        known = np.asarray(target[key])
        values = np.asarray(columns[self.field])
        if not len(values):
            return
        good = is_in(values, known)
        if self.only is not None:
            good |= ~self.only(columns)
        require(section, self.field, good, values, f"the {key} of a row of {self.target!r}")


def is_in(values: npt.NDArray[np.int64], known: npt.NDArray[np.int64]) -> Mask:
    """Return which values are in `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(values), dtype=np.bool_)
    first, last = int(known[0]), int(known[-1])
    # Dense ids, the usual case, need no search.
    if last - first + 1 == len(known):
        dense: Mask = (values >= first) & (values <= last)
        return dense
    at = np.minimum(known.searchsorted(values), len(known) - 1)
    found: Mask = known[at] == values
    return found


@dataclass(frozen=True, slots=True)
class Holds:
    """Any other condition on the rows of a section.

    `good` is called with the section's columns and all loaded sections, and returns which rows
    satisfy the condition.
    """

    field: str
    wanted: str
    good: Callable[[Columns, Loaded], Mask]
    is_local: bool = True

    def check(self, section: str, loaded: Loaded) -> None:
        """Check the rule, see `Rule`."""
        columns = loaded[section]
        if not len(columns[self.field]):
            return
        require(section, self.field, self.good(columns, loaded), columns[self.field], self.wanted)


def check_columns(section: str, columns: Columns, names: Sequence[str]) -> None:
    """Raise unless a section has these columns, with equal lengths."""
    for name in names:
        if name not in columns:
            raise DamagedMetadataError(section, -1, name, "nothing", "a column of that name")
    rows = len(columns[names[0]])
    for name, values in columns.items():
        length = len(values)
        if rows != length:
            raise DamagedMetadataError(section, -1, name, f"{length} rows", f"{rows} rows")


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def check_apart(
    columns: dict[str, Int64Column], listed: Int64Column | None, visible_from: VisibleFrom
) -> None:
    """Raise if ranges, `listed` by stream and end, overlap at visible offsets of their streams.

    None lists all in their present order. Look-ups find the range with the next end above an
    offset, so starts must be sorted as well.
    """
    for window in windows(len(columns["stream_id"] if listed is None else listed), overlap=1):
        rows = window if listed is None else listed[window]
        streams, end = columns["stream_id"][rows], columns["end_offset"][rows]
        # Below a stream's start ranges may overlap, as compactions leave them.
        starts = np.maximum(columns["start_offset"][rows], visible_from(streams))
        overlaps = (streams[1:] == streams[:-1]) & (starts[1:] < end[:-1])
        if not np.count_nonzero(overlaps):
            continue

        at = window.start + int(np.argmax(overlaps)) + 1
        row = at if listed is None else int(listed[at])
        raise DamagedMetadataError(
            "object_ranges",
            row,
            "start_offset",
            columns["start_offset"][row],
            "the end of the range before it in its stream, or above",
        )


def check_ends(end: Int64Column, exists: Mask, ends: Int64Column, first_row: int) -> None:
    """Raise for a range whose `end` is past its stream's, given by one element of `ends` per range.

    The ranges begin at row `first_row` of their section.
    """
    good = (end <= ends) | ~exists
    if np.count_nonzero(good) < len(good):
        at = int(np.argmin(good))
        wanted = "at most its stream's end"
        raise DamagedMetadataError("object_ranges", at + first_row, "end_offset", end[at], wanted)
