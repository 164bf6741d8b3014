"""Tree of the shell: directories, files and the documents in files.

A backend (the live cluster, a checkpoint file) provides a root `Directory`. The module does not
know where contents come from. Everything is resolved on demand and children are iterated lazily, so
a directory may have millions of them. Names never contain "/": `name_of` and `text_of` translate
any string, such as a key, to a name and back.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias
from urllib.parse import unquote

Value: TypeAlias = str | int | bool
"""One fact of a document. Absent facts are omitted."""

Path: TypeAlias = tuple[str, ...]
"""Names from the root down. The root is empty."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind inside a document. `name` and `columns` are snake_case."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a file: named facts, then tables. Times are ISO 8601 in UTC, sizes are bytes."""

    fields: tuple[tuple[str, Value], ...]
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class File:
    """Leaf of the tree. `read` fetches its content, or returns None if it was deleted."""

    read: Callable[[], Document | None]


@dataclass(frozen=True, slots=True)
class Child:
    """Entry of a directory."""

    name: str
    node: "Node"


class Directory(Protocol):
    """Inner node. Any method may raise `ApiError` when the backend fails."""

    def children(self, prefix: str = "") -> Iterator[Child]:
        """Yield the children whose names begin with `prefix`, fetched as the iterator advances.

        The directory defines their order: ids ascend as numbers, other names as text.
        """
        ...

    def child(self, name: str) -> "Node | None":
        """Return the child of this name, or None, without listing large directories."""
        # A name is its own prefix, which limits the listing.
        return next((child.node for child in self.children(name) if child.name == name), None)

    def suggest(self, prefix: str, limit: int) -> list[Child]:
        """Return at most `limit` children whose names begin with `prefix`, at a bounded cost."""
        return list(islice(self.children(prefix), limit))


class TaggedDirectory(Directory):
    """Directory whose children have tags."""

    __slots__ = ()

    def find_tagged(self, tags: Mapping[str, str]) -> Iterator[Child]:
        """Yield the children that have all these tags."""
        raise NotImplementedError


Node: TypeAlias = Directory | File

_RESERVED = frozenset("/%")


def name_of(text: str) -> str:
    """Return a name for any string but the empty one, reversible by `text_of`.

    "/", "%" and unprintable characters become %XX of their UTF-8 bytes. So do the dots of "." and
    "..", which have a special meaning in paths.
    """
    if text in {".", ".."}:
        return text.replace(".", "%2E")
    return "".join(
        char if char.isprintable() and char not in _RESERVED else _percent(char) for char in text
    )


def text_of(name: str) -> str | None:
    """Return the string that `name_of` turned into `name`, or None if no string has this name."""
    text = unquote(name, errors="replace")
    # unquote() maps several names to one text. Only the form of name_of is accepted.
    return text if name_of(text) == name else None


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


def path_text(path: Path) -> str:
    """Return a path as people write it, from the root."""
    return "/" + "/".join(path)
