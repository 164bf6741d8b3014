"""What commands of the shell produce, piece by piece, before anybody decides how to show it.

Commands yield these lazily, so a listing of millions of entries is never held in memory.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from streammeta.shell.tree import Document, Path


class ProblemCode(StrEnum):
    """Why a command failed, for programs."""

    NOT_FOUND = "NOT_FOUND"
    IS_DIRECTORY = "IS_DIRECTORY"
    NOT_DIRECTORY = "NOT_DIRECTORY"
    USAGE = "USAGE"


@dataclass(frozen=True, slots=True)
class Text:
    """A line of output."""

    text: str


@dataclass(frozen=True, slots=True)
class Caption:
    """A line that only helps people to read what follows, `depth` levels deep."""

    text: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry that `ls` or `find` found. `in_columns` entries in a row may share lines."""

    path: Path
    label: str
    is_directory: bool
    in_columns: bool


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds, `depth` levels deep in a tree."""

    path: Path
    document: Document
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """The command failed, wholly or for one of its arguments; the hint says what to do next."""

    code: ProblemCode
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """The shell's current directory becomes `path`."""

    path: Path


@dataclass(frozen=True, slots=True)
class Left:
    """The user wants to leave the shell."""


Event: TypeAlias = Text | Caption | Listed | Content | Problem | Moved | Left
