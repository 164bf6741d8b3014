"""Plans as values: commits, their iterations, and the outputs of each iteration.

A commit covers its source objects completely, so that they can be deleted once its outputs are
committed; an iteration is the unit held in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streammeta.storage.compaction.entries import EntryTable


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """Limits of a plan; sizes in bytes.

    An iteration reads at most `memory_budget`. A stream with more than `split_size`, 0 or more,
    gets a stream object of its own. One commit makes at most `max_stream_objects` of them and a
    stream set object of at most `max_streams` streams, and names at most `max_rows` stream
    objects and streams together.

    Raises `ValueError` when another limit than the split size is below 1.
    """

    memory_budget: int = 200 * 1024 * 1024
    split_size: int = 8 * 1024 * 1024
    max_streams: int = 20_000
    max_stream_objects: int = 10_000
    max_rows: int = 20_000  # as many as the controller takes in one request

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name == "split_size" else 1
            if value < least:
                raise ValueError(f"{name} is {value}, wanted at least {least}")


class OutputKind(StrEnum):
    """Kind of an output."""

    SPLIT = "SPLIT"
    """A stream object of its own."""
    COMPACT = "COMPACT"
    """The next piece of the one stream set object of the commit."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The part of one object that one iteration writes.

    `spans` are half-open ranges of rows of `iteration_entries`, ascending: the entries to write,
    in order.
    """

    kind: OutputKind
    spans: tuple[tuple[int, int], ...]
    iteration_entries: EntryTable

    @property
    def entries(self) -> EntryTable:
        """The entries that are written, with their places in the sources."""
        spans = [self.iteration_entries.span(start, stop) for start, stop in self.spans]
        return spans[0] if len(spans) == 1 else EntryTable.concatenate(spans)

    @property
    def data_size(self) -> int:
        """Bytes of blocks that are written."""
        size = self.iteration_entries.size
        return sum(int(size[start:stop].sum()) for start, stop in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """The entries that are read, held in memory and written at once.

    `entries` are sorted by stream and offset, each of them written by exactly one output. Outputs
    are first the stream objects, then at most one piece of the stream set object.
    """

    entries: EntryTable
    outputs: tuple[Output, ...]

    @property
    def data_size(self) -> int:
        """Bytes of blocks that are read and written, at most the memory budget."""
        return self.entries.data_size


@dataclass(frozen=True, slots=True, eq=False)
class CommitPlan:
    """One commit: every live entry of the sources is in exactly one iteration.

    `entries` are sorted by stream and offset.
    """

    source_ids: tuple[int, ...]
    entries: EntryTable
    iterations: tuple[Iteration, ...]


class ExclusionReason(StrEnum):
    """Why an object is not compacted."""

    OVERSIZED_ENTRY = "oversized_entry"
    """One of its entries is larger than the memory budget."""
    OVERLAP = "overlap"
    """It holds offsets of a stream that another object holds too."""
    TOO_MANY_STREAM_OBJECTS = "too_many_stream_objects"
    """With it the commit would make more stream objects than are allowed."""
    TOO_MANY_STREAMS = "too_many_streams"
    """With it the stream set object would hold more streams than are allowed."""
    TOO_MANY_ROWS = "too_many_rows"
    """With it the commit would tell of more streams and stream objects than are allowed."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An object that stays as it is, and why; `detail` is a sentence for people.

    `round` counts, from 0, how often objects were left out before because of a limit; objects of
    one round were left out together.
    """

    object_id: int
    reason: ExclusionReason
    detail: str
    round: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CompactionPlan:
    """The plan for some objects.

    Each is a source of exactly one commit, excluded, or left alone as compacting it would bring
    nothing together.
    """

    commits: tuple[CommitPlan, ...]
    excluded: tuple[Exclusion, ...]
    left_alone: tuple[int, ...]
