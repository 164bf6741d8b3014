"""The same commits on streammeta and its peers, in one run, by one client process.

Each system runs alone, in turn, fresh, and first gets a load of short commits: a Java server is
slow until it is warm. A system that is not installed is left out and listed with its package. At
last the leaders of ZooKeeper and etcd are killed: a client tries the surviving servers in turn, on
new connections and with the peers' default timeouts, until one accepts a write.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from scripts.benchmarks.cluster import PATIENT, VOTERS, find_leader, running_cluster
from scripts.benchmarks.commit_load import committer_of, load_commits
from scripts.benchmarks.commits import Point
from scripts.benchmarks.committer import Load, LoadError
from scripts.benchmarks.figures import Outcome, Progress, Table, Target, spread
from scripts.benchmarks.options import option, seconds
from scripts.benchmarks.peers.servers import (
    PeerCluster,
    PeerError,
    missing,
    missing_table,
    running_peer,
)
from scripts.benchmarks.processes import cpu_s, read_result, wait_ready, working

OURS = "streammeta"
_SYSTEMS = (OURS, "zookeeper", "etcd", "postgresql")
MEMBERS = (
    *((OURS, 3), ("zookeeper", 3), ("etcd", 3)),
    *((OURS, 1), ("zookeeper", 1), ("etcd", 1), ("postgresql", 1)),
)
WARM_UP = (1, 64)
"""Ranges and commits in flight of the load that is not measured."""
WARM_UP_S = 6.0
WRITE_WITHIN_S = 60.0
ATTEMPT_S = 0.25
"""Time after which a client gives up a server that neither answers nor closes the connection."""
_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Systems and loads."""

    systems: tuple[str, ...] = option(_SYSTEMS, "systems", choices=_SYSTEMS)
    ranges: tuple[int, ...] = option((1, 10, 100, 1_000), "ranges of one commit")
    in_flight: tuple[int, ...] = option((16, 64), "numbers of commits in flight; the better counts")
    seconds: float = seconds(3.0, "of each load")
    failovers: int = option(10, "kills of ZooKeeper's and etcd's leaders", least=0)


Measured: TypeAlias = Mapping[str, Any]
"""Figures of one load on one system. `server_cores` count all servers together."""


async def measure(root: Path, settings: Settings, progress: Progress) -> Outcome:
    """Measure every system that is installed."""
    left_out = {
        system: package
        for system in settings.systems
        if system != OURS and (package := missing(system))
    }
    measured: list[Measured] = []
    for system, voters in MEMBERS:
        if system not in settings.systems or system in left_out:
            continue
        progress(f"peers: {system}, {voters} voters, starting")
        place = root / f"{system}-{voters}"
        if system == OURS:
            with running_cluster(place, voters, PATIENT) as cluster:
                leader = (await find_leader(cluster)).endpoint
                servers = (leader, [child.pid for child in cluster.children.values()])
                measured += await _loads(system, voters, servers, place, settings, progress)
        else:
            with running_peer(system, place, voters) as peer:
                leader = peer.endpoints[await peer.find_leader()]
                servers = (leader, [child.pid for child in peer.children.values()])
                measured += await _loads(system, voters, servers, place, settings, progress)

    failovers: dict[str, Sequence[float]] = {}
    for system in ("zookeeper", "etcd"):
        if settings.failovers and system in settings.systems and system not in left_out:
            place = root / f"{system}-failover"
            failovers[system] = await _failovers(place, system, settings.failovers, progress)
    return _outcome(settings, measured, left_out, failovers)


async def _loads(
    system: str,
    voters: int,
    servers: tuple[str, Sequence[int]],
    place: Path,
    settings: Settings,
    progress: Progress,
) -> list[Measured]:
    """Warm up, then measure one short commit alone, then all loads."""
    endpoint, pids = servers
    loads = [(settings.ranges[0], 1)]
    loads += [(ranges, many) for ranges in settings.ranges for many in settings.in_flight]
    progress(f"peers: {system}, {voters} voters, warming up")
    await _load(system, endpoint, WARM_UP, WARM_UP_S, place)
    measured: list[Measured] = []

    for ranges, in_flight in loads:
        progress(f"peers: {system}, {voters} voters, {ranges} ranges, {in_flight} in flight")
        before_s = cpu_s(pids, with_children=True)
        result = await _load(system, endpoint, (ranges, in_flight), settings.seconds, place)
        # The servers' time includes the load's preparation: an upper bound of the commits' share.
        spent_s = cpu_s(pids, with_children=True) - before_s
        measured.append(
            {
                "system": system,
                "voters": voters,
                "ranges": ranges,
                "in_flight": in_flight,
                **{name: result[name] for name in ("commits_per_s", "p50_ms", "p99_ms")},
                "client_cores": round(result["client_cpu_s"] / settings.seconds, 2),
                "server_cores": round(spent_s / result["elapsed_s"], 2),
            }
        )
    return measured


async def _load(
    system: str, endpoint: str, load: tuple[int, int], seconds: float, place: Path
) -> dict[str, Any]:
    arguments = Point("pipelined", *load).load(seconds)
    if system != OURS:
        arguments["system"] = system
    async with working(
        place / "client.log", load_commits, endpoint=endpoint, **arguments
    ) as client:
        await wait_ready(client)
        began = time.monotonic()
        await wait_ready(client)
        elapsed_s = time.monotonic() - began
        return {**await read_result(client), "elapsed_s": elapsed_s}


