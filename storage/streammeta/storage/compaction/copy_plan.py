"""Layout of a merged stream object: one request, or parts that are copied or written.

Every part except the last has at least 5 MiB. Small neighbours are therefore fetched and written,
together with as much of a larger one as needed. A written part fetches at most
`CopyRules.fetched_bytes`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CopyRules:
    """Sizes in bytes: minimum and maximum of a part, and the most that a written part fetches.

    An object of up to `fetched_bytes` is put in one request. Raises `ValueError` on sizes that make
    parts exceed their limits.
    """

    # Limits of S3 for parts of an upload: 5 MiB, 5 GiB and 10,000.
    min_part_bytes: int = 5 * MIB
    max_part_bytes: int = 5 * 1024 * MIB
    fetched_bytes: int = 32 * MIB
    max_parts: int = 10_000

    def __post_init__(self) -> None:
        # Twice, because an open part just below the minimum may be followed by a range just below
        # it.
        low, high = 2 * self.min_part_bytes, self.max_part_bytes
        if not 2 <= low <= self.fetched_bytes <= high or self.max_parts < 1:
            raise ValueError(
                f"copy rules are {self}, expected at least one part, and 2 * min_part_bytes <="
                " fetched_bytes <= max_part_bytes"
            )


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Bytes `[start, end)` of an object. `copyable` if the store can copy them itself."""

    object_id: int
    start: int
    end: int
    copyable: bool = True

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """A part that the store copies."""

    source: SourceRange

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return self.source.size


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part of consecutive fetched ranges, followed by `trailer_size` bytes."""

    sources: tuple[SourceRange, ...]
    trailer_size: int = 0

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return sum(source.size for source in self.sources) + self.trailer_size


Part: TypeAlias = CopiedPart | WrittenPart


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The parts of the new object, in order. If `is_single`, one request puts the object."""

    parts: tuple[Part, ...]
    is_single: bool

    @property
    def size(self) -> int:
        """Bytes of the new object."""
        return sum(part.size for part in self.parts)

    @property
    def copies(self) -> int:
        """Number of parts that the store copies."""
        return sum(isinstance(part, CopiedPart) for part in self.parts)


def plan_copy(
    sources: Sequence[SourceRange], trailer_size: int, rules: CopyRules | None = None
) -> CopyPlan:
    """Plan an object of the bytes of `sources`, in order, followed by a trailer.

    Raises `ValueError` without bytes, or if they exceed the parts of one upload.
    """
    chosen = rules or CopyRules()
    ranges = [source for source in sources if source.size > 0]
    if not ranges or trailer_size < 1:
        raise ValueError(
            f"{len(ranges)} ranges with bytes and a trailer of {trailer_size} bytes, expected at"
            " least one of each"
        )
    # One PUT costs one request, a multipart upload at least three.
    if sum(source.size for source in ranges) <= chosen.fetched_bytes:
        return CopyPlan((WrittenPart(tuple(ranges), trailer_size),), is_single=True)

    layout = _Layout(chosen)
    for source in ranges:
        layout.add(source)

    parts = layout.finish(trailer_size)
    if len(parts) > chosen.max_parts:
        raise ValueError(
            f"object would have {len(parts)} parts, expected at most {chosen.max_parts}. Merge"
            " fewer sources"
        )

    return CopyPlan(tuple(parts), is_single=False)


class _Layout:
    """Parts under construction. Open ranges are fetched, in no part yet, below a full part."""

    def __init__(self, rules: CopyRules) -> None:
        self._rules = rules
        self._parts: list[Part] = []
        self._open: list[SourceRange] = []
        self._open_size = 0

    def add(self, source: SourceRange) -> None:
        """Append a range."""
        if not source.copyable:
            self._fetch_in_full_parts(source)
            return

        rules = self._rules
        if self._open_size > rules.min_part_bytes:
            self._close()

        # An open part below the minimum has to grow: by the whole range if that stays within the
        # fetch limit, otherwise by just enough of it, so that the store copies the rest.
        if not self._open_size:
            if source.size < rules.min_part_bytes:
                self._fetch(source)
            else:
                self._copy(source)
        elif self._open_size + source.size <= rules.fetched_bytes:
            self._fetch(source)
            if self._open_size > rules.min_part_bytes:
                self._close()
        else:
            head, rest = _cut(source, rules.min_part_bytes - self._open_size)
            self._fetch(head)
            self._close()
            self._copy(rest)

    def finish(self, trailer_size: int) -> list[Part]:
        """Return all parts. The last part has the open ranges and the trailer."""
        # Only the last part of an upload may be smaller than the store's minimum.
        self._parts.append(WrittenPart(tuple(self._open), trailer_size))
        return self._parts

    def _fetch(self, source: SourceRange) -> None:
        if source.size:
            self._open.append(source)
            self._open_size += source.size

    def _fetch_in_full_parts(self, source: SourceRange) -> None:
        """Add parts of equal size, which servers without copies may require."""
        while source.size:
            piece, source = _cut(source, self._rules.fetched_bytes - self._open_size)
            self._fetch(piece)
            if self._open_size == self._rules.fetched_bytes:
                self._close()

    def _close(self) -> None:
        self._parts.append(WrittenPart(tuple(self._open)))
        self._open, self._open_size = [], 0

    def _copy(self, source: SourceRange) -> None:
        self._parts.extend(CopiedPart(piece) for piece in self._pieces(source))

    def _pieces(self, source: SourceRange) -> Iterator[SourceRange]:
        """Cut a range into the largest parts, without a last piece below the minimum."""
        rules = self._rules
        while source.size > rules.max_part_bytes:
            size = rules.max_part_bytes
            # The rest would be a part below the minimum, so this part leaves it more bytes.
            if source.size - size < rules.min_part_bytes:
                size -= rules.min_part_bytes
            piece, source = _cut(source, size)
            yield piece
        yield source


def _cut(source: SourceRange, size: int) -> tuple[SourceRange, SourceRange]:
    """Cut a range after its first `size` bytes, or at its end if it is shorter."""
    at = min(source.end, source.start + size)
    return replace(source, end=at), replace(source, start=at)
