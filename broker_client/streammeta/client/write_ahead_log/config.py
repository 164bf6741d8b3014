"""Bounds of a write-ahead log."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.client.arguments import at_least, check_fields

_MIB = 1024 * 1024

_CHECKS = {
    "max_bytes": at_least(1),
    "segment_bytes": at_least(1),
    "group_bytes": at_least(1, 1024 * _MIB),
    "max_unflushed_bytes": at_least(1),
}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Sizes in bytes."""

    max_bytes: int = 1024 * _MIB  # of all segments and what waits for them
    segment_bytes: int = 64 * _MIB  # a segment that has reached this is followed by a new one
    group_bytes: int = 1 * _MIB  # of records in one frame; one larger record has its own
    max_unflushed_bytes: int = 32 * _MIB  # appended and not yet on the disk

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        check_fields(self, _CHECKS)
        if self.max_bytes < 2 * self.segment_bytes:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, wanted at least twice segment_bytes,"
                f" {self.segment_bytes}: only whole segments are given back"
            )
