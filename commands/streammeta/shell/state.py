"""State of a shell, form of its commands, and their interface to the metadata of the tree.

Contains no command and opens nothing: the caller of the shell supplies a source of metadata.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from streammeta.shell import events, tree


@dataclass(frozen=True, slots=True)
class MetadataCopy:
    """Whole metadata at one offset of its log, as the sections of a checkpoint.

    `name` is the user's name for it. A section is read on its first use, and may be missing in a
    copy of an older version. `controller.metadata.sections.frozen` lists sections and columns.
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
    """Metadata of a tree, and other metadata to compare it with. Methods raise `ApiError`."""

    def copy(self) -> MetadataCopy:
        """Return the whole metadata: of a cluster as of now, of a file as it is."""
        ...

    def other(self, address: str) -> MetadataCopy:
        """Return the metadata that the user names."""
        ...

    def changes(self, from_offset: int | None) -> Iterator[Change]:
        """Yield changes from an offset on, None for new ones, as they are committed. Never ends."""
        ...

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970."""
        ...


@dataclass(frozen=True, slots=True)
class ShellState:
    """Current directory and the lines typed so far, oldest first.

    `source` is the metadata of `root`, None for a tree without one.
    """

    root: tree.Directory
    here: tree.Path = ()
    history: tuple[str, ...] = ()
    source: MetadataSource | None = None


Run: TypeAlias = Callable[[ShellState, list[str]], Iterator[events.Event]]


@dataclass(frozen=True, slots=True)
class Command:
    """One command: usage, summary, function, and number of words (None: any number)."""

    usage: str
    summary: str
    run: Run
    words_min: int
    words_max: int | None
    goes_on: bool = False
    """Whether the output arrives over time, so that a pager must not delay it."""

    def takes(self, count: int) -> bool:
        """Return whether the command accepts this number of arguments."""
        return self.words_min <= count and (self.words_max is None or count <= self.words_max)

    @property
    def wanted(self) -> str:
        """Accepted number of arguments, in words."""
        if self.words_max is None:
            return f"{self.words_min} or more"
        return "none" if self.words_max == 0 else f"at most {self.words_max}"
