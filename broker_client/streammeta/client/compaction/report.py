"""What a compaction of set objects did, and what it left for another time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streammeta.storage.compaction.selection import GroupKind


@dataclass(slots=True)
class Figures:
    """What was asked of the store and moved, in bytes.

    `reused` are outputs of an earlier attempt, `sources_checked` those held against their checksum.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    gets: int = 0
    puts: int = 0
    multiparts: int = 0
    parts: int = 0
    iterations: int = 0
    commits: int = 0
    reused: int = 0
    sources_checked: int = 0

    def add(self, other: Figures) -> None:
        """Add the figures of another compaction."""
        for name in Figures.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What became of objects that were to be compacted together.

    `source_ids` are gone from the map, replaced by `set_object_ids` and `stream_object_ids`. Those
    in `left_out` stay for the reason given. `failure` says what went wrong with the rest, if it
    did: commits that were made before stand.
    """

    kind: GroupKind
    source_ids: tuple[int, ...] = ()
    set_object_ids: tuple[int, ...] = ()
    stream_object_ids: tuple[int, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)
    failure: str = ""
    figures: Figures = field(default_factory=Figures)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What one cycle did for a node. `set_aside` are objects not to be tried again for a while."""

    node_id: int
    groups: tuple[GroupReport, ...]
    set_aside: Mapping[int, str]
    seconds: float

    @property
    def left_out(self) -> dict[int, str]:
        """Objects that stay though they were to be compacted, and why."""
        found = dict(self.set_aside)
        for one in self.groups:
            found |= one.left_out
        return found

    @property
    def failures(self) -> tuple[str, ...]:
        """What went wrong."""
        return tuple(one.failure for one in self.groups if one.failure)

    @property
    def figures(self) -> Figures:
        """The sums over all groups."""
        return summed(one.figures for one in self.groups)


def summed(figures: Iterable[Figures]) -> Figures:
    """Return the sums."""
    total = Figures()
    for one in figures:
        total.add(one)
    return total
