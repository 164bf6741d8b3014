"""Tree of the shell: directories, files and the documents that files hold.

A backend (the live cluster, a checkpoint file) provides a root `Directory`; nothing here knows
where its content comes from. Everything is resolved on demand and children are iterated lazily, so
a directory may have millions of them. Names never contain "/": `name_of` and `text_of` translate
any string, such as a key, to a name and back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias
from urllib.parse import unquote

Value: TypeAlias = str | int | bool
"""One fact as a document shows it; absent facts are left out."""

Path: TypeAlias = tuple[str, ...]
"""Names from the root down; the root is empty."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind inside a document; `name` and `columns` are snake_case."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a file: named facts, then tables. Times are ISO 8601 in UTC, sizes bytes."""

    fields: tuple[tuple[str, Value], ...]
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class File:
    """A leaf of the tree. `read` fetches its content, or returns None if it was deleted."""

    read: Callable[[], Document | None]


@dataclass(frozen=True, slots=True)
class Child:
    """An entry of a directory."""

    name: str
    node: "Node"


class Directory(Protocol):
    """An inner node. Any method may raise `ApiError` when the backend fails."""

    def children(self, prefix: str = "") -> Iterator[Child]:
        """The children whose names begin with `prefix`, fetched as the iterator advances.

        Their order is the directory's own: ids ascend as numbers, other names as text.
        """
        ...

    def child(self, name: str) -> "Node | None":
        """The child of this name, or None; where there may be many, without listing the others."""
        return next((child.node for child in self.children(name) if child.name == name), None)

    def suggest(self, prefix: str, limit: int) -> list[Child]:
        """At most `limit` children whose names begin with `prefix`, at a bounded cost."""
        return list(islice(self.children(prefix), limit))


Node: TypeAlias = Directory | File

_RESERVED = frozenset("/%")


def name_of(text: str) -> str:
    """A name for any string but the empty one, reversible by `text_of`.

    "/", "%" and unprintable characters become %XX of their UTF-8 bytes; so do the dots of "." and
    "..", which mean something else in a path.
    """
    if text in {".", ".."}:
        return text.replace(".", "%2E")
    return "".join(
        char if char.isprintable() and char not in _RESERVED else _percent(char) for char in text
    )


def text_of(name: str) -> str | None:
    """The string that `name_of` turned into `name`, or None if it makes no such name."""
    text = unquote(name, errors="replace")
    return text if name_of(text) == name else None


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


def path_text(path: Path) -> str:
    """A path as people write it, from the root."""
    return "/" + "/".join(path)
