"""What the benchmarks of compaction measure, and how much of it.

Apart from them because the command line needs it whatever is measured, also of a commit that knows
no compaction yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 1 << 20
LARGE_MIB = 10 * 1024
LARGE_BUDGET_MIB = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The size of the example: bytes of one of its units, from 64 KiB on."""

    unit_bytes: int = MIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamObjects:
    """How many stream objects of one stream are made one, and how large they are."""

    objects: int = 12
    object_mib: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The load of a busy node on a virtual clock: sizes in bytes of payload, rates a second."""

    streams: int = 1_000
    bytes_per_s: int = MIB
    skew: float = 1.0
    """The rate of the stream of rank r is proportional to 1 / r ** skew."""
    hours: int = 26
    record_bytes: int = 1_024
    upload_bytes: int = 16 * MIB
    upload_every_s: int = 60
    """An upload comes when there are `upload_bytes`, or after this."""
    block_bytes: int = 512 * 1024
    compact_every_s: int = 300
    memory_mib: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What is really compacted, and with how much memory."""

    streams: int = 200
    record_bytes: int = 16 * 1024
    total_mib: int = 1024
    budgets_mib: tuple[int, ...] = (64, 200)
    large: bool = False
    profile: bool = False

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield MiB written and budget of each run."""
        yield from ((self.total_mib, budget) for budget in self.budgets_mib)
        if self.large:
            yield LARGE_MIB, LARGE_BUDGET_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of it."""

    example: Example = field(default_factory=Example)
    stream_objects: StreamObjects = field(default_factory=StreamObjects)
    workload: Workload = field(default_factory=Workload)
    throughput: Throughput = field(default_factory=Throughput)
