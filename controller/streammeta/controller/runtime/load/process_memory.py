"""Memory of this process: its resident size against a limit, measured a few times a second.

The resident size includes everything that individual budgets miss: metadata, parsed requests,
gRPC's buffers, and memory retained by the allocator. Beyond its limit the kernel kills a process,
and then all controllers with the same metadata follow. Calls are therefore rejected before that.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path

import structlog

SHARE_OF_MACHINE = 0.8
"""Default limit, as a share of the memory that this process may use."""

HIGH_SHARE = 0.85
"""Share of the limit above which memory is high."""

EASED_SHARE = 0.03
"""Share of the limit by which memory must fall below a mark to leave it (hysteresis)."""

INTERVAL_S = 0.25
"""Time between two measurements, in seconds."""

LOOK_EVERY_BYTES = 1 << 20
"""Request bytes after which memory is measured without waiting for the interval."""

_KNOWN_MIN = 1 << 20
"""Control group limits below this are ignored: no controller starts with so little."""

_log = structlog.get_logger(component="memory")


class Pressure(IntEnum):
    """How close memory is to the limit."""

    NONE = 0
    HIGH = 1
    FULL = 2


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(os.pread(_statm(), 128, 0).split()[1]) * resource.getpagesize()


@cache
def _statm() -> int:
    """Return the opened statm file, which stays open because descriptors may run out later."""
    # Memory is measured most urgently when the process is at its limits, descriptors included.
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def usable_bytes(root: Path = Path("/")) -> int:
    """Return the memory available to this process: its control groups' limit, or the machine's."""
    # Control groups may allow more than there is.
    machine = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    return min((machine, *_group_limits(root)))


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's control groups, versions 1 and 2."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return

    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            mounted, name = root / "sys/fs/cgroup", "memory.max"
        elif controllers == "memory":
            mounted, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = Path(path.lstrip("/"))
        # In a container the path may be the host's, while the group itself is mounted.
        for group_path in (inner, *inner.parents):
            try:
                limit = int((mounted / group_path / name).read_text())
            except (OSError, ValueError):
                continue  # the group is not visible here, or has no limit ("max")
            if limit >= _KNOWN_MIN:
                yield limit


def default_limit() -> int:
    """Return the default limit of a process in bytes."""
    return int(usable_bytes() * SHARE_OF_MACHINE)


class ProcessMemory:
    """Resident memory as of the last measurement."""

    def __init__(self, limit_bytes: int, measure: Callable[[], int] = resident_bytes) -> None:
        self.limit_bytes = limit_bytes
        self.pressure = Pressure.NONE
        self._measure = measure
        self.rss_bytes = measure()
        self._taken = 0

    def look(self) -> None:
        """Measure memory now."""
        # Counted from each measurement, whatever caused it.
        self._taken = 0
        self.rss_bytes = self._measure()
        pressure = self._pressure_now()
        # Only changes are logged: measurements come several times a second.
        if pressure != self.pressure:
            log = _log.warning if pressure > self.pressure else _log.info
            log(
                "memory_pressure",
                pressure=pressure.name,
                rss_bytes=self.rss_bytes,
                limit_bytes=self.limit_bytes,
            )
            self.pressure = pressure

    def took(self, size: int) -> None:
        """Record received bytes: many large requests can arrive between two measurements."""
        self._taken += size
        if self._taken >= LOOK_EVERY_BYTES:
            self.look()

    async def run(self) -> None:
        """Measure repeatedly until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)

    def _pressure_now(self) -> Pressure:
        for pressure, share in ((Pressure.FULL, 1.0), (Pressure.HIGH, HIGH_SHARE)):
            # Hysteresis: pressure near a mark must not flap with every allocation.
            eased = EASED_SHARE if self.pressure >= pressure else 0.0
            if self.rss_bytes >= (share - eased) * self.limit_bytes:
                return pressure
        return Pressure.NONE
