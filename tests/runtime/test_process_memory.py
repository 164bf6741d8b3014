"""Memory of the process: marks, control groups, and the loop that looks."""

import asyncio
import contextlib
import mmap
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from streammeta.controller.runtime.load import process_memory
from streammeta.controller.runtime.load.process_memory import (
    LOOK_EVERY_BYTES,
    Pressure,
    ProcessMemory,
    default_limit,
    resident_bytes,
    usable_bytes,
)

MACHINE = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
_GIB = 1 << 30


def test_pressure_rises_at_a_mark_and_falls_well_below_it() -> None:
    held = 0
    memory = ProcessMemory(1_000, lambda: held)
    seen = []
    for held in (0, 849, 850, 821, 820, 819, 999, 1_000, 971, 969, 900, 2_000, 100):
        memory.look()
        assert memory.rss_bytes == held
        seen.append(memory.pressure.name)
    high = ["HIGH"] * 2
    assert seen == [
        *("NONE", "NONE", *high, "HIGH", "NONE"),
        *("HIGH", "FULL", "FULL", *high, "FULL", "NONE"),
    ]


def test_the_process_knows_what_it_holds() -> None:
    with mmap.mmap(-1, 64 << 20) as fresh:  # no allocator gives what the process has already
        before = resident_bytes()
        fresh.write(b"." * len(fresh))
        assert resident_bytes() - before > 48 << 20


def grouped(root: Path, groups: str, limits: Mapping[str, str]) -> int:
    """Return what a process may use in groups like these."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{limit}\n")
    return usable_bytes(root)


@pytest.mark.parametrize(
    ("groups", "limits", "usable"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max"}, MACHINE),
        ("0::/\n", {"sys/fs/cgroup/memory.max": str(_GIB)}, _GIB),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": str(_GIB)},
            _GIB,
        ),
        ("0::/host/path\n", {"sys/fs/cgroup/memory.max": str(_GIB)}, _GIB),
        (
            "5:memory:/a\n4:cpu:/b\n0::/\n",
            {
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(_GIB),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 62),
                "sys/fs/cgroup/b/memory.max": str(_GIB // 2),
            },
            _GIB,
        ),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "0"}, MACHINE),
    ],
    ids=["none", "no limit", "one", "outer", "in a container", "version 1", "no group's"],
)
def test_the_smallest_limit_of_a_control_group_counts(
    tmp_path: Path, groups: str, limits: Mapping[str, str], usable: int
) -> None:
    assert grouped(tmp_path, groups, limits) == usable


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert usable_bytes(tmp_path) == MACHINE
    assert 0 < default_limit() < MACHINE


def test_it_is_looked_at_after_many_bytes_of_requests() -> None:
    looks = iter((0, 900, 1_000))
    memory = ProcessMemory(1_000, lambda: next(looks))
    for size, pressure in (
        (LOOK_EVERY_BYTES - 1, Pressure.NONE),
        (1, Pressure.HIGH),
        (LOOK_EVERY_BYTES - 1, Pressure.HIGH),
        (1, Pressure.FULL),
    ):
        memory.took(size)
        assert memory.pressure is pressure


async def test_it_is_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "INTERVAL_S", 0)
    looks = iter(range(0, 10_000, 100))
    memory = ProcessMemory(1_000, lambda: next(looks))
    running = asyncio.create_task(memory.run())
    async with asyncio.timeout(60):
        while memory.pressure is not Pressure.FULL:  # noqa: ASYNC110 (a gauge, not an event)
            await asyncio.sleep(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
