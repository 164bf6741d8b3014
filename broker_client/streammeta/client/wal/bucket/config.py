"""Configuration of a write-ahead log in the bucket: triggers of a slot, and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.client.arguments import at_least, check_fields, seconds

_MIB = 1024 * 1024

WAL_CONFIG = "object-log/1"
"""Registered value of a node with such a log. Its node id finds the log in the bucket."""


@dataclass(frozen=True, slots=True)
class ObjectLogConfig:
    """Sizes in bytes, times in seconds."""

    linger_s: float = 0.1  # latest time from a slot's first record to its upload
    slot_bytes: int = 4 * _MIB  # size of an upload; one larger record gets its own slot
    parallel_uploads: int = 8  # slots uploaded at the same time, 1..64
    max_bytes: int = 512 * _MIB  # of slots that are not trimmed, and of records waiting for slots
    max_unflushed_bytes: int = 64 * _MIB  # appended and not yet in the bucket
    close_deadline_s: float = 30.0  # how long `close` waits for slots in flight
    retention_s: float = 7 * 86_400.0  # how long seals and marks of former processes are kept

    def __post_init__(self) -> None:
        """Reject contradictory limits."""
        check_fields(
            self,
            {
                "linger_s": seconds(may_be_zero=True),
                "slot_bytes": at_least(1, 1024 * _MIB),
                "parallel_uploads": at_least(1, 64),
                "retention_s": seconds(may_be_zero=True),
            },
        )
        # A full slot must fit, or the log could never upload one.
        if self.max_bytes < self.slot_bytes:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, expected at least slot_bytes, {self.slot_bytes}"
            )
