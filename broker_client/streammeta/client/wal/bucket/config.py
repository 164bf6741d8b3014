"""Configuration of a write-ahead log in the bucket: triggers of a slot, and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.client.arguments import at_least, check_fields, seconds

_MIB = 1024 * 1024

WAL_CONFIG = "object-log/1"
"""Value that a node with such a log registers; the log is found in the bucket by the node's id."""


@dataclass(frozen=True, slots=True)
class ObjectLogConfig:
    """Sizes in bytes, times in seconds."""

    linger_s: float = 0.1  # a slot is uploaded so long after its first record, at the latest
    slot_bytes: int = 4 * _MIB  # so much is uploaded at once; one larger record has its own slot
    parallel_uploads: int = 8  # slots that are uploaded at the same time, 1..64
    max_bytes: int = 512 * _MIB  # of slots that are not trimmed, and of the records before them
    max_unflushed_bytes: int = 64 * _MIB  # appended and not yet in the bucket
    close_deadline_s: float = 30.0  # how long `close` waits for slots under way
    retention_s: float = 7 * 86_400.0  # seals and marks of former processes are kept so long

    def __post_init__(self) -> None:
        """Refuse bounds that could never be met."""
        check_fields(
            self,
            {
                "linger_s": seconds(may_be_zero=True),
                "slot_bytes": at_least(1, 1024 * _MIB),
                "parallel_uploads": at_least(1, 64),
                "retention_s": seconds(may_be_zero=True),
            },
        )
        if self.max_bytes < self.slot_bytes:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, wanted at least slot_bytes, {self.slot_bytes}"
            )
