"""When a controller writes a checkpoint of its own. Reads no clock; times are monotonic ms.

What was counted is forgotten when a checkpoint begins or one is loaded, never because leadership
was won or lost, so that a cluster whose leaders change often still gets its checkpoints. A large
state waits for more log, so that checkpoints never cost more than twice the log they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLimits:
    """How much log, and how much time, may lie behind the last checkpoint."""

    log_bytes: int = 20 << 20
    """Bytes of committed payload; half the size of the last checkpoint where that is more."""
    interval_ms: int = 3_600_000
    """Milliseconds, if anything at all was committed in them."""
    retry_ms: int = 30_000
    """Milliseconds to wait after the disk refused one."""

    def __post_init__(self) -> None:
        for name in ("log_bytes", "interval_ms", "retry_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; must be at least 1")


class CheckpointSchedule:
    """Counts what was committed since the last checkpoint."""

    def __init__(self, limits: CheckpointLimits, now_ms: int) -> None:
        self._limits = limits
        self._log_bytes = limits.log_bytes
        self._bytes = 0
        self._since = now_ms
        self._not_before = now_ms
        self._is_owed = False

    def committed(self, size: int) -> None:
        """Count `size` bytes of committed payload."""
        self._bytes += size

    def request(self, now_ms: int) -> None:
        """Make one due at once, whatever the counts say."""
        self._is_owed = True
        self._not_before = now_ms

    def begun(self, now_ms: int) -> None:
        """A checkpoint has begun, or one was loaded: count from here."""
        self._bytes = 0
        self._since = self._not_before = now_ms
        self._is_owed = False

    def written(self, size: int) -> None:
        """The one that had begun is complete and has `size` bytes."""
        self._log_bytes = max(self._limits.log_bytes, size // 2)

    def failed(self, now_ms: int) -> None:
        """The one that had begun could not be written: it is still owed, after a pause."""
        self._is_owed = True
        self._not_before = now_ms + self._limits.retry_ms

    def is_due(self, now_ms: int) -> bool:
        """Whether a checkpoint should begin."""
        deadline = self.deadline()
        return deadline is not None and deadline <= now_ms

    def deadline(self) -> int | None:
        """Return from when on one is due if nothing more is committed; None for never."""
        if self._is_owed or self._bytes >= self._log_bytes:
            return self._not_before
        if self._bytes:
            return max(self._not_before, self._since + self._limits.interval_ms)
        return None
