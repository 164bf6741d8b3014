"""Bounds of a write-ahead log."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Sizes in bytes."""

    max_bytes: int = 1024 * _MIB  # of all segments and what waits for them
    segment_bytes: int = 64 * _MIB  # a segment that has reached this is followed by a new one
    group_bytes: int = 1 * _MIB  # of records in one frame; one larger record has its own
    max_unflushed_bytes: int = 32 * _MIB  # appended and not yet on the disk

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        for name in ("segment_bytes", "group_bytes", "max_unflushed_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.group_bytes > 1024 * _MIB:
            raise ValueError(f"group_bytes is {self.group_bytes}, wanted at most 1 GiB")
        if self.max_bytes < 2 * self.segment_bytes:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, wanted at least twice segment_bytes,"
                f" {self.segment_bytes}: only whole segments are given back"
            )
