"""What the compaction of one stream came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from streammeta.storage.compaction.stream_objects import StreamCompaction


@dataclass(slots=True)
class Transfers:
    """Requests to the object store, and the bytes that they moved or had copied."""

    gets: int = 0
    puts: int = 0
    parts: int = 0
    copies: int = 0
    bytes_fetched: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0

    def add_reads(self, gets: int, nbytes: int) -> None:
        """Count reads."""
        self.gets += gets
        self.bytes_fetched += nbytes

    def add_put(self, nbytes: int) -> None:
        """Count an object put in one request."""
        self.puts += 1
        self.bytes_written += nbytes

    def add_part(self, nbytes: int) -> None:
        """Count a part that was sent."""
        self.parts += 1
        self.bytes_written += nbytes

    def add_copy(self, nbytes: int) -> None:
        """Count a part that the store copied by itself."""
        self.copies += 1
        self.bytes_copied += nbytes


@dataclass(frozen=True, slots=True)
class MadeObject:
    """An object that took the place of its sources; `size` as the map records it."""

    object_id: int
    composite: bool
    start_offset: int
    end_offset: int
    size: int
    source_ids: tuple[int, ...]


@dataclass(slots=True)
class StreamReport:
    """What was committed for a stream, and what was not.

    `removed_ids` held nothing but trimmed offsets. `left_out` are objects that can't be compacted,
    with the reason. After an `error` the compaction of the stream ended early; what is listed was
    committed all the same, and the next turn goes on from there.
    """

    stream_id: int
    kind: StreamCompaction
    removed_ids: list[int] = field(default_factory=list)
    made: list[MadeObject] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    transfers: Transfers = field(default_factory=Transfers)
    error: Exception | None = None

    @property
    def has_changed(self) -> bool:
        """Whether the map is another one than before."""
        return bool(self.removed_ids or self.made)
