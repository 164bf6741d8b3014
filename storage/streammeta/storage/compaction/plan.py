"""Plans as values: commits, their iterations, and the outputs of each iteration.

A commit covers its source objects completely, so that they can be deleted after its outputs are
committed. An iteration is the unit of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streammeta.storage.compaction.entries import EntryTable


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """Limits of a plan, sizes in bytes.

    An iteration reads at most `memory_budget`. A stream with more than `split_size` (0 or more)
    gets a stream object. A commit creates at most `max_stream_objects` stream objects and a stream
    set object of at most `max_streams` streams, and names at most `max_rows` of both in total.

    Raises `ValueError` if a limit other than the split size is below 1.
    """

    memory_budget: int = 200 * 1024 * 1024
    split_size: int = 8 * 1024 * 1024
    max_streams: int = 20_000
    max_stream_objects: int = 10_000
    max_rows: int = 20_000  # the controller's limit for one request

    def __post_init__(self) -> None:
        for name in self.__slots__:
            # 0 splits off every stream.
            value, least = getattr(self, name), 0 if name == "split_size" else 1
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")


class OutputKind(StrEnum):
    """Kind of an output."""

    SPLIT = "SPLIT"
    """A stream object."""
    COMPACT = "COMPACT"
    """The next piece of the commit's stream set object."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The part of an object that an iteration writes.

    `spans` are half-open ranges of rows of `iteration_entries`, ascending: the entries to write, in
    order.
    """

    kind: OutputKind
    spans: tuple[tuple[int, int], ...]
    iteration_entries: EntryTable

    @property
    def entries(self) -> EntryTable:
        """The entries to write, at their positions in the sources."""
        spans = [self.iteration_entries.span(start, stop) for start, stop in self.spans]
        # A single span stays a view without a copy.
        return spans[0] if len(spans) == 1 else EntryTable.concatenate(spans)

    @property
    def data_size(self) -> int:
        """Bytes of blocks to write."""
        size = self.iteration_entries.size
        return sum(int(size[start:stop].sum()) for start, stop in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """The entries that are read, kept in memory and written together.

    `entries` are sorted by stream and offset, and exactly one output writes each of them. The
    stream objects come first, then at most one piece of the stream set object.
    """

    entries: EntryTable
    outputs: tuple[Output, ...]

    @property
    def data_size(self) -> int:
        """Bytes of blocks to read and write, at most the memory budget."""
        return self.entries.data_size


@dataclass(frozen=True, slots=True, eq=False)
class CommitPlan:
    """A commit. Every live entry of the sources is in exactly one iteration.

    `entries` are sorted by stream and offset.
    """

    source_ids: tuple[int, ...]
    entries: EntryTable
    iterations: tuple[Iteration, ...]


class ExclusionReason(StrEnum):
    """Reason why an object is not compacted."""

    OVERSIZED_ENTRY = "oversized_entry"
    """One of its entries is larger than the memory budget."""
    OVERLAP = "overlap"
    """It contains offsets of a stream that another object contains too."""
    TOO_MANY_STREAM_OBJECTS = "too_many_stream_objects"
    """The commit would create too many stream objects with it."""
    TOO_MANY_STREAMS = "too_many_streams"
    """The stream set object would contain too many streams with it."""
    TOO_MANY_ROWS = "too_many_rows"
    """The commit would name too many streams and stream objects with it."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An object that stays unchanged, and the reason. `detail` is a sentence for people.

    Objects with the same `round` were excluded together. Rounds count from 0.
    """

    object_id: int
    reason: ExclusionReason
    detail: str
    round: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CompactionPlan:
    """The plan for some objects.

    Each object is a source of exactly one commit, excluded, or left alone because its compaction
    would merge nothing.
    """

    commits: tuple[CommitPlan, ...]
    excluded: tuple[Exclusion, ...]
    left_alone: tuple[int, ...]
