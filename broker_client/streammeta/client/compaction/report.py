"""Reports of compaction, and the error of an unusable source, for both kinds of compaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streammeta.storage.compaction.selection import GroupKind
from streammeta.storage.compaction.stream_objects import StreamCompaction
from streammeta.storage.object_format.index_block import StreamRange


class SourceError(Exception):
    """An object that cannot be compacted. `passing` if it may be usable later."""

    def __init__(self, object_id: int, reason: str, *, passing: bool = False) -> None:
        self.object_id = object_id
        self.reason = reason
        self.passing = passing
        super().__init__(f"object {object_id}: {reason}")


@dataclass(slots=True)
class Figures:
    """Requests to the store and transferred bytes.

    `copies` and `bytes_copied` are parts copied inside the store, `reused` outputs of an earlier
    attempt, `sources_checked` sources compared with their recorded checksum.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0
    gets: int = 0
    puts: int = 0
    multiparts: int = 0
    parts: int = 0
    copies: int = 0
    iterations: int = 0
    commits: int = 0
    reused: int = 0
    sources_checked: int = 0

    def add_reads(self, gets: int, nbytes: int) -> None:
        """Count reads."""
        self.gets += gets
        self.bytes_read += nbytes

    def add(self, other: Figures) -> None:
        """Add the figures of another compaction."""
        # By name, so that a new figure can't be forgotten here.
        for name in Figures.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @classmethod
    def total(cls, figures: Iterable[Figures]) -> Figures:
        """Return the sums."""
        total = cls()
        for item in figures:
            total.add(item)
        return total


@dataclass(frozen=True, slots=True)
class OutputObject:
    """A committed output, with its `size` in the metadata.

    `range` is the range of a stream object, None for a stream set object. Its commit replaced the
    objects `source_ids`.
    """

    object_id: int
    size: int
    source_ids: tuple[int, ...]
    range: StreamRange | None = None
    composite: bool = False


@dataclass(slots=True)
class GroupReport:
    """One compaction: of a group of stream set objects, or of the objects of stream `stream_id`.

    The metadata no longer lists `source_ids`. `removed_ids` are objects of a stream with only
    trimmed offsets. Objects in `left_out` stay, with the reason. `failures` ended the compaction
    early, the last one with `error`. Everything listed was committed nevertheless. With
    `was_overtaken` another node compacted the shared stream first. That is not a failure.
    """

    kind: GroupKind | StreamCompaction
    stream_id: int | None = None
    source_ids: list[int] = field(default_factory=list)
    removed_ids: list[int] = field(default_factory=list)
    made: list[OutputObject] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    error: Exception | None = None
    was_overtaken: bool = False
    figures: Figures = field(default_factory=Figures)
    seconds: float = 0.0

    @property
    def set_object_ids(self) -> tuple[int, ...]:
        """New stream set objects."""
        return tuple(output.object_id for output in self.made if output.range is None)

    @property
    def stream_object_ids(self) -> tuple[int, ...]:
        """New stream objects, composites included."""
        return tuple(output.object_id for output in self.made if output.range is not None)

    @property
    def has_changed(self) -> bool:
        """True if a commit was made."""
        return bool(self.source_ids)

    @property
    def says_anything(self) -> bool:
        """True if something was committed, left out or failed."""
        return bool(self.source_ids or self.left_out or self.failures)

    def fail(self, error: Exception, message: str | None = None) -> None:
        """Add a failure, described by `message` or by the error itself."""
        self.failures.append(str(error) if message is None else message)
        self.error = error


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """One cycle of a node. `set_aside` are objects that are not retried for a while."""

    node_id: int
    groups: tuple[GroupReport, ...]
    set_aside: Mapping[int, str]
    seconds: float

    @property
    def left_out(self) -> dict[int, str]:
        """Due objects that were not compacted, with the reason."""
        found = dict(self.set_aside)
        for group in self.groups:
            found |= group.left_out
        return found

    @property
    def failures(self) -> tuple[str, ...]:
        """Failures of all groups."""
        return tuple(failure for group in self.groups for failure in group.failures)

    @property
    def figures(self) -> Figures:
        """Sums over all groups."""
        return Figures.total(group.figures for group in self.groups)
