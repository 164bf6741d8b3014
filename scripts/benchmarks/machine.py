"""The machine and the commit that figures belong to, and how busy others kept the machine."""

import os
import platform
import resource
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from scripts.benchmarks.figures import percentile

SYNC_BYTES = 4096
SYNC_COUNT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about the machine that figures depend on."""

    cores: int
    memory_gib: float
    kernel: str
    python: str
    file_system: str
    fdatasync_p50_ms: float
    fdatasync_p99_ms: float

    def as_json(self) -> dict[str, object]:
        """Return the facts by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.cores} cores, {self.memory_gib:.0f} GiB, Linux {self.kernel}, "
            f"Python {self.python}; data on {self.file_system}, append of 4 KiB and fdatasync "
            f"p50 {self.fdatasync_p50_ms:.2f} ms, p99 {self.fdatasync_p99_ms:.2f} ms"
        )


def describe_machine(directory: Path) -> Machine:
    """Describe this machine, and the file system of `directory` by writing to it."""
    latencies = _sync_latencies_ms(directory / "fdatasync")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        file_system=_file_system(directory),
        fdatasync_p50_ms=round(percentile(latencies, 0.5), 3),
        fdatasync_p99_ms=round(percentile(latencies, 0.99), 3),
    )


def describe_commit(root: Path) -> str:
    """Return the commit of the checkout at `root`, marked if files differ, or "unknown"."""
    # Without optional locks git writes nothing, not even its index.
    git = ["git", "-C", str(root), "--no-optional-locks"]

    def ask(*words: str) -> str | None:
        done = subprocess.run([*git, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = ask("rev-parse", "--short=12", "HEAD")
    has_changes = ask("status", "--porcelain", "--untracked-files=no")
    return "unknown" if head is None else head + " with changes" * bool(has_changes)


class OtherWork:
    """CPU time that other processes used while a benchmark ran."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all, self._own = _busy_s(), _own_s()

    def cores(self) -> float:
        """Return the cores that others kept busy since the start. Our children must have ended."""
        seconds = time.monotonic() - self._began
        others = (_busy_s() - self._all) - (_own_s() - self._own)
        return round(max(0.0, others / seconds), 2)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _own_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _file_system(directory: Path) -> str:
    # The innermost mount point holds the directory.
    resolved = directory.resolve()
    holders = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(partition.mountpoint)
    ]
    if not holders:
        return "unknown"
    holder = max(holders, key=lambda partition: len(partition.mountpoint))
    return f"{holder.fstype} ({holder.device})"


def _sync_latencies_ms(path: Path) -> list[float]:
    block = os.urandom(SYNC_BYTES)
    latencies: list[float] = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for index in range(SYNC_COUNT):
            os.pwrite(fd, block, index * SYNC_BYTES)
            began = time.perf_counter()
            os.fdatasync(fd)
            latencies.append((time.perf_counter() - began) * 1000)
    finally:
        os.close(fd)
        path.unlink()
    return latencies
