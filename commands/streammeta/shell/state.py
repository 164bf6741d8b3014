"""State of a shell and form of its commands, and what commands ask of the map behind the tree.

Holds no command and opens nothing: a source of maps is given by whoever opens the shell.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from streammeta.shell.events import Event
from streammeta.shell.tree import Directory, Path


@dataclass(frozen=True, slots=True)
class MetadataCopy:
    """A whole map at one offset of its log, as the sections of a checkpoint.

    `name` is what the user called it. A section is read when it is asked for, and may be missing in
    a copy of an older version. `controller.metadata.sections.frozen` lists sections and columns.
    """

    name: str
    cluster_id: str
    end_offset: int
    sections: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """Records of one log entry, serialized as a `RecordSet`."""

    offset: int
    records: bytes


class MetadataSource(Protocol):
    """The map behind a tree, and others to compare it with. Methods raise `ApiError`."""

    def copy(self) -> MetadataCopy:
        """The whole map: of a cluster as it is now, of a file as it is there."""
        ...

    def other(self, address: str) -> MetadataCopy:
        """The map that the user names."""
        ...

    def changes(self, from_offset: int | None) -> Iterator[Change]:
        """Changes from an offset on, None: from now on, as they are committed; never ends."""
        ...

    def now_ms(self) -> int:
        """Time in milliseconds since 1970."""
        ...


@dataclass(frozen=True, slots=True)
class ShellState:
    """Current directory and the lines typed so far, oldest first.

    `source` is the map behind `root`; None for a tree without one.
    """

    root: Directory
    here: Path = ()
    history: tuple[str, ...] = ()
    source: MetadataSource | None = None


Run: TypeAlias = Callable[[ShellState, list[str]], Iterator[Event]]


@dataclass(frozen=True, slots=True)
class Command:
    """One command: usage, summary, function, and number of words (None: any number)."""

    usage: str
    summary: str
    run: Run
    words_min: int
    words_max: int | None
    goes_on: bool = False
    """Whether its output comes as things happen, so that no pager may hold it back."""

    def takes(self, count: int) -> bool:
        """Whether it can be called with so many arguments."""
        return self.words_min <= count and (self.words_max is None or count <= self.words_max)

    @property
    def wanted(self) -> str:
        """How many arguments it takes, in words."""
        if self.words_max is None:
            return f"{self.words_min} or more"
        return "none" if self.words_max == 0 else f"at most {self.words_max}"
