"""Events that shell commands yield, rendered as text for people or as one value for programs.

Events are yielded and rendered lazily, so a listing of millions of entries never fills memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any, TypeAlias

from streammeta.shell.tree import Document, Path, Table, Value, path_text


class ProblemCode(StrEnum):
    """Reason of a failure, for programs."""

    NOT_FOUND = "NOT_FOUND"
    IS_DIRECTORY = "IS_DIRECTORY"
    NOT_DIRECTORY = "NOT_DIRECTORY"
    USAGE = "USAGE"


@dataclass(frozen=True, slots=True)
class Text:
    """Line of output."""

    text: str


@dataclass(frozen=True, slots=True)
class Caption:
    """Line that helps people to read the following output, `depth` levels deep."""

    text: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """Entry that `ls` or `find` found. Consecutive entries with `in_columns` may share lines."""

    path: Path
    label: str
    is_directory: bool
    in_columns: bool


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a file, `depth` levels deep in a tree."""

    path: Path
    document: Document
    depth: int = 0


Fact: TypeAlias = Value | list[int] | list[str]
"""Fact of a change. A list has one item for each thing that changed in the same way."""


@dataclass(frozen=True, slots=True)
class Changed:
    """One record of the log: the change, and its subject."""

    offset: int
    kind: str
    facts: tuple[tuple[str, Fact], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Failure of the command, or of one of its arguments. The hint names the next step."""

    code: ProblemCode
    message: str
    hint: str = ""


def usage_problem(message: str, hint: str) -> Problem:
    """Return the failure of a command that was called the wrong way."""
    return Problem(ProblemCode.USAGE, message, hint)


@dataclass(frozen=True, slots=True)
class Moved:
    """The shell's current directory becomes `path`."""

    path: Path


@dataclass(frozen=True, slots=True)
class Left:
    """The user exits the shell."""


Event: TypeAlias = Text | Caption | Listed | Content | Changed | Problem | Moved | Left


COLUMN_GAP = 2
FACTS_SHOWN = 5  # items of a list of facts that people are shown; programs get all
LISTING_CHUNK = 1000  # entries laid out together; a longer listing continues in further blocks


def text_lines(events: Iterable[Event], width: int | None = None) -> Iterator[str]:
    """Yield lines for people, as the events arrive. The caller shows problems.

    `width` is the number of characters of a line for listings in columns. None puts every entry on
    its own line.
    """
    labels: list[str] = []
    for event in events:
        # The width of a column is known only for a whole block, so labels are collected.
        if isinstance(event, Listed) and event.in_columns and width is not None:
            labels.append(event.label)
            if len(labels) < LISTING_CHUNK:
                continue
        # Other output must not overtake labels that are still collected.
        yield from columns(labels, width or 0)
        labels = []
        match event:
            case Text(text):
                yield text
            case Caption(text, depth):
                yield f"{'  ' * depth}{text}"
            case Content(_, document, depth):
                yield from (f"{'  ' * depth}{line}".rstrip() for line in document_lines(document))
            case Changed(offset, kind, facts):
                yield f"{offset:>10}  {kind}  {_facts_text(facts)}".rstrip()
            case Listed() if width is None or not event.in_columns:
                yield event.label
            case Listed() | Problem() | Moved() | Left():
                pass

    yield from columns(labels, width or 0)


def _facts_text(facts: Iterable[tuple[str, Fact]]) -> str:
    return "  ".join(f"{name}={_fact_text(fact)}" for name, fact in facts)


def _fact_text(fact: Fact) -> str:
    if not isinstance(fact, list):
        return cell(fact)
    more = len(fact) - FACTS_SHOWN
    shown = ",".join(map(cell, fact[:FACTS_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown


def columns(labels: list[str], width: int) -> Iterator[str]:
    """Arrange labels in columns, filled downward."""
    if not labels:
        return
    column_width = max(map(len, labels)) + COLUMN_GAP
    column_count = max(1, (width + COLUMN_GAP) // column_width)
    row_count = -(-len(labels) // column_count)
    stacks = [labels[start : start + row_count] for start in range(0, len(labels), row_count)]
    for row in zip_longest(*stacks, fillvalue=""):
        yield "".join(f"{label:{column_width}}" for label in row).rstrip()


def document_lines(document: Document) -> Iterator[str]:
    """Yield `name: value` lines, then each table with a heading and aligned columns."""
    width = max((len(name) for name, _ in document.fields), default=0) + 1
    for name, value in document.fields:
        yield f"{name + ':':{width}} {cell(value)}"
    for table in document.tables:
        yield f"{table.name}: {'' if table.rows else 'none'}".rstrip()
        yield from _table_lines(table)


def _table_lines(table: Table) -> Iterator[str]:
    if not table.rows:
        return
    rows = [table.columns, *(tuple(map(cell, row)) for row in table.rows)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(table.columns))]
    is_number = [not isinstance(value, str) for value in table.rows[0]]
    for row in rows:
        cells = (
            f"{text:>{width}}" if number else f"{text:{width}}"
            for text, width, number in zip(row, widths, is_number, strict=True)
        )
        # Blanks at the ends of lines would disturb comparisons and copies.
        yield "  " + "  ".join(cells).rstrip()


def cell(value: object) -> str:
    """Return a value on one line, `-` for None, unprintable characters escaped as in Python."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    # Control characters in a key must not reach the terminal.
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )


def json_value(events: Iterable[Event]) -> dict[str, Any]:
    """Return all events in one value: lists of `entries`, `documents`, lines of `text`, `changes`.

    `changes` exists only if a command yields nothing else.
    """
    changes: list[dict[str, Any]] = []
    entries: list[dict[str, Value]] = []
    documents: list[dict[str, Any]] = []
    lines: list[str] = []

    for event in events:
        match event:
            case Text(text):
                lines.append(text)
            case Listed(path, _, is_directory, _):
                entries.append({"path": path_text(path), "directory": is_directory})
            case Content(path, document, _):
                documents.append({"path": path_text(path), **document_value(document)})
            case Changed(offset, kind, facts):
                changes.append({"offset": offset, "kind": kind, **dict(facts)})
            case Caption() | Problem() | Moved() | Left():
                pass

    found = {"entries": entries, "documents": documents, "text": lines}
    return {**found, "changes": changes} if changes else found


def document_value(document: Document) -> dict[str, Any]:
    """Return a document as an object: its fields, and each table as a list of objects."""
    tables = {
        table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        for table in document.tables
    }
    return {**dict(document.fields), **tables}
