"""Memory and file descriptors of the process: limits, marks, and the loop that looks."""

import asyncio
import contextlib
import mmap
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from streammeta.controller.monitoring.http import http_listener
from streammeta.controller.peers import server as peers
from streammeta.controller.process import operating_system
from streammeta.controller.process.operating_system import connections_within, raise_limit
from streammeta.controller.runtime.load import process_memory
from streammeta.tls import listener

MACHINE = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
_GIB = 1 << 30


def test_pressure_rises_at_a_mark_and_falls_well_below_it() -> None:
    held = 0
    memory = process_memory.ProcessMemory(1_000, lambda: held)
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
        before = process_memory.resident_bytes()
        fresh.write(b"." * len(fresh))
        assert process_memory.resident_bytes() - before > 48 << 20


def grouped(root: Path, groups: str, limits: Mapping[str, str]) -> int:
    """Return what a process may use in groups like these."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{limit}\n")
    return process_memory.usable_bytes(root)


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
    assert process_memory.usable_bytes(tmp_path) == MACHINE
    assert 0 < process_memory.default_limit() < MACHINE


def test_it_is_looked_at_after_many_bytes_of_requests() -> None:
    looks = iter((0, 900, 1_000))
    memory = process_memory.ProcessMemory(1_000, lambda: next(looks))
    for size, pressure in (
        (process_memory.LOOK_EVERY_BYTES - 1, process_memory.Pressure.NONE),
        (1, process_memory.Pressure.HIGH),
        (process_memory.LOOK_EVERY_BYTES - 1, process_memory.Pressure.HIGH),
        (1, process_memory.Pressure.FULL),
    ):
        memory.took(size)
        assert memory.pressure is pressure


async def test_it_is_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "INTERVAL_S", 0)
    looks = iter(range(0, 10_000, 100))
    memory = process_memory.ProcessMemory(1_000, lambda: next(looks))
    running = asyncio.create_task(memory.run())
    async with asyncio.timeout(60):
        while memory.pressure is not process_memory.Pressure.FULL:  # noqa: ASYNC110 (a gauge, not an event)
            await asyncio.sleep(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1_024, 4_096, 4_096),
        (4_096, 4_096, None),
        (1_024, resource.RLIM_INFINITY, 1 << 20),
        (1_024, 1 << 30, 1 << 20),
        (1 << 29, 1 << 30, None),
    ],
)
def test_the_limit_is_raised_to_what_may_be(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    assert raise_limit() == (soft if raised is None else raised)
    assert made == ([] if raised is None else [(raised, hard)])


def test_connections_leave_room_for_the_log_and_the_peers() -> None:
    assert connections_within(1 << 20, 4_096, 1) == 4_096
    assert connections_within(1_024, 4_096, 1) == 1_024 - operating_system.DESCRIPTORS_KEPT
    assert connections_within(1_024, 4_096, 2) == (1_024 - operating_system.DESCRIPTORS_KEPT) // 2
    assert connections_within(64, 4_096, 1) == operating_system.CONNECTIONS_MIN


def test_connections_leave_room_for_those_of_http_too() -> None:
    kept = operating_system.DESCRIPTORS_KEPT + operating_system.DESCRIPTORS_FOR_HTTP
    assert connections_within(1_024, 4_096, 1, serves_http=True) == 1_024 - kept
    assert connections_within(1 << 20, 4_096, 1, serves_http=True) == 4_096
    assert connections_within(300, 4_096, 1, serves_http=True) == operating_system.CONNECTIONS_MIN


def test_what_is_kept_is_more_than_the_other_listeners_take() -> None:
    of_http = http_listener.CONNECTIONS_MAX + listener.HANDSHAKES_MAX
    of_peers = peers.CONNECTIONS_MAX + listener.HANDSHAKES_MAX
    assert of_http <= operating_system.DESCRIPTORS_FOR_HTTP
    assert of_peers + 64 <= operating_system.DESCRIPTORS_KEPT, (
        "64 are for files, the bucket and calls of peers"
    )
