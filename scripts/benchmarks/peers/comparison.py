"""The same commits against streammeta and its peers, in one run, by one client process.

Each system runs alone, in turn, fresh, and takes a load of short commits first: a Java server is
slow until it is warm. A system that is not installed is left out and named with what to install.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.benchmarks.bench_cluster import running_cluster
from scripts.benchmarks.commits import (
    PATIENT,
    Point,
    client_result,
    find_leader,
    start_client,
)
from scripts.benchmarks.figures import Outcome, Table, Target, targets_table
from scripts.benchmarks.peers.failover import Failover, measure_failover
from scripts.benchmarks.peers.servers import missing, running_peer
from scripts.benchmarks.streammeta_client import has_pipeline

OURS = "streammeta"
MEMBERS = (
    *((OURS, 3), ("zookeeper", 3), ("etcd", 3)),
    *((OURS, 1), ("zookeeper", 1), ("etcd", 1), ("postgresql", 1)),
)
WARM_UP = (1, 64)
"""Ranges and commits in flight of the load that is not measured."""
WARM_UP_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    systems: Sequence[str] = (OURS, "zookeeper", "etcd", "postgresql")
    ranges: Sequence[int] = (1, 10, 100, 1_000)
    in_flight: Sequence[int] = (16, 64)
    """The better of them counts."""
    seconds: float = 3.0
    failovers: int = 10
    """How often the leaders of ZooKeeper and etcd are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One load at one system."""

    system: str
    voters: int
    ranges: int
    in_flight: int
    commits_per_s: float
    p50_ms: float
    p99_ms: float
    client_cores: float
    server_cores: float
    """Of all servers together."""


async def measure(root: Path, settings: Settings, progress: Callable[[str], None]) -> Outcome:
    """Measure every system that is installed.

    Raises:
        PeerError: a peer did not start.
        ChildFailedError: a server or the client ended early.
    """
    measured: list[Measured] = []
    left_out: dict[str, str] = {}
    for system, voters in MEMBERS:
        if system not in settings.systems:
            continue
        if system != OURS and (package := missing(system)):
            left_out[system] = package
            continue
        place = root / f"{system}-{voters}"
        if system == OURS:
            measured += await _measure_own(place, voters, settings, progress)
        else:
            measured += await _measure_peer(place, system, voters, settings, progress)
    failovers = [
        await measure_failover(root / f"{system}-failover", system, settings.failovers, progress)
        for system in ("zookeeper", "etcd")
        if settings.failovers and system in settings.systems and system not in left_out
    ]
    return _outcome(settings, measured, left_out, failovers)


async def _measure_own(
    place: Path, voters: int, settings: Settings, progress: Callable[[str], None]
) -> list[Measured]:
    with running_cluster(place, voters, PATIENT) as cluster:
        leader = await find_leader(cluster)
        endpoint = cluster.endpoints[leader.node_id - 1]
        pids = [child.pid for child in cluster.children.values()]
        return await _loads(OURS, voters, (endpoint, pids), place, settings, progress)


async def _measure_peer(
    place: Path, system: str, voters: int, settings: Settings, progress: Callable[[str], None]
) -> list[Measured]:
    progress(f"peers: {system}, {voters} voters, starting")
    with running_peer(system, place, voters) as cluster:
        endpoint = cluster.endpoints[await cluster.find_leader()]
        pids = [child.pid for child in cluster.children.values()]
        return await _loads(system, voters, (endpoint, pids), place, settings, progress)


async def _loads(
    system: str,
    voters: int,
    servers: tuple[str, Sequence[int]],
    place: Path,
    settings: Settings,
    progress: Callable[[str], None],
) -> list[Measured]:
    """Warm up, then measure one short commit alone, then all that are wanted."""
    endpoint, pids = servers
    loads = [(settings.ranges[0], 1)]
    loads += [(ranges, many) for ranges in settings.ranges for many in settings.in_flight]
    progress(f"peers: {system}, {voters} voters, warming up")
    await _load(system, endpoint, WARM_UP, WARM_UP_S, place)
    measured: list[Measured] = []
    for ranges, in_flight in loads:
        progress(f"peers: {system}, {voters} voters, {ranges} ranges, {in_flight} in flight")
        before = _cpu_s(pids)
        result = await _load(system, endpoint, (ranges, in_flight), settings.seconds, place)
        # The servers' time includes the load's preparation: an upper bound of the commits' share.
        spent = _cpu_s(pids) - before
        measured.append(
            Measured(
                system=system,
                voters=voters,
                ranges=ranges,
                in_flight=in_flight,
                commits_per_s=result["commits_per_s"],
                p50_ms=result["p50_ms"],
                p99_ms=result["p99_ms"],
                client_cores=round(result["client_cpu_s"] / settings.seconds, 2),
                server_cores=round(spent / result["elapsed_s"], 2),
            )
        )
    return measured


async def _load(
    system: str, endpoint: str, load: tuple[int, int], seconds: float, place: Path
) -> dict[str, Any]:
    way = own_way() if system == OURS else system
    objects = Point(own_way(), *load).objects(seconds) if system == OURS else 0
    client = start_client(way, endpoint, (*load, objects), seconds, place / "client.log")
    loop = asyncio.get_running_loop()
    try:
        await asyncio.to_thread(client.wait_ready)
        began = loop.time()
        await asyncio.to_thread(client.wait_ready)
        elapsed = loop.time() - began
        return {**await asyncio.to_thread(client_result, client), "elapsed_s": elapsed}
    finally:
        client.stop()


def own_way() -> Any:
    """Return the fastest way to commit that the controllers of this tree have."""
    return "pipelined" if has_pipeline() else "unary"


def _cpu_s(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        server = psutil.Process(pid)
        for process in (server, *server.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _outcome(
    settings: Settings,
    measured: Sequence[Measured],
    left_out: Mapping[str, str],
    failovers: Sequence[Failover],
) -> Outcome:
    alone = {(each.system, each.voters): each for each in measured if each.in_flight == 1}
    best: dict[tuple[str, int], dict[int, Measured]] = {}
    for each in measured:
        if each.in_flight == 1:
            continue
        by_ranges = best.setdefault((each.system, each.voters), {})
        if each.ranges not in by_ranges or (
            each.commits_per_s > by_ranges[each.ranges].commits_per_s
        ):
            by_ranges[each.ranges] = each
    tables = [_commits_table(settings, best, alone), _ratios_table(settings, best)]
    if failovers:
        tables.append(
            Table(
                title="kill -9 of the leader to the next acknowledged write, seconds",
                columns=("system, 3 voters", "p50", "p90", "max", "runs"),
                rows=tuple(each.row() for each in failovers),
            )
        )
    if left_out:
        rows = tuple(left_out.items())
        columns = ("system", "install")
        tables.append(Table(title="Not measured: not installed", columns=columns, rows=rows))
    return Outcome(
        benchmark="peers",
        settings=asdict(settings),
        figures={
            f"{system}_{voters}_voters_{ranges}_ranges_per_s": each.commits_per_s
            for (system, voters), by_ranges in best.items()
            for ranges, each in by_ranges.items()
        },
        details={
            "loads": [asdict(each) for each in measured],
            "failovers": [asdict(each) for each in failovers],
            "left_out": dict(left_out),
        },
        tables=(*tables, *targets_table(_targets(best))),
    )


Best = Mapping[tuple[str, int], Mapping[int, Measured]]


def _commits_table(
    settings: Settings, best: Best, alone: Mapping[tuple[str, int], Measured]
) -> Table:
    rows = []
    for (system, voters), by_ranges in best.items():
        cells = [
            f"{each.commits_per_s:,.0f} ({each.commits_per_s * each.ranges / 1000:,.1f}) "
            f"{each.p99_ms:,.0f}"
            for each in by_ranges.values()
        ]
        one = alone[system, voters]
        single = f"{one.commits_per_s:,.0f}, {one.p50_ms:.2f}, {one.p99_ms:.1f}"
        client = max(each.client_cores for each in by_ranges.values())
        rows.append((f"{system}, {_nodes(voters)}", *cells, single, client))
    shown = " and ".join(map(str, settings.in_flight))
    return Table(
        title=f"Commits/s (thousand ranges/s) p99 ms, the better of {shown} in flight",
        columns=(
            "system",
            *map(_ranges, settings.ranges),
            f"{_ranges(settings.ranges[0])}, one in flight: /s, p50, p99 ms",
            "client cores at most",
        ),
        rows=tuple(rows),
    )


def _ratios_table(settings: Settings, best: Best) -> Table:
    rows = []
    for (system, voters), by_ranges in best.items():
        ours = best.get((OURS, voters))
        if system == OURS or ours is None:
            continue
        ratios = (
            f"{ours[ranges].commits_per_s / each.commits_per_s:.2f}"
            for ranges, each in by_ranges.items()
        )
        rows.append((f"{system}, {_nodes(voters)}", *ratios))
    return Table(
        title="Commits/s of streammeta with as many nodes, as a multiple of the peer's",
        columns=("peer", *map(_ranges, settings.ranges)),
        rows=tuple(rows),
    )


def _targets(best: Best) -> Iterator[Target]:
    ours = best.get((OURS, 3), {}).get(1)
    for system, wanted in (("zookeeper", 1.5), ("etcd", 4.0)):
        peer = best.get((system, 3), {}).get(1)
        if ours is not None and peer is not None:
            ratio = ours.commits_per_s / peer.commits_per_s
            yield Target(f"1 range, 3 voters: multiple of {system}", "at least", wanted, ratio)


def _ranges(count: int) -> str:
    return "1 range" if count == 1 else f"{count} ranges"


def _nodes(voters: int) -> str:
    return "1 node" if voters == 1 else f"{voters} voters"
