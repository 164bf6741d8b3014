"""What a plan of compaction is: commits, their iterations, and what each iteration writes.

Values alone. A commit covers its source objects completely, so that they can go when its outputs
come; an iteration is what is in memory at once. Who makes plans and who carries them out is not
known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streammeta.storage.compaction.entries import EntryTable

DEFAULT_MEMORY_BUDGET = 200 * 1024 * 1024
DEFAULT_SPLIT_SIZE = 8 * 1024 * 1024
DEFAULT_MAX_STREAMS = 20_000
DEFAULT_MAX_STREAM_OBJECTS = 10_000
DEFAULT_MAX_ROWS = 20_000
"""As many as the map takes in one request."""


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """What a plan must keep to; sizes in bytes.

    An iteration reads at most `memory_budget`. A stream with more than `split_size`, 0 or more,
    gets a stream object of its own. One commit makes at most `max_stream_objects` of them and a
    stream set object of at most `max_streams` streams, and tells of at most `max_rows` stream
    objects and streams together. `max_commit_bytes` bounds what a commit covers: sources are taken
    in the order they are given in while their bytes fit, but at least two; None sets no bound.

    Raises `ValueError` when another limit than the split size is below 1.
    """

    memory_budget: int = DEFAULT_MEMORY_BUDGET
    split_size: int = DEFAULT_SPLIT_SIZE
    max_streams: int = DEFAULT_MAX_STREAMS
    max_stream_objects: int = DEFAULT_MAX_STREAM_OBJECTS
    max_rows: int = DEFAULT_MAX_ROWS
    max_commit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name == "split_size" else 1
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, wanted at least {least}")


class OutputKind(StrEnum):
    """What an output becomes."""

    SPLIT = "SPLIT"
    """A stream object of its own."""
    COMPACT = "COMPACT"
    """The next piece of the one stream set object of the commit."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What one iteration writes to one object.

    `spans` are half-open ranges of rows of `iteration_entries`, ascending: what is written, in this
    order.
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
    """What is read, held in memory and written at once.

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
    """What one commit replaces: every live entry of the sources is in exactly one iteration.

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
    """What to do with some objects.

    Each is a source of exactly one commit, excluded, or left alone as compacting it would bring
    nothing together.
    """

    commits: tuple[CommitPlan, ...]
    excluded: tuple[Exclusion, ...]
    left_alone: tuple[int, ...]