async def _failovers(place: Path, system: str, runs: int, progress: Progress) -> list[float]:
    """Kill the leader `runs` times and return the seconds until another server accepted a write."""
    seconds: list[float] = []
    with running_peer(system, place, VOTERS) as cluster:
        for run in range(runs):
            progress(f"peers: {system}, failover {run + 1} of {runs}")
            leader = await cluster.find_leader()
            survivors = [number for number in cluster.children if number != leader]
            # All servers have to take part again, or the next leader has no majority.
            for number in cluster.children:
                await _write(cluster, [number])
            cluster.children[leader].kill()
            seconds.append(await _write(cluster, survivors))
            cluster.start(leader)
    return seconds


async def _write(cluster: PeerCluster, numbers: Sequence[int]) -> float:
    """Write to the first of these servers that accepts it, and return the seconds it took."""
    began = time.monotonic()
    for number in itertools.cycle(numbers):
        if time.monotonic() - began > WRITE_WITHIN_S:
            break
        load = Load(endpoint=cluster.endpoints[number], ranges=1, in_flight=1)
        committer = committer_of(cluster.system, load)

        try:
            async with asyncio.timeout(ATTEMPT_S):
                # Opening creates a stream, which is a write.
                await committer.open()
                await committer.close()
            return time.monotonic() - began
        except (OSError, LoadError, TimeoutError):
            await asyncio.sleep(_PAUSE_S)
    raise PeerError(f"{cluster.system} accepted no write within {WRITE_WITHIN_S:.0f} s")


Best = Mapping[tuple[str, int], Mapping[int, Measured]]
"""By system and voters, and by ranges, the load with the most commits a second."""


def _outcome(
    settings: Settings,
    measured: Sequence[Measured],
    left_out: Mapping[str, str],
    failovers: Mapping[str, Sequence[float]],
) -> Outcome:
    best: dict[tuple[str, int], dict[int, Measured]] = {}
    for load in measured:
        if load["in_flight"] > 1:
            by_ranges = best.setdefault((load["system"], load["voters"]), {})
            known = by_ranges.setdefault(load["ranges"], load)
            by_ranges[load["ranges"]] = max(known, load, key=lambda load: load["commits_per_s"])
    alone = {(load["system"], load["voters"]): load for load in measured if load["in_flight"] == 1}
    tables = [_commits_table(settings, best, alone), _ratios_table(settings, best)]
    if failovers:
        rows = [
            {"system": name, **spread("", "s", found), "runs": len(found)}
            for name, found in failovers.items()
        ]
        title = "kill -9 of the leader to the next acknowledged write, seconds"
        columns = "system, 3 voters = system | p50 = _p50_s | p90 = _p90_s | max = _max_s | runs"
        tables.append(Table.of(title, rows, columns))

    return Outcome(
        benchmark="peers",
        figures={
            f"{system}_{voters}_voters_{ranges}_ranges_per_s": load["commits_per_s"]
            for (system, voters), by_ranges in best.items()
            for ranges, load in by_ranges.items()
        },
        details={
            "loads": measured,
            "failovers": [{"system": name, "seconds": found} for name, found in failovers.items()],
            "left_out": dict(left_out),
        },
        tables=[*tables, *missing_table(left_out)],
        targets=list(_targets(best)),
    )


def _commits_table(
    settings: Settings, best: Best, alone: Mapping[tuple[str, int], Measured]
) -> Table:
    rows = []
    for member, by_ranges in best.items():
        cells = [
            f"{load['commits_per_s']:,.0f} ({load['commits_per_s'] * ranges / 1000:,.1f}) "
            f"{load['p99_ms']:,.0f}"
            for ranges, load in by_ranges.items()
        ]
        lone = alone[member]
        single = f"{lone['commits_per_s']:,.0f}, {lone['p50_ms']:.2f}, {lone['p99_ms']:.1f}"
        client = max(load["client_cores"] for load in by_ranges.values())
        rows.append((_name(*member), *cells, single, client))
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
            f"{ours[ranges]['commits_per_s'] / load['commits_per_s']:.2f}"
            for ranges, load in by_ranges.items()
        )
        rows.append((_name(system, voters), *ratios))
    title = "Commits/s of streammeta with as many nodes, as a multiple of the peer's"
    return Table(title=title, columns=("peer", *map(_ranges, settings.ranges)), rows=tuple(rows))


def _targets(best: Best) -> Iterator[Target]:
    ours = best.get((OURS, 3), {}).get(1)
    for system, wanted in (("zookeeper", 1.5), ("etcd", 4.0)):
        peer = best.get((system, 3), {}).get(1)
        if ours is not None and peer is not None:
            ratio = ours["commits_per_s"] / peer["commits_per_s"]
            yield Target(f"1 range, 3 voters: multiple of {system}", "at least", wanted, ratio)


def _name(system: str, voters: int) -> str:
    return f"{system}, {'1 node' if voters == 1 else f'{voters} voters'}"


def _ranges(count: int) -> str:
    return "1 range" if count == 1 else f"{count} ranges"
